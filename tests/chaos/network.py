"""Lines on which things go wrong, under load: of clients to gateways, and of each process to PostgreSQL.

Two gateways and two brokers share a database; each process has a line of its own to it, and each gateway one
that its clients use. One fault at a time, on one line or on all of a sort, and then a rest in which all must
go on. Clients use the SDK. How long a gateway answered nobody and nothing was decided is read afterwards from
what clients were told and from the log.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import httpx
from gpubroker import AsyncBroker, BrokerError
from gpubroker_server.adapters.sql.store import migrate

from tests.chaos.load import LINES, Kind, Load
from tests.chaos.rig import DEVICE_MB, SiteRig
from tests.chaos.rows import Answers
from tests.chaos.verdict import judge
from tests.chaos.witness import lines_of
from tests.contracts.proxy import CLEAR, Proxy, Weather, a_proxy, to_postgres, url_through
from tests.e2e.service_process import until
from tests.postgres import a_server_of_its_own

SUMMED = (
    "faults", "acknowledged", "lost", "accepted_twice", "double_leased_mb", "leases_left", "events",
)  # fmt: skip
PER_SECOND = 40.0
CLIENT_PATIENCE_SECONDS = 3.0
CLIENT_RETRY_SECONDS = 2.0
BACK_SECONDS = 60.0
"""After which the wait for a gateway's next answer ends, and the run with it."""
GATEWAYS, BROKERS = ("data", "other"), ("one", "two")
_DECISIONS = "SELECT at FROM event WHERE kind IN ('task.admitted', 'task.succeeded')"
_LAST_DECISION = f"{_DECISIONS} ORDER BY position DESC LIMIT 1"


class Lines:
    """By name: `client data` is that of a gateway's clients, `data` that of the gateway to the database."""

    def __init__(self, proxies: Mapping[str, Proxy], rig: SiteRig, url: str) -> None:
        self._proxies, self._rig, self._url = proxies, rig, url

    def struck(self, place: str, chance: Random) -> Sequence[Proxy]:
        match place:
            case "clients of a gateway":
                names: Sequence[str] = [f"client {chance.choice(GATEWAYS)}"]
            case "gateway and PostgreSQL":
                names = [chance.choice(GATEWAYS)]
            case "leader and PostgreSQL":
                leader = self._rig.broker_that(leads=True)
                names = [BROKERS[self._rig.brokers.index(leader)] if leader else BROKERS[0]]
            case _:
                names = [*GATEWAYS, *BROKERS]
        return [self._proxies[name] for name in names]

    def decide_again(self, since: float) -> None:
        """Back when something was decided after that."""
        answers = Answers(self._url)
        until(lambda: answers.to(_LAST_DECISION)[0][0] > since, "something is decided", BACK_SECONDS)
        answers.close()


async def _late(proxy: Proxy, seconds: float) -> None:
    await _in(Weather(delay_seconds=0.1, jitter_seconds=0.2), proxy, seconds)


async def _narrow(proxy: Proxy, seconds: float) -> None:
    await _in(Weather(bytes_per_second=20_000, piece_bytes=1000), proxy, seconds)


async def _in_pieces(proxy: Proxy, seconds: float) -> None:
    await _in(Weather(piece_bytes=7), proxy, seconds)


async def _in(weather: Weather, proxy: Proxy, seconds: float) -> None:
    proxy.weather = weather
    await asyncio.sleep(seconds)
    proxy.weather = CLEAR


async def _half_open(proxy: Proxy, seconds: float) -> None:
    """Connections that were made before or meanwhile stay as they are, for ever."""
    proxy.is_silent = True
    proxy.fall_silent()
    await asyncio.sleep(seconds)
    proxy.is_silent = False


async def _reset(proxy: Proxy, seconds: float) -> None:
    proxy.is_refusing = True
    proxy.reset()
    await asyncio.sleep(seconds)
    proxy.is_refusing = False


async def _closed_slowly(proxy: Proxy, seconds: float) -> None:
    """The server knows of the end at once, and whoever asked it only after a while."""
    proxy.close_one_side()
    await asyncio.sleep(seconds)
    proxy.reset()


KINDS: Mapping[str, Callable[[Proxy, float], Awaitable[None]]] = {
    "late": _late,
    "narrow": _narrow,
    "in pieces": _in_pieces,
    "half-open": _half_open,
    "reset": _reset,
    "closed slowly": _closed_slowly,
}
PLACES = ("clients of a gateway", "gateway and PostgreSQL", "leader and PostgreSQL", "all and PostgreSQL")


@dataclass(frozen=True)
class Faults:
    seed: int
    rounds: int = 1
    """Of all kinds at all places."""
    seconds: tuple[float, ...] = (1.0, 3.0, 6.0)
    """How long one may last."""
    kinds: Sequence[str] = tuple(KINDS)
    places: Sequence[str] = PLACES
    rest_seconds: float = 4.0
    """Without a fault, once every gateway answers again: some lines are given up only then."""


@dataclass(frozen=True)
class Fault:
    place: str
    kind: str
    began_at: float
    ended_at: float


