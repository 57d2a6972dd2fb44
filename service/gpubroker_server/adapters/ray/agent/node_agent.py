"""The node agent: one per node, in a process that runs no user code, so that user code cannot block it.

The agent answers one leader at a time. `announce` begins an incarnation: from then on the agent refuses
orders and polls of every earlier incarnation, and reports again everything that it was not ordered to
forget.
"""

import asyncio
import contextlib
import os
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import structlog
from gpubroker import __version__
from gpubroker.runtime.journal import AT_ONCE
from gpubroker.runtime.mailbox import Mailbox
from gpubroker.runtime.messages import Report, RunKey, RunOrder
from msgspec.structs import astuple

from gpubroker_server.adapters.nvml.meter import MEASURE_SECONDS, DeviceMeter, Inventory
from gpubroker_server.adapters.nvml.probe import NODE_GPUS, GpuChoice, find_probes, restart_driver
from gpubroker_server.adapters.ray.agent.disk_cleaning import DiskCleaner
from gpubroker_server.adapters.ray.agent.host_meter import HostMeter
from gpubroker_server.adapters.ray.agent.runner_pool import RayRunners
from gpubroker_server.adapters.ray.agent.runner_process import retry_until_done
from gpubroker_server.adapters.ray.agent.runs import NodeRuns
from gpubroker_server.adapters.ray.head.head import lost_file
from gpubroker_server.adapters.ray.options import AgentConfig
from gpubroker_server.adapters.ray.peers import Peer
from gpubroker_server.adapters.ray.processes import boot_id, versions
from gpubroker_server.adapters.ray.wire import PROTOCOL, SPOKEN, TELLS_LOGS, WireSample, unpack, write_reports
from gpubroker_server.core.domain.units import Mib
from gpubroker_server.core.domain.visible_gpus import VARIABLE
from gpubroker_server.telemetry.logs import configure_logs

log = structlog.get_logger("gpubroker.agent")

DESERTED_SECONDS = 30.0
"""The time without a poll after which the agent takes the broker for gone. It then collects no reports until
a broker announces itself."""

FIRST_SAMPLE_SECONDS = 0.2
"""The pause before the second sample after an announcement. It is short, so that new devices can be used at
once."""

OPENING_MEASURE_SECONDS = 5.0
"""The longest wait of the answer to an announcement for the measurement of the devices."""
LOG_LIMIT_SECONDS = 30.0
WATCH_HEAD_SECONDS = 1.0
LOST_HEAD_GRACE_SECONDS = 30.0
"""The time that runs get, from notice to force, to leave a head that has lost a vital process."""


def gpu_choice(config: AgentConfig, own_start: Path = Path("/proc/self/environ")) -> GpuChoice | None:
    """Return the choice of GPUs for this node: that of the service, or else that of the environment in which
    the node was started, as in a Slurm job. `own_start` is a file with the environment of this process at
    its start, before Ray hid all GPUs from it."""
    if config.visible_gpus is not None:
        return GpuChoice(*config.visible_gpus)
    for variable in own_start.read_bytes().split(b"\0"):
        name, is_set, value = variable.partition(b"=")
        if is_set and name == VARIABLE.encode():
            return GpuChoice(value.decode(errors="replace"), f"{VARIABLE} of the node")
    return None


class LineageTerm(NamedTuple):
    """A term of a lineage. Any term of a later lineage is greater than all terms of an earlier one."""

    lineage: int
    term: int


