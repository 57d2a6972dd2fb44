"""Find the task that a person means by a name or a part of an id. The SDK and the command line both do."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpubroker.errors import Refused

if TYPE_CHECKING:
    from gpubroker.transport.exchange import Steps

SHOWN_ID_LENGTH = 8
"""Tables show this many characters from the end of an id; as many must be typed."""
TASKS_SEARCHED = 2000
UNFINISHED = ("pending", "admitted", "running", "stopping")

_PREFIX = "task_"
_WHOLE_LENGTH = len(_PREFIX) + 26
_PAGE = 500
_MOST_NAMED = 6

Ask = Callable[..., "Steps[Any]"]
"""Sends a request with these parameters and returns the JSON of its answer."""


def is_whole_id(word: str) -> bool:
    return word.startswith(_PREFIX) and len(word) == _WHOLE_LENGTH


def is_part_of_id(word: str) -> bool:
    """Fewer characters than lists show could match the task of another person."""
    return len(word.removeprefix(_PREFIX)) >= SHOWN_ID_LENGTH


def matches(id: str, word: str) -> bool:
    """Whether the word is long enough, and the beginning or the end of this id."""
    return is_part_of_id(word) and (id.startswith((word, f"{_PREFIX}{word}")) or id.endswith(word))


def no_such_id(word: str) -> str:
    if is_part_of_id(word):
        return f"no id among the newest {TASKS_SEARCHED} begins or ends with it"
    return f"an id needs at least {SHOWN_ID_LENGTH} characters, as lists show them"


def only(found: Sequence[str], word: str, if_none: str) -> str:
    """Return the only id that was found. Raises Refused if there is none, or more than one."""
    if not found:
        raise Refused(if_none, code="not-found")
    if len(found) > 1:
        ids = ", ".join(found[:5]) + (" ..." if found[5:] else "")
        raise Refused(f"{word!r} is ambiguous: {ids}; use one of these ids", code="ambiguous-name")
    return found[0]


def find_task(ask: Ask, word: str, *, to_change: bool) -> "Steps[str]":
    """Return the id of the task that is meant. Raises Refused.

    A name means the one unfinished task that has it, and ended ones only if there is none. It goes before a
    part of an id; for a change, a word may not be both. Each load of a model is a task with the model's name:
    the newest of its ended ones is meant.
    """
    if is_whole_id(word):
        return word
    named = (yield from ask("GET", "/tasks", name=word, state=UNFINISHED, limit=_MOST_NAMED))["items"]
    if not named:
        named = (yield from ask("GET", "/tasks", name=word, limit=_MOST_NAMED))["items"]
        named = named[:1] if all(task.get("run", {}).get("kind") == "model" for task in named) else named
    found = [task["id"] for task in named[:_MOST_NAMED]]
    if is_part_of_id(word) and (to_change or not found):
        cursor, pages = None, TASKS_SEARCHED // _PAGE
        for _ in range(pages):
            page = yield from ask("GET", "/tasks", limit=_PAGE, cursor=cursor)
            ids = (task["id"] for task in page["items"])
            found += [id for id in ids if matches(id, word) and id not in found]
            if (cursor := page.get("next_cursor")) is None:
                break
    return only(found, word, f"no task is named {word!r}, and {no_such_id(word)}")
