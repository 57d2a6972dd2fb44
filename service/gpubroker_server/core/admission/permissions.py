"""Check what a token and the operator's settings permit a task: kinds of run, entrypoints, environment
variables, priorities and secrets."""

from collections.abc import Collection, Container, Mapping
from fnmatch import fnmatchcase
from typing import Protocol

from msgspec import Struct

from gpubroker_server.core.admission.facts import INVALID, Refused
from gpubroker_server.core.admission.submission import Sender
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.reasons import Refusal
from gpubroker_server.core.domain.submission import (
    EntrypointPatterns,
    RunSpec,
    is_entrypoint_allowed,
    named_patterns,
)
from gpubroker_server.core.domain.suggestions import did_you_mean

CODE_SCOPE, COMMAND_SCOPE, SECRETS_SCOPE = "tasks:code", "tasks:command", "secrets:use"


class DefinedNames(Protocol):
    """The names that the modules of entrypoints define, as far as the process that admits tasks knows
    them."""

    @property
    def known(self) -> Container[str]:
        """Entrypoints for which `other_names` is known to return None."""

    def other_names(self, entrypoint: str) -> Collection[str] | None:
        """Return the names that the entrypoint's module defines if the module certainly lacks the function;
        otherwise None."""


class Permissions(Struct, frozen=True):
    policy: Policy
    entrypoints: EntrypointPatterns
    """Patterns of `module:function` that tasks may name, such as `myteam.*:*`."""
    python: str
    """The minor version of the Python that runs pickled functions, such as 3.12."""
    cloudpickle: str
    """The version of cloudpickle that unpickles functions."""
    env_allowed: tuple[str, ...] = ()
    """Patterns of the environment variables that a token without the scope for functions or commands may
    set."""
    modules: DefinedNames | None = None
    """The names that modules define; None if this process cannot know them."""
    shares_ray: bool = False
    """True if tasks may ask for the service's own Ray."""

    def check_run(
        self, sender: Sender, spec: RunSpec, cloudpickle: str | None = None, found_python: str = ""
    ) -> Refused | None:
        """Return a refusal if the token or the operator does not allow the run. `cloudpickle` is the version
        that pickled the function, if the client states it. `found_python` is the minor version of Python that
        nodes have found in the environment of the run; empty if they have not looked."""
        match spec.kind:
            case "entrypoint" if spec.upload:  # the entrypoint is in the submitter's own code
                return lacks(sender, CODE_SCOPE, "submitting a function with the directory that it is in")
            case "entrypoint" if spec.environment is not None and not spec.environment.name:
                purpose = "submitting a function with an environment of your own"
                return lacks(sender, CODE_SCOPE, purpose)
            case "entrypoint":
                return self._check_entrypoint(spec.entrypoint)
            case "command":
                return lacks(sender, COMMAND_SCOPE, "submitting a command")
            case "function":
                refused = lacks(sender, CODE_SCOPE, "submitting a function")
                return refused or self._check_pickle(spec, cloudpickle, found_python)
        return None

    def check_env(self, sender: Sender, env: Mapping[str, str]) -> Refused | None:
        """Return a refusal if the token may not set one of the environment variables `env`. Many variables
        make an allowed entrypoint run other code (BASH_ENV, PATH, GIT_SSH_COMMAND)."""
        if not env or sender.may(CODE_SCOPE) or sender.may(COMMAND_SCOPE):
            return None
        refused = [
            name for name in env if not any(fnmatchcase(name, allowed) for allowed in self.env_allowed)
        ]
        if not refused:
            return None
        allowed = ", ".join(self.env_allowed) or "none"
        detail = (
            f'token "{sender.name}" may not set the variables {", ".join(refused)}; without the scope '
            f"{CODE_SCOPE} or {COMMAND_SCOPE} it may set: {allowed}; leave them out, or have the operator "
            "add them to env_allowed"
        )
        faults = (Refusal("env-not-allowed", "is not in env_allowed", f"/env/{name}") for name in refused)
        return Refused("forbidden", detail, tuple(faults))

    def highest_priority(self, sender: Sender, tenant: str | None = None) -> int:
        """Return the highest priority that the token may give a task of `tenant`, by default its own tenant.
        The token and the tenant may each have a cap."""
        return min(sender.max_priority, self.policy.tenant(tenant or sender.tenant).max_priority)

    def default_priority(self, sender: Sender | None, usual: int, tenant: str | None = None) -> int:
        """Return the priority of a task that states none: `usual`, or the highest that the token may give if
        that is lower."""
        return usual if sender is None else min(usual, self.highest_priority(sender, tenant))

    def check_priority(
        self,
        sender: Sender,
        priority: int,
        tenant: str | None = None,
        *,
        at: str = "/priority",
        subject: str = "",
    ) -> Refused | None:
        """Return a refusal if the priority is above `highest_priority`.

        `at` is the JSON pointer to the priority in the body. `subject` is the beginning of the message if the
        body does not state the priority itself, such as "a pinned model has priority 90, which is".
        """
        if priority <= self.highest_priority(sender, tenant):
            return None
        name = tenant or sender.tenant
        cap = self.policy.tenant(name).max_priority
        if cap < min(priority, sender.max_priority):
            owner, remedy = f'tenant "{name}"', "have the operator raise its max_priority (policy.tenants)"
        else:
            cap, owner = sender.max_priority, f'token "{sender.name}"'
            remedy = "have an admin make a token with a higher max_priority"
        detail = (
            f"{subject or f'priority {priority} is'} above {cap}, the cap of {owner}; "
            f"ask for less, or {remedy}"
        )
        return Refused("priority-not-allowed", detail, (Refusal("above-cap", f"at most {cap}", at),))

    def _check_entrypoint(self, entrypoint: str) -> Refused | None:
        if is_entrypoint_allowed(self.entrypoints, entrypoint):
            if self.modules is None or entrypoint in self.modules.known:
                return None
            return self._check_defined(entrypoint, self.modules.other_names(entrypoint))
        allowed = named_patterns(self.entrypoints)
        detail = (
            f'"{entrypoint}" is not allowed; the operator allows {allowed} (setting entrypoints); to run a '
            "function of your own, send the folder that it is in (--upload, upload=)"
        )
        code = "entrypoint-not-allowed"
        return Refused(code, detail, (Refusal(code, detail, "/run/entrypoint"),))

    def _check_defined(self, entrypoint: str, others: Collection[str] | None) -> Refused | None:
        if others is None:
            return None
        module, _, name = entrypoint.partition(":")
        allowed = [other for other in others if is_entrypoint_allowed(self.entrypoints, f"{module}:{other}")]
        remedy = did_you_mean(name, allowed, otherwise="correct the name, or add the function to the module")
        detail = f'module "{module}" defines no "{name.partition(".")[0]}"; {remedy}'
        return Refused(INVALID, faults=(Refusal("unknown-function", detail, "/run/entrypoint"),))

    def _check_pickle(self, spec: RunSpec, cloudpickle: str | None, found_python: str) -> Refused | None:
        """Return a refusal if a pickled function could not be opened. It needs the minor version of Python
        that pickled it, and a major version of cloudpickle that is not older."""
        python, environment = spec.python, spec.environment
        opened_by = self.python if environment is None else environment.minor or found_python
        if environment is not None and opened_by not in ("", python):
            return _mismatch(
                "python",
                f"the function was pickled by Python {python}, and its environment "
                f'"{environment.label}" has Python {opened_by}; submit it from Python {opened_by}, choose an '
                f"environment with Python {python}, or name an entrypoint or a command instead",
            )
        if environment is None and python != opened_by:
            return _mismatch(
                "python",
                f"the function was pickled by Python {python} and would be opened by {opened_by}; submit it "
                f"from Python {opened_by}, give it an environment with Python {python}, or name an "
                "entrypoint instead",
            )
        if cloudpickle is not None and _major(cloudpickle) > _major(self.cloudpickle):
            return _mismatch(
                "cloudpickle",
                f"the function was pickled by cloudpickle {cloudpickle} and would be opened by the older "
                f"{self.cloudpickle}; install cloudpickle {_major(self.cloudpickle)} where you submit, or "
                "name an entrypoint instead",
            )
        return None


def lacks(sender: Sender, scope: str, purpose: str, *others: str) -> Refused | None:
    """Return a refusal if the token has neither the scope nor one of `others`. `purpose` names the action
    that needs the scope, such as "submitting a command"."""
    if sender.may(scope) or any(map(sender.may, others)):
        return None
    return Refused(
        "forbidden",
        f'token "{sender.name}" lacks the scope {" or ".join((scope, *others))}, which {purpose} '
        "needs; ask an admin for a token that has it",
    )


def _mismatch(field: str, detail: str) -> Refused:
    return Refused("python-mismatch", detail, (Refusal(f"{field}-mismatch", detail, f"/run/{field}"),))


def _major(version: str) -> int:
    return int(version.partition(".")[0])
