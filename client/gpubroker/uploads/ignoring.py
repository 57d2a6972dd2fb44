"""Which files of a directory are left out: `.git`, `__pycache__`, and what ignore files name."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pathspec import GitIgnoreSpec

from gpubroker.errors import WrongArgument

NEVER_SENT = frozenset({".git", "__pycache__"})
_IGNORE_FILES = (".gitignore", ".gpubrokerignore")
"""In each directory, the later one has the last word."""
_GIT_EXCLUDES = Path(".git", "info", "exclude")


class _Rules(NamedTuple):
    """The lines of one ignore file. Of a file in the uploaded directory or below, `within` is its place; of
    one above, `above` is the path from there to the uploaded directory."""

    spec: GitIgnoreSpec
    within: str
    above: str = ""

    def verdict(self, path: str) -> bool | None:
        """True if the path is left out, False if it is named with a `!`, None if nothing is said of it."""
        return self.spec.check_file(self.above + path.removeprefix(self.within)).include


class Entry(NamedTuple):
    name: str
    """Below the uploaded directory."""
    path: Path
    status: os.stat_result


def entries_of(root: Path) -> Iterator[Entry]:
    """Yield what is sent of a directory, each directory before what is in it, in the order of the names.
    Raises WrongArgument for what cannot be read."""
    yield from _entries(root, "", tuple(_rules_above(root)))


def _entries(directory: Path, within: str, rules: Sequence[_Rules]) -> Iterator[Entry]:
    rules = (*rules, *_rules_in(directory, within))
    try:
        found = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError as fault:
        raise WrongArgument(
            f"{directory} cannot be read: {fault.strerror}; allow it, or name it in .gpubrokerignore"
        ) from None
    for entry in found:
        name = within + entry.name
        is_directory = entry.is_dir(follow_symlinks=False)
        if entry.name in NEVER_SENT or _is_ignored(f"{name}/" if is_directory else name, rules):
            continue
        yield Entry(name, directory / entry.name, entry.stat(follow_symlinks=False))
        if is_directory:
            yield from _entries(directory / entry.name, f"{name}/", rules)


def _is_ignored(name: str, rules: Sequence[_Rules]) -> bool:
    """The innermost file that says anything of the path decides, as in git."""
    verdicts = (one.verdict(name) for one in reversed(rules))
    return next((verdict for verdict in verdicts if verdict is not None), False)


def _rules_in(directory: Path, within: str) -> Iterator[_Rules]:
    for name in _IGNORE_FILES:
        if (spec := _spec_of(directory / name)) is not None:
            yield _Rules(spec, within)


def _rules_above(root: Path) -> Iterator[_Rules]:
    """Yield the rules of the directories above, up to the top of the git work tree that this one is in."""
    root = root.resolve()
    above = (root, *root.parents)
    top = next((number for number, one in enumerate(above) if (one / ".git").exists()), 0)
    if (spec := _spec_of(above[top] / _GIT_EXCLUDES)) is not None:
        yield _Rules(spec, "", _below(root, above[top]))
    for directory in reversed(above[1 : top + 1]):
        if (spec := _spec_of(directory / ".gitignore")) is not None:
            yield _Rules(spec, "", _below(root, directory))


def _below(root: Path, directory: Path) -> str:
    path = root.relative_to(directory).as_posix()
    return "" if path == "." else f"{path}/"


def _spec_of(path: Path) -> GitIgnoreSpec | None:
    try:
        return GitIgnoreSpec.from_lines(
            path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as fault:
        raise WrongArgument(f"{path} cannot be read: {fault.strerror}; allow it, or remove it") from None
    except ValueError as fault:
        raise WrongArgument(f"{path} has a pattern that cannot be read: {fault}; correct it") from None
