"""Connect to the service, and find the task or lease that a person means."""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpubroker.cli import SHOWN_ID_LENGTH
from gpubroker.cli.printing import eprint, refuse
from gpubroker.errors import BrokerError, Refused
from gpubroker.tasks.naming import (
    TASKS_SEARCHED,
    begins_as_cut,
    is_cut,
    is_whole_id,
    matches,
    no_such_id,
    only,
)
from gpubroker.transport.connection import TOKEN_VARIABLE, client_file
from gpubroker.transport.starting import starting_for_seconds
from gpubroker.user_places import state_directory

if TYPE_CHECKING:
    from gpubroker.broker import Broker
    from gpubroker.wire.stats import Stats

_RETRY_SECONDS = 3.0
"""The seconds for which commands repeat failed requests. At a terminal, a quick error is better than a long
wait for a service that may come back."""
UNFINISHED_LEASES = "pending,held,stopping,quarantined"

_WAYS = (
    f"id, unique name, {SHOWN_ID_LENGTH} or more characters from the start or end of an id, or `last` (the "
    "task you last submitted from here)."
)
TaskWord = Annotated[str, typer.Argument(metavar="TASK", help=_WAYS.capitalize())]
_TASKS = typer.Argument(metavar="TASK", help=f"For each task: {_WAYS}")
TaskWords = Annotated[list[str], _TASKS]
WorkerId = Annotated[
    str | None,
    typer.Option("--worker", help="Id of one worker of an array or a worker set that has several."),
]
AnyTaskWords = Annotated[list[str] | None, _TASKS]


GLOBAL_OPTIONS: dict[str, str | None] = {}
"""The options `url` and `token` of this command line."""


@contextlib.contextmanager
def connect(retry_seconds: float | None = None) -> Iterator["Broker"]:
    """Yield a broker for the service of the global options, or else of the service that the SDK finds."""
    from gpubroker.broker import Broker
    from gpubroker.transport.http import check_listening

    retry_seconds = _RETRY_SECONDS if retry_seconds is None else retry_seconds
    url, token = map(GLOBAL_OPTIONS.get, ("url", "token"))
    with Broker(url, token, retry_seconds=retry_seconds) as broker:
        _say_if_it_starts(broker)
        try:
            check_listening(broker)  # a service that is down is reported at once, not retried
            yield broker
        except Refused as refused:
            if refused.code == "unauthenticated":
                refused.add_note(_token_source(broker.connection.url, token))
            if refused.code == "task-not-finished":
                refused.add_note("wait for it: gpubroker result TASK --wait")
            raise


def is_of_this_machine(broker: "Broker") -> bool:
    """Whether the address came from the file that a service writes for the users of its own machine."""
    return broker.connection.source == f"from {client_file()}"


def _say_if_it_starts(broker: "Broker") -> None:
    """Report a service that is starting: it accepts connections from the beginning of its start, and answers
    them only at its end."""
    path = client_file()
    if path is not None and is_of_this_machine(broker):
        seconds = starting_for_seconds(path.parent)
        if seconds is not None:
            eprint(f"the service in {path.parent} is starting, for {seconds:.0f} s now; waiting for it")


def _token_source(url: str, given: str | None) -> str:
    """Return where the refused token came from. Usually it is from the data directory of another service."""
    variable = os.environ.get(TOKEN_VARIABLE)
    source = "--token" if given else TOKEN_VARIABLE if variable else str(client_file())
    return (
        f"the token came from {source} and was sent to {url}; pass another with --token or {TOKEN_VARIABLE}, "
        "or name the service's data directory in GPUBROKER_DATA_DIR"
    )


def task_id(broker: "Broker", word: str, *, to_change: bool = False) -> str:
    """Return the id of the task that a person means, as `Broker.task_id` finds it. Raises Refused if there is
    none, or more than one.

    `last` is the task last submitted from this machine; without one, it shows the newest task of the service
    but never changes it.
    """
    return _last(broker, to_change) if word == "last" else broker.task_id(word, to_change=to_change)


def lease_id(broker: "Broker", word: str) -> str:
    """Return the id of the lease that a person means, as in `task_id`; the name of a lease is its holder.

    Ended leases of a holder only count if it has no other.
    """
    if is_whole_id(word):
        return word
    lease_ids = _leases_meant(broker, word)
    if not lease_ids:
        try:
            lease_ids = _leases_meant(broker, word, tenant="*")
        except Refused as refused:
            if refused.status != HTTPStatus.FORBIDDEN:
                raise
    return only(lease_ids, word, f"no lease is held by {word!r}, and {no_such_id(word)}")


def _leases_meant(broker: "Broker", word: str, **whose: Any) -> list[str]:
    if held := [lease.id for lease in broker.leases(state=UNFINISHED_LEASES, holder=word, **whose)]:
        return held
    recent = list(islice(broker.leases(**whose), TASKS_SEARCHED))
    lease_ids = [lease.id for lease in recent if lease.holder == word or begins_as_cut(lease.holder, word)]
    return lease_ids or [lease.id for lease in recent if matches(lease.id, word)]


def listed_name(word: str, listed: Callable[[], Iterable[str]], what: str) -> str:
    """Return the name that a person means: the word, unless a list cut it short. Raises Refused if several
    names begin as the word does."""
    if not is_cut(word):
        return word
    names = sorted({name for name in listed() if begins_as_cut(name, word)})
    return only(names, word, f"no {what} begins as {word!r} does")


def change_each(ids: Sequence[str], change: Callable[[str], None]) -> None:
    """Change one task after the other; an error names those that were not tried."""
    for number, id in enumerate(ids, start=1):
        try:
            change(id)
        except BrokerError as fault:
            if not_tried := ids[number:]:
                fault.add_note(f"not tried after this error: {', '.join(not_tried)}")
            raise


def _last(broker: "Broker", to_change: bool) -> str:
    url = broker.connection.url
    if known := _submitted().get(url):
        return known
    newest = next(broker.list(limit=1), None)
    if newest is None:
        refuse("there is no task yet")
    if to_change:
        refuse(
            f"`last` is the task you last submitted from here, and there is none; the newest task of {url} "
            f"is {newest.id}{f' ({newest.name})' if newest.name else ''}; to change it, use its id"
        )
    eprint(f"nothing was submitted from here yet; this is the newest task of {url}")
    return newest.id


def remember_last(broker: "Broker", task: str) -> None:
    """Store the newest submitted task per service, for the word `last`. If the file cannot be written, `last`
    does not work."""
    path = _last_file()
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "w") as file:
            json.dump({**_submitted(), broker.connection.url: task}, file)
        Path(draft).replace(path)


def _submitted() -> dict[str, str]:
    path = _last_file()
    if path is None:
        return {}
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _last_file() -> Path | None:
    # The service's data directory may belong to another user or be on another machine.
    state = state_directory()
    return None if state is None else state / "gpubroker-client" / "last.json"


def stats_if_known(broker: "Broker") -> "Stats | None":
    """Return the stats for a hint; None if the token may not see the cluster, or nobody can say now."""
    try:
        return broker.stats()
    except BrokerError:
        return None
