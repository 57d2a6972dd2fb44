"""The runs of one node: started, stopped, listened to, and proven gone."""

import asyncio
import bisect
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import structlog
from gpubroker.runtime.journal import AT_ONCE, SOON
from gpubroker.runtime.messages import Report, RunKey, RunOrder, is_report
from gpubroker.runtime.output import tail_of_file

from gpubroker_server.adapters.ray.agent.device_meter import MEASURE_SECONDS, Meter
from gpubroker_server.adapters.ray.agent.external_processes import Outsiders
from gpubroker_server.adapters.ray.agent.memory_limit import breakers
from gpubroker_server.adapters.ray.agent.reaper import put_down, sweep
from gpubroker_server.adapters.ray.agent.retry_until_done import until_done
from gpubroker_server.adapters.ray.agent.run_records import Card, RunFiles
from gpubroker_server.adapters.ray.agent.run_table import Run, RunBook
from gpubroker_server.adapters.ray.agent.runner_pool import Pool
from gpubroker_server.adapters.ray.agent.runner_process import Lane
from gpubroker_server.adapters.ray.agent.runners import Runners
from gpubroker_server.adapters.ray.agent.takeover import look_around, take_over
from gpubroker_server.adapters.ray.options import AgentConfig
from gpubroker_server.adapters.ray.processes import ProcessId, Watched, boot_id
from gpubroker_server.adapters.ray.wire import WireSample

log = structlog.get_logger("gpubroker.agent")


class Ear(Protocol):
    """Who hears what happens to runs."""

    def say(self, report: Report, delay_seconds: float = AT_ONCE) -> None: ...