class NodeAgent:
    """The agent of one node. All methods run on the actor's event loop."""

    def __init__(self, config: str, runners: RayRunners | None = None) -> None:
        self._config = AgentConfig.from_json(config)
        choice = gpu_choice(self._config)
        if choice is not None:
            log.info(
                "not all GPUs are for this node",
                node=self._config.node,
                why=f"{choice.by} is {choice.words!r}",
            )
        size_mb = None if self._config.gpu_memory_mb is None else Mib(self._config.gpu_memory_mb)
        probes = find_probes(self._config.simulated, os.environ.get(NODE_GPUS), choice, size_mb)
        is_real = self._config.simulated is None and NODE_GPUS not in os.environ
        self._meter = DeviceMeter(probes, partial(restart_driver, choice, size_mb) if is_real else None)
        self._has_own_process = runners is None
        self._runners = runners or RayRunners(self._config)
        self._disks = DiskCleaner(Path(self._config.run_dir) / self._config.node, self.report)
        self._host = HostMeter(self._runners.session, self._config.watched_directories)
        self._id = uuid4().hex[:8]
        self._announcements = 0
        self._term = LineageTerm(0, 0)
        self._broker = ""
        self._protocol = PROTOCOL
        """The protocol that the leader speaks."""
        self._is_replaced = False
        """True if the leader wants an agent with another configuration. This agent ends once the reports
        that only it has are received."""
        self._head_is_lost = False
        """True if the node has lost Ray's head: nothing new starts here, and the agent ends when its runs
        have left."""
        self._mailbox: Mailbox | None = None
        self._acknowledged = 0
        """The number of the last report that the leader has received."""
        self._announced: Inventory | None = None
        """The devices that were last reported to the leader."""
        self._runs: NodeRuns | None = None
        self._telling: tuple[asyncio.Task[None], ...] = ()
        self._measure_now = asyncio.Event()
        self._leaving: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._announced_at = 0.0
        self._limited_logs_at = 0.0
        self._polled_at = time.monotonic()

    async def announce(
        self, protocol: int, config: str, broker: str, lineage: int, term: int
    ) -> tuple[str, str] | tuple[str, int, int]:
        """Begin an incarnation for a leader. Returns (`welcome`, the new incarnation), (`stale`, the known
        lineage, the known term) or (`outdated`, the protocols that this agent speaks).

        A later lineage is welcome whatever its term. A term belongs to one process, so a database that gives
        it to another process has lost commits, and the answer is `stale`. After `outdated`, the caller tries
        an earlier protocol, or kills this agent and starts another one. An agent with another configuration
        than the leader's takes no new runs, and ends when the reports that only it has are received.
        """
        async with self._opening:
            if self._leaving is not None:
                # This process ends, and the caller then finds the next agent.
                await asyncio.shield(self._leaving)
            # The check needs the lock: a later term may have been announced while this call waited for it.
            announced = LineageTerm(lineage, term)
            is_given_again = announced == self._term and self._broker not in ("", broker)
            if announced < self._term or is_given_again:
                return "stale", *self._term
            if protocol not in SPOKEN:
                return "outdated", f"protocols {SPOKEN}"
            self._is_replaced = AgentConfig.from_json(config) != self._config
            self._exit_if_replaced()
            self._term, self._protocol = announced, protocol
            runs = await self._open_runs()
            samples = await self._sampled(runs, OPENING_MEASURE_SECONDS)
            self._answer(runs, broker, samples)
        return "welcome", self._incarnation

    async def orders(self, protocol: int, lineage: int, term: int, packed: bytes) -> None:
        """Carry out orders for this incarnation. A start for another one is reported as never started."""
        if protocol not in SPOKEN or self._runs is None:
            raise ValueError(f"orders of protocol {protocol} before an announcement of one of {SPOKEN}")
        faults = []
        is_over = LineageTerm(lineage, term) < self._term
        if is_over:
            log.warning(
                "refused: orders of a term that is over",
                term=term,
                fault=f"it is term {self._term.term} of lineage {self._term.lineage}",
            )
        for order in unpack(packed):
            try:
                self._carry_out(self._runs, order, is_over=is_over)
            except Exception as fault:
                log.exception("an order cannot be carried out")
                faults.append(repr(fault))
        if faults:
            # The driver announces itself again, and learns which runs are here and which never started.
            raise ValueError(f"{len(faults)} orders could not be carried out: {faults[0]}")

    async def poll(self, incarnation: str, acknowledged: int, timeout_seconds: float) -> tuple[int, bytes]:
        """Return the number to acknowledge next and the packed reports; (-1, b"") if another announcement
        was made."""
        mailbox = self._mailbox
        if mailbox is None or incarnation != self._incarnation:
            return -1, b""
        asked_at = self._polled_at = time.monotonic()
        self._acknowledged = acknowledged
        read = await mailbox.read(acknowledged, may_come=lambda: True, timeout_seconds=timeout_seconds)
        if incarnation != self._incarnation:
            return -1, b""
        self._polled_at = time.monotonic()
        if not read:
            return acknowledged, b""
        reports = [report for _, report in read]
        held_seconds = self._polled_at - asked_at
        packed = write_reports(self._config.node, time.time(), reports, held_seconds, self._protocol)
        return read[-1][0], packed

    async def runner_of(self, task: str, fence: int, rank: int) -> str:
        """Return the name of the actor that has this run, for calls to it; empty if no actor has it."""
        return "" if self._runs is None else self._runs.table.runner_of(RunKey(task, fence, rank))

    async def leave(self) -> None:
        """Kill all runs and runners of this service on the node, remove its files, and end this process."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave())
        await asyncio.shield(self._leaving)

    def _on_news(self, report: Report, delay_seconds: float = AT_ONCE) -> None:
        if report[0] in ("started", "ended", "gone"):
            self._log_run(report[0], RunKey(*report[1:4]))
        self.report(report, delay_seconds)

    def _log_run(self, move: str, key: RunKey) -> None:
        log.info(f"run {move}", task=key.task, attempt=key.fence, rank=key.rank, node=self._config.node)

    def report(self, report: Report, delay_seconds: float = AT_ONCE) -> None:
        """Keep a report for the next poll. Of the progress and the checkpoints of a run, only the newest is
        kept."""
        if self._head_is_lost and self._runs is not None and self._runs.table.was_stopped(report):
            self._runs.forget(RunKey(*report[1:4]))
            return
        if self._mailbox is None:
            return
        journal = self._mailbox.journal
        if report[0] in ("progressed", "loaded", "checkpointed", "items"):
            journal.note(RunKey(*report[1:4]), report, AT_ONCE)
        elif report[0] == "environment":
            journal.note(report[2], report, AT_ONCE)
        elif report[0] == "ended":
            key = RunKey(*report[1:4])
            if self._runs is not None and self._protocol >= TELLS_LOGS:
                for log_report in self._runs.logs.kept(key):
                    journal.add(log_report, delay_seconds)
            journal.add(report, delay_seconds, after_news_of=key)
        else:
            journal.add(report, delay_seconds)

    def _note(self, report: Report) -> None:
        """Keep a report for the next poll, in place of an earlier one of its kind."""
        if self._mailbox is not None:
            self._mailbox.journal.note(report[0], report, AT_ONCE)

    @property
    def _incarnation(self) -> str:
        return f"{self._id}.{self._announcements}"

    def _carry_out(self, runs: NodeRuns, order: tuple[Any, ...], *, is_over: bool) -> None:
        """Carry out an order. All orders but a start name one claim, so they are valid in every incarnation.
        `is_over` is True if the order is of a term that is over."""
        match order:
            case ("start", incarnation, shareable, run):
                wanted = RunOrder.from_wire(run)
                if is_over or incarnation != self._incarnation or self._head_is_lost:
                    runs.refuse(wanted.key)
                else:
                    self._log_run("ordered", wanted.key)
                    runs.start(wanted, shareable=shareable)
            case ("go", task, fence, rank, rank_zero_address) if not is_over:
                runs.go(RunKey(task, fence, rank), rank_zero_address)
            case ("world" | "resized" | "items" | "part" as what, task, fence, rank, *values) if not is_over:
                runs.pass_on(what, RunKey(task, fence, rank), *values)
            case ("object", task, fence, rank, *answer) if not is_over:
                runs.take_object(RunKey(task, fence, rank), *answer)
            case ("output", task, fence, rank, id, stored_bytes, over) if not is_over:
                runs.directories.outputs.answer(RunKey(task, fence, rank), id, stored_bytes, is_over=over)
            case ("prepare", key, tenant, definition, project) if not is_over:
                runs.environments.prepare(key, tenant, definition, project)
            case ("watch", task, fence, rank, pid, leases) if not is_over:
                runs.external.watch(RunKey(task, fence, rank), pid, leases)
            case ("stop", task, fence, rank, _reason, grace_seconds) if not is_over:
                runs.stop(RunKey(task, fence, rank), grace_seconds)
            case ("stack", task, fence, rank, request) if not is_over:
                runs.tell_stack(RunKey(task, fence, rank), request)
            case ("disk", *about) if not is_over:
                self._disks.take(about)
            case ("forget", task, fence, rank) if not is_over:
                runs.forget(RunKey(task, fence, rank))
            case ("log", task, fence, rank, stream, first_byte) if not is_over:
                self.report(runs.logs.new(RunKey(task, fence, rank), stream, first_byte))
            case ("peers", peers):
                self._host.peers.try_all(Peer(*peer) for peer in peers)
            case ("measure",):
                self._measure_now.set()

    def _exit_if_replaced(self) -> None:
        """End this process if it is to be replaced and has nothing that only it knows. The next agent has
        the wanted configuration, and finds the runs by their records.

        This method must not await: no report may arrive between the check and the end of the process.
        """
        if self._is_replaced and not (self._runs and self._runs.has_unrecorded_state):
            log.info("ending, to be replaced by an agent with another configuration", node=self._config.node)
            os._exit(0)

    async def _open_runs(self) -> NodeRuns:
        """Return the runs of this node. The first announcement opens them, because there is no event loop
        before.

        The agent must not answer before it has found all runs of its node: a run that it does not list
        counts as gone.
        """
        if self._runs is None:
            runs = NodeRuns(self._config, self._on_news, self._meter, self._runners)
            if self._has_own_process:
                lines = Path(self._config.run_dir) / self._config.node / "agent.log"
                configure_logs(self._config.log_level, self._config.log_format, lines.open("a"))
            await runs.adopt()
            self._runs = runs
            if self._config.keepalive:
                self._watching = asyncio.create_task(self._watch_head(runs))
        return self._runs

    def _answer(self, runs: NodeRuns, broker: str, samples: list[WireSample] | None) -> None:
        """Report the samples, then the node and its runs. The samples come first: a run that the node report
        does not list was already gone when they were taken."""
        if self._broker not in ("", broker):
            runs.pool.retire_shared()
        self._broker = broker
        self._announcements += 1
        self._announced_at = self._polled_at = time.monotonic()
        self._change_mailbox(Mailbox())
        if samples is not None:
            self.report(("sampled", time.time(), samples))
        self.report(self._described(runs))
        for reports in (
            runs.table.all_reports(),
            runs.external.all_reports(),
            runs.objects.questions(),
            runs.directories.questions(),
        ):
            for report in reports:
                self.report(report)
        for task in self._telling:
            task.cancel()
        self._telling = asyncio.create_task(self._sample(runs)), asyncio.create_task(self._beat())

    async def _leave(self) -> None:
        if self._runs is not None:
            await retry_until_done("leaving the node", self._runs.close)
        os._exit(0)

    def _end_conversation(self) -> None:
        """Begin an incarnation without a reader. A leader that still polls announces itself again, and so
        learns the present devices and runs."""
        if self._mailbox is not None:
            self._announcements += 1
            self._change_mailbox(None)

    def _change_mailbox(self, mailbox: Mailbox | None) -> None:
        if self._mailbox is not None:
            self._mailbox.close()
        self._mailbox, self._acknowledged = mailbox, 0

    def _described(self, runs: NodeRuns) -> Report:
        config = self._config
        inventory = self._announced = self._meter.inventory()
        if inventory.faults:
            faults = "; ".join(f"{gpu}: {fault}" for gpu, fault in inventory.faults)
            log.warning("GPUs of this node cannot be used", node=config.node, fault=faults)
        if inventory.absence:
            log.info("this node has no GPU", node=config.node, why=inventory.absence)
        node = {
            "name": config.node,
            "cpu": config.cpu or float(len(os.sched_getaffinity(0))),
            "memory_mb": config.host_memory_mb,
            # A start that is on its way to this agent would be lost with it.
            "max_runs": 0 if self._is_replaced or self._head_is_lost else config.max_runs,
            "incarnation": self._incarnation,
            "boot_id": boot_id(),
            "release": __version__,
            "faults": dict(inventory.faults),
            "complete": inventory.complete,
            "gpu_absence": inventory.absence,
            "versions": versions(),
            "environments": runs.environments.states(),
        }
        run_keys = [tuple(key) for key in (*runs.table.runs, *runs.external)]
        return "node_seen", time.time(), node, [astuple(device) for device in inventory.devices], run_keys

    async def _sampled(self, runs: NodeRuns, timeout_seconds: float) -> list[WireSample] | None:
        """Return samples of the devices; None if these cannot be measured."""
        try:
            return await runs.measure(timeout_seconds=timeout_seconds)
        except Exception:
            log.exception("devices cannot be measured; they take nothing new until they can")
            return None

    async def _beat(self) -> None:
        """Report heartbeats until cancelled. This is a task of its own, because a node is not dead when its
        devices do not answer."""
        while True:
            self._note(("beat", time.time()))
            await asyncio.sleep(self._config.beat_seconds)

    async def _sample(self, runs: NodeRuns) -> None:
        while True:
            self._measure_now.clear()
            asked_at = time.time()  # memory may be released between the measurement and its answer
            samples = await self._sampled(runs, MEASURE_SECONDS)
            if samples is not None:
                self._note(("sampled", asked_at, samples))
            try:
                await self._look_after(runs)
                self._note(await self._host.report(self._meter.health()))
            except Exception:
                log.exception("looking after the node failed; the agent goes on")
            since = time.monotonic() - self._announced_at
            pause = min(self._config.sample_period_seconds, max(FIRST_SAMPLE_SECONDS, since))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._measure_now.wait(), pause)

    async def _look_after(self, runs: NodeRuns) -> None:
        self._exit_if_replaced()
        now = time.monotonic()
        unpolled = now - self._polled_at
        if unpolled > DESERTED_SECONDS or self._announced != self._meter.inventory():
            self._end_conversation()
        is_used = unpolled < DESERTED_SECONDS or not runs.table.is_idle
        if is_used and not self._head_is_lost:  # with a lost head, `_watch_head` keeps the node alive
            self._keep_alive()
        if not is_used and not self._config.keepalive and unpolled > self._config.idle_stop_seconds:
            await self.leave()
        if now > self._limited_logs_at + LOG_LIMIT_SECONDS:
            self._limited_logs_at = now
            await runs.limit_logs()
        runs.pool.retire_gpu_users()
        await runs.enforce_memory_limit()

    async def _watch_head(self, runs: NodeRuns) -> None:
        """Wait until the head has lost a vital process, stop all runs, and end this process. The head's
        supervisor waits for that end.

        The end of a run that is stopped here is not reported, because no leader asked for it. The task is
        planned again when the node is lost, and the memory is free when the next agent finds the run gone.
        """
        lost = lost_file(Path(self._config.keepalive))
        while not lost.exists():  # noqa: ASYNC110  # no event: another process writes it
            await asyncio.sleep(WATCH_HEAD_SECONDS)
        log.error("the head lost a process that Ray needs; its runs get notice", fault=lost.read_text())
        self._head_is_lost = True
        self.report(self._described(runs))
        for key in list(runs.table.runs):
            runs.stop(key, LOST_HEAD_GRACE_SECONDS)
        while runs.table.has_processes or self._keeps_news(runs):
            self._keep_alive()
            await asyncio.sleep(WATCH_HEAD_SECONDS / 10)
        os._exit(0)

    def _keeps_news(self, runs: NodeRuns) -> bool:
        """Return True if the leader still has to receive reports that only this agent has, such as the last
        checkpoint of a stopped run."""
        is_polled = time.monotonic() - self._polled_at < DESERTED_SECONDS
        is_received = self._mailbox is None or self._mailbox.journal.is_received(self._acknowledged)
        return is_polled and (runs.has_unrecorded_state or not is_received)

    def _keep_alive(self) -> None:
        if self._config.keepalive:
            with contextlib.suppress(OSError):
                Path(self._config.keepalive).touch()
