"""`gpubroker health`: finds out whether the process of these settings lives on this machine.

A service or a gateway is asked at the address in client.json. A broker is judged by the age of its file, and
a Ray node by its raylet's socket. Whether a process can do its work at the moment is answered by /readyz
instead.
"""

import json
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Literal
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

from msgspec import Struct

from gpubroker_server.adapters.ray.head.raylet import raylet_fault, raylet_socket
from gpubroker_server.bootstrap.broker_file import LATE_SECONDS, ages_of_brokers

ANSWER_SECONDS = 5.0
MAX_BYTES = 4096
"""The most bytes that are read of an answer."""


class Liveness(Struct, frozen=True):
    is_alive: bool
    sentence: str


def health_of(data_dir: Path, role: Literal["serve", "gateway", "broker", "node"] | None) -> Liveness:
    """Return the health of the process with this role. Without a role, it is the service or the gateway of
    this data directory, or else its broker. The role `node` is the Ray node that `ray start` started on this
    machine."""
    client = data_dir / "client.json"
    if role == "node":
        return _node()
    if role == "broker" or (role is None and not client.exists()):
        return _broker(data_dir)
    return _http(client)


def health_at(url: str) -> Liveness:
    """Return the health of the service or gateway at this address. The address may be that of a TLS proxy,
    whose certificate is verified by SSL_CERT_FILE."""
    # The proxy of the environment is not used, because it is for outward requests.
    direct = build_opener(ProxyHandler({}))
    try:
        with direct.open(f"{url.rstrip('/')}/healthz", timeout=ANSWER_SECONDS) as answer:
            health = json.loads(answer.read(MAX_BYTES))
    except HTTPError as refused:
        return Liveness(False, f"{url} answers {refused.code}; is gpubroker there?")
    except (OSError, HTTPException, ValueError) as fault:
        cause = getattr(fault, "reason", None) or fault
        return Liveness(False, f"no healthy answer from {url}: {cause}")
    if not isinstance(health, Mapping) or health.get("status") != "ok":
        return Liveness(False, f"{url} answers, but not as gpubroker does; is another program there?")
    return Liveness(True, f"{url} answers")


def _http(client: Path) -> Liveness:
    try:
        url = str(json.loads(client.read_text(encoding="utf-8"))["url"])
    except FileNotFoundError:
        return Liveness(
            False, f"no service or gateway has started yet with the data directory {client.parent}"
        )
    except OSError as fault:
        return Liveness(False, f"cannot read {client}: {fault.strerror}; ask as the user of the service")
    except (ValueError, TypeError, KeyError):
        return Liveness(False, f"{client} does not say where the service is; a start writes it again")
    return health_at(url)


def _broker(data_dir: Path) -> Liveness:
    try:
        ages = dict(ages_of_brokers(data_dir))
    except OSError as fault:
        return Liveness(False, f"cannot read {data_dir}: {fault.strerror}; ask as the user of the broker")
    if not ages:
        return Liveness(False, f"no process of gpubroker runs with the data directory {data_dir}")
    process, age_seconds = max(ages.items(), key=lambda item: item[1])
    if age_seconds > LATE_SECONDS:
        return Liveness(False, f"broker (process {process}) hangs: its last sign is {age_seconds:.0f} s old")
    return Liveness(True, f"broker (process {process}) runs")


def _node() -> Liveness:
    if fault := raylet_fault():
        return Liveness(False, f"no Ray node answers at {raylet_socket()}: {fault}")
    return Liveness(True, f"the Ray node at {raylet_socket()} answers")