class RunKeeper:
    """Implements `pool.Audience`. Everything here happens on one event loop."""

    def __init__(self, config: AgentConfig, ear: Ear, meter: Meter, runners: Runners) -> None:
        """Raises PermissionError if others could forge cards."""
        self._config = config
        self._ear = ear
        self._meter = meter
        self._runners = runners
        self._files = RunFiles(Path(config.run_dir) / config.node, boot_id())
        self._waiting: list[Run] = []
        """The highest priority first, then in order of arrival."""
        self._jobs: set[asyncio.Task[None]] = set()
        self.book = RunBook()
        self.pool = Pool(config, runners, self, lambda: sum(not run.shared for run in self._waiting))
        self.outsiders = Outsiders(
            self._files, config.instance, runners.node, self._runner_pids, ear.say, self.measure, self._do
        )

    @property
    def is_idle(self) -> bool:
        return all(run.has_ended or run.is_gone for run in self.book.runs.values())

    @property
    def knows_what_no_card_tells(self) -> bool:
        """An agent that came now would take a run that still waits for its process for one that nobody began,
        and would not hear how those have ended whose end is not durable elsewhere."""
        return bool(self._waiting) or self.book.keeps_outcomes

    def _runner_pids(self) -> list[int]:
        """Of the processes that runs are in, or will be."""
        lanes = (*self.pool.ready, *(run.lane for run in self.book.runs.values()))
        return [lane.watched.id.pid for lane in lanes if lane is not None]

    async def measure(
        self, needed: Sequence[str] = (), timeout_seconds: float = MEASURE_SECONDS
    ) -> list[WireSample]:
        """What every device holds now; see Meter.measure."""
        processes = {
            str(run.key): (run.lane.watched.id, dict(run.order.leases))
            for run in self.book.runs.values()
            if run.order.leases and run.lane is not None and not run.lane.watched.ended
        }
        return await self._meter.measure(processes | self.outsiders.processes(), needed, timeout_seconds)

    def start(self, order: RunOrder, *, shareable: bool) -> None:
        """A run that was heard of before is not started again."""
        if not self.book.is_new(order.key):
            return
        self.book.note_fence(order.key)
        small = shareable and not order.barrier and self._config.warm_runners > 0
        run = Run(order, shared=small and not self.book.is_suspect(order.task))
        self.book.runs[order.key] = run
        if not self._place(run):
            bisect.insort(self._waiting, run, key=lambda waiting: -waiting.order.priority)
            self.pool.keep_full()

    def refuse(self, key: RunKey) -> None:
        """It has not been started and never will be."""
        if self.book.is_new(key):
            self.book.note_fence(key)
            self._ear.say(_ended(key, "never_started"))
            self._ear.say(_gone(key, "never_started"))

    def stop(self, key: RunKey, grace_seconds: float) -> None:
        """Give notice, kill after the grace period. A second stop may only shorten it."""
        if key in self.outsiders:
            return  # nobody but its owner ends it
        run = self.book.runs.get(key)
        if run is None:
            self._stop_unknown(key)
        elif run in self._waiting:
            self._waiting.remove(run)
            self._end(run, _ended(key, "never_started"))
            self._depart(run, "never_started")
        elif run.lane is not None and not run.has_ended:
            if grace_seconds > 0:
                run.lane.hand_over(("stop", tuple(key)))
            self._kill_later(run, grace_seconds)

    def go(self, key: RunKey, rank_zero_address: str) -> None:
        """All ranks are ready. Said again it makes good what was lost on the way; nothing begins twice."""
        run = self.book.runs.get(key)
        if run is not None:
            run.go = rank_zero_address
            self._pass_on_go(run)

    def tell_world(self, key: RunKey, ranks: Sequence[int]) -> None:
        """Which ranks are left; for a run that has begun."""
        run = self.book.runs.get(key)
        if run is not None and run.lane is not None and not run.has_ended:
            run.lane.hand_over(("world", tuple(key), tuple(ranks)))

    def forget(self, key: RunKey) -> None:
        self.outsiders.forget(key)
        run = self.book.runs.get(key)
        if run is not None:
            run.forgotten = True
            self.book.drop_if_done(run)

    async def adopt(self) -> None:
        """Take over what an earlier agent of this node left: runs, remains of runs, processes kept ready.

        Nothing is changed unless all of it could be found out. Raises UnreadableCard, OSError, RayError.
        """
        left = await look_around(self._files, self._runners, self._config)
        took = take_over(left, self.book, self.pool)
        for lane in took.lanes:
            # What the agent before was told may never have left it.
            lane.listen_again(*(("retell", tuple(key)) for key in lane.runs))
        for run, card in took.lost:
            self._do(f"burying run {run.key}", partial(self._bury, run, card))
        for run in took.strays:
            self._do(f"ending what is left of run {run.key}", partial(self._end_stray, run))
        for card in took.outsiders:
            self.outsiders.adopt(card)
        for runner in took.blank:
            self._do("ending a blank runner", partial(asyncio.to_thread, self._runners.kill, runner))
        self._files.remove_outdated()
        self.pool.keep_full()

    async def hold_to_allowance(self) -> None:
        """End the runs of which one process has taken more host memory than it may have."""
        for lane in await breakers(list(self.book.runs.values()), self._config.process_memory_mb):
            self._do("ending a process that is too large", partial(put_down, lane.watched))

    async def tidy(self) -> None:
        await asyncio.to_thread(self._files.tidy)

    async def close(self) -> None:
        """Kill every run and every process kept ready; back when nothing of them is left, files included."""
        await self.pool.close()
        runs = list(self.book.runs.values())
        what = "ending a run before leaving"
        await asyncio.gather(*(until_done(what, partial(self._clear_away, run)) for run in runs))
        self._files.remove_all()

    def on_ready(self) -> None:
        for run in list(self._waiting):
            if self._place(run):
                self._waiting.remove(run)

    def on_report(self, lane: Lane, report: Report) -> None:
        if not is_report(report):
            log.error("a process said what is no report", runner=lane.name)
            return
        kind, key = report[0], RunKey(*report[1:4])
        run = self.book.runs.get(key)
        if run is None or run.lane is not lane or run.has_ended:
            return  # user code may have forged it
        if kind != "ended":
            if kind != "progressed":
                run.told[kind] = report
            self._ear.say(report, SOON if kind == "started" else AT_ONCE)
            return
        self._end(run, report)
        lane.runs.discard(key)
        if lane.shared:
            self._depart(run, "shared_process")
            self.pool.dismiss_if_done(lane)
        else:
            self._put_down(run, lane)

    def on_end(self, lane: Lane) -> None:
        """The process of a lane is gone; whoever it ran and has not ended is lost."""
        self.pool.forget(lane)
        its_runs = [run for run in self.book.runs.values() if run.lane is lane]
        cut_off = [run for run in its_runs if not run.has_ended]
        somebody_killed = any(run.killed for run in cut_off)
        for run in cut_off:
            if not lane.shared or run.killed or len(cut_off) == 1:
                self._end(run, self._lost(run, lane))
                continue
            # Killed with another, or by one that nobody can name: each starts again, the latter alone.
            self._end(run, _ended(run.key, "never_started"))
            if not somebody_killed:
                self.book.suspect(run.key.task)
        for run in its_runs:
            run.lane = None
            if lane.shared:
                self._depart(run, "process_absent")
            else:
                self._prove_gone(run, lane.watched.id)

    def _place(self, run: Run) -> bool:
        """Whether it has to wait no longer: it starts, or never will."""
        lane = self.pool.least_busy_shared() if run.shared else self.pool.take_spare()
        if lane is None:
            return False
        order, config = run.order, self._config
        if run.shared:
            begin: tuple[Any, ...] = ("share", order.to_wire())
        elif self._has_card(run, lane):
            begin = own_start(order, lane.protocol, config, self._files.log_of(order.key), self._runners.host)
        else:
            self.pool.give_back(lane)
            self._end(run, _ended(order.key, "never_started"))
            self._depart(run, "never_started")
            return True
        run.lane = lane
        lane.runs.add(order.key)
        lane.hand_over(begin)
        self._pass_on_go(run)
        return True

    def _pass_on_go(self, run: Run) -> None:
        if run.go and run.lane is not None:
            run.lane.hand_over(("go", tuple(run.key), run.go))

    def _has_card(self, run: Run, lane: Lane) -> bool:
        """Without one a later agent would not know of the run; then it must not start."""
        order = run.order
        card = Card(
            *order.key, order.leases, lane.name, *lane.watched.id, self._runners.node, order.memory_mb
        )
        try:
            self._files.write_card(card)
        except OSError as fault:
            log.error("a run cannot start, its card cannot be written", task=order.task, fault=str(fault))
            return False
        return True

    def _kill_later(self, run: Run, grace_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if run.kill is not None:
            if run.kill.when() <= loop.time() + grace_seconds:
                return
            run.kill.cancel()
        run.kill = loop.call_later(grace_seconds, self._kill, run, grace_seconds)

    def _kill(self, run: Run, grace_seconds: float) -> None:
        if run.lane is None or run.has_ended:
            return
        run.killed = (
            f"it did not give way within its grace period of {grace_seconds:g} s and was killed"
            if grace_seconds > 0
            else "it was killed"
        )
        self._put_down(run, run.lane)

    def _stop_unknown(self, key: RunKey) -> None:
        departure = self.book.departure_of(key)
        if departure is not None:
            self._ear.say(departure)
        elif self.book.is_new(key):
            self.refuse(key)
        else:
            self._do(f"proving run {key} absent", partial(self._say_absent, key))

    def _end(self, run: Run, report: Report) -> None:
        if run.kill is not None:
            run.kill.cancel()
        run.told["ended"] = report
        self._ear.say(report)

    def _lost(self, run: Run, lane: Lane) -> Report:
        if lane.breach:
            failure = ("host_memory_exceeded", lane.breach, "")
        elif lane.out_of_memory:
            failure = ("out_of_memory", "the node ran out of memory and Ray killed the process", "")
        else:
            why = run.killed or "its process ended without a word: it was killed or it crashed"
            failure = ("killed", f"{why}; the last lines of its log may say more", "")
        return _ended(run.key, "lost", failure, tail_of_file(self._files.log_of(run.key)))

    def _put_down(self, run: Run, lane: Lane) -> None:
        self._do(f"ending the process of run {run.key}", partial(put_down, lane.watched))

    def _prove_gone(self, run: Run, process: ProcessId, proof: str = "process_absent") -> None:
        self._do(f"proving run {run.key} gone", partial(self._say_gone, run, process, proof))

    async def _say_gone(self, run: Run, process: ProcessId, proof: str) -> None:
        """Its memory is free: it is measured, on each of its devices, after its last process has gone."""
        if not run.is_gone:
            log_path = self._files.log_of(run.key)
            await sweep(self._config.instance, str(run.key), log_path, process.start_ticks)
            leased = [uuid for uuid, _mb in run.order.leases]
            self._depart(run, proof, await self.measure(leased) if leased else ())
        self._files.remove_card(run.key)

    async def _say_absent(self, key: RunKey) -> None:
        await sweep(self._config.instance, str(key), self._files.log_of(key))
        self._ear.say(_gone(key, "process_absent", await self.measure()))

    async def _clear_away(self, run: Run) -> None:
        if run.lane is not None:
            await put_down(run.lane.watched)
        if not run.shared:
            await sweep(self._config.instance, str(run.key), self._files.log_of(run.key))

    def _depart(self, run: Run, proof: str, samples: Sequence[WireSample] = ()) -> None:
        run.lane = None
        run.told["gone"] = _gone(run.key, proof, samples)
        self._ear.say(run.told["gone"])
        self.book.drop_if_done(run)

    async def _bury(self, run: Run, card: Card) -> None:
        """Nobody can talk to it any more: its process is gone, or its Ray is."""
        with contextlib.suppress(ProcessLookupError):
            await put_down(Watched(card.process))
        if card.ray_node != self._runners.node:
            await self._say_gone(run, card.process, "agent_restarted")
            return
        if not run.has_ended:
            failure = ("killed", "its process ended while no agent watched", "")
            self._end(run, _ended(run.key, "lost", failure, tail_of_file(self._files.log_of(run.key))))
        await self._say_gone(run, card.process, "process_absent")

    async def _end_stray(self, run: Run) -> None:
        """Nobody knows any more what it leased: all is measured after it."""
        await sweep(self._config.instance, str(run.key), self._files.log_of(run.key))
        self._depart(run, "process_absent", await self.measure())

    def _do(self, what: str, attempt: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """In the background, over and over until it succeeds."""
        task = asyncio.create_task(until_done(what, attempt))
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)


def own_start(
    order: RunOrder, protocol: int | None, config: AgentConfig, log: Path, host: str
) -> tuple[Any, ...]:
    """For a process that has it to itself."""
    start = ("own", order.to_wire(), config.instance, str(log), config.task_user, host)
    return start if protocol == 4 else (*start, config.node)


def _ended(
    key: RunKey, ending: str, failure: tuple[str, str, str] | None = None, log_tail: bytes = b""
) -> Report:
    return ("ended", *key, time.time(), ending, None, "json", failure, log_tail)


def _gone(key: RunKey, proof: str, samples: Sequence[WireSample] = ()) -> Report:
    return ("gone", *key, time.time(), proof, tuple(samples))
