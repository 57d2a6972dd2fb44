"""Each operation of the API is written once, as a generator of steps, and is a method of both brokers.

    class TaskApi(Operations):
        @operation
        def get(self, task: AnyTask) -> Steps[Task]: ...

`Broker.get` returns the Task; `AsyncBroker.get` is a coroutine function that returns it.
"""

import inspect
import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import update_wrapper
from types import NoneType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, get_args, get_origin, overload
from urllib.parse import quote

from msgspec import Struct

from gpubroker.errors import BrokerError, Unreachable
from gpubroker.transport.decoding import Page, page_of
from gpubroker.transport.exchange import Answer, Call, Steps, exchange

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=Struct)


@dataclass(frozen=True, slots=True)
class Pages(Generic[T]):
    """A list of the service in pages. `fetch` returns the page at a cursor, which is None for the first page.
    `leave` is carried out if the iteration ends before the last item was taken."""

    fetch: Callable[[str | None], Steps[Page[T]]]
    leave: Callable[[], Steps[None]] | None = None


class Reading(ABC, Generic[T]):
    """An answer of any length that is read as it arrives. If it breaks off, another call continues."""

    @abstractmethod
    def next_call(self) -> Steps[Call | None]:
        """Return the call that continues the reading; None at the end."""

    @abstractmethod
    def take(self, data: bytes) -> Iterable[T]:
        """Return the items that these bytes complete."""

    @abstractmethod
    def end(self, fault: Unreachable | None) -> Iterable[T]:
        """Return the remaining items after the answer has ended, or has broken off with `fault`."""

    def refused(self, error: BrokerError) -> None:
        """Note that the call was refused. Raises `error` unless another call may be answered."""
        raise error


class Lines(Reading[T]):
    """An answer that arrives line by line and is requested once. `read` makes an item of a line, or returns
    None."""

    def __init__(self, call: Call, read: Callable[[str], T | None]) -> None:
        self._call: Call | None = call
        self._read = read
        self._begun = b""

    def next_call(self) -> Steps[Call | None]:
        call, self._call = self._call, None
        yield from ()
        return call

    def take(self, data: bytes) -> Iterator[T]:
        *whole, self._begun = (self._begun + data).split(b"\n")
        for line in whole:
            if (item := self._read(line.decode(errors="replace").removesuffix("\r"))) is not None:
                yield item

    def end(self, fault: Unreachable | None) -> Iterator[T]:
        if fault is not None:
            raise fault
        yield from self.take(b"\n")


Listed = Pages[T] | Reading[T]


