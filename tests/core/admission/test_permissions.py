"""What a token and the operator allow."""

from collections.abc import Collection
from typing import Any

import pytest
from gpubroker_server.core.admission.permissions import lacks
from gpubroker_server.core.domain.submission import RunSpec
from msgspec.structs import replace

from tests.core.admission.scenes import CALL, RULES, Token

ALLOWED = RULES.permissions
WRITER = Token(("tasks:write",))


@pytest.mark.parametrize(
    ("token", "spec", "cloudpickle", "code"),
    [
        (WRITER, CALL, None, None),
        (WRITER, RunSpec("entrypoint", "os:system"), None, "entrypoint-not-allowed"),
        (WRITER, RunSpec("command"), None, "forbidden"),
        (WRITER, RunSpec("function", python="3.11"), None, "forbidden"),
        (Token(("tasks:command",)), RunSpec("command"), None, None),
        (Token(("tasks:code",)), RunSpec("function", python="3.11"), None, None),
        (Token(("tasks:code",)), RunSpec("function", python="3.11"), "3.9", None),
        (Token(("tasks:code",)), RunSpec("function", python="3.12"), None, "python-mismatch"),
        (Token(("tasks:code",)), RunSpec("function", python="3.11"), "4.0", "python-mismatch"),
        (WRITER, RunSpec("external"), None, None),
    ],
)
def test_a_run_needs_its_scope_and_what_can_open_it(
    token: Token, spec: RunSpec, cloudpickle: str | None, code: str | None
) -> None:
    found = ALLOWED.check_run(token, spec, cloudpickle)
    assert (None if found is None else found.code) == code


@pytest.mark.parametrize(
    ("token", "env", "names"),
    [
        (WRITER, {}, []),
        (WRITER, {"SEED": "1"}, []),
        (WRITER, {"SEED": "1", "PATH": "/", "BASH_ENV": "x"}, ["/env/PATH", "/env/BASH_ENV"]),
        (Token(("tasks:code",)), {"PATH": "/"}, []),
        (Token(("tasks:command",)), {"PATH": "/"}, []),
    ],
)
def test_only_who_may_run_any_code_sets_any_variable(
    token: Token, env: dict[str, str], names: list[str]
) -> None:
    found = ALLOWED.check_env(token, env)
    assert [fault.field for fault in ([] if found is None else found.faults)] == names


@pytest.mark.parametrize(
    ("token", "priority", "fields", "said"),
    [
        (Token(max_priority=60), 60, {}, None),
        (Token(max_priority=60), 61, {}, 'priority 61 is above 60, the cap of token "ann"'),
        (Token(tenant="modest"), 70, {}, 'above 69, the cap of tenant "modest"'),
        (Token(max_priority=60), 65, {"tenant": "modest"}, 'above 60, the cap of token "ann"'),
        (Token(max_priority=60), 100, {"subject": "a pinned model is"}, "a pinned model is above 60"),
    ],
)
def test_a_priority_is_capped_by_the_token_and_by_the_tenant(
    token: Token, priority: int, fields: dict[str, Any], said: str | None
) -> None:
    found = ALLOWED.check_priority(token, priority, **fields)
    assert (found is None) is (said is None)
    assert said is None or (found is not None and said in found.detail)


def test_any_of_several_scopes_is_enough() -> None:
    assert lacks(WRITER, "admin", "this", "tasks:write") is None
    found = lacks(WRITER, "admin", "this", "tasks:read")
    assert found is not None
    assert found.detail.startswith('token "ann" lacks the scope admin or tasks:read, which this needs')


class Modules:
    """The names that the module `myteam.jobs` defines; other modules cannot be read."""

    known = frozenset({"myteam.jobs:train"})

    def other_names(self, entrypoint: str) -> Collection[str] | None:
        return ["train", "evaluate"] if entrypoint.startswith("myteam.jobs:") else None


@pytest.mark.parametrize(
    ("entrypoint", "detail"),
    [
        ("myteam.jobs:train", None),
        ("myteam.jobs:trian", 'module "myteam.jobs" defines no "trian"; did you mean "train"?'),
        ("myteam.other:trian", None),
    ],
)
def test_a_function_that_its_module_does_not_define_is_refused(entrypoint: str, detail: str | None) -> None:
    permissions = replace(ALLOWED, entrypoints=("myteam.*:*",), modules=Modules())
    refused = permissions.check_run(WRITER, RunSpec("entrypoint", entrypoint))
    assert (None if refused is None else refused.faults[0].message) == detail


def test_an_entrypoint_of_an_upload_is_the_submitters_own_code() -> None:
    spec = RunSpec("entrypoint", "anything:at_all", upload="0" * 64)
    refused = ALLOWED.check_run(WRITER, spec)
    assert refused is not None
    assert refused.code == "forbidden"
    assert ALLOWED.check_run(Token(("tasks:code",)), spec) is None
