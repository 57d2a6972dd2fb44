"""Fields that are copied by their name: from a body to a run, and from a task and its run to an answer.

mypy does not see these copies, so their types are compared here.
"""

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

import pytest
from gpubroker.wire.tasks import Task as Shown
from gpubroker_server.core.domain.submission import RunSpec
from gpubroker_server.core.domain.task import Task
from gpubroker_server.gateway.status.task_view import _SAME_IN_SPEC, _SAME_IN_TASK
from gpubroker_server.gateway.submission.task_body import SubmitTask
from gpubroker_server.gateway.submission.translation import _KEPT


def classes_in(annotation: Any) -> set[type]:
    """Return the classes that a value of this type may have, without the types of what it contains."""
    if isinstance(annotation, NewType):
        return classes_in(annotation.__supertype__)
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return classes_in(parts[0])
    if origin in (Union, UnionType):
        return set().union(*map(classes_in, parts))
    if origin is Literal:
        return {type(value) for value in parts}
    return {annotation if origin is None else origin}


COPIES = [
    *((SubmitTask, RunSpec, name) for name in _KEPT),
    *((Task, Shown, name) for name in _SAME_IN_TASK),
    *((RunSpec, Shown, name) for name in _SAME_IN_SPEC),
]


@pytest.mark.parametrize(("source", "target", "name"), COPIES)
def test_a_field_that_is_copied_has_the_same_type_on_both_sides(
    source: type, target: type, name: str
) -> None:
    given, taken = (classes_in(get_type_hints(kind)[name]) for kind in (source, target))
    wrong = [kind for kind in given if not issubclass(kind, tuple(taken))]
    assert wrong == [], f"{source.__name__}.{name} is copied to {target.__name__}, which takes {taken}"


def test_the_compared_types_are_the_classes_of_values() -> None:
    assert classes_in(get_type_hints(Task)["timeout_seconds"]) == {float, NoneType}
    assert classes_in(get_type_hints(RunSpec)["command"]) == {tuple}
