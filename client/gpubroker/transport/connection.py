"""Find the address and the token of the service: arguments, then the environment, then client.json."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpubroker.errors import Unreachable
from gpubroker.transport.starting import starting_for_seconds
from gpubroker.user_places import expanded, state_directory

TASK_VARIABLE = "GPUBROKER_TASK"
"""The variable with the task's id, which every run has."""
URL_VARIABLE = "GPUBROKER_URL"
TOKEN_VARIABLE = "GPUBROKER_TOKEN"  # noqa: S105 - the name of a variable, not a token
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, slots=True)
class Connection:
    url: str
    token: str | None = field(repr=False)
    source: str
    """The source of the address, for error messages."""


def find_service(
    url: str | None = None, token: str | None = None, *, environ: Mapping[str, str] | None = None
) -> Connection:
    """Return the connection for `url` and `token` if given, else from the environment, else from
    `client.json`, which the service writes for the users of its own machine.

    The file is only read for values that are missing, and its token is only sent to its address. Raises
    Unreachable if no address is known, or if the file is needed and cannot be read.
    """
    environ = _environment() if environ is None else environ
    given = (
        (token, "the token that was given")
        if token is not None
        else (environ.get(TOKEN_VARIABLE), TOKEN_VARIABLE)
    )
    token = (token or environ.get(TOKEN_VARIABLE) or "").strip() or None
    url, source = (url, "given") if url else (environ.get(URL_VARIABLE), f"from {URL_VARIABLE}")
    # A task has the rights that the operator gives to tasks, not those of the service's owner.
    is_known = (url and token) or TASK_VARIABLE in environ
    path = None if is_known else client_file(environ)
    written_url, written_token = (None, None) if path is None else _read(path)
    if not url:
        url, source = written_url, f"from {path}"
    if not url and TASK_VARIABLE in environ:
        raise Unreachable(
            f"this code runs in {environ[TASK_VARIABLE]}, which has no access to the service: have the "
            "operator set submit_from_tasks: true, or give url and token",
            code="no-service",
        )
    if not url and path is not None and (seconds := starting_for_seconds(path.parent)) is not None:
        raise Unreachable(
            f"a service is starting in {path.parent}, for {seconds:.0f} s now; try again when it listens",
            code="starting",
        )
    if not url:
        lacking = f"{path} does not exist" if path else "this user has no home directory with a client.json"
        raise Unreachable(
            f"no gpubroker service is known: no url was given, {URL_VARIABLE} is not set, and {lacking}; "
            f"start a service with `gpubroker serve`, or set {URL_VARIABLE} and {TOKEN_VARIABLE}",
            code="no-service",
        )
    if not url.startswith(("http://", "https://")):
        raise Unreachable(
            f"invalid address {url!r} ({source}): it must begin with http:// or https://", code="no-service"
        )
    url = url.rstrip("/")
    if token is None and written_url is not None and url == written_url.rstrip("/"):
        token = written_token
    _check_token(token, *given)
    return Connection(url, token, source)


def _check_token(token: str | None, given: str | None, name: str) -> None:
    """Check the token. Raises Unreachable for an empty token if no other is known, and for a token that no
    header can carry."""
    if token is None and given is not None:
        raise Unreachable(
            f"{name} is empty: set it to a token (`gpubroker token create` makes one), or unset it to use "
            "the token of a service on this machine",
            code="no-token",
        )
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise Unreachable(
            f"{name} is not a token: it has blanks or other characters than ASCII", code="no-token"
        )


def _environment() -> Mapping[str, str]:
    """Return the environment of the task in which this code runs, if the runtime of tasks is loaded;
    otherwise that of the process."""
    runtime = sys.modules.get("gpubroker.runtime.task")
    return os.environ if runtime is None else runtime.environment()


def client_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the path of `client.json` in the data directory of a service on this machine; the file may not
    exist. Return None if the user has no home directory to look in. Raises Unreachable for a data directory
    in an unknown home directory."""
    if given := environ.get("GPUBROKER_DATA_DIR"):
        try:
            return expanded(Path(given)) / "client.json"
        except ValueError as fault:
            raise Unreachable(f"GPUBROKER_DATA_DIR: {fault}", code="no-service") from None
    state = state_directory(environ)
    return None if state is None else state / "gpubroker" / "client.json"


def _read(path: Path) -> tuple[str | None, str | None]:
    try:
        written = json.loads(path.read_text())
        return written.get("url"), written.get("token")
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError, AttributeError) as error:
        raise Unreachable(
            f"cannot read {path}: {error}; set {URL_VARIABLE} and {TOKEN_VARIABLE}", code="no-service"
        ) from error
