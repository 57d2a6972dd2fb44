"""Runs tasks in threads of this process and keeps their reports until they are acknowledged."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import current_thread
from typing import Any

from gpubroker.runtime.calls import REFUSED, Answer, SetWorker, is_worker
from gpubroker.runtime.child_host import ChildHost
from gpubroker.runtime.command import run_command
from gpubroker.runtime.invoke import CannotOpen, called, opened, with_objects
from gpubroker.runtime.items import ItemWorker, is_array
from gpubroker.runtime.journal import SOON, Journal
from gpubroker.runtime.messages import (
    RunKey,
    RunOrder,
    RunOutcome,
    ended,
    failed,
    printed,
    ready,
    started,
)
from gpubroker.runtime.outcome import describe, raised, trace_of
from gpubroker.runtime.output import FileOutput, MemoryOutput, Output, enter_output, leave_output
from gpubroker.runtime.process import (
    NoDirectory,
    ProcessSetup,
    RendezvousPort,
    announce_rendezvous,
    take_process,
)
from gpubroker.runtime.ray_cluster import DriverRun, RayFailed, RayNode, has_private_ray, run_node
from gpubroker.runtime.run_objects import RunObjects
from gpubroker.runtime.task import RunningTask, enter_task, leave_task, own_process

MOST_THREADS = 256


class RunHost:
    """The runs of one process: many small ones side by side, or one that owns the process.

    User code never runs in the thread that calls these methods. Its reports go to the journal.
    """

    def __init__(
        self,
        journal: Journal,
        open_shared: Callable[[Any], memoryview] = memoryview,
        task_path: Sequence[str] = (),
    ) -> None:
        """`open_shared` returns the bytes of an object, from what the agent sends for it. `task_path` are the
        operator's directories of modules."""
        self._journal = journal
        self._open_shared = open_shared
        self._task_path = task_path
        self.orders: dict[RunKey, RunOrder] = {}
        """The runs that have not ended."""
        self._tasks: dict[RunKey, RunningTask] = {}
        self._workers: dict[RunKey, ItemWorker] = {}
        """The workers of arrays."""
        self.set_workers: dict[RunKey, SetWorker] = {}
        """The workers of worker sets."""
        self._child: ChildHost | None = None
        """The process that carries out the run if that has an environment with another interpreter."""
        self._objects: dict[RunKey, RunObjects] = {}
        self._rendezvous: RendezvousPort | None = None
        """The rendezvous of a run with several ranks; such a run has the process to itself."""
        self._host = ""
        """The address at which other nodes reach this one."""
        self._offer = ""
        """The address of the rendezvous, while the run waits for the other ranks."""
        self._threads = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="run")

    @property
    def busy(self) -> bool:
        return bool(self.orders)

    def start_shared(self, order: RunOrder, *, tell_output: bool = True) -> None:
        """Run the order in a thread, beside other runs. With `tell_output`, what the run prints is
        reported."""
        output = MemoryOutput((lambda: self._note_output(order.key, output)) if tell_output else None)
        self._submit(order, RunningTask(order, self._journal), output)

    def take(self, item: Sequence[Any], *, tell_output: bool = True) -> None:
        """Carry out a message of the agent. With `tell_output`, what runs beside others print is reported.
        Raises ValueError for a message of an unknown kind."""
        if self._child is not None:
            self._child.pass_on(self._with_bytes(item))
            return
        match tuple(item):
            case ("share", order):
                self.start_shared(RunOrder.from_wire(order), tell_output=tell_output)
            case ("own", order, instance, log, user, address, node):
                setup = ProcessSetup(instance, user, address, node)
                self.start_alone(RunOrder.from_wire(order), setup, Path(log))
            case ("go", key, rank_zero_address):
                self.go(RunKey(*key), rank_zero_address)
            case ("world", key, ranks):
                self.change_world(RunKey(*key), ranks)
            case ("resized", key, ranks, number):
                self.change_world(RunKey(*key), ranks, number)
            case ("items", key, number, held, is_over):
                self.answer_items(RunKey(*key), number, held, is_over=is_over)
            case ("object", key, id, shared, failure):
                self.take_object(RunKey(*key), id, shared, failure)
            case ("part", key, digest, stored_bytes, failure):
                self.answer_part(RunKey(*key), digest, stored_bytes, failure)
            case ("retell", key):
                self.report_again(RunKey(*key))
            case ("stop", key):
                self.stop(RunKey(*key))
            case _:
                raise ValueError(f"unknown order {item[0]!r}")

    async def call(
        self, key: RunKey, role: str, method: str, form: str, arguments: bytes, seconds: float
    ) -> Answer:
        """Call a method of the worker of a set, and return the answer of `SetWorker.call`."""
        if self._child is not None and key in self.orders:
            answer: Answer = await self._child.call(role, method, form, arguments, seconds)
            return answer
        worker = self.set_workers.get(key)
        if worker is None:
            return REFUSED, f"run {key} is not here"
        return await worker.call(role, method, form, arguments, seconds)

    def start_alone(self, order: RunOrder, setup: ProcessSetup, log: Path) -> None:
        """Give the whole process to the run; the process must not be used again. A function of an environment
        is called by the environment's own interpreter, in a child process."""
        try:
            output = FileOutput(log)
            output.take_over()
            take_process(order, setup)
            self._host = setup.host
            if order.interpreter and order.kind != "command":
                self._start_child(order, setup, output)
            else:
                self.begin_alone(order, setup.host, output)
        except NoDirectory as fault:
            self._refuse(order, failed("no_directory", str(fault)))
            return
        except (OSError, KeyError) as fault:
            message = f"the process could not be prepared: {describe(fault)}"
            self._refuse(order, failed("exception", message, trace_of(fault)))

    def begin_alone(self, order: RunOrder, host_address: str, output: Output) -> None:
        """Begin a run to which this process belongs. `host_address` is the address at which other nodes reach
        this one. Raises OSError if there is no free port for the rendezvous of several ranks."""
        self._rendezvous = RendezvousPort(host_address) if order.barrier else None
        task = RunningTask(order, self._journal)
        own_process(task)
        self._submit(order, task, output)

    def _start_child(self, order: RunOrder, setup: ProcessSetup, output: Output) -> None:
        child = ChildHost(order, self._journal, output, self._forget_child)
        try:
            child.start(setup.host, self._task_path)
        except OSError as fault:
            message = (
                f"the Python of its environment, {order.interpreter}, cannot be started: {fault.strerror}"
            )
            self._refuse(order, failed("environment", message))
            return
        self.orders[order.key] = order
        self._child = child

    def _forget_child(self, key: RunKey) -> None:
        self.orders.pop(key, None)

    def _with_bytes(self, item: Sequence[Any]) -> Sequence[Any]:
        """Return a message that another process can read: with the bytes of an object in place of a reference
        to shared memory."""
        match tuple(item):
            case ("object", key, id, shared, None):
                return "object", key, id, bytes(self._open_shared(shared)), None
            case _:
                return item

    def stop(self, key: RunKey) -> None:
        """Give the stop notice to the run. Nothing happens if it has ended."""
        task = self._tasks.get(key)
        if task is not None:
            task.give_notice()

    def go(self, key: RunKey, rank_zero_address: str) -> None:
        """Begin the run, since all ranks are ready. Nothing happens if the run has begun or ended."""
        task = self._tasks.get(key)
        if task is not None:
            task.go(rank_zero_address)

    def change_world(self, key: RunKey, ranks: Iterable[int], number: int | None = None) -> None:
        """Tell the run that ranks have joined, or have left. Nothing happens if the run has ended."""
        task = self._tasks.get(key)
        if task is not None:
            task.resize(ranks, number)

    def answer_items(self, key: RunKey, number: int, held: Iterable[Sequence[int]], *, is_over: bool) -> None:
        """Hand the answer to a report of items to the run. Nothing happens if it has ended."""
        worker = self._workers.get(key)
        if worker is not None:
            worker.take(number, held, is_over=is_over)

    def take_object(self, key: RunKey, id: str, shared: Any, failure: tuple[str, str] | None) -> None:
        """Hand the run the object that it waits for, or the failure to get the object. Nothing happens if the
        run has ended."""
        if (objects := self._objects.get(key)) is not None:
            objects.take(id, shared, failure)

    def answer_part(self, key: RunKey, digest: str, stored_bytes: int, failure: str) -> None:
        """Note how much of a result that becomes an object is stored. Nothing happens if the run has
        ended."""
        if (objects := self._objects.get(key)) is not None:
            objects.answer_part(digest, stored_bytes, failure)

    def report_again(self, key: RunKey) -> None:
        """Repeat the progress of the run, since an earlier agent may not have forwarded it."""
        if key in self._tasks:
            self._journal.add(started(key, os.getpid()))
            if (objects := self._objects.get(key)) is not None:
                objects.ask_again()
            if self._offer:
                self._journal.add(ready(key, self._offer))

    def _note_output(self, key: RunKey, output: MemoryOutput) -> None:
        self._journal.note_to_make(key, "printed", lambda: printed(key, *output.take()))

    def _submit(self, order: RunOrder, task: RunningTask, output: Output) -> None:
        self.orders[order.key] = order
        self._tasks[order.key] = task
        objects = self._objects[order.key] = RunObjects(order, self._journal, task, self._open_shared)
        if is_array(order):
            self._workers[order.key] = ItemWorker(order, self._journal, task, output, objects)
        if is_worker(order):
            self.set_workers[order.key] = SetWorker(order, self._journal, task, self._objects[order.key])
        self._threads.submit(self._run, order, task, output)

    def _run(self, order: RunOrder, task: RunningTask, output: Output) -> None:
        key, thread = order.key, current_thread()
        idle_name, thread.name = thread.name, str(key)  # by which its stack is told from those of others
        self._journal.add(started(key, os.getpid()), SOON)
        entered = enter_task(task)
        printing = enter_output(output) if isinstance(output, MemoryOutput) else None
        outcome = self._outcome_of(order, task)
        leave_task(entered)
        if printing is not None:
            leave_output(printing)
        thread.name = idle_name
        # The end is reported before the run is removed, so that a reader that sees no run has all ends.
        self._journal.add(ended(key, outcome, output.tail()), after_news_of=key)
        self._workers.pop(key, None)
        self.set_workers.pop(key, None)
        del self.orders[key], self._tasks[key], self._objects[key]

    def _outcome_of(self, order: RunOrder, task: RunningTask) -> RunOutcome:
        try:
            worker = self._workers.get(order.key) or self.set_workers.get(order.key)
            if worker is not None:
                return worker.work()
            if has_private_ray(order):
                return self._run_with_ray(order, task)
            call, objects = None, self._objects[order.key]
            if order.kind != "command":
                call = with_objects(opened(order), objects.fetch)
            if order.barrier and not self._wait_for_all(task, order.key):
                return RunOutcome("stopped")
            return run_command(order, task) if call is None else called(call, order, objects.store, task)
        except CannotOpen as refusal:
            return refusal.outcome
        except RayFailed as fault:
            return failed(fault.kind, str(fault))
        except BaseException as fault:
            return raised(fault)
        finally:
            # User code may have replaced our streams, and closed or broken its own.
            with contextlib.suppress(Exception):
                sys.stdout.flush()

    def _run_with_ray(self, order: RunOrder, task: RunningTask) -> RunOutcome:
        """Run the command as the driver of a Ray cluster of its own, or a node of this cluster. Raises
        RayFailed."""
        node = RayNode(order, self._host)
        if self._rendezvous is None:
            return DriverRun(order, task, node, None).run()
        if not self._meet(task, order.key):
            return RunOutcome("stopped")
        if order.rank:
            self._rendezvous.close()
            return run_node(order, task, node)
        return DriverRun(order, task, node, self._rendezvous.listen()).run()

    def _wait_for_all(self, task: RunningTask, key: RunKey) -> bool:
        """Return True when all ranks are ready; False if the run has to stop instead."""
        assert self._rendezvous is not None
        begins = self._meet(task, key)
        self._rendezvous.close()
        if begins:
            announce_rendezvous(task.rank_zero_address)
        return begins

    def _meet(self, task: RunningTask, key: RunKey) -> bool:
        """Offer the reserved port, and wait as `_wait_for_all` does."""
        assert self._rendezvous is not None
        self._offer = self._rendezvous.address
        self._journal.add(ready(key, self._offer))
        begins = task.wait_for_go()
        self._offer = ""
        return begins

    def _refuse(self, order: RunOrder, outcome: RunOutcome) -> None:
        self._journal.add(started(order.key, os.getpid()), SOON)
        self._journal.add(ended(order.key, outcome, b""))
