"""The runs of one node: started, stopped, listened to, and proven gone."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol

import ray
from gpubroker.runtime.journal import AT_ONCE, SOON
from gpubroker.runtime.messages import Report, RunKey, RunOrder
from gpubroker.runtime.output import tail_of_file

from service.adapters.ray.cards import Card, RunFiles
from service.adapters.ray.lane import Lane
from service.adapters.ray.options import AgentConfig
from service.adapters.ray.pool import Pool, describe
from service.adapters.ray.processes import ProcessId, Watched, boot_id, process_id
from service.adapters.ray.reaper import put_down, sweep
from service.adapters.ray.runbook import Run, RunBook
from service.adapters.ray.wire import WireSample

Measure = Callable[[], Awaitable[Sequence[WireSample]]]


class Ear(Protocol):
    """Who hears what happens to runs."""

    def say(self, report: Report, delay_seconds: float = AT_ONCE) -> None: ...

    def note(self, key: RunKey, report: Report) -> None: ...


class RunKeeper:
    """Implements `pool.Audience`. Everything here happens on one event loop."""

    def __init__(self, config: AgentConfig, ear: Ear, measure: Measure) -> None:
        self._config = config
        self._ear = ear
        self._measure = measure
        self._files = RunFiles(Path(config.run_dir) / config.node)
        self._boot = boot_id()
        self._waiting: deque[Run] = deque()
        self._jobs: set[asyncio.Task[None]] = set()
        self.book = RunBook()
        self.pool = Pool(config, self, lambda: sum(not run.shared for run in self._waiting))

    @property
    def is_idle(self) -> bool:
        return all(run.has_ended or run.is_gone for run in self.book.runs.values())

    def gpu_processes(self) -> dict[str, tuple[ProcessId, dict[str, int]]]:
        """`task:fence` of every run that holds devices and has a process -> that process, and its leases."""
        return {
            str(run.key): (run.lane.watched.id, dict(run.order.leases))
            for run in self.book.runs.values()
            if run.order.leases and run.lane is not None and not run.lane.watched.ended
        }

    def start(self, order: RunOrder, *, shareable: bool) -> None:
        """A run that was heard of before is not started again."""
        if not self.book.is_new(order.key):
            return
        self.book.note_fence(order.key)
        small = shareable and self._config.warm_runners > 0
        run = Run(order, shared=small and not self.book.is_suspect(order.task))
        self.book.runs[order.key] = run
        if not self._place(run):
            self._waiting.append(run)
            self.pool.keep_full()

    def refuse(self, key: RunKey) -> None:
        """It has not been started and never will be."""
        if self.book.is_new(key):
            self.book.note_fence(key)
            self._ear.say(_ended(key, "never_started"))
            self._ear.say(_gone(key, "never_started"))

    def stop(self, key: RunKey, grace_seconds: float) -> None:
        """Give notice, kill after the grace period. A second stop may only shorten it."""
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

    def forget(self, key: RunKey) -> None:
        run = self.book.runs.get(key)
        if run is not None:
            run.forgotten = True
            self.book.drop_if_done(run)

    async def adopt(self) -> None:
        """Take over what an earlier agent of this node left: runs, remains of runs, processes kept ready."""
        self._files.prune_logs()
        taken = set()
        for card in list(self._files.cards()):
            if card.boot_id == self._boot:
                taken.add(card.runner)
                await self._adopt_run(card)
            else:
                self._files.remove_card(card.key)
        for name in await asyncio.to_thread(self.pool.left_over):
            if name not in taken:
                with contextlib.suppress(ValueError, ProcessLookupError):
                    await self._adopt_runner(name)
        self.pool.keep_full()

    async def close(self) -> None:
        """Kill every run and every process kept ready."""
        self.pool.close()
        lanes = {run.lane for run in self.book.runs.values() if run.lane is not None}
        await asyncio.gather(*(put_down(lane.watched) for lane in lanes))

    def on_ready(self) -> None:
        for run in list(self._waiting):
            if self._place(run):
                self._waiting.remove(run)

    def on_report(self, lane: Lane, report: Report) -> None:
        kind, key = report[0], RunKey(*report[1:4])
        run = self.book.runs.get(key)
        if run is None or run.lane is not lane or run.has_ended:
            return  # user code may have forged it
        if kind == "progressed":
            self._ear.note(key, report)
            return
        if kind != "ended":
            run.told[kind] = report
            self._ear.say(report, SOON if kind == "started" else AT_ONCE)
            return
        self._end(run, report)
        lane.runs.discard(key)
        if lane.shared:
            self._depart(run, "shared_process")
            self.pool.dismiss_if_done(lane)
        else:
            self._do(put_down(lane.watched))

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
                self._do(self._prove_gone(run, lane.watched.id))

    def _place(self, run: Run) -> bool:
        lane = self.pool.least_busy_shared() if run.shared else self.pool.take_spare()
        if lane is None:
            return False
        order = run.order
        run.lane = lane
        lane.runs.add(order.key)
        if run.shared:
            lane.hand_over(("share", order.to_wire()))
            return True
        self._files.write_card(
            Card(*order.key, order.leases, lane.name, *lane.watched.id, self._boot, self.pool.ray_node)
        )
        log_path = str(self._files.log_of(order.key))
        config = self._config
        lane.hand_over(("own", order.to_wire(), config.instance, log_path, config.task_user))
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
        self._do(put_down(run.lane.watched))

    def _stop_unknown(self, key: RunKey) -> None:
        departure = self.book.departure_of(key)
        if departure is not None:
            self._ear.say(departure)
        elif self.book.is_new(key):
            self.refuse(key)
        else:
            self._do(self._prove_absent(key))

    def _end(self, run: Run, report: Report) -> None:
        if run.kill is not None:
            run.kill.cancel()
        run.told["ended"] = report
        self._ear.say(report)

    def _lost(self, run: Run, lane: Lane) -> Report:
        if lane.out_of_memory:
            failure = ("out_of_memory", "the node ran out of memory and Ray killed the process", "")
        else:
            why = run.killed or "its process ended without a word: it was killed or it crashed"
            failure = ("killed", f"{why}; the last lines of its log may say more", "")
        return _ended(run.key, "lost", failure, tail_of_file(self._files.log_of(run.key)))

    async def _prove_gone(self, run: Run, process: ProcessId, proof: str = "process_absent") -> None:
        log = self._files.log_of(run.key)
        await sweep(self._config.instance, str(run.key), log, process.start_ticks)
        samples = await self._measure() if run.order.leases else ()
        self._files.remove_card(run.key)
        self._depart(run, proof, samples)

    async def _prove_absent(self, key: RunKey) -> None:
        await sweep(self._config.instance, str(key), self._files.log_of(key))
        self._ear.say(_gone(key, "process_absent", await self._measure()))

    def _depart(self, run: Run, proof: str, samples: Sequence[WireSample] = ()) -> None:
        run.lane = None
        run.told["gone"] = _gone(run.key, proof, samples)
        self._ear.say(run.told["gone"])
        self.book.drop_if_done(run)

    async def _adopt_run(self, card: Card) -> None:
        order = RunOrder(task=card.task, fence=card.fence, rank=card.rank, kind="", leases=card.leases)
        run = self.book.runs[card.key] = Run(order, shared=False)
        self.book.note_fence(card.key)
        try:
            actor = await asyncio.to_thread(ray.get_actor, card.runner, self._config.namespace)
            run.lane = self.pool.adopt(card.runner, actor, card.process, shared=False)
        except (ValueError, ProcessLookupError):
            self._do(self._bury(run, card))
            return
        run.lane.runs.add(card.key)
        run.lane.listen_again()

    async def _bury(self, run: Run, card: Card) -> None:
        """Nobody can talk to it any more: its process is gone, or its Ray is."""
        with contextlib.suppress(ProcessLookupError):
            await put_down(Watched(card.process))
        if card.ray_node != self.pool.ray_node:
            await self._prove_gone(run, card.process, "agent_restarted")
            return
        failure = ("killed", "its process ended while no agent watched", "")
        self._end(run, _ended(run.key, "lost", failure, tail_of_file(self._files.log_of(run.key))))
        await self._prove_gone(run, card.process)

    async def _adopt_runner(self, name: str) -> None:
        """Raises ValueError or ProcessLookupError if it is gone."""
        actor = await asyncio.to_thread(ray.get_actor, name, self._config.namespace)
        told = await describe(actor)
        if told is None or not told["shared"]:
            # Without a card it is blank, and soon made again.
            await asyncio.to_thread(ray.kill, actor)
            return
        lane = self.pool.adopt(name, actor, process_id(told["pid"]), shared=True)
        for wire in told["runs"]:
            order = RunOrder(**wire)
            self.book.runs[order.key] = Run(order, shared=True, lane=lane)
            self.book.note_fence(order.key)
            lane.runs.add(order.key)
        lane.listen_again()

    def _do(self, job: Coroutine[Any, Any, None]) -> None:
        """Run it to its end in the background."""
        task = asyncio.create_task(job)
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)


def _ended(
    key: RunKey, ending: str, failure: tuple[str, str, str] | None = None, log_tail: bytes = b""
) -> Report:
    return ("ended", *key, time.time(), ending, None, "json", failure, log_tail)


def _gone(key: RunKey, proof: str, samples: Sequence[WireSample] = ()) -> Report:
    return ("gone", *key, time.time(), proof, tuple(samples))
