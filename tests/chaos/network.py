"""Network faults under load: between clients and gateways, and between each process and PostgreSQL.

Two gateways and two brokers share a database. Each process reaches it through a proxy of its own, and clients
reach each gateway through one. One fault at a time, on one connection or on all of a kind, and then a rest in
which everything must recover. Clients use the SDK. The longest times without an answer and without a decision
come from the recorded answers and from the log.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import httpx
from gpubroker import AsyncBroker, BrokerError
from gpubroker_server.adapters.sql.store import migrate
from msgspec import Struct

from tests.chaos.database import Reader
from tests.chaos.deployment import DEVICE_MB, GatewaysAndBrokers
from tests.chaos.evidence import Evidence, add_seeds, on_database, run_seeds
from tests.chaos.load import CLIENTS, Kind, Load
from tests.chaos.verdict import judge
from tests.chaos.witness import lines_of
from tests.contracts.proxy import CLEAR, Proxy, Weather, a_proxy, to_postgres, url_through
from tests.e2e.service_process import until
from tests.postgres import a_server_of_its_own

SUMMED = (
    "faults", "acknowledged", "lost", "accepted_twice", "double_leased_mb", "leases_left", "events",
)  # fmt: skip
PER_SECOND = 40.0
CLIENT_TIMEOUT_SECONDS = 3.0
CLIENT_RETRY_SECONDS = 2.0
RECOVERY_SECONDS = 60.0
"""The run fails if a gateway has not answered in this time after a fault."""
GATEWAYS, BROKERS = ("data", "other"), ("one", "two")
_DECISIONS = "SELECT at FROM event WHERE kind IN ('task.admitted', 'task.succeeded')"
_LAST_DECISION = f"{_DECISIONS} ORDER BY position DESC LIMIT 1"


class Connections:
    """The proxies by name: `client data` for a gateway's clients, `data` from that gateway to PostgreSQL."""

    def __init__(self, proxies: Mapping[str, Proxy], deployment: GatewaysAndBrokers, url: str) -> None:
        self._proxies, self._deployment, self._url = proxies, deployment, url

    def at(self, place: str, chance: Random) -> Sequence[Proxy]:
        match place:
            case "clients of a gateway":
                names: Sequence[str] = [f"client {chance.choice(GATEWAYS)}"]
            case "gateway and PostgreSQL":
                names = [chance.choice(GATEWAYS)]
            case "leader and PostgreSQL":
                leader = self._deployment.broker_which(leads=True)
                names = [BROKERS[self._deployment.brokers.index(leader)] if leader else BROKERS[0]]
            case _:
                names = [*GATEWAYS, *BROKERS]
        return [self._proxies[name] for name in names]

    def wait_for_a_decision(self, since: float) -> None:
        """Until the log has a decision after that time."""
        reader = Reader(self._url)
        until(lambda: reader.rows(_LAST_DECISION)[0][0] > since, "the next decision", RECOVERY_SECONDS)
        reader.close()


async def _latency(proxy: Proxy, seconds: float) -> None:
    await _in(Weather(delay_seconds=0.1, jitter_seconds=0.2), proxy, seconds)


async def _low_bandwidth(proxy: Proxy, seconds: float) -> None:
    await _in(Weather(bytes_per_second=20_000, piece_bytes=1000), proxy, seconds)


async def _fragmented(proxy: Proxy, seconds: float) -> None:
    await _in(Weather(piece_bytes=7), proxy, seconds)


async def _in(weather: Weather, proxy: Proxy, seconds: float) -> None:
    proxy.weather = weather
    await asyncio.sleep(seconds)
    proxy.weather = CLEAR


async def _half_open(proxy: Proxy, seconds: float) -> None:
    """Old and new connections stay open and transfer nothing, for ever."""
    proxy.is_silent = True
    proxy.fall_silent()
    await asyncio.sleep(seconds)
    proxy.is_silent = False


async def _reset(proxy: Proxy, seconds: float) -> None:
    proxy.is_refusing = True
    proxy.reset()
    await asyncio.sleep(seconds)
    proxy.is_refusing = False


async def _half_closed(proxy: Proxy, seconds: float) -> None:
    """The server sees the end of the connection at once, the client only after a while."""
    proxy.close_one_side()
    await asyncio.sleep(seconds)
    proxy.reset()


