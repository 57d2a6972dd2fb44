"""Find the task, array or worker set that a person means by a name or a part of an id. The SDK and the
command line both do."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from gpubroker.errors import Refused

if TYPE_CHECKING:
    from gpubroker.transport.exchange import Steps

SHOWN_ID_LENGTH = 8
"""The number of characters from the end of an id that tables show; a person must type at least as many."""
TASKS_SEARCHED = 2000
UNFINISHED = ("pending", "admitted", "running", "stopping")

_PREFIX = "task_"
_WHOLE_LENGTH = len(_PREFIX) + 26
_PAGE = 500
_MAX_NAMED = 6
_CUT = "…"

Ask = Callable[..., "Steps[Any]"]
"""Sends a request with these parameters and returns the JSON of its answer."""


def is_whole_id(word: str) -> bool:
    return word.startswith(_PREFIX) and len(word) == _WHOLE_LENGTH


def _is_id(word: str) -> bool:
    """True if the word goes to the service as it is. A list may have cut an id short, though."""
    return word.startswith(_PREFIX) and not is_cut(word)


def is_part_of_id(word: str) -> bool:
    """True if the word is long enough to be a part of an id. A shorter one could match the task of another
    person."""
    return len(word.removeprefix(_PREFIX)) >= SHOWN_ID_LENGTH


def matches(id: str, word: str) -> bool:
    """True if the word is long enough, and is the beginning or the end of `id`."""
    part = word.removesuffix(_CUT)
    return is_part_of_id(part) and (id.startswith((part, f"{_PREFIX}{part}")) or id.endswith(word))


def is_cut(word: str) -> bool:
    """True if the word ends in the ellipsis with which a list cuts a name that is too long."""
    return len(word) > 1 and word.endswith(_CUT)


def begins_as_cut(name: str | None, word: str) -> bool:
    """True if `word` is the name `name` as a list has cut it short."""
    return is_cut(word) and name is not None and name.startswith(word.removesuffix(_CUT))


def no_such_id(word: str) -> str:
    if is_part_of_id(word):
        return f"no id among the newest {TASKS_SEARCHED} begins or ends with it"
    return f"an id needs at least {SHOWN_ID_LENGTH} characters, as lists show them"


def only(ids_found: Sequence[str], word: str, if_none: str) -> str:
    """Return the only id in `found`. Raises Refused if there is none, or more than one."""
    if not ids_found:
        raise Refused(if_none, code="not-found")
    if len(ids_found) > 1:
        ids = ", ".join(ids_found[:5]) + (" ..." if ids_found[5:] else "")
        raise Refused(f"{word!r} is ambiguous: {ids}; use one of these ids", code="ambiguous-name")
    return ids_found[0]


def find_task(ask: Ask, word: str, *, to_change: bool) -> "Steps[str]":
    """Return the id of the task that `word` means. Raises Refused if there is no such task, or more than one.

    A name means the one unfinished task that has it; ended tasks count only if there is no unfinished one. A
    name takes precedence over a part of an id, but for a change a word that is both is refused. Each load of
    a model is a task with the model's name: of its ended loads the newest is meant. All workers of an array
    or a worker set have the name of the array or the set, and the name means all of it. If the tenant of the
    token has no such task, an admin's word may mean a task of another tenant.
    """
    if is_whole_id(word):
        return word
    ids = yield from own_or_any(partial(_meant, ask, word, to_change=to_change))
    if not ids and not to_change:  # loads of models are listed only if they are asked for
        ids = [task["id"] for task in (yield from _named(ask, name=word, kind="model"))]
    return only(ids, word, f"no task is named {word!r}, and {no_such_id(word)}")


def id_meant(ask: Ask, task: Any, *, to_change: bool = False) -> "Steps[str]":
    """Return the id of an answer of the service, or of the task that a word means. An id is not looked up.
    Raises Refused as `find_task` does."""
    if not isinstance(task, str) or _is_id(task):
        return str(getattr(task, "id", task))
    return (yield from find_task(ask, task, to_change=to_change))


def ids_after(ask: Ask, after: Any, known: MutableMapping[str, str] | None = None) -> "Steps[Any]":
    """Return dependencies with ids in place of names and parts of ids. Raises Refused as `find_task` does.

    `known`: what a word stands for already, such as the name of a task of the same batch; what is found is
    added, so that each word is looked up once.
    """
    if after is None or isinstance(after, str):  # whoever writes the body refuses a text
        return after
    known = {} if known is None else known
    ids: list[Any] = []
    for dependency in after:
        is_mapping = isinstance(dependency, Mapping)
        task = dependency.get("task") if is_mapping else dependency
        if isinstance(task, str) and task not in known:
            known[task] = yield from id_meant(ask, task)
        id = known[task] if isinstance(task, str) else getattr(task, "id", task)
        ids.append({**dependency, "task": id} if is_mapping else id)
    return ids


def set_meant(ask: Ask, workers: Any) -> "Steps[str]":
    """Return the id of a worker set: of an answer of the service, or of the set that a word means by its name
    or a part of its id, or by the id of one of its workers. Raises Refused."""
    if not isinstance(workers, str) or _is_id(workers):
        return str(getattr(workers, "id", workers))
    page = yield from ask("GET", "/worker-sets")
    known = list(page["items"])
    while cursor := page.get("next_cursor"):
        page = yield from ask("GET", "/worker-sets", cursor=cursor)
        known += page["items"]
    named = [each["id"] for each in known if each["name"] == workers or begins_as_cut(each["name"], workers)]
    found = named or [each["id"] for each in known if matches(each["id"], workers)]
    if not found:  # the id of one of its workers, or of a set that is over
        found = yield from own_or_any(partial(_meant, ask, workers, to_change=False))
    return only(found, workers, f"no worker set is named {workers!r}, and {no_such_id(workers)}")


def own_or_any(find: Callable[..., "Steps[list[str]]"]) -> "Steps[list[str]]":
    """Return what `find` finds in the token's own tenant, else in all tenants if the token may see them.
    `find` takes the argument `tenant`: the tenant's name, or `*` for all."""
    if found := (yield from find()):
        return found
    try:
        return (yield from find(tenant="*"))
    except Refused as refused:
        if refused.status == HTTPStatus.FORBIDDEN:
            return []
        raise


