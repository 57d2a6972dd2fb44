"""Say in the words of the command line what the service says in the words of its HTTP API."""

import re
from typing import Final

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


def with_all_commands(message: str) -> str:
    """Return a message that quotes nobody with commands in place of routes."""
    return _ROUTE.sub(_command, message)


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