KINDS: Mapping[str, Callable[[Proxy, float], Awaitable[None]]] = {
    "latency": _latency,
    "low bandwidth": _low_bandwidth,
    "fragmented": _fragmented,
    "half-open": _half_open,
    "reset": _reset,
    "half-closed": _half_closed,
}
PLACES = ("clients of a gateway", "gateway and PostgreSQL", "leader and PostgreSQL", "all and PostgreSQL")


class Batch(Struct, frozen=True):
    seed: int
    rounds: int = 1
    """Rounds of all kinds at all places."""
    seconds: tuple[float, ...] = (1.0, 3.0, 6.0)
    """The durations of faults."""
    kinds: Sequence[str] = tuple(KINDS)
    places: Sequence[str] = PLACES
    rest_seconds: float = 4.0
    """Rest after a fault, once every gateway answers again: some connections are given up only then."""


class Fault(Struct, frozen=True):
    place: str
    kind: str
    began_at: float
    ended_at: float


class SdkLoad(Load):
    """Clients of the SDK with short timeouts, each gateway through its proxy."""

    def __init__(self, brokers: Mapping[str, AsyncBroker], *rest: Any) -> None:
        super().__init__(*rest)
        self._brokers = brokers

    async def _post(
        self, client: httpx.AsyncClient, data_dir: Path, key: str, body: dict[str, Any]
    ) -> tuple[str, bool]:
        run, resources = body["run"], body["resources"]
        rest = {name: body[name] for name in ("priority", "max_retries", "grace_seconds")}
        try:
            task = await self._brokers[data_dir.name].submit(
                run["entrypoint"], kwargs=run["kwargs"], idempotency_key=key, **resources, **rest
            )
        except BrokerError as error:
            raise OSError(str(error)) from error
        return task.id, False

    async def _cancel(self, client: httpx.AsyncClient, data_dir: Path, id: str) -> None:
        with suppress(BrokerError):
            await self._brokers[data_dir.name].cancel(id)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=1, help="rounds of all kinds at all places")
    parser.add_argument(
        "--kind",
        action="append",
        choices=sorted(KINDS),
        metavar="KIND",
        help=f"kind of fault: {', '.join(sorted(KINDS))} (may be repeated)",
    )
    parser.add_argument(
        "--place",
        action="append",
        choices=sorted(PLACES),
        metavar="PLACE",
        help=f"connection: {', '.join(sorted(PLACES))} (may be repeated)",
    )
    parser.add_argument("--most-seconds", type=float, default=6.0, help="longest duration of a fault")
    parser.add_argument("--rest-seconds", type=float, default=4.0, help="shortest time between two faults")
    add_seeds(parser)


def command(options: argparse.Namespace) -> None:
    most = options.most_seconds
    kinds, places = options.kind or tuple(KINDS), options.place or PLACES
    how = options.rounds, (most / 6, most / 2, most), kinds, places, options.rest_seconds
    evidence = Evidence("network", SUMMED, trials=("faults", "acknowledged"))
    run_seeds(options, evidence, lambda seed: run(Batch(seed, *how)), **on_database("postgres"))


def run(batch: Batch) -> dict[str, Any]:
    """The record of this batch; `wrong` lists what is wrong, in words."""
    with tempfile.TemporaryDirectory(prefix="gpb-chaos-") as place, a_server_of_its_own() as server:
        migrate(server.url, "head")
        faults, deployment, load = asyncio.run(_with_proxies(batch, Path(place), server.url))
        verdict = judge(server.url, deployment.folder, load.contradictions, DEVICE_MB)
        return {
            "seed": batch.seed,
            "faults": len(faults),
            **verdict.counts("acknowledged", "lost", "accepted_twice", "double_leased_mb"),
            **verdict.counts("leases_left", "events"),
            "offered_per_second": PER_SECOND,
            "client_timeout_seconds": CLIENT_TIMEOUT_SECONDS,
            "observed": list(_observed(faults, deployment.folder / "answers", server.url)),
            "wrong": verdict.wrong,
        }


