"""`make matrix`: fast tests on each Python of this machine, and on both ends of the range of Ray.

Writes evidence/matrix.json and the table in docs/how-to/install.md. Pythons are those that uv finds on the
PATH, and those of pyenv; none is downloaded.
"""

import argparse
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

from msgspec import Struct, convert, to_builtins
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
PROJECT: Mapping[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FILE = ROOT / "evidence" / "matrix.json"
PAGE = ROOT / "docs" / "how-to" / "install.md"
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
UV = ROOT / ".tools" / "bin" / "uv"

WITHOUT_RAY = (
    "tests/core/domain",
    "tests/client/test_runtime_*.py",
    "tests/client/test_submission.py",
    "tests/client/test_task_decorator.py",
    "tests/contracts/test_store_submit.py",
    "tests/gateway/test_demands.py",
)
"""What depends on the Python: values, their forms, what runs beside users' code, pickles, databases, HTTP."""
ON_RAY = ("tests/e2e/lab/test_ray_runs.py", "tests/e2e/test_demo.py")


class Row(Struct, frozen=True, kw_only=True):
    """What became of the tests on one Python, and one Ray; `ray` is empty for the tests without Ray."""

    python: str
    ray: str = ""
    passed: int = 0
    failed: tuple[str, ...] = ()
    fault: str = ""
    """Why the tests could not be run."""
    commit: str = ""

    @property
    def minor(self) -> str:
        return self.python.rpartition(".")[0]


def ray_range() -> str:
    """The requirement of the extra `ray`."""
    return next(str(one) for one in PROJECT["optional-dependencies"]["ray"] if one.startswith("ray"))


def stated_pythons() -> list[str]:
    """The minor versions that the package says it supports."""
    before = "Programming Language :: Python :: 3."
    return [f"3.{one.removeprefix(before)}" for one in PROJECT["classifiers"] if one.startswith(before)]


def uv(*words: str, **env: str) -> str:
    """What uv prints. Raises CalledProcessError, with its complaint as stderr."""
    given = {**os.environ, "UV_PYTHON_DOWNLOADS": "never", **env}
    given.pop("VIRTUAL_ENV", None)
    return subprocess.run(
        [UV, *words], env=given, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def pythons() -> dict[str, Path]:
    """The newest release of each minor version that the package takes: its full version -> where it is."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    folders = [*map(str, sorted(pyenv.glob("versions/*/bin"))), os.environ["PATH"]]
    asked = ("python", "list", "--only-installed", "--output-format", "json")
    found: dict[tuple[int, int], tuple[int, str, Path]] = {}
    for one in json.loads(uv(*asked, PATH=os.pathsep.join(folders))):
        parts = one["version_parts"]
        key, version = (parts["major"], parts["minor"]), one["version"]
        is_usual = (one["implementation"], one["variant"]) == ("cpython", "default")
        if is_usual and version in SpecifierSet(PROJECT["requires-python"]):
            candidate = parts["patch"], version, Path(one["path"])
            if key not in found or candidate[0] > found[key][0]:
                found[key] = candidate
    return {version: path for _, (_, version, path) in sorted(found.items())}


def ends_of_ray(python: str) -> Iterator[str]:
    """The oldest and the newest release of the range with a wheel for this Python.

    Raises CalledProcessError.
    """
    with TemporaryDirectory() as folder:
        (asked := Path(folder, "ray.in")).write_text(ray_range())
        for end in ("lowest", "highest"):
            how = ("--no-deps", "--no-header", "--no-annotate", "--only-binary", ":all:", "--resolution", end)
            told = uv("pip", "compile", "--quiet", *how, "--python-version", python, str(asked))
            yield told.strip().removeprefix("ray==")


def tried(python: str, where: Path) -> Iterator[Row]:
    """A row without Ray, and one for each end of its range."""
    home = ROOT / ".tools" / "matrix" / python
    groups = ("--no-default-groups", "--group", "dev", "--group", "demo")
    try:
        uv("sync", "--frozen", *groups, "--python", str(where), UV_PROJECT_ENVIRONMENT=str(home))
        yield run(Row(python=python), home, WITHOUT_RAY)
        for ray in dict.fromkeys(ends_of_ray(python)):
            uv("pip", "install", "--python", str(home), f"ray=={ray}")
            yield run(Row(python=python, ray=ray), home, ON_RAY)
    except subprocess.CalledProcessError as fault:
        yield Row(python=python, fault=fault.stderr.strip().splitlines()[-1])


def run(row: Row, home: Path, tests: Sequence[str]) -> Row:
    """The row with what became of these tests in the environment at `home`."""
    env = {**os.environ, "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        files = [str(found) for pattern in tests for found in sorted(ROOT.glob(pattern))]
        command = [str(home / "bin" / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
        subprocess.run([*command, f"--junitxml={report}"], env=env, cwd=ROOT, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    names = tuple(sorted({f"{case.get('classname')}.{case.get('name')}" for case in failed}))
    return convert(
        {**to_builtins(row), "passed": len(cases) - len(failed) - len(skipped), "failed": names}, Row
    )


def known() -> list[Row]:
    return convert(json.loads(FILE.read_text(encoding="utf-8")), list[Row]) if FILE.exists() else []


def page(rows: Sequence[Row]) -> str:
    """The text of the page with these rows."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{table(rows)}\n{END}{after}"


def table(rows: Sequence[Row]) -> str:
    lines = ["| Python | Ray | Passed | Failed |", "|---|---|---|---|"]
    for row in rows:
        failed = row.fault or ", ".join(row.failed) or "none"
        lines.append(f"| {row.python} | {row.ray or '–'} | {row.passed} | {failed} |")
    missing = sorted(set(stated_pythons()) - {row.minor for row in rows})
    not_tried = (
        f"\n\nNot tried, as the machine did not have it: Python {', '.join(missing)}." if missing else ""
    )
    return "\n".join(lines) + not_tried


def main() -> None:
    parser = argparse.ArgumentParser(prog="make matrix", description=__doc__)
    parser.add_argument("--python", action="append", help="try only this minor version, such as 3.12")
    only = parser.parse_args().python
    from tests.chaos.evidence import commit

    rows = known()
    for version, where in pythons().items():
        if only and version.rpartition(".")[0] not in only:
            continue
        print(f"Python {version} at {where}", flush=True)
        for row in tried(version, where):
            print(row, flush=True)
            rows = [old for old in rows if (old.minor, old.ray) != (row.minor, row.ray)]
            rows.append(convert({**to_builtins(row), "commit": commit()}, Row))
            rows.sort(
                key=lambda one: [
                    [int(part) for part in text.split(".") if part] for text in (one.python, one.ray)
                ]
            )
            FILE.write_text(json.dumps(to_builtins(rows), indent=1) + "\n", encoding="utf-8")
            PAGE.write_text(page(rows), encoding="utf-8")
    sys.exit(any(row.failed or row.fault for row in rows))


if __name__ == "__main__":
    main()
