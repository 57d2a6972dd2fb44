"""What is sent with a load: only to a server that sees the leased GPUs, and with dynamic batching where the
settings ask for it."""

import json
import shutil
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http
from gpubroker_server.adapters.triton.grpc_backend import TritonRpcServer
from gpubroker_server.adapters.triton.host import TritonHost
from gpubroker_server.adapters.triton.http_backend import HttpBackend, TritonServer
from gpubroker_server.core.domain.units import DeviceKey, Seconds
from gpubroker_server.core.serving.batching import BatchRules
from gpubroker_server.ports.models import HostFault, HostRefused, ModelState

from tests.chaos.forked import ForkedService
from tests.e2e.service_process import GIB
from tests.patience import PATIENCE_SECONDS
from tests.triton.gpu_metrics import gpu_metrics
from tests.triton.server import Triton
from tests.triton.test_host import gone, stage_of

SOON = Seconds(PATIENCE_SECONDS)
FOUR_AT_ONCE = BatchRules(4, SOON)
"""A batch waits until four are there: if they are grouped, it is all four."""


@pytest.fixture(scope="module")
def own_triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    with Triton(tmp_path_factory.mktemp("loads")) as running:
        yield running


def web(port: int) -> HttpBackend:
    return HttpBackend(TritonServer("main", "127.0.0.1", port, b"127.0.0.1:%d" % port))


@asynccontextmanager
async def a_host(
    triton: Triton, batches: Mapping[str, BatchRules] | None = None, metrics: int | None = None
) -> AsyncIterator[TritonHost]:
    """`metrics`: the port."""
    host = TritonHost(
        TritonRpcServer("main", f"127.0.0.1:{triton.grpc_port}"),
        triton.repository,
        None if metrics is None else web(metrics),
        web(triton.http_port),
        batches,
    )
    yield host
    for model in (await host.index(SOON)).models.values():
        if model.stage is not ModelState.ABSENT:
            await host.unload(model.model, SOON)
            await gone(host, model.model)
    await host.close()


def config_of(triton: Triton, model: str) -> Any:
    with urllib.request.urlopen(f"{triton.url}/v2/models/{model}/config", timeout=SOON) as answer:
        return json.load(answer)


def loads(triton: Triton, model: str) -> int:
    """How often the server has begun one."""
    return triton.log().count(f"loading: {model}:1")


def asked_at_once(url: str, times: int, model: str = "together", **headers: str) -> list[int]:
    """How many requests came with each of these to the model."""

    def ask(_: int) -> int:
        tensor = tritonclient.http.InferInput("INPUT0", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.ones([1, 1], np.float32))
        with tritonclient.http.InferenceServerClient(
            url.removeprefix("http://"), network_timeout=SOON
        ) as client:
            answer = client.infer(model, [tensor], headers=headers)
        return int(answer.as_numpy("TOGETHER").item())

    with ThreadPoolExecutor(times) as pool:
        return list(pool.map(ask, range(times)))


async def test_server_that_sees_other_gpus_than_those_of_the_lease_loads_nothing(
    own_triton: Triton,
) -> None:
    with gpu_metrics("GPU-b", "GPU-a") as port:
        async with a_host(own_triton, metrics=port) as host:
            assert (await host.describe("identity_fp32", SOON)).seen == ("GPU-a", "GPU-b")
            with pytest.raises(HostRefused, match="CUDA_VISIBLE_DEVICES") as refused:
                await host.load("identity_fp32", [DeviceKey("c/n1/GPU-a")], SOON)
            assert refused.value.fault is HostFault.OTHER_GPUS
            assert await stage_of(host, "identity_fp32") is ModelState.ABSENT
            await host.load("identity_fp32", [DeviceKey("c/n1/GPU-a"), DeviceKey("c/n1/GPU-b")], SOON)
            await host.load("two_versions", (), SOON)  # on CPUs, without a lease
            assert await stage_of(host, "two_versions") is ModelState.READY


async def test_server_whose_metrics_list_no_gpu_is_believed_by_its_settings(
    own_triton: Triton,
) -> None:
    async with a_host(own_triton, metrics=own_triton.metrics_port) as host:
        assert (await host.describe("identity_fp32", SOON)).seen == ()
        await host.load("identity_fp32", [DeviceKey("c/n1/GPU-a")], SOON)
        assert await stage_of(host, "identity_fp32") is ModelState.READY


async def test_nothing_is_loaded_while_the_metrics_cannot_be_read(own_triton: Triton) -> None:
    with gpu_metrics("GPU-a") as port:
        pass  # closed again
    async with a_host(own_triton, metrics=port) as host:
        with pytest.raises(HostRefused, match="metrics") as refused:
            await host.load("identity_fp32", [DeviceKey("c/n1/GPU-a")], SOON)
        assert refused.value.fault is HostFault.UNREACHABLE
        assert await stage_of(host, "identity_fp32") is ModelState.ABSENT


