"""The items of an array: which are done, which run holds them, and which items a run gets next."""

import json
from base64 import b64encode
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpubroker_server.core.domain.decisions import Decision, ItemPage, write_move
from gpubroker_server.core.domain.holders import WorkerSeat
from gpubroker_server.core.domain.orders import (
    Failure,
    ItemRange,
    ItemResult,
    ItemsOrder,
    ItemsReported,
)
from gpubroker_server.core.domain.ranks import node_of
from gpubroker_server.core.domain.submission import ArrayTerms
from gpubroker_server.core.domain.task import Move, RetryOn, StopReason, Task, TaskState
from gpubroker_server.core.domain.units import Fence, Instant, TaskId
from gpubroker_server.core.lifecycle.stopping import cancel_pending, will_requeue, with_cause
from gpubroker_server.core.lifecycle.task_update import TaskUpdate
from gpubroker_server.core.world.world import World

_ABSENT, _OPEN, _HELD, _SUSPECT, _DONE = range(5)
"""The states of an item. A suspect is an item that was held by a run that crashed. A run gets a suspect
alone, because one of several items may have ended the process."""

CHUNKS_AHEAD = 10
"""The number of chunks in which a run gets the items that it wants, about a second of work, if the array has
no chunk size."""
MAX_WANTED = 1000
"""The most items that a run may hold: the cost of its reports for the leader grows with them."""
ARRAY_RESULTS_TOO_LARGE = "array_results_too_large"
"""The failure kind of an item whose result was dropped, because its array has too many bytes of results."""
ITEM_TIMEOUT = "timeout"
"""The failure kind of an item that its time limit ended."""
PAGE_BYTES = 4 * 2**20
"""The size in bytes at which a page of results ends."""

_Holder = tuple[TaskId, Fence]


