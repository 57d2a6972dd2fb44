"""The environment of a submission: whose it is, what the operator allows, and which functions it opens."""

from typing import Any

import pytest
from gpubroker_server.core.admission.admit import AdmissionPolicy
from gpubroker_server.core.admission.defaults import NamedDefaults
from gpubroker_server.core.admission.environments import EnvironmentPolicy
from gpubroker_server.core.admission.facts import Refused
from gpubroker_server.core.admission.submission import Asked
from gpubroker_server.core.domain.environment import Environment, environment_key
from gpubroker_server.core.domain.submission import RunSpec
from msgspec.structs import replace

from tests.core.admission.scenes import CALL, RULES, OneNode, Token, admitted, judge

RL = Environment(python="3.12", requirements=("gymnasium",))
DEFAULTS = replace(
    RULES.defaults, environments={"rl": RL}, profiles={"actor": NamedDefaults(cpu=1.0, environment="rl")}
)
OPEN = replace(RULES, defaults=DEFAULTS)
COMMAND = RunSpec("command", command=("true",))


def function(pickled_by: str = "3.11", **fields: Any) -> RunSpec:
    return RunSpec("function", python=pickled_by, environment=Environment(**fields))


def in_(environment: Environment, spec: RunSpec = COMMAND) -> RunSpec:
    return replace(spec, environment=environment)


def refusal(spec: RunSpec, rules: AdmissionPolicy = OPEN, **more: Any) -> Refused:
    found = judge(spec=spec, rules=rules, **more)
    assert isinstance(found, Refused), found
    return found


def test_the_demand_of_a_task_names_the_key_of_its_environment() -> None:
    new = admitted(spec=in_(RL), rules=OPEN, tenant="acme")
    assert new.spec.environment == RL
    assert new.task.demand.where.environment == environment_key(RL, "acme")


def test_tenants_share_an_environment_only_if_the_operator_says_so() -> None:
    shared = replace(OPEN, environments=EnvironmentPolicy(shared=True))
    new = admitted(spec=in_(RL), rules=shared)
    assert new.task.demand.where.environment == environment_key(RL, "")


@pytest.mark.parametrize("spec", [in_(Environment(name="rl"), CALL), replace(CALL, profile="actor")])
def test_a_name_or_a_profile_stands_for_the_operators_environment(spec: RunSpec) -> None:
    new = admitted(Token(("tasks:write",)), spec=spec, rules=OPEN)
    assert new.spec.environment == replace(RL, name="rl")


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    [fault] = refusal(in_(Environment(name="lr"))).faults
    assert fault.field == "/environment"
    assert 'no environment "lr"' in fault.message
    assert "rl" in fault.message


def test_wrong_fields_are_named_by_their_place_in_the_body() -> None:
    [fault] = refusal(in_(Environment(requirements=("-e .",)))).faults
    assert fault.field == "/environment/requirements/0"
    [fault] = refusal(in_(Environment())).faults
    assert fault.field == "/environment"


@pytest.mark.parametrize(
    ("spec", "python"),
    [
        (in_(Environment(requirements=("six",))), "3.11"),
        (function("3.12", requirements=("six",)), "3.12"),
        (in_(Environment(requirements=("six",), python=">=3.11")), ">=3.11"),
        (in_(Environment(conda="x")), ""),
    ],
)
def test_packages_are_installed_for_the_python_of_function_or_service(spec: RunSpec, python: str) -> None:
    new = admitted(spec=spec, rules=OPEN)
    assert new.spec.environment is not None
    assert new.spec.environment.python == python


def test_a_function_is_refused_by_the_python_of_its_environment() -> None:
    refused = refusal(function("3.11", requirements=("six",), python="3.12"))
    assert refused.code == "python-mismatch"
    assert 'its environment "six" has Python 3.12' in refused.detail


def test_a_function_is_refused_by_the_python_that_a_node_has_found() -> None:
    conda = function("3.11", conda="torch")
    fleet = OneNode(pythons={environment_key(Environment(conda="torch"), "default"): "3.10"})
    assert "has Python 3.10" in refusal(conda, fleet=fleet).detail
    assert admitted(spec=conda, rules=OPEN).spec.python == "3.11"  # no node has looked yet


@pytest.mark.parametrize(
    ("token", "spec", "code"),
    [
        (Token(("tasks:write",)), in_(RL, CALL), "forbidden"),
        (Token(("tasks:write", "tasks:command")), in_(RL, CALL), "forbidden"),
        (Token(("tasks:write", "tasks:code")), in_(RL, CALL), None),
        (Token(("tasks:write", "tasks:command")), in_(RL), None),
        (Token(("tasks:write",)), in_(Environment(name="rl"), CALL), None),
    ],
)
def test_an_environment_of_ones_own_needs_the_scope_for_code(
    token: Token, spec: RunSpec, code: str | None
) -> None:
    found = judge(token, spec=spec, rules=OPEN)
    assert (found.code if isinstance(found, Refused) else None) == code


def test_a_token_that_may_run_nothing_cannot_have_packages_installed() -> None:
    external = RunSpec("external", environment=RL)
    found = judge(Token(("tasks:write",)), spec=external, rules=OPEN)
    assert isinstance(found, Refused)
    assert "an environment of your own" in found.detail


def test_the_operator_may_allow_only_environments_of_the_settings() -> None:
    closed = replace(OPEN, environments=EnvironmentPolicy(builds=False))
    refused = refusal(in_(RL), closed)
    assert refused.code == "environment-not-allowed"
    assert "environments.builds" in refused.detail
    assert admitted(spec=in_(Environment(name="rl")), rules=closed).spec.environment is not None
    assert admitted(spec=in_(Environment(conda="x")), rules=closed).spec.environment is not None


def test_containers_run_commands_where_the_operator_allows_them() -> None:
    image = Environment(container="python:3.12")
    assert "environments.container_engine" in refusal(in_(image)).detail
    podman = replace(OPEN, environments=EnvironmentPolicy(container_engine="podman"))
    assert admitted(spec=in_(image), rules=podman).spec.environment == image
    assert "submit a command" in refusal(in_(image, function()), podman).detail


def test_a_task_with_an_environment_never_shares_a_process() -> None:
    small = Asked(cpu=0.5)
    assert admitted(spec=CALL, rules=OPEN, demand=small).task.shareable
    assert not admitted(spec=in_(Environment(name="rl"), CALL), rules=OPEN, demand=small).task.shareable