class ThroughSdk(Load):
    """Clients with little patience, on lines of their own."""

    def __init__(self, brokers: Mapping[str, AsyncBroker], *rest: Any) -> None:
        super().__init__(*rest)
        self._brokers = brokers

    async def _ask(
        self, client: httpx.AsyncClient, home: Path, key: str, body: dict[str, Any]
    ) -> tuple[str, bool]:
        run, resources = body["run"], body["resources"]
        rest = {name: body[name] for name in ("priority", "max_retries", "grace_seconds")}
        try:
            task = await self._brokers[home.name].submit(
                run["entrypoint"], kwargs=run["kwargs"], idempotency_key=key, **resources, **rest
            )
        except BrokerError as error:
            raise OSError(str(error)) from error
        return task.id, False

    async def _cancel(self, client: httpx.AsyncClient, home: Path, id: str) -> None:
        with suppress(BrokerError):
            await self._brokers[home.name].cancel(id)


def run(faults: Faults) -> dict[str, Any]:
    """The record for the evidence. What is wrong is in it in words."""
    with tempfile.TemporaryDirectory(prefix="gpb-chaos-") as place, a_server_of_its_own() as server:
        migrate(server.url, "head")
        struck, rig, load = asyncio.run(_with_lines(faults, Path(place), server.url))
        found = judge(server.url, rig.folder, load.contradictions, DEVICE_MB)
        return {
            "seed": faults.seed,
            "faults": len(struck),
            "acknowledged": found.acknowledged,
            "lost": found.lost,
            "accepted_twice": found.accepted_twice,
            "double_leased_mb": found.double_leased_mb,
            "leases_left": found.leases_left,
            "events": found.events,
            "offered_per_second": PER_SECOND,
            "client_patience_seconds": CLIENT_PATIENCE_SECONDS,
            "met": list(_met(struck, rig.folder / "told", server.url)),
            "wrong": found.wrong,
        }


async def _with_lines(faults: Faults, folder: Path, url: str) -> tuple[Sequence[Fault], SiteRig, Load]:
    async with AsyncExitStack() as stack:
        proxies = {
            name: await stack.enter_async_context(a_proxy(to_postgres(url), f"{faults.seed}/{name}"))
            for name in (*GATEWAYS, *BROKERS)
        }
        rig = SiteRig(folder, url, {name: url_through(proxy, url) for name, proxy in proxies.items()})
        try:
            await asyncio.to_thread(rig.start)
            brokers = {}
            for gateway in rig.gateways:
                name = gateway.data_dir.name
                known = json.loads((gateway.data_dir / "client.json").read_text())
                port = httpx.URL(known["url"]).port or 0
                proxy = await stack.enter_async_context(a_proxy(_to(port), f"{faults.seed}/{name}"))
                proxies[f"client {name}"] = proxy
                brokers[name] = await stack.enter_async_context(
                    AsyncBroker(
                        f"http://127.0.0.1:{proxy.port}", known["token"],
                        timeout_seconds=CLIENT_PATIENCE_SECONDS, retry_seconds=CLIENT_RETRY_SECONDS,
                    )
                )  # fmt: skip
            kind: Kind = rig.kind()
            load = ThroughSdk(brokers, rig.homes, folder / "told", kind, f"{faults.seed}", LINES / PER_SECOND)
            struck = await _strike(faults, load, Lines(proxies, rig, url))
            await asyncio.to_thread(rig.settle)
        finally:
            await asyncio.to_thread(rig.stop)
        return struck, rig, load


def _to(port: int) -> Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    return lambda: asyncio.open_connection("127.0.0.1", port)


async def _strike(faults: Faults, load: Load, lines: Lines) -> list[Fault]:
    chance = Random(f"{faults.seed}/network")
    every = [(place, kind) for place in faults.places for kind in faults.kinds] * faults.rounds
    submitting = asyncio.create_task(load.submit(sys.maxsize))
    await load.reaches(int(PER_SECOND))
    struck = []
    for place, kind in chance.sample(every, len(every)):
        seconds = chance.choice(faults.seconds)
        proxies = await asyncio.to_thread(lines.struck, place, chance)
        began_at = time.time()
        await asyncio.gather(*(KINDS[kind](proxy, seconds) for proxy in proxies))
        struck.append(Fault(place, kind, began_at, time.time()))
        async with asyncio.timeout(BACK_SECONDS):
            await load.is_answered_by_all()
        await asyncio.to_thread(lines.decide_again, struck[-1].ended_at)
        await asyncio.sleep(faults.rest_seconds)
    await load.reaches(load.accepted + int(PER_SECOND))
    submitting.cancel()
    with suppress(asyncio.CancelledError):
        await submitting
    return struck


def _met(struck: Sequence[Fault], told: Path, url: str) -> Iterator[dict[str, Any]]:
    """Each fault, with the longest time in and after it in which one of the gateways answered nobody, and in
    which nothing was decided."""
    lines = lines_of(told)
    answers = [[line["at"] for line in lines if line["home"] == name] for name in GATEWAYS]
    decisions = [at for (at,) in Answers(url).to(_DECISIONS)]
    ends = [*(fault.began_at for fault in struck[1:]), time.time()]
    for fault, end in zip(struck, ends, strict=True):
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
    """The longest pause of this time: of a fault, and of all that follows up to the next one."""
    pauses = [
        min(later, until) - max(early, since)
        for early, later in pairwise(sorted(moments))
        if since < later and early < until
    ]
    return round(max(pauses, default=0.0), 2)


def _next(moments: Sequence[float], since: float) -> float:
    return round(min(at for at in moments if at >= since) - since, 2)
