"""`gpubroker down`: stop the service of a data directory, and the local Ray that outlives it."""

import asyncio
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from service.adapters.ray.head import read_state, stop_head
from service.settings import Settings


def stop_everything(settings: Settings) -> Sequence[str]:
    """Stop the service of this data directory, then the local Ray it may have left; what was done."""
    said = [_ask_to_stop(settings.data_dir / "client.json")]
    head = read_state(settings.data_dir)
    if head is not None:
        asyncio.run(stop_head(settings.data_dir))
        said.append(f"local Ray (process {head.pid}) stopped")
    return said


def _ask_to_stop(client_file: Path) -> str:
    if not client_file.exists():
        return f"no service has run in {client_file.parent}"
    known = json.loads(client_file.read_text(encoding="utf-8"))
    request = urllib.request.Request(  # noqa: S310  # the address is our own file's
        f"{known['url']}/shutdown",
        data=b'{"stop_cluster": true}',
        headers={"Authorization": f"Bearer {known['token']}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=10):  # noqa: S310
            pass
    except urllib.error.HTTPError as error:
        return f"{known['url']} refused to stop: {error.code} {error.reason}; is another service there?"
    except OSError:
        return f"no service answers on {known['url']}"
    _wait_until_closed(known["url"])
    return f"service on {known['url']} stopped"


def _wait_until_closed(url: str, patience_seconds: float = 30.0) -> None:
    deadline = time.monotonic() + patience_seconds
    host, port = url.removeprefix("http://").rsplit(":", 1)
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
        except OSError:
            return
        time.sleep(0.05)
