"""From settings to the servers whose models the leader loads."""

import asyncio
from pathlib import Path

from gpubroker_server.bootstrap.compose import hosts_of
from gpubroker_server.settings.loading import load_settings


def test_only_a_server_with_a_node_has_models_of_ours(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    server = "{name: main, http_url: 'http://h:1'%s}"
    file.write_text("triton: {servers: [%s]}" % (server % ""), encoding="utf-8")
    assert hosts_of(load_settings(file)) == []
    file.write_text(
        "triton: {servers: [%s]}" % (server % ", grpc_url: 'http://h:2', node: n1"), encoding="utf-8"
    )
    [host] = hosts_of(load_settings(file))
    assert host.name == "main"
    asyncio.run(host.close())
