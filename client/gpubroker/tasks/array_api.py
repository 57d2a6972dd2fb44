"""Operations on arrays: one function or command for many items."""

import base64
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypedDict, Unpack

import cloudpickle
from msgspec import UNSET

from gpubroker.errors import BrokerError, ItemFailed, ResultUnreadable, WrongArgument
from gpubroker.runtime.carrying import faulty_part, is_not_json, is_not_pickled
from gpubroker.tasks.large_arguments import fitting_body, small_items
from gpubroker.tasks.naming import id_meant
from gpubroker.tasks.object_api import upload_call
from gpubroker.tasks.submission import (
    SubmitOptions,
    Target,
    as_json,
    objects_named,
    parted_options,
    with_ids_after,
)
from gpubroker.transport.decoding import Page, a_page, decode
from gpubroker.transport.exchange import Pause, Steps
from gpubroker.transport.operations import Operations, Pages, listing, operation, path_part
from gpubroker.wire.arrays import Array
from gpubroker.wire.arrays import ArrayItem as Answer
from gpubroker.wire.bounds import MAX_ITEMS
from gpubroker.wire.tasks import Failure

_INLINE_BYTES = 4 * 2**20
"""If all items together are larger than this, they are uploaded first, as one object."""
_COPIED_BYTES = 16 * 2**20
"""If all items together are larger than this, each large item is uploaded first, as an object of its own. It
is the default of the operator's `limits.copied_object_bytes`."""
_ITEMS_PER_PAGE = 5000
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 0.5
_SUBMIT_SECONDS = 60.0
_BAR_WIDTH = 30


class ArrayOptions(SubmitOptions, total=False):
    """The keyword arguments of `map` and `submit_array`. All may be left out. The resources are those of one
    worker."""

    max_parallel: int
    """The number of workers that run at once, if there is room. Default: 4."""
    chunk: int
    """The number of items that are handed to a worker together. Default: about 100 ms of work."""
    item_timeout_seconds: float
    """The time limit of one item."""
    item_retries: int
    """The number of times that an item is tried again, as `retry_on` says."""


class ItemFilter(TypedDict, total=False):
    """The results that `array_items` fetches, and their order."""

    state: str
    """The state of the items: succeeded or failed."""
    order: str
    """The order: number (default), or completed, as they were done."""


AnyArray = Array | str
"""An array, its id or that of one of its workers, 8 or more characters from the end of it, or a unique
name."""


class ArrayItem(Answer, frozen=True):
    """The outcome of one item. `result` holds a JSON result; `data` holds the bytes of a pickled one."""

    result: Any = None
    error: Failure | None = None  # type: ignore[assignment]  # None for what the service leaves out

    @property
    def array(self) -> str:
        """The id of the array to which the item belongs."""
        array: str = self.__dict__.get("array", "")
        return array

    @property
    def data(self) -> bytes | None:
        return None if self.data_base64 is UNSET else base64.b64decode(self.data_base64)

    @property
    def value(self) -> Any:
        """Return the result; a pickled result is unpickled, which runs code that the function chose. Raises
        ItemFailed if the item failed, and ResultUnreadable if a pickle cannot be opened here."""
        if self.failed is not None:
            raise self.failed
        data = self.data
        if data is None:
            return self.result
        try:
            return cloudpickle.loads(data)
        except Exception as fault:  # to unpickle may raise anything, also exceptions of other libraries
            raise ResultUnreadable(self.array or "an array", fault, number=self.number) from fault

    @property
    def failed(self) -> ItemFailed | None:
        if self.error is None:
            return None
        failure = self.error.kind, self.error.message, self.error.traceback
        return ItemFailed(self.number, *failure, array=self.array)


