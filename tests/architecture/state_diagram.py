"""Writes docs/reference/states.md from the core's tables: `python -m tests.architecture.state_diagram`."""

import ast
from collections.abc import Iterable
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

from gpubroker_server.core.domain import lease, task
from gpubroker_server.core.domain.lease import NEXT_STATES, LeaseState, PledgeEnd
from gpubroker_server.core.domain.task import TERMINAL, TRANSITIONS, Move, TaskState
from gpubroker_server.core.serving import request_states
from gpubroker_server.core.serving.request_states import ENDS, NEXT, RequestMove, RequestState

from tests.architecture.source_tree import ROOT

PAGE = ROOT / "docs" / "reference" / "states.md"

SOURCE = """\
Generated from the tables in `core/domain/task.py`, `core/domain/lease.py` and
`core/serving/request_states.py`; a test fails when they differ. A move that is not drawn cannot happen: the
code refuses it, and the database guards each row's version."""

NOT_DRAWN = """\
Changes that leave the state as it is are not drawn: a new priority, a hold, a checkpoint, an outcome, or the
end of the last task that a task runs after."""

PHASES = """\
The `phases` of a task say how many seconds it was in each state that is not an end, over all attempts:
`queued_seconds` (`pending`), `admitted_seconds` and `starting_seconds` (both `admitted`), `running_seconds`
and `stopping_seconds`. `admitted_seconds` ends when the agent of its node has the order to start it, and
`starting_seconds` when its code begins; of a gang, the last agent and the last rank. The agent says when it
had the order together with the start, so until then, and in an attempt that never started, the time counts as
`admitted_seconds`."""

REQUESTS = """\
A request that is passed on to a model server lives in the gateway's memory alone. From each state that is not
an end, `fail` leads to `failed` and `abandon` to `abandoned`; these moves are not drawn."""

Arrow = tuple[str, str, str]
"""(from, to, label)"""


def page() -> str:
    sections = (
        "# States and moves",
        SOURCE,
        "## Task",
        mermaid(["[*] --> pending: submitted"], task_arrows(), TERMINAL),
        meanings(TaskState, Path(task.__file__)),
        NOT_DRAWN,
        PHASES,
        "## Lease",
        mermaid(["[*] --> reserved: admitted"], lease_arrows(), [LeaseState.RELEASED]),
        meanings(LeaseState, Path(lease.__file__)),
        "## Pledge",
        "A pledge ends in exactly one of these ways.",
        meanings(PledgeEnd, Path(lease.__file__)),
        "## Request to a model",
        REQUESTS,
        mermaid(["[*] --> receiving: head read"], request_arrows(), ENDS),
        meanings(RequestState, Path(request_states.__file__)),
        meanings(RequestMove, Path(request_states.__file__), "Move | When"),
    )
    return "\n\n".join(sections) + "\n"


def task_arrows() -> list[Arrow]:
    return [(old, new, move) for (old, move), new in TRANSITIONS.items() if move is not Move.CHANGED]


def lease_arrows() -> list[Arrow]:
    order = list(LeaseState)
    return [(old, new, "") for old in order for new in order if new in NEXT_STATES[old]]


def request_arrows() -> list[Arrow]:
    not_drawn = RequestMove.FAIL, RequestMove.ABANDON
    moves = [(old, new, move) for old, each in NEXT.items() for move, new in each.items()]
    return [arrow for arrow in moves if arrow[2] not in not_drawn]


def mermaid(first: list[str], arrows: Iterable[Arrow], last: Iterable[str]) -> str:
    drawn = [f"{old} --> {new}: {label}" if label else f"{old} --> {new}" for old, new, label in arrows]
    ends = [f"{state} --> [*]" for state in sorted(last)]
    lines = "\n".join(f"    {line}" for line in (*first, *drawn, *ends))
    return f"```mermaid\nstateDiagram-v2\n{lines}\n```"


def meanings(
    states: type[StrEnum], source: Path, what: str = "State | What it is, and what moves it on"
) -> str:
    """A table of the values and of the comments that stand below them in the source."""
    comments = _comments_below(states.__name__, source)
    rows = [f"| `{state}` | {comments.get(state.name, 'The end.')} |" for state in states]
    return "\n".join(
        [
            f"| {what} |",
            "|---|---|",
            *rows,
        ]
    )


def _comments_below(name: str, source: Path) -> dict[str, str]:
    tree = ast.parse(source.read_text(encoding="utf-8"))
    (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    found = {}
    for value, comment in pairwise(body):
        match value, comment:
            case ast.Assign(targets=[ast.Name(id=member)]), ast.Expr(value=ast.Constant(value=str(text))):
                found[member] = " ".join(text.split())
    return found


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
