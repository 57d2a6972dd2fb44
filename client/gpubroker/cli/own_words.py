"""Say in the words of the command line what the service says in the words of its HTTP API."""

import re
from collections.abc import Sequence
from typing import Any, Final, get_type_hints

_COMMANDS: Final = {
    "arrays/{}/items": "array {} --items",
    "arrays/{}": "array {}",
    "worker-sets/{}": "workers show {}",
    "leases/{}": "lease show {}",
    "tasks/{}/explain": "explain {}",
    "tasks/{}/wait": "wait {}",
    "gpus": "gpus",
    "idle-templates": "idle-template list",
    "leases": "lease list",
    "models": "models",
    "nodes": "nodes",
    "objects": "objects",
    "quarantine": "quarantine",
    "secrets": "secrets list",
    "stats": "stats",
    "streams": "streams",
    "tasks": "ps",
    "tenants": "tenants",
    "tokens": "token list",
    "worker-sets": "workers list",
}
"""Routes that answers name -> the commands that show the same; `{}` is an id."""
_ROUTE = re.compile(r"GET /([\w-]+(?:/[\w/.-]*\w)?)")
_ROUTE_OF_ID = re.compile(r"GET /([a-z-]+/task_\w+(?:/\w+)?)")
_POINTER = re.compile(r"(?:/resources)?/(\w+)(?:/\w+)*: ")
_QUERY = re.compile(r"query:\w+: ")


def in_own_words(message: str, words: Sequence[str]) -> str:
    """Return the message with commands in place of routes, and with the option that a person has written in
    place of the pointer to a field. `words` are those of the command line."""
    message = _ROUTE.sub(_command, _QUERY.sub("", message, count=1))
    pointer = _POINTER.match(message)
    if pointer is None:
        return message
    option = _written_option(pointer[1], words)
    return message if option is None else f"{option}: {message[pointer.end() :]}"


def with_commands(message: str) -> str:
    """Return the message with commands in place of the routes of a task, an array or a set. Other routes
    stay: the message may quote a program that speaks HTTP."""
    return _ROUTE_OF_ID.sub(_command, message)


def _command(found: re.Match[str]) -> str:
    collection, _, rest = found[1].partition("/")
    id, _, part = rest.partition("/")
    shape = "/".join(filter(None, (collection, "{}" if id else "", part)))
    command = _COMMANDS.get(shape)
    return found[0] if command is None else f"`gpubroker {command.format(id)}`"


def _written_option(field: str, words: Sequence[str]) -> str | None:
    """Return the option for a field of a submit as it was written; None if it was not written."""
    given = words[: words.index("--")] if "--" in words else words
    names = {word.partition("=")[0] for word in given}
    return next((name for name in _options_of(field) if name in names), None)


def _options_of(field: str) -> Sequence[str]:
    from gpubroker.cli.tasks.submit import SubmitParameters

    annotated: Any = get_type_hints(SubmitParameters, include_extras=True).get(field)
    declared = next(iter(getattr(annotated, "__metadata__", ())), None)
    # In an annotation, typer keeps the first name of an option where a default would stand.
    names = [getattr(declared, "default", None), *(getattr(declared, "param_decls", None) or ())]
    parts = [part for name in names if isinstance(name, str) for part in name.split("/")]
    return [part for part in parts if part.startswith("-")] or [f"--{field.replace('_', '-')}"]
