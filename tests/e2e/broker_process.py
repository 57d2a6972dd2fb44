"""A broker as a process of its own, without HTTP, that stops itself at chosen moments.

`python -m tests.e2e.broker_process CONFIG` reads orders from its standard input, a word a line, and tells on
its standard output what happens, as JSON with the time on this machine's clock.
"""

import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml
from gpubroker_server.adapters.blobs.directory import DirectoryBlobs
from gpubroker_server.adapters.clock import boot_seconds
from gpubroker_server.adapters.ray.driver import link as driver_link
from gpubroker_server.adapters.sql.postgres import PostgresSession
from gpubroker_server.adapters.sql.store import open_store
from gpubroker_server.bootstrap.broker_role import BrokerRole
from gpubroker_server.bootstrap.follower import LogFollower
from gpubroker_server.bootstrap.run_access import RunAccess
from gpubroker_server.core.domain.leader_term import NEVER, LeaderTerm, LeaderTermRules
from gpubroker_server.core.domain.orders import Ended, Order, StartOrder, StopOrder
from gpubroker_server.core.domain.policy import HALF_LIFE_SECONDS
from gpubroker_server.core.domain.units import TaskId, Term
from gpubroker_server.ports.executor import RunPayload
from gpubroker_server.settings.loading import load_settings
from gpubroker_server.telemetry.logs import configure_logs

from tests.e2e.service_process import ROOT, environment
from tests.patience import PATIENCE_SECONDS

IN_TRANSACTION = "stop-between-two-statements"
WITH_HEAD = "stop-with-the-head-of-the-log"
BEFORE_START = "stop-before-the-next-start-is-sent"
BEFORE_STOP = "stop-before-the-next-stop-is-sent"
_BEFORE: Mapping[type, str] = {StartOrder: BEFORE_START, StopOrder: BEFORE_STOP}
NOTICES_NOTHING = "notices-nothing"
LEAVE = "leave"
"""End everything of ours on the nodes as well."""