class Operations:
    """The methods that all operations use."""

    _retry_seconds: float

    def _send(self, call: Call) -> Steps[Answer]:
        return (yield from exchange(call, self._retry_seconds))

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, **params: Any
    ) -> Steps[Any]:
        """Send a call and return the JSON of its answer. Parameters that are None are left out."""
        answer = yield from self._send(Call(method, path, params=without_none(params), body=json_body(body)))
        return answer.json()

    def _make(
        self,
        path: str,
        key: str | None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        patience_seconds: float = 0.0,
    ) -> Steps[Any]:
        """Create something with a POST. With one key (default: a new one) it is created only once, however
        often the request is sent. Return the JSON of the answer."""
        headers = {**(headers or {}), "Idempotency-Key": f'"{key or uuid.uuid4().hex}"'}
        call = Call("POST", path, body=body, headers=headers, patience_seconds=patience_seconds)
        return (yield from self._send(call)).json()

    def _pages(
        self, model: type[S], path: str, *, context: Mapping[str, Any] | None = None, **params: Any
    ) -> Pages[S]:
        """Return a list of the service that has a cursor. `context` has further fields for each item."""

        def fetch(cursor: str | None) -> Steps[Page[S]]:
            raw = yield from self._ask("GET", path, **params, cursor=cursor)
            return page_of(model, raw, **(context or {}))

        return Pages(fetch)

    def _whole(self, model: type[S], path: str, **params: Any) -> Steps[Page[S]]:
        """Return an overview of the service, which may arrive in pages, as one page."""
        raw = first = yield from self._ask("GET", path, **params)
        items = list(raw["items"])
        while cursor := raw.get("next_cursor"):
            raw = yield from self._ask("GET", path, **params, cursor=cursor)
            items += raw["items"]
        whole = {"next_cursor": None, "has_more": False} if "next_cursor" in first else {}
        return page_of(model, {**first, "items": items, **whole})

    def _ask_once(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Steps[Answer]:
        """Send a call that must not be carried out twice."""
        return (yield from self._send(Call(method, path, body=json_body(body), repeatable=False)))


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def json_body(body: Mapping[str, Any] | None) -> bytes | None:
    return None if body is None else json.dumps(body, allow_nan=False).encode()


def path_part(name: str) -> str:
    return quote(name, safe="")


class SyncCaller(ABC):
    """Carries out operations and returns their values."""

    @abstractmethod
    def _carry_out(self, steps: Steps[T]) -> T: ...

    @abstractmethod
    def _items(self, listed: Listed[T]) -> Iterator[T]:
        """Yield the items of all pages, each page fetched when it is needed, or all lines as they arrive."""


class AsyncCaller(ABC):
    """Carries out operations for asyncio and returns their values."""

    @abstractmethod
    async def _carry_out(self, steps: Steps[T]) -> T: ...

    @abstractmethod
    def _items(self, listed: Listed[T]) -> AsyncIterator[T]: ...


class operation(Generic[P, T]):  # noqa: N801  # a decorator
    """Makes a generator of steps a method of both brokers, which returns its value or a coroutine of it."""

    def __init__(self, steps: Callable[Concatenate[Any, P], Steps[T]]) -> None:
        def call(self: SyncCaller, *args: P.args, **options: P.kwargs) -> T:
            return self._carry_out(steps(self, *args, **options))

        async def call_async(self: AsyncCaller, *args: P.args, **options: P.kwargs) -> T:
            return await self._carry_out(steps(self, *args, **options))

        self._sync = _documented(call, steps)
        self._async = _documented(call_async, steps)

    @overload
    def __get__(self, instance: SyncCaller, owner: Any) -> Callable[P, T]: ...
    @overload
    def __get__(self, instance: AsyncCaller, owner: Any) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, instance: object, owner: Any) -> Callable[..., Any]: ...
    def __get__(self, instance: object, owner: Any) -> Any:
        method = self._async if issubclass(owner, AsyncCaller) else self._sync
        return method.__get__(instance, owner)


class listing(Generic[P, T]):  # noqa: N801  # a decorator
    """Makes a function that returns what is Listed a method of both brokers, which iterates over all
    items."""

    def __init__(self, pages: Callable[Concatenate[Any, P], Listed[T]]) -> None:
        def call(self: SyncCaller, *args: P.args, **options: P.kwargs) -> Iterator[T]:
            return self._items(pages(self, *args, **options))

        def call_async(self: AsyncCaller, *args: P.args, **options: P.kwargs) -> AsyncIterator[T]:
            return self._items(pages(self, *args, **options))

        self._sync = _documented(call, pages, Iterator)
        self._async = _documented(call_async, pages, AsyncIterator)

    @overload
    def __get__(self, instance: SyncCaller, owner: Any) -> Callable[P, Iterator[T]]: ...
    @overload
    def __get__(self, instance: AsyncCaller, owner: Any) -> Callable[P, AsyncIterator[T]]: ...
    @overload
    def __get__(self, instance: object, owner: Any) -> Callable[..., Any]: ...
    def __get__(self, instance: object, owner: Any) -> Any:
        method = self._async if issubclass(owner, AsyncCaller) else self._sync
        return method.__get__(instance, owner)


def _documented(function: Callable[..., Any], written: Callable[..., Any], iterator: Any = None) -> Any:
    """Give a method the name, docstring and signature of the operation as it was written."""
    update_wrapper(function, written)
    signature = inspect.signature(written)
    value = get_args(signature.return_annotation)[-1]
    if iterator and get_origin(value) is Reading:  # a choice: pages, or what is read as it arrives
        [value] = get_args(value)
    returns = iterator[value] if iterator else None if value is NoneType else value
    setattr(function, "__signature__", signature.replace(return_annotation=returns))  # noqa: B010
    return function