class ArrayApi(Operations):
    @operation
    def submit_array(
        self, target: Target, items: Iterable[Any], *args: Any, **options: Unpack[ArrayOptions]
    ) -> Steps[Array]:
        """Run `target` once for each item, by up to `max_parallel` workers; when this returns, the array is
        on the service's disk.

            broker.submit_array("team.checks:verify", files, max_parallel=8, item_retries=2)
            broker.submit_array(["convert", "{}", "--small"], names)

        A function gets the item as its first argument, before `args` and `kwargs`. In a command each `{}` is
        replaced by the item, also inside a word. The other options are those of `submit`, for each worker.
        Raises Refused.
        """
        return (yield from self._submit_array(target, items, args, options))

    @operation
    def array(self, array: AnyArray) -> Steps[Array]:
        """Return the array as it is now."""
        return (yield from self._seen(array))

    @listing
    def array_items(self, array: AnyArray, **wanted: Unpack[ItemFilter]) -> Pages[ArrayItem]:
        """Yield the items that are done, fetched page by page as they are used."""

        def fetch(cursor: str | None) -> Steps[Page[ArrayItem]]:
            nonlocal array
            array = yield from id_meant(self._ask, array)
            return (yield from self._items_after(array, cursor, wanted))

        return Pages(fetch)

    @listing
    def array_progress(self, array: AnyArray) -> Pages[Array]:
        """Yield the array each time that more of its items are done, until it has ended."""

        def fetch(cursor: str | None) -> Steps[Page[Array]]:
            nonlocal array
            array = yield from id_meant(self._ask, array)
            pause_seconds = _FIRST_PAUSE_SECONDS
            while True:
                seen = yield from self._seen(array)
                if seen.is_finished or cursor != str(seen.done):
                    return a_page((seen,), None if seen.is_finished else str(seen.done), seen.raw)
                yield Pause(pause_seconds)
                pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)

        return Pages(fetch)

    @operation
    def cancel_array(self, array: AnyArray) -> Steps[Array]:
        """Cancel what is left of an array. Results stay."""
        path = yield from self._array_path(array, to_change=True)
        return decode(Array, (yield from self._ask("POST", f"{path}/cancel")))

    @operation
    def retry_array(self, array: AnyArray, *, idempotency_key: str | None = None) -> Steps[Array]:
        """Repeat the items of an ended array that failed or were not done, as a new array in which they keep
        their numbers. Raises Refused if there are none."""
        path = yield from self._array_path(array, to_change=True)
        return decode(Array, (yield from self._make(f"{path}/retry", idempotency_key)))

    @listing
    def map(
        self,
        target: Target,
        items: Iterable[Any],
        *args: Any,
        ordered: bool = True,
        return_exceptions: bool = False,
        progress: bool = False,
        keep: bool = False,
        **options: Unpack[ArrayOptions],
    ) -> Pages[Any]:
        """Run `target(item)` for each item in workers of the service, and iterate over the results: in the
        order of the items, or with `ordered=False` in the order in which they are done.

            for size in broker.map(measure, paths, max_parallel=8, progress=True): ...

        The array is submitted when the first result is asked for, with the options of `submit_array`; without
        items nothing is submitted. For an item that failed, the iterator raises ItemFailed, or with
        `return_exceptions` yields that exception. If the loop ends before the last result, because of such an
        exception or otherwise, the rest of the array is cancelled; with `keep` it goes on. `progress` shows a
        bar on standard error. Results of functions are unpickled here. Raises BrokerError if the array ends
        with items that were not done, such as by a cancel.
        """
        show = progress_bar() if progress else None
        mapped = _Mapped(ordered, return_exceptions)

        def leave() -> Steps[None]:
            if mapped.array is not None and not mapped.array.is_finished:
                path = yield from self._array_path(mapped.array)
                yield from self._ask("POST", f"{path}/cancel")

        def fetch(cursor: str | None) -> Steps[Page[Any]]:
            mapped.raise_fault()
            if mapped.array is None and not (listed := _listed(items)):
                return a_page(())
            array = mapped.array or (yield from self._submit_array(target, listed, args, options))
            mapped.array, pause_seconds = array, _FIRST_PAUSE_SECONDS
            if not mapped.has_more:
                yield Pause(pause_seconds)
            while True:
                was_finished = array.is_finished
                page = yield from self._items_after(array, cursor, {"order": "completed"})
                mapped.add(page)
                if not was_finished and (show is not None or not page.items):
                    array = mapped.array = yield from self._seen(array)
                if show is not None:
                    show(array)
                if page.items or was_finished:
                    return mapped.page(page.raw["next_after"], array)
                if not array.is_finished:
                    yield Pause(pause_seconds)
                    pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)

        return Pages(fetch, None if keep else leave)

    def _submit_array(
        self, target: Target, items: Iterable[Any], args: Sequence[Any], options: ArrayOptions
    ) -> Steps[Array]:
        of_task, of_array = parted_options(options, ArrayOptions)
        of_task = yield from with_ids_after(self._ask, target, of_task)
        body = yield from fitting_body(self._send, target, args, of_task)
        listed = _listed(items)
        packed = _packed(target, listed)
        if len(packed) > _COPIED_BYTES:
            listed = yield from small_items(self._send, target, listed)
            packed = _packed(target, listed)
        count = len(listed)
        if callable(target):
            body = _with_objects_of(body, listed)
        if len(packed) > _INLINE_BYTES:
            stored = (yield from self._send(upload_call(packed))).json()["id"]
            given_as: Any = {"object": stored, "count": count}
        elif callable(target):
            given_as = {"pickled": base64.b64encode(packed).decode(), "count": count}
        else:
            given_as = None
        text = packed if given_as is None else json.dumps(given_as).encode()
        array_fields = json.dumps(of_array).encode()[1:]
        body = body[:-1] + b',"items":' + text + (b"," if of_array else b"") + array_fields
        key = options.get("idempotency_key")
        made = yield from self._make("/arrays", key, body, patience_seconds=_SUBMIT_SECONDS)
        return decode(Array, made)

    def _items_after(self, array: AnyArray, cursor: str | None, wanted: ItemFilter) -> Steps[Page[ArrayItem]]:
        params: dict[str, Any] = {**wanted, "after": cursor, "limit": _ITEMS_PER_PAGE}
        id = yield from id_meant(self._ask, array)
        raw = yield from self._ask("GET", f"/arrays/{path_part(id)}/items", **params)
        found = tuple(decode(ArrayItem, item, array=id) for item in raw["items"])
        return a_page(found, str(raw["next_after"]) if raw["has_more"] else None, raw)

    def _seen(self, array: AnyArray) -> Steps[Array]:
        return decode(Array, (yield from self._ask("GET", (yield from self._array_path(array)))))

    def _array_path(self, array: AnyArray, *, to_change: bool = False) -> Steps[str]:
        return f"/arrays/{path_part((yield from id_meant(self._ask, array, to_change=to_change)))}"


