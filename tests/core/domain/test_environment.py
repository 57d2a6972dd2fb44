"""What an environment may be, and by what it is known on the nodes."""

import pytest
from gpubroker_server.core.domain.environment import (
    Environment,
    EnvironmentKind,
    environment_key,
)

HASH = "a" * 64


@pytest.mark.parametrize(
    ("fields", "kind", "minor", "label"),
    [
        ({"name": "rl"}, EnvironmentKind.NAMED, "", "rl"),
        ({"python": "/opt/py/bin/python"}, EnvironmentKind.INTERPRETER, "", "Python /opt/py/bin/python"),
        ({"conda": "torch"}, EnvironmentKind.INTERPRETER, "", "torch"),
        ({"python": "3.12"}, EnvironmentKind.BUILT, "3.12", "Python 3.12"),
        ({"python": ">=3.11, <3.14", "requirements": ("numpy",)}, EnvironmentKind.BUILT, "", "numpy"),
        ({"requirements": ("numpy", "six")}, EnvironmentKind.BUILT, "", "numpy and 1 more"),
        ({"project": HASH, "python": "3.12.4"}, EnvironmentKind.BUILT, "3.12", f"project {HASH[:12]}"),
        ({"container": "python:3.12"}, EnvironmentKind.CONTAINER, "", "python:3.12"),
    ],
)
def test_the_fields_of_an_environment_say_its_kind(
    fields: dict[str, object], kind: EnvironmentKind, minor: str, label: str
) -> None:
    environment = Environment(**fields)  # type: ignore[arg-type]
    assert (environment.kind, environment.minor, environment.label) == (kind, minor, label)
    assert not list(environment.faults())


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({}, "", "names nothing"),
        ({"name": "rl", "python": "3.12"}, "name", "leave the others out"),
        ({"conda": "a", "container": "b"}, "container", "has conda and container"),
        ({"python": "/bin/python3", "requirements": ("six",)}, "requirements", "give one of them"),
        ({"project": HASH, "requirements": ("six",)}, "requirements", "has project and requirements"),
        ({"conda": "torch", "python": "3.12"}, "python", "has a Python of its own"),
        ({"python": "python3"}, "python", '"python3" is neither an absolute path'),
        ({"python": "/opt/a\nb"}, "python", "is neither an absolute path"),
        ({"conda": "../x"}, "conda", "neither the name of a conda environment"),
        ({"container": "Bad Image"}, "container", "is no image name"),
        ({"requirements": ("-r other.txt",)}, "requirements/0", "is an option"),
        ({"requirements": ("six", "./pkg")}, "requirements/1", "is a path"),
        ({"requirements": ("pkg @ file:///etc",)}, "requirements/0", "is a path"),
        ({"requirements": (" ",)}, "requirements/0", "is not one line"),
        ({"requirements": ("a\tb",)}, "requirements/0", "is not one line"),
        ({"requirements": ("a" * 2001,)}, "requirements/0", "is not one line"),
        ({"requirements": ("six",) * 1001}, "requirements", "may have 1000"),
    ],
)
def test_a_wrong_environment_is_refused_with_field_and_remedy(
    fields: dict[str, object], field: str, said: str
) -> None:
    [fault] = Environment(**fields).faults()  # type: ignore[arg-type]
    assert fault.field == field
    assert said in fault.message


def test_equal_environments_of_a_tenant_have_one_key() -> None:
    numpy = Environment(python="3.12", requirements=("numpy",))
    named = Environment(name="science", python="3.12", requirements=("numpy",))
    assert environment_key(numpy, "acme") == environment_key(named, "acme")
    assert environment_key(numpy, "acme") != environment_key(numpy, "labs")
    assert environment_key(numpy, "") != environment_key(Environment(requirements=("numpy",)), "")
