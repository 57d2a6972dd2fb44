"""What the pages say is there: commands, links, files of the image. And no page names somebody's machine."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from subprocess import run
from typing import Any

import gpubroker
import pytest
import typer
from gpubroker.cli.app import app
from typer.core import TyperGroup
from typer.main import get_command

from bench.__main__ import BENCHMARKS
from tests.architecture.source_tree import PYTHON_FOLDERS, ROOT, modules, pages

FENCED = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(?:#([^)]*))?\)")
FENCED_ANY = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
TARGET = re.compile(r"(?<=\])\([^)\s]+\)")
MAX_COLUMNS = 140
CONFLICT = re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE)
PRIVATE_PATH = re.compile(r"(?<![\w.~}])/(?:home|root|work|Users)/\w|\.\./shared\b")


def markdown() -> list[Path]:
    return [page for page in pages() if page.suffix == ".md"]


def commands_in(text: str) -> Iterator[list[str]]:
    """The words of each command line in the page's shell blocks, continued lines joined."""
    for block in FENCED.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words:
                yield words


def is_unknown(words: list[str]) -> bool:
    match words:
        case ["make", *targets]:
            return not {word for word in targets if "=" not in word} <= make_targets()
        case ["gpubroker", *rest]:
            return not is_verb([word for word in rest if not word.startswith("-")])
        case ["python", "-m", "bench", name, *_]:
            return name not in {*BENCHMARKS, "--help"}
        case _:
            return False


def is_verb(words: list[str]) -> bool:
    """`token create` is two verbs; what follows the last one is its arguments."""
    found: Any = get_command(app)
    for word in words:
        if not isinstance(found, TyperGroup):
            return True
        found = found.get_command(typer.Context(found), word)
    return found is not None


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("is_exported", [False, True])
def test_pages_are_what_the_repository_keeps_and_not_what_a_run_left_there(
    tmp_path: Path, is_exported: bool
) -> None:
    (tmp_path / ".gitignore").write_text(".coverage\n*.db\n")
    (tmp_path / "README.md").write_text("read me")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "guide.md").write_text("a guide")
    if not is_exported:
        run(("git", "init", "--quiet", str(tmp_path)), check=True)
        run(("git", "-C", str(tmp_path), "add", "."), check=True)
    for left in (".coverage", "docs/tried.db"):
        (tmp_path / left).write_bytes(b"\x80 no text")
    found = [page.relative_to(tmp_path).as_posix() for page in pages(tmp_path)]
    assert found == [".gitignore", "README.md", "docs/guide.md"]


def test_every_command_shown_on_a_page_exists() -> None:
    unknown = [
        f"{page.relative_to(ROOT)}: {' '.join(words)}"
        for page in markdown()
        for words in commands_in(page.read_text(encoding="utf-8"))
        if is_unknown(words)
    ]
    assert unknown == []


