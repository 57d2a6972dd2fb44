"""Reads bodies of tasks faster if they differ from an earlier body only in their arguments, as those of a
program that submits in a loop."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from gpubroker_server.core.admission.submission import Submission
from gpubroker_server.gateway.submission.named_objects import may_name_objects
from gpubroker_server.gateway.submission.task_body import SubmitTask
from gpubroker_server.gateway.submission.translation import submission_of
from gpubroker_server.gateway.tasks.run_text import (
    EntrypointCall,
    Surroundings,
    arguments_within,
    is_split_at_run,
    split_at_run,
)
from gpubroker_server.http.routing import Call, check_content_type

MAX_KNOWN: Final = 64
MAX_BYTES: Final = 16 * 1024
"""Surroundings with more bytes are not kept."""


class KnownBodies:
    """Reads bodies of tasks. If a body differs from an earlier one only in the arguments of its entrypoint,
    only the arguments are read, because validating the rest takes as long as admitting the task.

    A submission is a pure function of its body and its tenant, so a kept submission cannot be out of date.
    """

    def __init__(self, read_body: Callable[[Call, bytes], SubmitTask]) -> None:
        self._read_body = read_body
        self._last: tuple[Surroundings, Submission] | None = None
        self._known: OrderedDict[Surroundings, Submission] = OrderedDict()

    def read(self, call: Call, text: bytes) -> Submission:
        """Return the submission of a body. Raises InvalidPart or Problem if the body is invalid."""
        tenant = call.identity.tenant
        if may_name_objects(text):
            return submission_of(self._read_body(call, text), tenant)
        check_content_type(call.header(b"content-type"))
        if self._last is not None:
            surroundings, first = self._last
            arguments = arguments_within(text, surroundings)
            if arguments is not None:
                return _like(first, tenant, arguments)
        split = split_at_run(text)
        if split is None or not isinstance(split.run, EntrypointCall):
            return submission_of(self._read_body(call, text), tenant)
        surroundings = split.surroundings
        earlier = self._known.get(surroundings)
        if earlier is not None:
            arguments = arguments_within(text, surroundings)
            if arguments is not None:
                self._last = surroundings, earlier
                return _like(earlier, tenant, arguments)
        submission = submission_of(self._read_body(call, text), tenant)
        if len(surroundings.before) + len(surroundings.after) <= MAX_BYTES and is_split_at_run(split):
            self._last = surroundings, submission
            self._known[surroundings] = submission
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return submission


def _like(first: Submission, tenant: str, arguments: bytes) -> Submission:
    return replace(first, tenant=tenant, spec=replace(first.spec, arguments=arguments))
