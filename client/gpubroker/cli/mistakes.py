"""Guess what was meant by a command line that cannot be read."""

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, Final

from gpubroker import units

_OTHER_OPTIONS: Final[Mapping[str, str]] = {
    "--json": "--output json", "--ndjson": "--output ndjson", "--format": "--output",
    "--gpu": "--gpus", "--gres": "--gpus", "--gpus-per-task": "--gpus", "--mem": "--memory",
    "--cpus": "--cpu", "--cpus-per-task": "--cpu", "--job-name": "--name", "--time": "--timeout",
    "--dependency": "--after", "--begin": "--not-before", "--chdir": "--working-directory",
    "--constraint": "--on", "--nodelist": "--on", "--array": "--items", "--export": "--env",
}  # fmt: skip
"""The options of other systems -> the words for them here."""
_NUMBER = re.compile(r"(?:--?[\w-]+=)?(\d+(?:\.\d+)?)")


def near_commands(word: str, names: Iterable[str], other_names: Mapping[str, str]) -> list[str]:
    """Return the commands whose names, here or in other systems, are like this word, the nearest first."""
    near = get_close_matches(word, [*names, *other_names], n=3)
    return list(dict.fromkeys(other_names.get(name, name) for name in near))


def explain(error: Any, words: Sequence[str]) -> None:
    """Change the message of a usage error if it is known what was meant."""
    given = words[: words.index("--")] if "--" in words else words
    for before, word in pairwise(given):
        number = _NUMBER.fullmatch(before)
        if number and units.is_unit(word) and not hasattr(error, "option_name"):
            error.message = (
                f"unexpected word {word!r}: a size or a duration is one word; write {number[1]}{word}"
            )
            return
    option = getattr(error, "option_name", None)
    if option is None or getattr(error, "possibilities", ()) is None:
        return
    meant = _meant_option(option, error)
    if meant is not None:
        error.message, error.possibilities = f"no option {option}; write {meant}", None


def _meant_option(option: str, error: Any) -> str | None:
    """Return what to write instead of an option of another system; None if the command has no such option."""
    known = (
        {name for parameter in error.ctx.command.params for name in parameter.opts} if error.ctx else set()
    )
    name = option.partition("=")[0]
    if name not in _OTHER_OPTIONS and not error.possibilities:
        name = next(iter(get_close_matches(name, _OTHER_OPTIONS, n=1, cutoff=0.8)), name)
    meant = _OTHER_OPTIONS.get(name)
    if meant is not None and meant.startswith("--output") and "--output" not in known:
        return f"{meant} after the command" if hasattr(error.ctx.command, "commands") else None
    return meant if meant is not None and meant.split()[0] in known else None