def test_the_readme_shows_how_to_run_see_and_test_it() -> None:
    shown = {tuple(words[:2]) for words in commands_in((ROOT / "README.md").read_text(encoding="utf-8"))}
    verbs = ("submit", "ps", "show", "explain", "cancel", "gpus", "stats", "token", "down")
    assert {("make", "demo"), ("make", "try"), ("make", "serve"), ("make", "test")} <= shown
    assert {("gpubroker", verb) for verb in verbs} <= shown


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial/getting-started.md"])
def test_first_pages_say_how_to_watch_and_where_commands_run(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for told in (
        "ps --watch",
        "gpus",
        "--watch",
        "first folder of the service's",
        "-C DIR",
        "share-data-between",
    ):
        assert told in text, told
    assert {"come-from-slurm.md", "come-from-ray-jobs.md"} <= set(re.findall(r"come-from-[\w-]+\.md", text))


def test_one_sentence_says_what_max_concurrency_is() -> None:
    told = [page for page in markdown() if "no other effect" in page.read_text(encoding="utf-8")]
    assert told == []


def test_a_command_that_does_not_exist_would_be_seen() -> None:
    assert is_unknown(["make", "coffee"])
    assert is_unknown(["gpubroker", "brew"])
    assert is_unknown(["python", "-m", "bench", "coffee"])
    assert not is_unknown(["gpubroker", "ps", "-o", "json"])


def links() -> Iterator[tuple[str, Path, str]]:
    """Link as written, page, and anchor of each link to a page of this repository."""
    for page in markdown():
        for target, anchor in LINK.findall(FENCED_ANY.sub("", page.read_text(encoding="utf-8"))):
            if "://" not in target:
                yield (
                    f"{page.relative_to(ROOT)} -> {target}#{anchor}",
                    page.parent / target if target else page,
                    anchor,
                )


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = FENCED_ANY.sub("", page.read_text(encoding="utf-8"))
    plain = (re.sub(r"[`*]|\[|\]\([^)]*\)", "", heading).lower() for heading in HEADING.findall(text))
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


def test_links_between_pages_lead_to_a_file() -> None:
    assert [link for link, page, _anchor in links() if not page.exists()] == []


def test_links_between_pages_lead_to_a_heading() -> None:
    assert [
        link for link, page, anchor in links() if anchor and page.exists() and anchor not in anchors(page)
    ] == []


def test_the_index_of_decisions_lists_each_one() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    decisions = sorted(folder.glob("0*.md"))
    assert [page.name for page in decisions if f"]({page.name})" not in index] == []


def test_every_file_that_contributing_names_exists() -> None:
    """A path is that of the repository, or of the server's package."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z][\w/.-]*/(?:[\w.-]+\.(?:py|yaml|md))?)`", text)
    places = (ROOT, ROOT / "service" / "gpubroker_server", ROOT / "service" / "gpubroker_server" / "core")
    assert [path for path in named if not any((place / path).exists() for place in places)] == []
    assert len(named) >= 30


def test_lines_of_pages_are_short_enough_to_be_compared() -> None:
    """Tables have no narrower form, and where a link leads is not read."""
    long = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in sorted((ROOT / "docs").rglob("*.md"))
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if not line.lstrip().startswith("|") and len(TARGET.sub("", line)) > MAX_COLUMNS
    ]
    assert long == []


def test_every_kind_of_finding_is_explained_and_provoked_by_a_test() -> None:
    folder = ROOT / "service/gpubroker_server/core/control/findings"
    code = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    kinds = set(re.findall(r'"([a-z]+(?:-[a-z]+)+)"', code)) - {"no-head", "gpubroker-server"}
    kinds |= {f"out-of-memory-{memory}" for memory in ("cuda", "host", "node")}
    kinds |= {f"{what}-version-differs" for what in ("python", "ray")}
    page = (ROOT / "docs/how-to/find-what-is-wrong.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", "".join(re.findall(r"^\| (`[^|]*)", page, re.M))))
    assert explained == kinds
    tests = "".join(module.text for module in modules("tests"))
    marks = "".join(re.findall(r"pytest\.mark\.provokes\(([^)]*)\)", tests))
    assert kinds - set(re.findall(r'"([^"]+)"', marks)) == set()
    assert len(kinds) > 30


def texts_by_path() -> dict[str, str]:
    texts = {module.path: module.text for module in modules(*PYTHON_FOLDERS)}
    return texts | {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in pages()}


def test_no_text_keeps_both_sides_of_a_merge() -> None:
    assert [path for path, text in texts_by_path().items() if CONFLICT.search(text)] == []


def test_no_page_or_source_names_a_path_of_somebodys_machine() -> None:
    texts = texts_by_path()
    texts.pop(Path(__file__).relative_to(ROOT).as_posix())
    found = [
        f"{path}: {match.group()}"
        for path, text in texts.items()
        for match in PRIVATE_PATH.finditer(text)
        if not match.group().startswith("/home/gpubroker"[: len(match.group())])
    ]
    assert found == []


def test_both_packages_carry_the_same_version() -> None:
    server, client = (
        tomllib.loads((ROOT / path).read_text(encoding="utf-8"))["project"]["version"]
        for path in ("pyproject.toml", "client/pyproject.toml")
    )
    assert server == client == gpubroker.__version__
