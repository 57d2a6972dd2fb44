"""A refusal of the service in the words of the command line that was written."""

import re
from collections.abc import Sequence
from typing import Any, get_type_hints

from gpubroker.cli.own_words import with_all_commands

_POINTER = re.compile(r"(?:/resources)?/(\w+)(?:/\w+)*: ")
_QUERY = re.compile(r"query:\w+: ")


def in_own_words(message: str, words: Sequence[str]) -> str:
    """Return the message with commands in place of routes, and with the option that a person has written in
    place of the pointer to a field. `words` are those of the command line."""
    message = with_all_commands(_QUERY.sub("", message, count=1))
    pointer = _POINTER.match(message)
    if pointer is None:
        return message
    option = _written_option(pointer[1], words)
    return message if option is None else f"{option}: {message[pointer.end() :]}"


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
