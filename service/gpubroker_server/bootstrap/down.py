"""`gpubroker down`: stop the service of a data directory, and the local Ray that keeps running after it."""

import asyncio
import json
import socket
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from gpubroker import Broker, BrokerError, Unreachable

from gpubroker_server.adapters.ray.driver.leave import CannotLeave, leave_cluster
from gpubroker_server.adapters.ray.head.head import HeadRefused, reach, read_state, stop_head
from gpubroker_server.bootstrap.broker_file import brokers_of, service_at
from gpubroker_server.settings.loading import Settings

_CLIENT_FILE = "client.json"
"""Written by a process that serves HTTP."""
ANSWER_SECONDS = 30.0
CLOSE_SECONDS = 30.0
TAKEOVER_SECONDS = 1.5
"""The time within which another process leads after a leader resigned."""
_LEADER = "SELECT holder FROM leadership WHERE lease_until > extract(epoch FROM clock_timestamp())"


class StillRunning(Exception):
    """The service may still run, so its local Ray was not stopped. The message says why and what to do."""


def stop_everything(settings: Settings) -> list[str]:
    """Stop the service of this data directory, then its local Ray with all runs, and wait until they are
    gone; what was done. Raises StillRunning."""
    head = read_state(settings.data_dir)  # A service that stops its Ray itself removes the state.
    has_served = (settings.data_dir / _CLIENT_FILE).exists()
    service, brokers = _stop_service(settings), _stop_brokers(settings.data_dir)
    done = [service, *brokers] if has_served or not brokers else brokers
    head = head or read_state(settings.data_dir)
    if head is not None:
        if left := asyncio.run(stop_head(settings.data_dir)):
            named = ", ".join(str(process.pid) for process in left)
            raise StillRunning(
                f"of the local Ray (process {head.pid}), processes {named} are still ending although they "
                "were killed; try again, and look at what they wait for (ps -o stat,wchan)"
            )
        done.append(f"local Ray (process {head.pid}) stopped")
    if settings.ray.address and settings.engine == "ray":
        done.append(_leave_cluster(settings))
    return done


def _leave_cluster(settings: Settings) -> str:
    """End the agents and runs of this service on a joined Ray, unless another broker leads. Returns a
    message. Raises StillRunning."""
    ray = settings.ray
    if (other := _other_leader(settings.database)) is not None:
        return f"{other} leads on this database; its node agents and runs on {ray.address} go on"
    from gpubroker_server.bootstrap.compose import ray_options_of  # it imports the whole service

    try:
        asyncio.run(reach(ray.address))
        agents = leave_cluster(ray_options_of(settings))
    except HeadRefused:
        return f"nothing answers at {ray.address}, so what ran there could not be asked to end"
    except CannotLeave as fault:
        raise StillRunning(f"{fault}; runs may go on there, try again") from None
    if not agents:
        return f"no node agent is left on {ray.address}, and none of its runs; that Ray goes on"
    what = (
        "1 node agent and all runs of it" if agents == 1 else f"{agents} node agents and all runs of theirs"
    )
    return f"{what} on {ray.address} ended; that Ray goes on"


def _other_leader(database: str) -> str | None:
    """Return the broker that leads now or within TAKEOVER_SECONDS; None if there is none. Stopped brokers
    have resigned."""
    if database.startswith("sqlite"):
        return None
    from gpubroker_server.adapters.sql.connections import connect_reader

    deadline = time.monotonic() + TAKEOVER_SECONDS
    with connect_reader(database) as connection:
        while True:
            row = connection.execute(_LEADER).fetchone()
            if row is not None or time.monotonic() > deadline:
                return None if row is None else str(row[0])
            time.sleep(0.05)


def _stop_service(settings: Settings) -> str:
    client_file = settings.data_dir / _CLIENT_FILE
    if not client_file.exists():
        return f"no service has run in {client_file.parent}"
    try:
        known = json.loads(client_file.read_text(encoding="utf-8"))
        url, token = known["url"], known["token"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StillRunning(
            f"{client_file} does not say where the service is ({error!r}); start the service, which writes "
            "the file again, or end its process"
        ) from None
    try:
        with Broker(url, token, timeout_seconds=ANSWER_SECONDS, retry_seconds=0) as broker:
            broker.shutdown(stop_cluster=True)
    except Unreachable as error:
        if _listens(url):
            raise StillRunning(
                f"a process listens on {url} and does not answer: {error}; try again"
            ) from None
        if service_at(settings.data_dir, url) is None:
            return f"no service answers on {url}"
    except BrokerError as error:
        raise StillRunning(
            f"{url} refused to stop: {error.status} {error}; is the service of another data directory there?"
        ) from None
    _wait_until_closed(url)
    _wait_until_gone(settings, url)
    return f"service on {url} stopped"


def _stop_brokers(data_dir: Path) -> list[str]:
    """Stop the brokers that serve no HTTP, and return a message about each."""
    done: list[str] = []
    for broker in brokers_of(data_dir):
        with suppress(psutil.NoSuchProcess):
            _end(data_dir, psutil.Process(broker))
        done.append(f"broker (process {broker}) stopped")
    return done


def _end(data_dir: Path, broker: psutil.Process) -> None:
    """Stop a broker, and return when both its process and its file are gone. Raises StillRunning."""
    broker.terminate()
    deadline = time.monotonic() + CLOSE_SECONDS
    while broker.pid in brokers_of(data_dir) or (
        broker.is_running() and broker.status() != psutil.STATUS_ZOMBIE
    ):
        if time.monotonic() > deadline:
            raise StillRunning(
                f"broker (process {broker.pid}) runs {CLOSE_SECONDS:.0f} s after SIGTERM; try again"
            )
        time.sleep(0.05)


def _wait_until_closed(url: str) -> None:
    deadline = time.monotonic() + CLOSE_SECONDS
    while _listens(url):
        if time.monotonic() > deadline:
            raise StillRunning(f"the service on {url} still listens after {CLOSE_SECONDS:.0f} s; try again")
        time.sleep(0.05)


def _wait_until_gone(settings: Settings, url: str) -> None:
    """Return when the process of the service is gone. Requests under way may take `drain_seconds` after the
    port was closed. Raises StillRunning."""
    most_seconds = settings.drain_seconds + CLOSE_SECONDS
    deadline = time.monotonic() + most_seconds
    while (process := service_at(settings.data_dir, url)) is not None:
        if time.monotonic() > deadline:
            raise StillRunning(
                f"the service on {url} (process {process}) has closed its port and is still ending after "
                f"{most_seconds:.0f} s; its log says what it waits for, then try again"
            )
        time.sleep(0.05)


def _listens(url: str) -> bool:
    """Return True if a process accepts connections at the URL, or if connecting times out."""
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname or "", address.port or 80), timeout=1).close()
    except TimeoutError:
        return True
    except OSError:
        return False
    return True
