"""Many tasks taken in at once. Those that differ in nothing but their run share all other work."""

import asyncio
import re
from collections.abc import Sequence
from time import monotonic
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from gpubroker_server.core.domain.submission import RunSpec
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.domain.values import changed
from gpubroker_server.core.planning.run_estimates import Size
from gpubroker_server.gateway.http.faults import body_faults, refused
from gpubroker_server.gateway.http.problems import Fault, Problem
from gpubroker_server.gateway.http.routing import Call
from gpubroker_server.gateway.status.task_view import arguments_of, spec_of
from gpubroker_server.gateway.submission.permission import check_run
from gpubroker_server.gateway.submission.submissions import (
    check_allowed,
    check_possible,
    digest_if_large,
    stored_spec,
    taken_in,
)
from gpubroker_server.gateway.submission.task_body import SubmitTask
from gpubroker_server.gateway.tasks.run_text import (
    Around,
    EntrypointCall,
    call_within,
    cut_at_run,
    is_cut_at_run,
)
from gpubroker_server.ports.store import Stand, Submission

TURN_SECONDS = 0.003
"""After so long everybody else has a turn on the event loop."""

STANDS_AT_ONCE = 1000

_read_task = TypeAdapter(SubmitTask).validator.validate_json
_TASK_IDS = re.compile(rb"task_[0-7][0-9a-hjkmnp-tv-z]{25}")


class _Like(NamedTuple):
    """What was found out about the first of several tasks that are alike."""

    body: SubmitTask
    first: Submission
    learned: Size | None


class Batch:
    """The tasks of one request, taken in one after the other, as they would be one by one."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._now = call.parts.clock.now()
        self._inline_bytes = call.parts.limits.inline_bytes
        self._likes: dict[Around, _Like] = {}
        self._last: tuple[Around, Submission] | None = None
        """What stood around the run of the last task, and the first of all that are like it."""
        self._stands: dict[TaskId, Stand] = {}

    async def take_in(self, pieces: Sequence[bytes]) -> list[Submission | Problem]:
        """Of each, what is to be stored or why it is refused. Objects are stored by then."""
        await self._look_up(pieces)
        taken: list[Submission | Problem] = []
        until = monotonic() + TURN_SECONDS
        for id, piece in zip(self._call.parts.ids.tasks(self._now, len(pieces)), pieces, strict=True):
            try:
                taken.append(self._as_the_last(piece, id) or await self._submission(piece, id))
            except Problem as problem:
                taken.append(problem)
            if monotonic() > until:
                await asyncio.sleep(0)
                until = monotonic() + TURN_SECONDS
        return taken

    async def _look_up(self, pieces: Sequence[bytes]) -> None:
        """Whatever may be the id of a task that one of them runs after."""
        if b"after" not in await self._call.body():
            return
        named = sorted({id for piece in pieces if b"after" in piece for id in _TASK_IDS.findall(piece)})
        ids = [TaskId(id.decode()) for id in named]
        for start in range(0, len(ids), STANDS_AT_ONCE):
            self._stands |= await self._call.parts.store.stands(ids[start : start + STANDS_AT_ONCE])

    def _as_the_last(self, piece: bytes, id: TaskId) -> Submission | None:
        """If it calls the entrypoint that the one before it called, and differs in nothing else."""
        if self._last is None:
            return None
        around, first = self._last
        call = call_within(piece, around)
        if call is None or len(call.arguments) > self._inline_bytes:
            return None
        spec = changed(first.spec, arguments=call.arguments, arguments_digest=None)
        return Submission(changed(first.task, id=id), spec, like=first)

    async def _submission(self, piece: bytes, id: TaskId) -> Submission:
        """Raises Problem."""
        cut = cut_at_run(piece)
        if cut is None:
            return (await self._met(piece, id)).first
        like = self._likes.get(cut.around)
        if like is None:
            like = await self._met(piece, id)
            if is_cut_at_run(cut):
                self._likes[cut.around] = like
                self._last = cut.around, like.first
            return like.first
        self._last = cut.around, like.first
        if isinstance(cut.run, EntrypointCall):
            spec = await self._with_arguments(like.first.spec, cut.run.arguments, id)
        else:
            check_run(self._call, cut.run)
            spec = spec_of(like.body, cut.run, b"", None, like.learned)
            spec = await self._with_arguments(spec, arguments_of(cut.run), id)
        return Submission(changed(like.first.task, id=id), spec, like=like.first)

    async def _with_arguments(self, spec: RunSpec, arguments: bytes, id: TaskId) -> RunSpec:
        digest = await digest_if_large(self._call, arguments, id)
        return changed(spec, arguments=arguments if digest is None else b"", arguments_digest=digest)

    async def _met(self, piece: bytes, id: TaskId) -> _Like:
        """The first of its likes, as far as anybody knows. Raises Problem."""
        try:
            body = _read_task(piece)
        except ValidationError as error:
            raise refused(body_faults(error, SubmitTask)) from None
        task, learned = taken_in(self._call, body, id, self._stands, self._now)
        check_allowed(self._call, body, task)
        check_possible(self._call, task)
        return _Like(body, Submission(task, await stored_spec(self._call, body, task, learned)), learned)


def at_item(number: int, problem: Problem) -> list[Fault]:
    """What is wrong with a task of a batch, said of the batch."""
    place = f"/tasks/{number}"
    if not problem.errors:
        return [Fault(pointer=place, detail=problem.detail, code=problem.code)]
    return [
        Fault(pointer=f"{place}{fault['pointer']}", detail=fault["detail"], code=fault["code"])
        for fault in problem.errors
    ]
