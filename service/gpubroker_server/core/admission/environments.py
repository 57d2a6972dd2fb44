"""The environment of a submission: one of the operator's by name, or the submitter's own as far as the
operator allows it."""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from gpubroker_server.core.admission.defaults import Defaults, NamedDefaults
from gpubroker_server.core.admission.facts import INVALID, Refused
from gpubroker_server.core.admission.permissions import CODE_SCOPE, COMMAND_SCOPE, lacks
from gpubroker_server.core.admission.submission import Sender
from gpubroker_server.core.domain.environment import Environment, EnvironmentKind
from gpubroker_server.core.domain.reasons import Refusal
from gpubroker_server.core.domain.submission import RunSpec
from gpubroker_server.core.domain.suggestions import did_you_mean


class EnvironmentPolicy(Struct, frozen=True):
    """What the operator allows of environments."""

    container_engine: str = ""
    """The program that runs containers on the nodes: `podman`, `docker` or `apptainer`; empty if containers
    are not allowed."""
    builds: bool = True
    """True if submitters may have nodes install packages. Environments of the settings may always."""
    shared: bool = False
    """True if tenants share what nodes have installed for one of them."""

    def owner(self, tenant: str) -> str:
        """Return the tenant for which an environment is kept; empty if all tenants share it."""
        return "" if self.shared else tenant


def environment_for(
    spec: RunSpec, usual: NamedDefaults, defaults: Defaults, python: str
) -> Environment | Refused:
    """Return the environment of a run: the one that it states, or that of its profile or model type. A name
    is replaced by the operator's environment of that name. `python` is the minor version of the service."""
    asked = spec.environment or Environment(name=usual.environment or "")
    faults = list(asked.faults())
    if not faults and asked.name:
        found = defaults.environments.get(asked.name)
        if found is None:
            names = defaults.environments
            known = f"there are: {', '.join(sorted(names)) or 'none'}"
            suggestion = did_you_mean(asked.name, names, otherwise=known)
            detail = f'the operator has no environment "{asked.name[:100]}"; {suggestion}'
            return Refused(INVALID, faults=(Refusal("unknown", detail, "/environment"),))
        asked = replace(found, name=asked.name)
    if faults:
        at = (replace_field(fault) for fault in faults)
        return Refused(INVALID, faults=tuple(at))
    if asked.kind is EnvironmentKind.BUILT and not asked.python:
        # A function can be opened by no other minor version than the one that pickled it.
        asked = replace(asked, python=spec.python or python)
    return asked


def replace_field(fault: Refusal) -> Refusal:
    """Return the refusal with a pointer into the body in place of the name of a field."""
    return Refusal(fault.code, fault.message, f"/environment/{fault.field}".rstrip("/"))


def check_environment(sender: Sender, spec: RunSpec, policy: EnvironmentPolicy) -> Refused | None:
    """Return a refusal if the token or the operator does not allow the environment. Installing packages, and
    starting any interpreter of the nodes, runs code that the submitter has chosen."""
    environment = spec.environment
    if environment is None:
        return None
    if not environment.name:
        refused = lacks(sender, CODE_SCOPE, "an environment of your own", COMMAND_SCOPE)
        if refused is not None:
            return refused
    faults = tuple(_not_allowed(environment, spec, policy))
    return Refused("environment-not-allowed", faults[0].message, faults) if faults else None


def _not_allowed(environment: Environment, spec: RunSpec, policy: EnvironmentPolicy) -> Iterator[Refusal]:
    match environment.kind:
        case EnvironmentKind.BUILT if not (policy.builds or environment.name):
            detail = (
                "the operator allows no packages but those of the environments in the settings "
                "(environments.builds); name one of those, or an interpreter of the nodes"
            )
            yield Refusal("builds-not-allowed", detail, "/environment")
        case EnvironmentKind.CONTAINER if not policy.container_engine:
            detail = (
                "the operator allows no containers (environments.container_engine); give packages or an "
                "interpreter instead"
            )
            yield Refusal("containers-not-allowed", detail, "/environment/container")
        case EnvironmentKind.CONTAINER if spec.kind != "command":
            detail = "a container runs commands; submit a command, or give packages instead of a container"
            yield Refusal("containers-run-commands", detail, "/environment/container")
        case _:
            pass