class ArrayWork:
    """The work of an array, which is kept in the leader's memory only.

    A new leader learns the work again from the next reports of the runs, except how often items have ended
    their process. Changes are made to a `copy`, which replaces the original once the decisions that follow
    from the changes are committed.
    """

    def __init__(
        self, terms: ArrayTerms, done: Iterable[ItemRange], last_page: int, size_bytes: int = 0
    ) -> None:
        self.terms = terms
        self._status = bytearray(max((end for _, end in terms.numbers), default=0))
        for first, end in terms.numbers:
            self._status[first:end] = bytes([_OPEN]) * (end - first)
        for first, end in done:
            self._status[first:end] = bytes([_DONE]) * (end - first)
        self.left = len(self._status) - self._status.count(_DONE) - self._status.count(_ABSENT)
        self.last_page = last_page
        self.size_bytes = size_bytes
        """The bytes of the array's results."""
        self._lowest_open = 0
        """A lower bound of the numbers of open items."""
        self._held: dict[_Holder, frozenset[int]] = {}
        self._tries: dict[int, int] = {}
        """Maps an item that ended its process at its time limit to its tries in such processes."""
        self._crashes: dict[int, int] = {}
        """Maps a suspect to the number of runs that have crashed since and held only that item."""
        self._crashed_too_often: list[int] = []
        """The items that crashed too often, and are not recorded as failed yet."""

    def copy(self) -> "ArrayWork":
        new = ArrayWork.__new__(ArrayWork)
        new.__dict__ = {
            name: value.copy() if isinstance(value, bytearray | dict | list) else value
            for name, value in self.__dict__.items()
        }
        return new

    def take(self, world: World, task: Task, report: ItemsReported) -> list[ItemResult]:
        """Take a run's report, give the run the items that it wants as far as there is work, and return the
        new results."""
        self._take_back(world)
        run = task.id, task.fence
        if run not in self._held:
            # A new leader learns from the report what the run holds. An item that the leader has given to
            # another run in the meantime stays with that other run.
            reported = (n for first, end in report.held for n in range(first, min(end, len(self._status))))
            items = frozenset(n for n in reported if self._status[n] == _OPEN)
            self._mark(items, _HELD)
            self._held[run] = items
        new_results = {result.number: result for result in report.results if self._is_left(result.number)}
        new = [
            self._with_tries(result)
            for result in new_results.values()
            if not self._is_tried_again(run, result)
        ]
        new += [self._killed(number) for number in self._crashed_too_often if self._is_left(number)]
        self._crashed_too_often = []
        for result in new:
            self._status[result.number] = _DONE
        self.left -= len(new)
        if report.wanted > 0:
            self._give(run, report.wanted)
        else:
            self._give_back(run, crashed=False)
        return new

    def held_by(self, task: Task) -> tuple[ItemRange, ...]:
        return tuple(ranges_of(sorted(self._held.get((task.id, task.fence), ()))))

    def _is_left(self, number: int) -> bool:
        return 0 <= number < len(self._status) and self._status[number] not in (_ABSENT, _DONE)

    def _is_tried_again(self, run: _Holder, result: ItemResult) -> bool:
        """Return True if the failed item is tried again. A run itself tries an item as often as allowed,
        unless it could not interrupt the item: then the process ends with it, and another run continues."""
        if result.failure is None:
            return False
        retries = self.terms.retries_on(
            RetryOn.TIMEOUT if result.failure.kind == ITEM_TIMEOUT else RetryOn.FAILURE
        )
        if result.tries > retries:
            return False
        if result.number not in self._held[run]:
            return True  # the tries were counted before, unless by another leader
        tries = self._tries.get(result.number, 0) + result.tries
        if tries > retries:
            return False
        self._tries[result.number] = tries
        return True

    def _with_tries(self, result: ItemResult) -> ItemResult:
        return result._replace(tries=result.tries + self._tries.pop(result.number, 0))

    def _mark(self, numbers: Iterable[int], status: int) -> None:
        for number in numbers:
            self._status[number] = status

    def _give(self, run: _Holder, wanted: int) -> None:
        """Give items to a run: fewer at a time towards the end, so that all runs end together."""
        items = [number for number in self._held[run] if self._status[number] == _HELD]
        # Nothing is given beside a suspect, so that another crash proves that the suspect is the cause.
        if not any(number in self._crashes for number in items):
            wanted = min(wanted, MAX_WANTED)
            share = -(-self.left // (2 * len(self._held)))
            chunk = self.terms.chunk or max(1, min(wanted // CHUNKS_AHEAD, share))
            lacking = max(chunk, min(wanted, share)) - len(items)
            if lacking > 0:
                items += self._next_open(-(-lacking // chunk) * chunk)
            if not items and (suspect := self._status.find(_SUSPECT)) >= 0:
                items = [suspect]
        self._mark(items, _HELD)
        self._held[run] = frozenset(items)

    def _next_open(self, limit: int) -> list[int]:
        open_items: list[int] = []
        number = self._lowest_open
        while len(open_items) < limit and (number := self._status.find(_OPEN, number)) >= 0:
            open_items.append(number)
            number += 1
        self._lowest_open = number if number >= 0 else len(self._status)
        return open_items

    def _take_back(self, world: World) -> None:
        """Take the items back from runs that are over. A failure counts as a crash, since the first report of
        a run resets its failures (`reported`)."""
        for run in list(self._held):
            task = world.tasks.get(run[0])
            if task is None or not task.is_active or task.fence != run[1]:
                self._give_back(run, crashed=task is not None and task.failures > 0)

    def _give_back(self, run: _Holder, *, crashed: bool) -> None:
        left = sorted(number for number in self._held.pop(run) if self._status[number] == _HELD)
        self._mark(left, _SUSPECT if crashed else _OPEN)
        if left and not crashed:
            self._lowest_open = min(self._lowest_open, left[0])
        if not crashed:
            return
        for number in left:
            # The first crash proves nothing: something else may have killed the process.
            again_alone = number in self._crashes and len(left) == 1
            self._crashes[number] = self._crashes.get(number, 0) + again_alone
            if self._crashes[number] > self.terms.retries_on(RetryOn.FAILURE):
                # No run holds the item, but as "held" it is given to none; `take` records its failure.
                self._status[number] = _HELD
                self._crashed_too_often.append(number)

    def _killed(self, number: int) -> ItemResult:
        tries = 1 + self._crashes.pop(number)
        message = f"its process ended {tries} times without a result: it crashed or was killed"
        return ItemResult(number, 0.0, tries, None, Failure("killed", message))


def reported(
    update: TaskUpdate,
    world: World,
    arrays: Mapping[TaskId, ArrayWork],
    report: ItemsReported,
    now: Instant,
    most_bytes: int,
) -> None:
    """Store the new results of a report, and answer the run.

    Results count as a checkpoint, since they are not lost with the run. A worker that reports has loaded its
    function and its items, so its failures are reset: a later end is the fault of an item, which has retries
    of its own.
    """
    task = update.live(report.fence, report.rank)
    seat = None if task is None else task.holder
    if task is None or not isinstance(seat, WorkerSeat) or (work := arrays.get(seat.array)) is None:
        return
    new = work.take(world, task, report)
    update.items += _pages(work, new, now, most_bytes)
    changes: dict[str, Any] = {"checkpoint_at": now} if new else {}
    if task.failures:
        changes["failures"] = 0
    if changes:
        update.move(Move.CHANGED, "items", **changes)
    held, node = work.held_by(task), node_of(task, report.rank)
    incarnation = world.nodes[node].incarnation
    about = task.id, task.fence, node, incarnation, report.number
    update.orders.append(ItemsOrder(*about, held, not held, report.rank))


def without_spare_workers(
    world: World, works: Iterable[ArrayWork], but_not: Collection[str], now: Instant
) -> Iterator[Decision]:
    """Cancel workers that wait, or would be requeued, although no item is left.

    `but_not` are the tasks that other decisions of this batch write. Each write names the version of the row
    that it replaces, so of two writes of one row the second would be refused.
    """
    over = {worker for work in works if work.left == 0 for worker in work.terms.workers}
    for task in map(world.tasks.__getitem__, sorted(over.intersection(world.tasks).difference(but_not))):
        if task.state is TaskState.PENDING:
            yield cancel_pending(world, task, now, Decision(task.id, "array_done"))
        elif task.state is TaskState.STOPPING and will_requeue(task):
            cause = with_cause(task, "the end of its array, of which no item is left")
            changed = write_move(task, Move.CHANGED, stop_reason=StopReason.CANCEL, **cause)
            yield Decision(task.id, "array_done", tasks=(changed,))


def ranges_of(numbers: Sequence[int]) -> Iterator[ItemRange]:
    """Yield the ranges of numbers that are in order and without repetitions."""
    first = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield numbers[first], numbers[index - 1] + 1
            first = index


def _pages(work: ArrayWork, new: Iterable[ItemResult], now: Instant, most_bytes: int) -> Iterator[ItemPage]:
    results = {result.number: result for result in new}
    for first, end in ranges_of(sorted(results)):
        size_bytes, start = 0, first
        lines: list[bytes] = []
        for number in range(first, end):
            line = line_of(results[number], work.terms.result_format)
            if work.size_bytes + len(line) > most_bytes:
                results[number] = _without_result(results[number], most_bytes)
                line = line_of(results[number], work.terms.result_format)
            lines.append(line)
            size_bytes += len(line)
            work.size_bytes += len(line)
            if size_bytes > PAGE_BYTES or number + 1 == end:
                work.last_page += 1
                failed = sum(results[n].failure is not None for n in range(start, number + 1))
                about = work.terms.id, start, work.last_page, work.terms.tenant
                yield ItemPage(*about, len(lines), failed, now, b"".join(lines), size_bytes=size_bytes)
                size_bytes, start, lines = 0, number + 1, []


def _without_result(item: ItemResult, most_bytes: int) -> ItemResult:
    """Return the item with a short failure instead of its result, so that the array can end."""
    message = f"the results of its array take more than {most_bytes} bytes (limits.array_result_bytes)"
    failure = (
        Failure(item.failure.kind, message) if item.failure else Failure(ARRAY_RESULTS_TOO_LARGE, message)
    )
    return item._replace(result=None, failure=failure)


def line_of(item: ItemResult, result_format: str) -> bytes:
    """Return the line of JSON that clients get. A result in JSON is written unchanged, but on one line."""
    state = "succeeded" if item.failure is None else "failed"
    head = (
        f'{{"number":{item.number},"state":"{state}","seconds":{item.seconds:.6f},"tries":{item.tries},'
    ).encode()
    if item.failure is not None:
        error: Mapping[str, str] = {
            "kind": item.failure.kind,
            "message": item.failure.message,
            "traceback": item.failure.traceback,
        }
        return head + b'"error":' + json.dumps(error).encode() + b"}\n"
    result = item.result or b"null"
    if result_format == "json":
        # JSON escapes the line breaks inside strings, so every other line break is between two tokens.
        return head + b'"result":' + result.replace(b"\n", b" ") + b"}\n"
    return head + b'"data_base64":"' + b64encode(result) + b'"}\n'
