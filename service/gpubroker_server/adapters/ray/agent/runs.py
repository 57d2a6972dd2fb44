"""The runs of one node: the agent starts them, stops them, listens to them, and proves them gone."""

import asyncio
import bisect
import contextlib
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from gpubroker.runtime.command_reports import remove_reports_of
from gpubroker.runtime.journal import AT_ONCE, SOON
from gpubroker.runtime.messages import (
    Report,
    RunFault,
    RunKey,
    RunOrder,
    RunOutcome,
    ended,
    failed,
    is_report,
    is_unproven_end,
)
from gpubroker.runtime.output import tail_of_files
from gpubroker.runtime.process import RAY_VARIABLE
from gpubroker.runtime.ray_cluster import remove_ray_directories

from gpubroker_server.adapters.nvml.meter import MEASURE_SECONDS, DeviceMeter
from gpubroker_server.adapters.ray.agent.external_processes import ExternalProcesses
from gpubroker_server.adapters.ray.agent.memory_cgroups import MemoryCgroups
from gpubroker_server.adapters.ray.agent.run_directories import RunDirectories
from gpubroker_server.adapters.ray.agent.run_environments import RunEnvironments
from gpubroker_server.adapters.ray.agent.run_files import RunFiles, RunLogs, RunRecord
from gpubroker_server.adapters.ray.agent.runner_pool import RayRunners, RunnerPool
from gpubroker_server.adapters.ray.agent.runner_process import (
    AgentRun,
    RunnerProcess,
    RunTable,
    gone,
    how_it_ended,
    over_memory_limit,
    own_start,
    retry_until_done,
)
from gpubroker_server.adapters.ray.agent.shared_objects import Failed, SharedObjects
from gpubroker_server.adapters.ray.agent.stacks import tell_stack
from gpubroker_server.adapters.ray.agent.takeover import take_over
from gpubroker_server.adapters.ray.options import AgentConfig
from gpubroker_server.adapters.ray.processes import (
    ProcessId,
    WatchedProcess,
    boot_id,
    disjoint_trees,
    kill_leftovers,
    kill_tree,
)
from gpubroker_server.adapters.ray.wire import WireSample
from gpubroker_server.core.domain.units import Mib
from gpubroker_server.ports.devices import ProcessGroup

log = structlog.get_logger("gpubroker.agent")

NEVER_STARTED = RunOutcome("never_started")

ReportWithin = Callable[[Report, float], None]
"""Keeps a report. The second argument is the time in seconds for which the report may wait for others."""