class BrokerProcess:
    """As a context manager it is started, and ended at the latest by force."""

    def __init__(
        self, folder: Path, name: str, *words: str, env: Mapping[str, str] | None = None, **settings: Any
    ) -> None:
        """`words`: NOTICES_NOTHING, or none. `env`: variables that it gets besides the tester's."""
        self._folder = folder / name
        self._folder.mkdir()
        self._config = self._folder / "config.yaml"
        self._config.write_text(yaml.safe_dump({"data_dir": str(self._folder), **settings}), encoding="utf-8")
        self._words = words
        self._env = environment(**(env or {}))
        self._told: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "BrokerProcess":
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(self._config), *self._words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._env,
                cwd=ROOT,
            )
        threading.Thread(target=self._listen, args=[self._process], daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _listen(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._told.put(json.loads(line))

    def next(self, what: str, seconds: float = PATIENCE_SECONDS) -> dict[str, Any]:
        """What it tells of this kind next; other things are passed over."""
        deadline = boot_seconds() + seconds
        while True:
            try:
                told = self._told.get(timeout=max(0.0, deadline - boot_seconds()))
            except queue.Empty:
                raise AssertionError(
                    f"it did not tell {what!r} within {seconds:g} s:\n{self.log()}"
                ) from None
            if told["what"] == what:
                return told

    def order(self, word: str) -> None:
        """Back when it knows."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        self.next(f"knows {word}")

    def send(self, number: signal.Signals) -> float:
        """When it was sent, on this machine's clock."""
        assert self._process is not None
        self._process.send_signal(number)
        return boot_seconds()

    def end(self, number: signal.Signals) -> float:
        at = self.send(number)
        assert self._process is not None
        self._process.wait(PATIENCE_SECONDS)
        return at

    def is_stopped(self) -> bool:
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] == "T"

    def log(self) -> str:
        return (self._folder / "log").read_text(encoding="utf-8", errors="replace")


class Broker:
    """What happens inside."""

    def __init__(self, config: Path) -> None:
        self._settings = load_settings(config)
        self._stops_at = ""
        self._ending = asyncio.Event()
        self._leaves = False

    async def run(self) -> None:
        settings = self._settings
        store = await open_store(settings.database)
        picture = LogFollower(store, HALF_LIFE_SECONDS, self._fail)
        blobs = DirectoryBlobs(settings.data_dir / "blobs", max_bytes=2**20)
        name, runs = f"{settings.data_dir.name}:{os.getpid()}", RunAccess(settings, None)
        role = BrokerRole(name, settings, store, picture, blobs, runs)
        self._watch(role)
        await picture.begin()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._ending.set)
        threading.Thread(target=self._obey, args=[loop], daemon=True).start()
        jobs = [asyncio.create_task(job) for part in (role, picture) for _, job in part.jobs()]
        jobs.append(asyncio.create_task(self._tell_who_leads(role)))
        tell("up")
        ending = asyncio.create_task(self._ending.wait())
        await asyncio.wait([ending, *jobs], return_when=asyncio.FIRST_COMPLETED)
        for job in jobs:
            job.cancel()
        faults = [f for f in await asyncio.gather(*jobs, return_exceptions=True) if isinstance(f, Exception)]
        await role.close(stop_cluster=self._leaves)
        await store.close()
        tell("left")
        if faults:
            raise ExceptionGroup("a part of the broker ended", faults)

    def _fail(self, part: str, fault: BaseException) -> None:
        print(f"{part}: {fault!r}", file=sys.stderr)
        self._ending.set()

    async def _tell_who_leads(self, role: BrokerRole) -> None:
        before: Term | None = None
        state = ""
        while True:
            if (term := role.candidate.term) != before:
                before = term
                tell("stands back" if term is None else "leads", term=term)
            if (now := str(role.executor.status()["state"])) != state:
                state = now
                tell(f"executor {state}")
            await asyncio.sleep(0.005)

    def _obey(self, loop: asyncio.AbstractEventLoop) -> None:
        for line in sys.stdin:
            self._stops_at = line.strip()
            tell(f"knows {self._stops_at}")
            if self._stops_at == LEAVE:
                self._leaves = True
                loop.call_soon_threadsafe(self._ending.set)

    def _watch(self, role: BrokerRole) -> None:
        """Between the calls of the real parts, tell and stop where that was ordered."""
        require_term, number = PostgresSession.require_term, PostgresSession.take_positions
        send, reports = role.executor.send, role.executor.reports

        def require_and_stop(session: PostgresSession, term: Term) -> None:
            require_term(session, term)
            self._stop_at(IN_TRANSACTION)

        def number_and_stop(session: PostgresSession, events: int) -> Any:
            numbered = number(session, events)
            self._stop_at(WITH_HEAD if events else "")
            return numbered

        async def stop_and_send(orders: Sequence[Order], payloads: Mapping[TaskId, RunPayload]) -> None:
            told = [order for order in orders if type(order) in _BEFORE]
            for order in told:
                self._stop_at(_BEFORE[type(order)])
            await send(orders, payloads)
            for order in told:
                tell("sent", task=order.task, fence=order.fence, kind=type(order).__name__)

        async def send_reports() -> Sequence[Any]:
            heard = await reports()
            for report in heard:
                if isinstance(report, Ended):
                    tell("heard", task=report.task, fence=report.fence, ending=report.ending)
            return heard

        replace(PostgresSession, require_term=require_and_stop, take_positions=number_and_stop)
        replace(role.executor, send=stop_and_send, reports=send_reports)

    def _stop_at(self, moment: str) -> None:
        if moment and self._stops_at == moment:
            self._stops_at = ""
            tell("stops")
            os.kill(os.getpid(), signal.SIGSTOP)


def replace(owner: object, **methods: Callable[..., Any]) -> None:
    for name, method in methods.items():
        setattr(owner, name, method)


def tell(what: str, **more: Any) -> None:
    """In one write: lines of two threads never mix."""
    line = json.dumps({"what": what, "at": boot_seconds(), **more})
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def notice_nothing() -> None:
    """The machine's clock stands still, so that the leader never finds its time over, and its driver does not
    hear that agents listen to another one."""
    driver_link.DRIVER = "tests.e2e.deaf_driver"
    replace(LeaderTerm, is_over=lambda _leader_term, _now: False)
    replace(LeaderTermRules, renew_at=lambda rules, _until: boot_seconds() + rules.renew_seconds)
    setattr(LeaderTerm, "until", property(lambda _leader_term: NEVER))  # noqa: B010  # to a type checker it is no field


def main() -> None:
    configure_logs("INFO", "console")
    if NOTICES_NOTHING in sys.argv[2:]:
        notice_nothing()
    asyncio.run(Broker(Path(sys.argv[1])).run())


if __name__ == "__main__":
    main()