def _meant(ask: Ask, word: str, *, to_change: bool, **whose: str) -> "Steps[list[str]]":
    named = yield from _named(ask, name=word, **whose)
    ids_meant = [task["id"] for task in named]
    if len(ids_meant) > 1 and (whole := _whole_of(named)) is not None:
        ids_meant = [whole]
    if (is_part_of_id(word) or is_cut(word)) and (to_change or not ids_meant):
        cursor, pages = None, TASKS_SEARCHED // _PAGE
        for _ in range(pages):
            page = yield from ask("GET", "/tasks", limit=_PAGE, cursor=cursor, **whose)
            ids = [
                task["id"]
                for task in page["items"]
                if matches(task["id"], word) or begins_as_cut(task.get("name"), word)
            ]
            ids_meant += [id for id in ids if id not in ids_meant]
            if (cursor := page.get("next_cursor")) is None:
                break
    return ids_meant


def _named(ask: Ask, **selection: str) -> "Steps[list[Any]]":
    unfinished = yield from ask("GET", "/tasks", state=UNFINISHED, limit=_MAX_NAMED, **selection)
    if unfinished["items"]:
        return list(unfinished["items"])[:_MAX_NAMED]
    ended = (yield from ask("GET", "/tasks", limit=_MAX_NAMED, **selection))["items"]
    is_model = all(task.get("run", {}).get("kind") == "model" for task in ended)
    return list(ended)[: 1 if is_model else _MAX_NAMED]


def _whole_of(tasks: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the id of the array or the worker set if all these tasks are workers of one. Each worker has the
    name of its array or set, and its id as a label."""
    for label in ("array", "worker_set"):
        wholes = {task.get("labels", {}).get(label) for task in tasks}
        if len(wholes) == 1 and None not in wholes:
            return str(wholes.pop())
    return None
