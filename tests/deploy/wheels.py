"""Wheels of this tree, and places elsewhere to install them in, with nothing more than they require."""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from tests.e2e.service_process import ROOT, environment
from tests.patience import PATIENCE_SECONDS


def build(folder: Path) -> Sequence[Path]:
    """The wheels of both distributions."""
    command = ["uv", "build", "--all-packages", "--wheel", "--offline", "-q", "-o", str(folder)]
    uv = ROOT / ".tools/bin/uv"
    ran([str(uv) if uv.exists() else "uv", *command[1:]], cwd=ROOT)
    return sorted(folder.glob("*.whl"))


def ran(
    command: Sequence[str], cwd: Path, timeout_seconds: float = PATIENCE_SECONDS, **variables: str
) -> str:
    """What it printed; it must have succeeded."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(**variables),
        timeout=timeout_seconds,
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout + done.stderr


class Place:
    """A virtual environment, empty at first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ran([sys.executable, "-m", "venv", str(folder)], cwd=folder.parent)
        [self._packages] = folder.glob("lib/python*/site-packages")

    @property
    def python(self) -> str:
        return str(self.folder / "bin/python")

    def install(self, wheels: Sequence[Path], *extras: str) -> None:
        """As users do: pip finds what they require on the package index, in the newest release allowed."""
        client, server = wheels
        pip = [self.python, "-m", "pip", "install", "-q", "--no-compile"]
        # The first time on a machine, it downloads 120 MB.
        found = [str(client), f"{server}[{','.join(extras)}]"]
        ran([*pip, *found], cwd=self.folder, timeout_seconds=4 * PATIENCE_SECONDS)

    def install_linked(self, wheels: Sequence[Path], *extras: str) -> None:
        """What they require is linked from the tester's own environment: the same files that pip would have
        unpacked, without the time that it takes."""
        pip = [self.python, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
        ran([*pip, *map(str, wheels)], cwd=self.folder)
        for name in _required(extras):
            self._link(distribution(name))

    def run(self, *words: str, **variables: Any) -> str:
        return ran([str(self.folder / "bin" / words[0]), *words[1:]], cwd=self.folder, **variables)

    def _link(self, found: Distribution) -> None:
        tops = {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            source, link = Path(str(found.locate_file(top))), self._packages / top
            if not link.exists():
                link.symlink_to(source)
            elif link.is_symlink() and link.resolve() != source.resolve():
                raise AssertionError(f"{top} has two places")
        _scripts(self.folder, found)


def _scripts(folder: Path, found: Distribution) -> None:
    for entry in found.entry_points.select(group="console_scripts"):
        script = folder / "bin" / entry.name
        if not script.exists():
            text = f"#!{folder}/bin/python\nimport sys\nfrom {entry.module} import {entry.attr}\n"
            script.write_text(f"{text}sys.exit({entry.attr}())\n", encoding="utf-8")
            script.chmod(0o755)


@cache
def _required(extras: tuple[str, ...]) -> frozenset[str]:
    """Names of all that both distributions require, with these extras of the server."""
    found: set[str] = set()
    open_ = [("gpubroker", ""), *(("gpubroker-server", extra) for extra in ("", *extras))]
    seen = set(open_)
    while open_:
        name, extra = open_.pop()
        for text in distribution(name).requires or ():
            needed = Requirement(text)
            if needed.marker is not None and not needed.marker.evaluate({"extra": extra}):
                continue
            found.add(_normal(needed.name))
            more = {(_normal(needed.name), of) for of in ("", *needed.extras)}
            open_ += more - seen
            seen |= more
    return frozenset(found - {"gpubroker", "gpubroker-server"})


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def sizes(place: Place) -> Iterator[tuple[str, int]]:
    """Bytes of what was installed or linked, by name."""
    for path in place._packages.iterdir():
        files = [path] if path.is_file() else path.resolve().rglob("*")
        yield path.name, sum(file.stat().st_size for file in files if file.is_file())