class _Mapped:
    """Collects the results of a map that have arrived, and yields them in the order that the caller wants."""

    def __init__(self, ordered: bool, return_exceptions: bool) -> None:
        self.array: Array | None = None
        self.has_more = True
        """True if results may have arrived already, so that there is no need to wait."""
        self._ordered = ordered
        self._return_exceptions = return_exceptions
        self._early: dict[int, ArrayItem] = {}
        self._next = 0
        self._fault: Exception | None = None
        """The fault of the next item, if that item failed."""

    def add(self, page: Page[ArrayItem]) -> None:
        self._early |= {item.number: item for item in page.items}
        self.has_more = page.next_cursor is not None

    def raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def page(self, cursor: int, seen: Array) -> Page[Any]:
        """Return the values up to the next item that failed; `raise_fault` raises the fault of that item.
        Raises BrokerError if no more results will arrive."""
        values: list[Any] = []
        try:
            values.extend(self._values())
        except Exception as fault:  # to unpickle a result may raise anything
            self._fault = fault
        is_over = self._next >= seen.total
        if self._fault is not None or values:
            return a_page(tuple(values), None if is_over and self._fault is None else str(cursor))
        if seen.is_finished and not is_over and seen.done <= self._next + len(self._early):
            missing = seen.total - seen.done
            raise BrokerError(
                f"array {seen.id} {seen.state.value} with {missing} items left", code="array-ended"
            )
        return a_page((), None if is_over else str(cursor))

    def _values(self) -> Iterator[Any]:
        while self._early:
            number = self._next if self._ordered else next(iter(self._early))
            item = self._early.pop(number, None)
            if item is None:
                return
            self._next += 1
            try:
                value = item.value
            except (ItemFailed, ResultUnreadable) as fault:
                if not self._return_exceptions:
                    raise
                value = fault
            yield value


