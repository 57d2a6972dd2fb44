"""Agents and run processes outlive the service: when what they are told or tell changes, its number must."""

import ast
import hashlib
from collections.abc import Iterator

import pytest
from gpubroker.runtime import messages

from service.adapters.ray import wire
from tests.architecture.source_tree import modules

MESSAGES = "client/gpubroker/runtime/messages.py"
AGENT = ("service/adapters/ray/agent.py", "service/adapters/ray/report_form.py", MESSAGES)
"""Read what driver and agent send each other."""
RUNNER = ("service/adapters/ray/runner.py", MESSAGES)
"""Read what agent and run process send each other."""


def form_of(*paths: str) -> str:
    """A digest of each form that these modules match, of each report, and of a run's order."""
    read = {
        form
        for module in modules("service", "client")
        if module.path in paths
        for form in _forms(module.tree)
    }
    return hashlib.sha256("\n".join(sorted(read)).encode()).hexdigest()[:12]


def _forms(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.match_case():
                yield ast.unparse(node.pattern)
            case ast.AnnAssign(target=ast.Name("_FIELDS")):
                yield ast.unparse(node)
            case ast.ClassDef("RunOrder"):
                told = [field for field in node.body if isinstance(field, ast.AnnAssign)]
                yield from (f"{ast.unparse(field.target)}: {ast.unparse(field.annotation)}" for field in told)


@pytest.mark.parametrize(
    ("protocol", "read_by", "number", "form"),
    [(wire.PROTOCOL, AGENT, 6, "a89b8c6b99e2"), (messages.PROTOCOL, RUNNER, 4, "087c69529fc4")],
    ids=["driver and agent", "agent and run process"],
)
def test_a_changed_form_has_a_new_number(
    protocol: int, read_by: tuple[str, ...], number: int, form: str
) -> None:
    """If this fails: raise that PROTOCOL by one, then write its number and the digest here."""
    assert (protocol, form_of(*read_by)) == (number, form)
