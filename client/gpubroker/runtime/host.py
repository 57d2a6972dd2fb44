"""Runs tasks in threads of this process and keeps what they reported until it is acknowledged."""

import contextlib
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpubroker.runtime.command import run_command
from gpubroker.runtime.invoke import CannotOpen, called, opened
from gpubroker.runtime.journal import SOON, Journal
from gpubroker.runtime.meeting import MeetingPort, announce_meeting_place
from gpubroker.runtime.messages import Outcome, RunKey, RunOrder, ended, failed, ready, started
from gpubroker.runtime.outcome import describe, raised, trace_of
from gpubroker.runtime.output import FileOutput, MemoryOutput, Output, enter_output, leave_output
from gpubroker.runtime.process import Claim, claim
from gpubroker.runtime.task import RunningTask, enter_task, leave_task, own_process

MOST_THREADS = 256


class RunHost:
    """The runs of one process: many small ones side by side, or one that owns the process.

    User code never runs in the thread that calls these methods. What it reports goes to the journal.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.orders: dict[RunKey, RunOrder] = {}
        """Runs that have not ended."""
        self._tasks: dict[RunKey, RunningTask] = {}
        self._meeting: MeetingPort | None = None
        """Of a run that begins with others, and so has this process to itself."""
        self._offer = ""
        """Its address while it waits for them."""
        self._threads = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="run")

    @property
    def busy(self) -> bool:
        return bool(self.orders)

    def start_shared(self, order: RunOrder) -> None:
        """Run it beside others: nothing of the process is its own but a thread."""
        self._submit(order, RunningTask(order, self._journal), MemoryOutput())

    def start_alone(self, order: RunOrder, given: Claim, log: Path) -> None:
        """Give it the whole process; the process must not be used again."""
        try:
            output = FileOutput(log)
            output.take_over()
            claim(order, given)
            self._meeting = MeetingPort(given.host) if order.barrier else None
        except (OSError, KeyError) as fault:
            self._refuse(order, fault)
            return
        task = RunningTask(order, self._journal)
        own_process(task)
        self._submit(order, task, output)

    def stop(self, key: RunKey) -> None:
        """Give notice; a run that is not here has ended."""
        task = self._tasks.get(key)
        if task is not None:
            task.give_notice()

    def go(self, key: RunKey, rank_zero_address: str) -> None:
        """All ranks are ready. Void for a run that has begun, or is not here."""
        task = self._tasks.get(key)
        if task is not None:
            task.go(rank_zero_address)

    def tell_world(self, key: RunKey, ranks: Iterable[int]) -> None:
        """Ranks have left; void for a run that is not here."""
        task = self._tasks.get(key)
        if task is not None:
            task.shrink_world(ranks)

    def retell(self, key: RunKey) -> None:
        """Say again how far the run is: who was told before may not have passed it on."""
        if key in self._tasks:
            self._journal.add(started(key, os.getpid()))
            if self._offer:
                self._journal.add(ready(key, self._offer))

    def _submit(self, order: RunOrder, task: RunningTask, output: Output) -> None:
        self.orders[order.key] = order
        self._tasks[order.key] = task
        self._threads.submit(self._run, order, task, output)

    def _run(self, order: RunOrder, task: RunningTask, output: Output) -> None:
        key = order.key
        self._journal.add(started(key, os.getpid()), SOON)
        entered = enter_task(task)
        printing = enter_output(output) if isinstance(output, MemoryOutput) else None
        outcome = self._outcome_of(order, task)
        leave_task(entered)
        if printing is not None:
            leave_output(printing)
        # Told before it is struck off: whoever sees no run left has been told of every end.
        self._journal.add(ended(key, outcome, output.tail()), after_news_of=key)
        del self.orders[key], self._tasks[key]

    def _outcome_of(self, order: RunOrder, task: RunningTask) -> Outcome:
        try:
            call = None if order.kind == "command" else opened(order)
            if order.barrier and not self._waits_for_all(task, order.key):
                return Outcome("stopped")
            return run_command(order, task) if call is None else called(call, order)
        except CannotOpen as refusal:
            return refusal.outcome
        except BaseException as fault:
            return raised(fault)
        finally:
            # Buffers of streams that user code put in place of ours; they may be closed or broken.
            with contextlib.suppress(Exception):
                sys.stdout.flush()

    def _waits_for_all(self, task: RunningTask, key: RunKey) -> bool:
        """Back when all ranks are ready; False if it shall stop instead."""
        assert self._meeting is not None
        self._offer = self._meeting.address
        self._journal.add(ready(key, self._offer))
        begins = task.wait_for_go()
        self._offer = ""
        self._meeting.close()
        if begins:
            announce_meeting_place(task.rank_zero_address)
        return begins

    def _refuse(self, order: RunOrder, fault: Exception) -> None:
        message = f"the process could not be prepared: {describe(fault)}"
        outcome = failed("exception", message, trace_of(fault))
        self._journal.add(started(order.key, os.getpid()), SOON)
        self._journal.add(ended(order.key, outcome, b""))