def progress_bar() -> Callable[[Array], None]:
    """Return a function that shows how many items of an array are done: in a notebook as a bar, on standard
    error of a terminal as one line that changes, otherwise as a line for each tenth of the items."""
    if (notebook := _notebook_bar()) is not None:
        return notebook
    shown = -1

    def show(array: Array) -> None:
        nonlocal shown
        out = sys.stderr
        steps = 100 if out.isatty() else 10
        is_over = array.is_finished or array.done >= array.total
        step = steps + 1 if is_over else int(array.fraction * steps)
        if step == shown:
            return
        shown = step
        print(bar_line(array), end="\r" if out.isatty() and step <= steps else "\n", file=out)
        out.flush()

    return show


def _notebook_bar() -> Callable[[Array], None] | None:
    """Return a function that shows a bar in the notebook in which this process runs; None if it runs in
    none."""
    ipython = sys.modules.get("IPython")  # a notebook has imported it
    if ipython is None or not hasattr(ipython.get_ipython(), "kernel"):
        return None
    from gpubroker.notebook import html_of_progress

    html = ipython.display.HTML
    handle = ipython.display.display(html(""), display_id=True)

    def show(array: Array) -> None:
        handle.update(html(html_of_progress(array.fraction, _counts(array))))

    return show


def bar_line(array: Array, width: int = _BAR_WIDTH) -> str:
    """Return the line of a progress bar: `[#####.....] 50/100, 2 failed, 25/s`."""
    filled = int(array.fraction * width)
    return f"[{'#' * filled}{'.' * (width - filled)}] {_counts(array)}"


def _counts(array: Array) -> str:
    failed = f", {array.failed} failed" if array.failed else ""
    rate = f", {array.items_per_second:.0f}/s" if array.items_per_second else ""
    return f"{array.done}/{array.total}{failed}{rate}"


def _with_objects_of(body: bytes, items: Sequence[Any]) -> bytes:
    """Return the body with the ids of the objects that the pickled items name."""
    named = objects_named(items).get("objects", [])
    if not named:
        return body
    given = json.loads(body)
    given["run"]["objects"] = sorted({*named, *given["run"].get("objects", [])})
    return json.dumps(given).encode()


def _listed(items: Iterable[Any]) -> Sequence[Any]:
    """Return all items as a sequence. Raises WrongArgument if there are more items than an array may have, or
    no end of them."""
    listed = list(islice(items, MAX_ITEMS + 1))
    if len(listed) > MAX_ITEMS:
        raise WrongArgument(
            f"an array has at most {MAX_ITEMS} items, and there are more (or the iterator has no end); make "
            "several arrays, such as with itertools.islice"
        )
    return listed


def _packed(target: Target, listed: Sequence[Any]) -> bytes:
    """Return the items as a pickled list for functions, otherwise as JSON. Raises WrongArgument if they
    cannot be written so."""
    if not listed:
        raise WrongArgument("an array needs one item or more; there are none")
    try:
        if callable(target):
            packed: bytes = cloudpickle.dumps(listed)
            return packed
        return json.dumps(list(map(as_json, listed)), separators=(",", ":"), allow_nan=False).encode()
    except Exception as error:  # objects may raise anything when they are pickled
        how, fails = ("pickled", is_not_pickled) if callable(target) else ("written as JSON", is_not_json)
        part = faulty_part(((f"item {number}", item) for number, item in enumerate(listed)), fails)
        raise WrongArgument(f"{part or 'the items'} cannot be {how} ({error}); pass plain values") from None
