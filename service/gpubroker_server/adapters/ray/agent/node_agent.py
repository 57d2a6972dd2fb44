"""The node agent: one per node, in a process that runs no user code, so that nothing starves it.

It answers one leader at a time. `announce` opens an incarnation: orders and polls of every earlier one are
refused from then on, and everything that is not forgotten is told again.
"""

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import structlog
from gpubroker import __version__
from gpubroker.runtime.journal import AT_ONCE
from gpubroker.runtime.mailbox import Mailbox
from gpubroker.runtime.messages import Report, RunKey, RunOrder

from gpubroker_server.adapters.nvml.probe import new_probe
from gpubroker_server.adapters.ray.agent.device_meter import MEASURE_SECONDS, Meter
from gpubroker_server.adapters.ray.agent.retry_until_done import until_done
from gpubroker_server.adapters.ray.agent.runners import RayRunners, Runners
from gpubroker_server.adapters.ray.agent.runs import RunKeeper
from gpubroker_server.adapters.ray.options import AgentConfig
from gpubroker_server.adapters.ray.processes import boot_id
from gpubroker_server.adapters.ray.wire import (
    PROTOCOL,
    RELEASE_SINCE,
    SPOKEN,
    WireSample,
    unpack,
    write_reports,
)

log = structlog.get_logger("gpubroker.agent")

DESERTED_SECONDS = 30.0
"""Without a poll for so long there is no broker: nothing is collected for it; the next announces itself."""

FIRST_LOOK_SECONDS = 0.2
"""After an announcement samples come quickly at first, so that new devices are placeable at once."""

OPENING_MEASURE_SECONDS = 5.0
"""An answer to the leader waits no longer for the devices; they can be measured later."""

TIDY_SECONDS = 30.0