async def test_model_without_dynamic_batching_is_loaded_with_it_and_then_groups(
    own_triton: Triton,
) -> None:
    async with a_host(own_triton) as host:
        await host.load("together", (), SOON)
        own = config_of(own_triton, "together")
        assert "dynamic_batching" not in own
        assert asked_at_once(own_triton.url, 4) == [1, 1, 1, 1]
    async with a_host(own_triton, {"together": FOUR_AT_ONCE}) as host:
        await host.load("together", (), SOON)
        grouped = config_of(own_triton, "together")
        batching = grouped.pop("dynamic_batching")
        assert grouped == own, "all else is as its files say"
        assert batching["preferred_batch_size"] == [4]
        assert batching["max_queue_delay_microseconds"] == SOON * 1_000_000
        assert asked_at_once(own_triton.url, 4) == [4, 4, 4, 4]


async def test_only_the_first_load_of_a_model_is_doubled_until_its_files_change(
    own_triton: Triton,
) -> None:
    async with a_host(own_triton, {"together": FOUR_AT_ONCE}) as host:
        found = []
        for touched in (False, False, True):
            if touched:
                (own_triton.repository / "together" / "config.pbtxt").touch()
            before = loads(own_triton, "together")
            await host.load("together", (), SOON)
            assert "dynamic_batching" in config_of(own_triton, "together")
            await host.unload("together", SOON)
            await gone(host, "together")
            found.append(loads(own_triton, "together") - before)
        assert found == [2, 1, 2]


@pytest.mark.parametrize("model", ["queued", "identity_fp32", "chain"])
async def test_model_with_its_own_batching_or_none_is_loaded_once_as_it_is(
    own_triton: Triton, model: str
) -> None:
    async with a_host(own_triton) as host:
        await host.load(model, (), SOON)
        own = config_of(own_triton, model)
    async with a_host(own_triton, {model: FOUR_AT_ONCE}) as host:
        before = loads(own_triton, model)
        await host.load(model, (), SOON)
        assert config_of(own_triton, model) == own
        assert loads(own_triton, model) - before == 1


async def test_a_model_whose_load_fails_with_dynamic_batching_is_loaded_without(own_triton: Triton) -> None:
    folder = own_triton.repository / "alone"
    shutil.copytree(own_triton.repository / "together", folder)
    config = folder / "config.pbtxt"
    config.write_text(config.read_text(encoding="utf-8").replace("together", "alone"), encoding="utf-8")
    refuses = (
        '\n    def initialize(self, args):\n        assert "dynamic_batching" not in args["model_config"]\n'
    )
    code = folder / "1" / "model.py"
    code.write_text(
        code.read_text(encoding="utf-8").replace(
            "class TritonPythonModel:\n", f"class TritonPythonModel:{refuses}"
        ),
        encoding="utf-8",
    )
    async with a_host(own_triton, {"alone": FOUR_AT_ONCE}) as host:
        await host.load("alone", (), SOON)
        assert asked_at_once(own_triton.url, 2, "alone") == [1, 1]


async def test_model_is_tried_with_rows_and_shapes_and_its_refusals_are_quoted(
    own_triton: Triton,
) -> None:
    async with a_host(own_triton) as host:
        for model, rows in (("grows", 8), ("identity_fp32", 0)):
            await host.load(model, (), SOON)
            assert await host.most_rows(model, SOON) == rows
        await host.try_out("identity_fp32", 0, {}, SOON)
        values = own_triton.repository.parent / "grows.values"
        for rows, shapes, most in ((1, {}, 4), (8, {}, 32), (8, {"INPUT0": [3, 4]}, 96)):
            await host.try_out("grows", rows, shapes, SOON)
            assert values.read_text(encoding="utf-8") == str(most)
        for rows, shapes, words in (
            (9, {}, "batch-size must be <= 8"),
            (8, {"INPUT0": [3]}, "unexpected shape for input 'INPUT0'"),
            (8, {"IMAGE": [3]}, "no input IMAGE; inputs: TEXT, INPUT0"),
        ):
            with pytest.raises(HostRefused, match=words) as refused:
                await host.try_out("grows", rows, shapes, SOON)
            assert refused.value.fault is HostFault.FAILED


def test_live_requests_are_grouped_for_a_model_that_the_settings_name(
    own_triton: Triton, tmp_path: Path
) -> None:
    server = {
        "name": "main", "http_url": own_triton.url, "grpc_url": f"http://127.0.0.1:{own_triton.grpc_port}",
        "node": "local", "repository": str(own_triton.repository),
        "models": {"together": {"gpu_mb": GIB}},
    }  # fmt: skip
    triton = {
        "servers": [server],
        "batch": {"together": {"max_size": 4, "delay_seconds": 60}},
        "slots": {"together": 4},
    }
    devices = [{"kind": "sim-24g", "memory_mb": 24 * GIB, "count": 1}]
    chosen: dict[str, Any] = {
        "engine": "simulated",
        "ray": {"node_name": "local"},
        "simulated_devices": devices,
    }
    with ForkedService(tmp_path / "data", **chosen, triton=triton) as service:
        authorization = {"Authorization": f"Bearer {service.token}"}
        assert asked_at_once(service.url, 4, **authorization) == [4, 4, 4, 4]
        assert "dynamic_batching" in config_of(own_triton, "together")
        service.broker.unload_model("together")
