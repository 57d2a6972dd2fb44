"""Many tasks taken in at once. Those that differ in nothing but their run share all other work."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from service.core.expectations import Size
from service.core.task import Task, changed
from service.core.units import TaskId
from service.gateway.direct import Call
from service.gateway.faults import body_faults, refused
from service.gateway.intake import check_allowed, check_possible, digest_if_large, taken_in
from service.gateway.permission import check_run
from service.gateway.pieces import members_of
from service.gateway.problems import Fault, Problem
from service.gateway.schemas import Command, Entrypoint, Function, SubmitTask
from service.gateway.translate import arguments_of, spec_of
from service.ports import Stand, Submission

TURN_SECONDS = 0.003
"""After so long everybody else has a turn on the event loop."""

STANDS_AT_ONCE = 1000

_read_task = TypeAdapter(SubmitTask).validator.validate_json
_read_run = {kind.tag: TypeAdapter(kind).validator.validate_json for kind in (Entrypoint, Command, Function)}
_TASK_IDS = re.compile(rb"task_[0-7][0-9a-hjkmnp-tv-z]{25}")

Key = tuple[object, ...]
AnyRun = Entrypoint | Command | Function


class _Like(NamedTuple):
    """What was found out about the first of several tasks that are alike."""

    body: SubmitTask
    task: Task
    learned: Size | None


class Batch:
    """The tasks of one request, taken in one after the other, as they would be one by one."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._now = call.parts.clock.now()
        self._inline_bytes = call.parts.limits.inline_bytes
        self._likes: dict[Key, _Like] = {}
        self._stands: dict[TaskId, Stand] = {}

    async def take_in(self, pieces: Sequence[bytes]) -> list[Submission | Problem]:
        """Of each, what is to be stored or why it is refused. Objects are stored by then."""
        await self._look_up(pieces)
        taken: list[Submission | Problem] = []
        until = monotonic() + TURN_SECONDS
        for id, piece in zip(self._call.parts.ids.tasks(self._now, len(pieces)), pieces, strict=True):
            try:
                like, run = self._read(piece, id)
                taken.append(await self._submission(like, run, id))
            except Problem as problem:
                taken.append(problem)
            if monotonic() > until:
                await asyncio.sleep(0)
                until = monotonic() + TURN_SECONDS
        return taken

    async def _look_up(self, pieces: Sequence[bytes]) -> None:
        """Whatever may be the id of a task that one of them runs after."""
        named = sorted({id for piece in pieces if b"after" in piece for id in _TASK_IDS.findall(piece)})
        ids = [TaskId(id.decode()) for id in named]
        for start in range(0, len(ids), STANDS_AT_ONCE):
            self._stands |= await self._call.parts.store.stands(ids[start : start + STANDS_AT_ONCE])

    def _read(self, piece: bytes, id: TaskId) -> tuple[_Like, AnyRun]:
        """The first task that is like this one, which it may be itself, and its own run. Raises Problem."""
        members = members_of(piece)
        run = None if members is None else _run_in(members)
        if members is None or run is None:
            like = self._met(piece, id)
            return like, like.body.run
        key = _key_of(members, run)
        known = self._likes.get(key)
        if known is None:
            known = self._likes[key] = self._met(piece, id)
        else:
            check_run(self._call, run)
        return known, run

    def _met(self, piece: bytes, id: TaskId) -> _Like:
        """Raises Problem."""
        try:
            body = _read_task(piece)
        except ValidationError as error:
            raise refused(body_faults(error, SubmitTask)) from None
        task, learned = taken_in(self._call, body, id, self._stands, self._now)
        check_allowed(self._call, body, task)
        check_possible(self._call, task)
        return _Like(body, task, learned)

    async def _submission(self, like: _Like, run: AnyRun, id: TaskId) -> Submission:
        arguments = arguments_of(run)
        digest = None
        if len(arguments) > self._inline_bytes:
            digest = await digest_if_large(self._call, arguments, id)
        task = like.task if like.task.id == id else changed(like.task, id=id)
        return Submission(task, spec_of(like.body, run, arguments, digest, like.learned), like=like.task)


def _run_in(members: Mapping[str, bytes]) -> AnyRun | None:
    """None if it is none; what is wrong with it is told by who reads all of the task."""
    if "run" not in members:
        return None
    text = members["run"]
    parts = members_of(text) or {}
    kinds = [kind for kind in _read_run if kind in parts]
    if len(kinds) != 1:
        return None
    try:
        run: AnyRun = _read_run[kinds[0]](text)
    except ValidationError:
        return None
    return run


def _key_of(members: Mapping[str, bytes], run: AnyRun) -> Key:
    """The same for tasks that differ in nothing but the arguments of their run."""
    others = [member for member in members.items() if member[0] != "run"]
    return (run.tag, run.entrypoint if isinstance(run, Entrypoint) else "", *others)


def at_item(number: int, problem: Problem) -> list[Fault]:
    """What is wrong with a task of a batch, said of the batch."""
    place = f"/tasks/{number}"
    if not problem.errors:
        return [Fault(pointer=place, detail=problem.detail, code=problem.code)]
    return [
        Fault(pointer=f"{place}{fault['pointer']}", detail=fault["detail"], code=fault["code"])
        for fault in problem.errors
    ]