class NodeRuns:
    """The runs of one node. All methods run on one event loop."""

    def __init__(
        self, config: AgentConfig, report: ReportWithin, meter: DeviceMeter, runners: RayRunners
    ) -> None:
        """Open the files of the runs. Raises PermissionError if other users could forge records."""
        self._config = config
        self._report_within = report
        self._meter = meter
        self._runners = runners
        self._files = RunFiles(Path(config.run_dir) / config.node, boot_id())
        self.logs = RunLogs(self._files, config.log_limit_bytes)
        self._cgroups = MemoryCgroups()
        self._waiting: list[AgentRun] = []
        """The runs that wait for a process, the highest priority first, then in order of arrival."""
        self._jobs: set[asyncio.Task[None]] = set()
        self.table = RunTable()
        hooks = self._on_report, self._on_end, self._on_ready
        self.pool = RunnerPool(config, runners, *hooks, lambda: sum(not run.shared for run in self._waiting))
        give = partial(self.pass_on, "object")
        share = partial(_share, runners)
        self.objects = SharedObjects(runners.object_cache_bytes, share, self._report, give)
        self.directories = RunDirectories(config, self._report, self._on_directory, self._do)
        self.environments = RunEnvironments(config, self._report, self._do)
        about = self._files, config.instance, runners.node
        self.external = ExternalProcesses(*about, self._runner_pids, self._report, self.measure, self._do)

    @property
    def has_unrecorded_state(self) -> bool:
        """True if this agent knows something about its runs that is in no record. A later agent would report
        a waiting run as never begun, and would not know the end of a run before that end is stored
        elsewhere."""
        return bool(self._waiting) or self.table.keeps_outcomes or self.directories.is_preparing

    def _runner_pids(self) -> list[int]:
        """Return the process ids of all runners, those of blank runners included."""
        processes = (*self.pool.ready, *(run.process for run in self.table.runs.values()))
        return [process.watched.id.pid for process in processes if process is not None]

    async def measure(
        self, needed: Sequence[str] = (), timeout_seconds: float = MEASURE_SECONDS
    ) -> list[WireSample]:
        """Measure each device that can be measured now. Raises what DeviceMeter.measure raises."""
        holders = self.table.alive_with_leases() | self.external.alive()
        roots = {key: process for key, (process, _) in holders.items()}
        leased = {key: {uuid: Mib(mb) for uuid, mb in leases} for key, (_, leases) in holders.items()}

        def groups() -> dict[str, ProcessGroup]:
            return {key: ProcessGroup(pids, leased[key]) for key, pids in disjoint_trees(roots).items()}

        return [
            (device.uuid, device.used_mb, device.foreign_mb, dict(device.by_holder), device.utilization)
            for device in await self._meter.measure(groups, needed, timeout_seconds)
        ]

    def start(self, order: RunOrder, *, shareable: bool) -> None:
        """Start a run, or report that it never starts if its claim is not newer than one that was here
        before."""
        if not self.table.is_new(order.key):
            self.refuse(order.key)
            return
        self.table.note_fence(order.key)
        may_share = shareable and not order.barrier and self._config.warm_runners > 0
        run = AgentRun(order, shared=may_share and not self.table.is_suspect(order.task))
        self.table.runs[order.key] = run
        if order.upload:
            self.directories.prepare(order)
        else:
            if order.outputs:
                self.directories.expect(order)
            self._place_or_wait(run)

    def _enter_environment(self, run: AgentRun) -> bool:
        """Fill in the environment of a run and return True, or report that the run does not start."""
        entered = self.environments.take(run.order)
        if isinstance(entered, RunOrder):
            run.order = entered
            self._files.add_setup_log(run.key, self.environments.setup_log(entered.environment))
            return True
        outcome = NEVER_STARTED if entered is None else failed(*entered)
        self._end(run, ended(run.key, outcome, b""))
        self._report_gone(run, "never_started")
        self.directories.drop(run.key)
        return False

    def _on_directory(self, key: RunKey, directory: str, failure: Failed | None) -> None:
        """Place a run whose working directory is ready, or report its failure if the directory could not be
        made."""
        run = self.table.runs[key]
        if failure is not None:
            self._end(run, ended(key, failed(*failure), b""))
            self._report_gone(run, "never_started")
            return
        run.order = dataclasses.replace(run.order, working_directory=directory)
        self._place_or_wait(run)

    def _place_or_wait(self, run: AgentRun) -> None:
        if run.order.environment and not self._enter_environment(run):
            return
        if not self._place(run):
            bisect.insort(self._waiting, run, key=lambda waiting: -waiting.order.priority)
            self.pool.refill()

    def refuse(self, key: RunKey) -> None:
        """Note that this order never starts the run. A run that is already here reports its own outcome."""
        if key not in self.table.runs:
            self.table.note_fence(key)
            self._report(ended(key, NEVER_STARTED, b""))
            self._report(gone(key, "never_started"))

    def stop(self, key: RunKey, grace_seconds: float) -> None:
        """Give a run notice, and kill it after the grace period. A second stop can only shorten the grace
        period."""
        if key in self.external:
            return  # its owner ends it
        run = self.table.runs.get(key)
        if run is None:
            self._stop_unknown(key)
        elif run in self._waiting:
            self._waiting.remove(run)
            self._cancel_start(run)
        elif self.directories.prepares(key):
            self._cancel_start(run)
        elif run.process is not None and not run.has_ended:
            if grace_seconds > 0:
                run.process.send(("stop", tuple(key)))
            self._kill_later(run, grace_seconds)

    def go(self, key: RunKey, rank_zero_address: str) -> None:
        """Begin a run whose ranks are all ready. The order may be repeated; a run begins only once."""
        run = self.table.runs.get(key)
        if run is not None:
            run.go = rank_zero_address
            self._pass_on_go(run)

    def pass_on(self, kind: str, key: RunKey, *values: Any) -> None:
        """Send a message to a run that has a process."""
        run = self.table.runs.get(key)
        if run is not None and run.process is not None and not run.has_ended:
            run.process.send((kind, tuple(key), *values))

    def tell_stack(self, key: RunKey, request: str) -> None:
        tell = partial(tell_stack, self.table.runs.get(key), key, request, self._report)
        self._do(f"reading the stacks of run {key}", tell)

    def take_object(self, key: RunKey, *answer: Any) -> None:
        """Pass on the leader's answer about an object that a run opens, or from which its working directory
        is made."""
        self.objects.take(key, *answer)
        self.directories.objects.take(key, *answer)

    def forget(self, key: RunKey) -> None:
        self.external.forget(key)
        run = self.table.runs.get(key)
        if run is not None:
            run.forgotten = True
            self.table.drop_if_done(run)

    async def adopt(self) -> None:
        """Take over the runs, the remains of runs and the blank runners that an earlier agent of this node
        left.

        Changes nothing unless all of them could be found. Raises UnreadableRecord, OSError and RayError.
        """
        took = await take_over(self._files, self._runners, self._config, self.table, self.pool)
        for process in took.processes:
            # Reports that the earlier agent received may never have left it.
            process.listen_again(*(("retell", tuple(key)) for key in process.runs))
        for run, record in took.lost:
            self._do(f"clearing away run {run.key}", partial(self._end_lost, run, record))
        for run in took.strays:
            self._do(f"ending what is left of run {run.key}", partial(self._end_stray, run))
        for record in took.external:
            self.external.adopt(record)
        for runner in took.blank:
            self._do("ending a blank runner", partial(asyncio.to_thread, self._runners.kill, runner))
        self._files.remove_outdated()
        await self.environments.adopt()
        for run in self.table.runs.values():
            self.environments.keep(run.order)
        await self.directories.adopt(self.table.runs.keys())
        self.pool.refill()

    async def enforce_memory_limit(self) -> None:
        """End the processes of runs that take more host memory than they may have."""
        most_mb = min(self._config.process_memory_mb, self._config.host_memory_mb)
        for process in await over_memory_limit(list(self.table.runs.values()), most_mb):
            self._kill_process(process)

    async def limit_logs(self) -> None:
        await asyncio.to_thread(self._files.limit_logs)

    async def close(self) -> None:
        """Kill all runs and blank runners, and return when nothing of them is left, their files included."""
        await self.pool.close()
        job = "ending a run before leaving"
        runs = list(self.table.runs.values())
        await asyncio.gather(*(retry_until_done(job, partial(self._clear_away, run)) for run in runs))
        self._files.remove_all()
        await asyncio.to_thread(self.directories.remove_all)

    def _on_ready(self) -> None:
        for run in list(self._waiting):
            if self._place(run):
                self._waiting.remove(run)

    def _on_report(self, process: RunnerProcess, report: Report) -> None:
        if not is_report(report):
            log.error("a process wrote something that is no report", runner=process.name)
            return
        kind, key = report[0], RunKey(*report[1:4])
        run = self.table.runs.get(key)
        if run is None or run.process is not process or run.has_ended:
            return  # user code may have forged it
        if kind == "printed":
            self._files.add_to_log(key, *report[5:])
            return
        if kind == "wanted":
            self.objects.want(key, run.order.tenant, report[5])
            return
        report = (*report, run.ordered_at) if kind == "started" else report
        if kind != "ended":
            if kind not in ("progressed", "loaded"):
                run.reports[kind] = report
            self._report_within(report, SOON if kind == "started" else AT_ONCE)
            return
        self._end(run, (*report, is_unproven_end(report, process.protocol)))
        process.runs.discard(key)
        if process.shared:
            self._report_gone(run, "shared_process")
            self.pool.dismiss_if_done(process)
        else:
            self._kill_process(process)

    def _on_end(self, process: RunnerProcess) -> None:
        """Report the end of each run in a process that is gone. A run that has not ended is lost, or starts
        again."""
        self.pool.forget(process)
        process_runs = [run for run in self.table.runs.values() if run.process is process]
        cut_off = [run for run in process_runs if not run.has_ended]
        one_was_killed = any(run.killed for run in cut_off)
        for run in cut_off:
            if not process.shared or run.killed or len(cut_off) == 1:
                self._end(run, self._lost(run, process))
                continue
            # Unless one run was killed, any of them may have crashed the process: each starts again alone.
            self._end(run, ended(run.key, NEVER_STARTED, b""))
            if not one_was_killed:
                self.table.suspect(run.key.task)
        for run in process_runs:
            run.process = None
            if process.shared:
                self._report_gone(run, "process_absent")
            else:
                job = partial(self._prove_gone, run, process.watched.id, "process_absent")
                self._do(f"proving run {run.key} gone", job)

    def _place(self, run: AgentRun) -> bool:
        """Start a run if a process is free. Returns False if the run must wait; True if it starts or never
        will."""
        process = self.pool.least_busy_shared() if run.shared else self.pool.take_spare()
        if process is None:
            return False
        order = run.order
        if run.shared:
            begin: tuple[Any, ...] = ("share", order.to_wire())
        elif self._write_record(run, process):
            self._cgroups.hold(order, process.watched.id.pid)
            begin = own_start(order, self._config, self._files.log_of(order.key), self._runners.host)
        else:
            self.pool.give_back(process)
            self._cancel_start(run)
            return True
        run.process = process
        process.runs.add(order.key)
        process.send(begin)
        self._pass_on_go(run)
        return True

    def _pass_on_go(self, run: AgentRun) -> None:
        if run.go and run.process is not None:
            run.process.send(("go", tuple(run.key), run.go))

    def _write_record(self, run: AgentRun, process: RunnerProcess) -> bool:
        """Write the record of a run, and return True if that succeeded. A run must not start without one,
        because a later agent would not know of it."""
        order, process_id = run.order, process.watched.id
        record = RunRecord.of(order, process.name, process_id, self._runners.node, process.protocol)
        try:
            self._files.write_record(record)
        except OSError as fault:
            log.error("a run cannot start, its record cannot be written", task=order.task, fault=str(fault))
            return False
        return True

    def _kill_later(self, run: AgentRun, grace_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if run.kill is not None:
            if run.kill.when() <= loop.time() + grace_seconds:
                return
            run.kill.cancel()
        run.kill = loop.call_later(grace_seconds, self._kill, run, grace_seconds)

    def _kill(self, run: AgentRun, grace_seconds: float) -> None:
        if run.process is None or run.has_ended:
            return
        late = f"it did not stop within its grace period of {grace_seconds:g} s and was killed"
        run.killed = late if grace_seconds > 0 else "it was killed"
        self._kill_process(run.process)

    def _stop_unknown(self, key: RunKey) -> None:
        report = self.table.gone_report(key)
        if report is not None:
            self._report(report)
        elif self.table.is_new(key):
            self.refuse(key)
        else:
            self._do(f"proving run {key} absent", partial(self._prove_absent, key))

    def _cancel_start(self, run: AgentRun) -> None:
        self._end(run, ended(run.key, NEVER_STARTED, b""))
        self._report_gone(run, "never_started")
        self.directories.drop(run.key)

    def _end(self, run: AgentRun, report: Report) -> None:
        if run.kill is not None:
            run.kill.cancel()
        run.reports["ended"] = report
        run.reports.pop("part", None)
        self.objects.leave(run.key)
        self.directories.leave(run.key)
        self._report(report)

    def _lost(self, run: AgentRun, process: RunnerProcess) -> Report:
        if breach := process.breach or self._cgroups.breach_of(run.order):
            return self._ended_lost(run, "host_memory_exceeded", breach)
        if process.out_of_memory:
            cause = "the node ran out of memory and Ray killed the process"
            return self._ended_lost(run, "out_of_memory", cause)
        cause = run.killed or how_it_ended(process.exit_status)
        return self._ended_lost(run, "killed", f"{cause}; the last lines of its log may say more")

    def _ended_lost(self, run: AgentRun, kind: str, message: str) -> Report:
        outcome = RunOutcome("lost", fault=RunFault(kind, message))
        return ended(run.key, outcome, tail_of_files(self._files.log_of(run.key)))

    def _kill_process(self, process: RunnerProcess) -> None:
        self._do(f"ending runner {process.name}", partial(kill_tree, process.watched))

    async def _prove_gone(self, run: AgentRun, process: ProcessId, proof: str) -> None:
        """Report that the run is gone. Its devices are measured after its last process has ended."""
        if not run.is_gone:
            await self._kill_leftovers(run.key, process.start_ticks)
            await asyncio.to_thread(self._remove_files, run)
            leased = [uuid for uuid, _mb in run.order.leases]
            self._report_gone(run, proof, await self.measure(leased) if leased else ())
        self.directories.end(run.key)
        self._files.remove_record(run.key)
        self._cgroups.release(run.key)

    def _remove_files(self, run: AgentRun) -> None:
        """Remove the temporary files of a run of which no process is left."""
        remove_reports_of(self._config.instance, run.key)
        # Of a run that an earlier agent started, only the key is known.
        if RAY_VARIABLE in run.order.env or run.ordered_at is None:
            remove_ray_directories(self._config.instance, run.key, dict(self._config.task_env))

    async def _prove_absent(self, key: RunKey) -> None:
        await self._kill_leftovers(key)
        self._report(gone(key, "process_absent", await self.measure()))

    async def _kill_leftovers(self, key: RunKey, since_ticks: int = 0) -> None:
        await kill_leftovers(self._config.instance, str(key), self._files.log_of(key), since_ticks)

    async def _clear_away(self, run: AgentRun) -> None:
        if run.process is not None:
            await kill_tree(run.process.watched)
        if not run.shared:
            await self._kill_leftovers(run.key)

    def _report_gone(self, run: AgentRun, proof: str, samples: Sequence[WireSample] = ()) -> None:
        run.process = None
        if run.order.environment:
            self.environments.leave(run.key)
        run.reports["gone"] = gone(run.key, proof, samples)
        self._report(run.reports["gone"])
        self.table.drop_if_done(run)

    async def _end_lost(self, run: AgentRun, record: RunRecord) -> None:
        """End and report a run whose process is gone, or whose Ray node is."""
        with contextlib.suppress(ProcessLookupError):
            await kill_tree(WatchedProcess(record.process))
        if record.ray_node != self._runners.node:
            await self._prove_gone(run, record.process, "agent_restarted")
            return
        if not run.has_ended:
            self._end(run, self._ended_lost(run, "killed", "its process ended while no agent watched it"))
        await self._prove_gone(run, record.process, "process_absent")

    async def _end_stray(self, run: AgentRun) -> None:
        """End a run without a record. Its leases are unknown, so every device is measured after it."""
        await self._kill_leftovers(run.key)
        await asyncio.to_thread(self._remove_files, run)
        self._report_gone(run, "process_absent", await self.measure())
        self.directories.end(run.key)

    def _report(self, report: Report) -> None:
        self._report_within(report, AT_ONCE)

    def _do(self, job: str, attempt: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a job in the background, and repeat it until it succeeds."""
        task = asyncio.create_task(retry_until_done(job, attempt))
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)


def _share(runners: RayRunners, _tenant: str, _id: str, data: bytearray) -> Any:
    return runners.share(data)
