"""Agents and run processes outlive the service: a changed message needs a new protocol number."""

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpubroker.runtime import messages
from gpubroker_server.adapters.ray import wire

from tests.architecture.source_tree import modules

MESSAGES = "client/gpubroker/runtime/messages.py"
AGENT = (
    "service/gpubroker_server/adapters/ray/agent/node_agent.py",
    "service/gpubroker_server/adapters/ray/driver/reports.py",
    MESSAGES,
)
"""The modules that read messages between driver and agent."""
RUNNER = ("service/gpubroker_server/adapters/ray/agent/runner.py", MESSAGES)
"""The modules that read messages between agent and run process."""
ACTORS = ("NodeAgent", "Runner")
"""Actors called through handles of another release."""

FORMS = Path(__file__).parents[1] / "contracts" / "forms"
FROZEN = {
    "agent-10": "a026f3b01602",
    "agent-11": "f7cefd5b0a1f",
    "agent-12": "a40418991153",
    "agent-13": "2b496df2d185",
    "agent-14": "acaaa22db03f",
    "agent-8": "005da3f522c4",
    "agent-9": "40dc594a24b7",
    "runner-5": "159adbd1a83c",
    "runner-6": "ab963385aa8e",
    "runner-7": "4005b5bfc4e2",
    "runner-8": "5b683abd84a4",
    "runner-10": "57c650cd49c7",
    "runner-9": "879bea52e326",
}
RELEASED = {"agent": 8, "runner": 5}
"""The newest form of the last release. It and those after it are read, for agents and runs live on while the
service is upgraded, to a release or to what lies between two."""


def form_of(*paths: str) -> str:
    """A digest of the message forms that these modules match, of the reports, of a run's order, and of the
    signatures of the actors."""
    read = {
        form
        for module in modules("service", "client")
        if module.path in paths
        for form in _forms(module.tree)
    }
    return _digest("\n".join(sorted(read)).encode())


def _forms(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.match_case():
                yield ast.unparse(node.pattern)
            case ast.AnnAssign(target=ast.Name("_FIELDS")):
                yield ast.unparse(node)
            case ast.ClassDef(name) if name == "RunOrder" or name.endswith("Form"):
                fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
                form = [f"{ast.unparse(field.target)}: {ast.unparse(field.annotation)}" for field in fields]
                kind = [ast.unparse(keyword) for keyword in node.keywords]
                yield f"{name}({', '.join(kind)}): {'; '.join(form)}"
            case ast.Call(func=ast.Name("_form")):
                yield ast.unparse(node)
            case ast.ClassDef(name) if name in ACTORS:
                methods = (m for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef))
                called = (m for m in methods if m.name == "__init__" or m.name[0] != "_")
                yield from (f"{name}.{method.name}({ast.unparse(method.args)})" for method in called)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


@pytest.mark.parametrize(
    ("sides", "protocol", "spoken", "read_by", "number", "form"),
    [
        ("agent", wire.PROTOCOL, wire.SPOKEN, AGENT, 14, "43f610cc5ceb"),
        ("runner", messages.PROTOCOL, messages.SPOKEN, RUNNER, 10, "564ae71cc573"),
    ],
    ids=["driver and agent", "agent and run process"],
)
def test_changed_form_has_a_new_number_and_those_since_release_are_spoken(
    sides: str, protocol: int, spoken: tuple[int, ...], read_by: tuple[str, ...], number: int, form: str
) -> None:
    """If this fails: increase that PROTOCOL by one, put its number and the digest here, and freeze samples of
    the new form (tests/contracts/form_samples.py)."""
    assert (protocol, form_of(*read_by)) == (number, form)
    assert spoken == tuple(range(RELEASED[sides], number + 1))


def test_the_samples_of_released_forms_are_frozen() -> None:
    """Agents and runs of those releases still write them."""
    found = {
        name: _digest(b"\n".join(path.read_bytes() for path in sorted(FORMS.glob(f"{name}-*"))))
        for name in sorted({"-".join(path.name.split("-")[:2]) for path in FORMS.iterdir()})
    }
    assert found == FROZEN