async def _with_proxies(
    batch: Batch, folder: Path, url: str
) -> tuple[Sequence[Fault], GatewaysAndBrokers, Load]:
    async with AsyncExitStack() as stack:
        proxies = {
            name: await stack.enter_async_context(a_proxy(to_postgres(url), f"{batch.seed}/{name}"))
            for name in (*GATEWAYS, *BROKERS)
        }
        urls = {name: url_through(proxy, url) for name, proxy in proxies.items()}
        deployment = GatewaysAndBrokers(folder, url, urls)
        try:
            await asyncio.to_thread(deployment.start)
            brokers = {}
            for gateway in deployment.gateways:
                name = gateway.data_dir.name
                known = json.loads((gateway.data_dir / "client.json").read_text())
                port = httpx.URL(known["url"]).port or 0
                proxy = await stack.enter_async_context(a_proxy(_to(port), f"{batch.seed}/{name}"))
                proxies[f"client {name}"] = proxy
                brokers[name] = await stack.enter_async_context(
                    AsyncBroker(
                        f"http://127.0.0.1:{proxy.port}", known["token"],
                        timeout_seconds=CLIENT_TIMEOUT_SECONDS, retry_seconds=CLIENT_RETRY_SECONDS,
                    )
                )  # fmt: skip
            kind: Kind = deployment.kind()
            answers, interval = folder / "answers", CLIENTS / PER_SECOND
            load = SdkLoad(brokers, deployment.data_dirs, answers, kind, f"{batch.seed}", interval)
            faults = await _inject(batch, load, Connections(proxies, deployment, url))
            await asyncio.to_thread(deployment.drain)
        finally:
            await asyncio.to_thread(deployment.stop)
        return faults, deployment, load


def _to(port: int) -> Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    return lambda: asyncio.open_connection("127.0.0.1", port)


async def _inject(batch: Batch, load: Load, connections: Connections) -> list[Fault]:
    chance = Random(f"{batch.seed}/network")
    every = [(place, kind) for place in batch.places for kind in batch.kinds] * batch.rounds
    submitting = asyncio.create_task(load.submit(sys.maxsize))
    await load.reaches(int(PER_SECOND))
    faults = []
    for place, kind in chance.sample(every, len(every)):
        seconds = chance.choice(batch.seconds)
        proxies = await asyncio.to_thread(connections.at, place, chance)
        began_at = time.time()
        await asyncio.gather(*(KINDS[kind](proxy, seconds) for proxy in proxies))
        faults.append(Fault(place, kind, began_at, time.time()))
        async with asyncio.timeout(RECOVERY_SECONDS):
            await load.is_answered_by_all()
        await asyncio.to_thread(connections.wait_for_a_decision, faults[-1].ended_at)
        await asyncio.sleep(batch.rest_seconds)
    await load.reaches(load.accepted + int(PER_SECOND))
    submitting.cancel()
    with suppress(asyncio.CancelledError):
        await submitting
    return faults


def _observed(faults: Sequence[Fault], file: Path, url: str) -> Iterator[dict[str, Any]]:
    """Each fault, with the longest times without an answer of a gateway and without a decision, during it and
    after it."""
    lines = lines_of(file)
    answers = [[line["at"] for line in lines if line["home"] == name] for name in GATEWAYS]
    decisions = [at for (at,) in Reader(url).rows(_DECISIONS)]
    ends = [*(fault.began_at for fault in faults[1:]), time.time()]
    for fault, end in zip(faults, ends, strict=True):
        yield {
            "place": fault.place,
            "kind": fault.kind,
            "seconds": round(fault.ended_at - fault.began_at, 2),
            "without_an_answer_seconds": max(_longest(one, fault.began_at, end) for one in answers),
            "without_a_decision_seconds": _longest(decisions, fault.began_at, end),
            "next_answer_after_seconds": max(_next(one, fault.ended_at) for one in answers),
            "next_decision_after_seconds": _next(decisions, fault.ended_at),
        }


def _longest(moments: Sequence[float], since: float, until: float) -> float:
    """The longest time between two of the moments, within `since` to `until`."""
    pauses = [
        min(later, until) - max(early, since)
        for early, later in pairwise(sorted(moments))
        if since < later and early < until
    ]
    return round(max(pauses, default=0.0), 2)


def _next(moments: Sequence[float], since: float) -> float:
    return round(min(at for at in moments if at >= since) - since, 2)
