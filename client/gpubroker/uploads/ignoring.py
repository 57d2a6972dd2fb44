"""Select the files of a directory that are left out: `.git`, `__pycache__`, and what ignore files name."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pathspec import GitIgnoreSpec

from gpubroker.errors import WrongArgument

NEVER_SENT = frozenset({".git", "__pycache__"})
_IGNORE_FILES = (".gitignore", ".gpubrokerignore")
"""The names of ignore files, read in this order in each directory: the last rule that matches decides."""
_GIT_EXCLUDES = Path(".git", "info", "exclude")


class _Rules(NamedTuple):
    """The lines of one ignore file. `within` is the place of a file in the uploaded directory or below;
    `above` is the path from the directory of a file above to the uploaded directory."""

    spec: GitIgnoreSpec
    within: str
    above: str = ""

    def verdict(self, path: str) -> bool | None:
        """True if the path is left out, False if a line with `!` includes it, None if no line matches it."""
        return self.spec.check_file(self.above + path.removeprefix(self.within)).include


class Entry(NamedTuple):
    name: str
    """The path relative to the uploaded directory."""
    path: Path
    status: os.stat_result


def entries_of(root: Path) -> Iterator[Entry]:
    """Yield the entries of a directory that are sent, each directory before its contents, sorted by name.
    Raises WrongArgument for what cannot be read."""
    yield from _entries(root, "", tuple(_rules_above(root)))


def _entries(directory: Path, within: str, rules: Sequence[_Rules]) -> Iterator[Entry]:
    rules = (*rules, *_rules_in(directory, within))
    try:
        listed = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError as fault:
        raise WrongArgument(
            f"{directory} cannot be read: {fault.strerror}; allow it, or name it in .gpubrokerignore"
        ) from None
    for entry in listed:
        name = within + entry.name
        is_directory = entry.is_dir(follow_symlinks=False)
        if entry.name in NEVER_SENT or _is_ignored(f"{name}/" if is_directory else name, rules):
            continue
        yield Entry(name, directory / entry.name, entry.stat(follow_symlinks=False))
        if is_directory:
            yield from _entries(directory / entry.name, f"{name}/", rules)


def _is_ignored(name: str, rules: Sequence[_Rules]) -> bool:
    """True if the path is left out: the innermost file with a matching line decides, as in git."""
    verdicts = (one.verdict(name) for one in reversed(rules))
    return next((verdict for verdict in verdicts if verdict is not None), False)


def _rules_in(directory: Path, within: str) -> Iterator[_Rules]:
    for name in _IGNORE_FILES:
        if (spec := _spec_of(directory / name)) is not None:
            yield _Rules(spec, within)


def _rules_above(root: Path) -> Iterator[_Rules]:
    """Yield the rules of the directories above, up to the top of the git work tree that contains this one."""
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