class NodeAgent:
    """Implements `keeper.Ear`. All methods run on the actor's event loop."""

    def __init__(self, config: str, runners: Runners | None = None) -> None:
        self._config = AgentConfig.from_json(config)
        self._meter = Meter(new_probe(self._config.simulated))
        self._runners = runners or RayRunners(self._config)
        self._id = uuid4().hex[:8]
        self._announcements = 0
        self._term = 0
        self._broker = ""
        self._protocol = PROTOCOL
        """That the leader speaks."""
        self._is_replaced = False
        """The leader wants another configuration, and waits for what this agent alone can tell."""
        self._mailbox: Mailbox | None = None
        self._keeper: RunKeeper | None = None
        self._looking: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._announced_at = 0.0
        self._tidied_at = 0.0
        self._attended_at = time.monotonic()

    async def announce(self, protocol: int, config: str, broker: str, term: int) -> tuple[str, str]:
        """(`welcome`, the new incarnation), or why not: (`stale`, the known term) and (`outdated`, ...).

        One that is outdated does not speak this form: try an older one, or kill it and make a new one. One
        with another configuration takes no new runs, and ends by itself as soon as it has told what nobody
        else knows.
        """
        async with self._opening:
            if self._leaving is not None:
                await asyncio.shield(self._leaving)  # whoever asks again finds the next agent
            # Asked in here: a later term may have been announced while this one waited its turn.
            if term < self._term:
                return "stale", str(self._term)
            if protocol not in SPOKEN:
                return "outdated", f"protocols {SPOKEN}"
            self._is_replaced = AgentConfig.from_json(config) != self._config
            self._make_room()
            self._term, self._protocol = term, protocol
            keeper = await self._open_keeper()
            samples = await self._sampled(keeper, OPENING_MEASURE_SECONDS)
            self._answer(keeper, broker, samples)
        return "welcome", self._incarnation

    async def orders(self, protocol: int, term: int, packed: bytes) -> None:
        """Carry out what is for this incarnation. A start for another one is answered: it never started."""
        if protocol not in SPOKEN or self._keeper is None:
            raise ValueError(f"orders of protocol {protocol} before an announcement of one of {SPOKEN}")
        faults = []
        if term < self._term:
            log.warning("refused: orders of a term that is over", term=term, fault=f"it is term {self._term}")
        for order in unpack(packed):
            try:
                self._carry_out(self._keeper, term, order)
            except Exception as fault:
                log.exception("an order cannot be carried out")
                faults.append(repr(fault))
        if faults:
            # The driver announces itself again, and hears which runs are here and which never started.
            raise ValueError(f"{len(faults)} orders could not be carried out: {faults[0]}")

    async def poll(self, incarnation: str, acknowledged: int, timeout_seconds: float) -> tuple[int, bytes]:
        """(number to acknowledge next, reports as bytes); (-1, b"") if another announcement was made."""
        mailbox = self._mailbox
        if mailbox is None or incarnation != self._incarnation:
            return -1, b""
        asked_at = self._attended_at = time.monotonic()
        read = await mailbox.read(acknowledged, may_come=lambda: True, timeout_seconds=timeout_seconds)
        if incarnation != self._incarnation:
            return -1, b""
        self._attended_at = time.monotonic()
        if not read:
            return acknowledged, b""
        reports = [report for _, report in read]
        held_seconds = self._attended_at - asked_at
        packed = write_reports(self._config.node, time.time(), reports, held_seconds, self._protocol)
        return read[-1][0], packed

    async def leave(self) -> None:
        """Kill every run and every process of ours on this node, then this one; no file stays behind."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave())
        await asyncio.shield(self._leaving)

    def say(self, report: Report, delay_seconds: float = AT_ONCE) -> None:
        """Of progress and checkpoints only the newest of a run waits for the next poll."""
        if self._mailbox is None:
            return
        journal = self._mailbox.journal
        if report[0] in ("progressed", "checkpointed"):
            journal.note(RunKey(*report[1:4]), report, AT_ONCE)
        elif report[0] == "ended":
            journal.add(report, delay_seconds, after_news_of=RunKey(*report[1:4]))
        else:
            journal.add(report, delay_seconds)

    @property
    def _incarnation(self) -> str:
        return f"{self._id}.{self._announcements}"

    def _carry_out(self, keeper: RunKeeper, term: int, order: tuple[Any, ...]) -> None:
        """All but a start name one claim: they are right whichever incarnation they were meant for."""
        outdated = term < self._term
        match order:
            case ("start", incarnation, shareable, run):
                wanted = RunOrder.from_wire(run)
                if outdated or incarnation != self._incarnation:
                    keeper.refuse(wanted.key)
                else:
                    keeper.start(wanted, shareable=shareable)
            case ("go", task, fence, rank, rank_zero_address) if not outdated:
                keeper.go(RunKey(task, fence, rank), rank_zero_address)
            case ("world", task, fence, rank, ranks) if not outdated:
                keeper.tell_world(RunKey(task, fence, rank), ranks)
            case ("watch", task, fence, rank, pid, leases) if not outdated:
                keeper.outsiders.watch(RunKey(task, fence, rank), pid, leases)
            case ("stop", task, fence, rank, _reason, grace_seconds) if not outdated:
                keeper.stop(RunKey(task, fence, rank), grace_seconds)
            case ("forget", task, fence, rank) if not outdated:
                keeper.forget(RunKey(task, fence, rank))

    def _make_room(self) -> None:
        """For an agent with the configuration that is wanted, which finds the runs by their cards.

        At once: no end of a run may be heard between this look and the end of this process.
        """
        if self._is_replaced and not (self._keeper and self._keeper.knows_what_no_card_tells):
            log.info("ending, to be replaced by an agent with another configuration", node=self._config.node)
            os._exit(0)

    async def _open_keeper(self) -> RunKeeper:
        """Made at the first announcement: only then is there an event loop.

        One that does not know yet what is on this node must not answer: whatever it does not name is gone.
        """
        if self._keeper is None:
            keeper = RunKeeper(self._config, self, self._meter, self._runners)
            await keeper.adopt()
            self._keeper = keeper
        return self._keeper

    def _answer(self, keeper: RunKeeper, broker: str, samples: list[WireSample] | None) -> None:
        """The samples first: what the answer proves gone was gone when they were taken."""
        if self._broker not in ("", broker):
            keeper.pool.retire_shared()
        self._broker = broker
        self._announcements += 1
        self._announced_at = self._attended_at = time.monotonic()
        self._change_mailbox(Mailbox())
        if samples is not None:
            self.say(("sampled", time.time(), samples))
        self.say(self._described(keeper))
        for report in (*keeper.book.everything_told(), *keeper.outsiders.everything_told()):
            self.say(report)
        self._begin_anew(keeper)

    async def _leave(self) -> None:
        if self._keeper is not None:
            await until_done("leaving the node", self._keeper.close)
        os._exit(0)

    def _change_mailbox(self, mailbox: Mailbox | None) -> None:
        if self._mailbox is not None:
            self._mailbox.close()
        self._mailbox = mailbox

    def _described(self, keeper: RunKeeper) -> Report:
        config = self._config
        memory_mb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
        node = {
            "name": config.node,
            "cpu": config.cpu or float(len(os.sched_getaffinity(0))),
            "memory_mb": config.memory_mb or memory_mb,
            "max_runs": 0 if self._is_replaced else config.max_runs,  # a start on its way would be lost
            "incarnation": self._incarnation,
            "boot_id": boot_id(),
        }
        if self._protocol >= RELEASE_SINCE:
            node["release"] = __version__
        devices = [
            (d.uuid, d.kind, d.index, d.physical_mb, d.simulated, d.parent, d.split)
            for d in self._meter.inventory()
        ]
        runs = [tuple(key) for key in (*keeper.book.runs, *keeper.outsiders)]
        return ("node_seen", time.time(), node, devices, runs)

    async def _sampled(self, keeper: RunKeeper, timeout_seconds: float) -> list[WireSample] | None:
        """None if it cannot be told what the devices hold."""
        try:
            return await keeper.measure(timeout_seconds=timeout_seconds)
        except Exception:
            log.exception("devices cannot be measured; they take nothing new until they can")
            return None

    def _begin_anew(self, keeper: RunKeeper) -> None:
        for task in (self._looking, self._beating):
            if task is not None:
                task.cancel()
        self._looking = asyncio.create_task(self._look(keeper))
        self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        """Apart from all else that may take its time: devices that do not answer are no reason to be thought
        dead. Everything that computes is in other processes."""
        while True:
            if self._mailbox is not None:
                self._mailbox.journal.note("beat", ("beat", time.time()), AT_ONCE)
            await asyncio.sleep(self._config.beat_seconds)

    async def _look(self, keeper: RunKeeper) -> None:
        while True:
            samples = await self._sampled(keeper, MEASURE_SECONDS)
            if samples is not None and self._mailbox is not None:
                self._mailbox.journal.note("sampled", ("sampled", time.time(), samples), AT_ONCE)
            try:
                await self._look_after(keeper)
            except Exception:
                log.exception("looking after the node failed; the agent goes on")
            since = time.monotonic() - self._announced_at
            await asyncio.sleep(min(self._config.sample_period_seconds, max(FIRST_LOOK_SECONDS, since)))

    async def _look_after(self, keeper: RunKeeper) -> None:
        self._make_room()
        now = time.monotonic()
        unattended = now - self._attended_at
        if unattended > DESERTED_SECONDS and self._mailbox is not None:
            self._announcements += 1
            self._change_mailbox(None)
        if unattended < DESERTED_SECONDS or not keeper.is_idle:
            self._keep_alive()
        elif not self._config.keepalive and unattended > self._config.idle_stop_seconds:
            await self.leave()
        if now > self._tidied_at + TIDY_SECONDS:
            self._tidied_at = now
            await keeper.tidy()
        await keeper.hold_to_allowance()

    def _keep_alive(self) -> None:
        if self._config.keepalive:
            with contextlib.suppress(OSError):
                Path(self._config.keepalive).touch()
