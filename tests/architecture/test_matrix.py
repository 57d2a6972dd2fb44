"""The page on versions shows what `make matrix` has tried, and that is what the package says it supports."""

import re

from packaging.requirements import Requirement

from tests.matrix import PAGE, Row, known, page, ray_range, stated_pythons, table


def test_the_page_shows_the_versions_that_were_tried() -> None:
    """If it does not: make matrix."""
    assert PAGE.read_text(encoding="utf-8") == page(known())


def test_both_ends_of_the_stated_range_of_ray_are_tried() -> None:
    """If it fails after a change of the range: make matrix."""
    bound = Requirement(ray_range()).specifier
    tried: dict[str, list[str]] = {row.python: [] for row in known()}
    for row in known():
        assert (row.failed, row.fault) == ((), ""), row
        tried[row.python] += [row.ray] if row.ray else []
    assert tried
    for rays in tried.values():
        oldest, newest = rays
        assert f">={oldest.rpartition('.')[0]}" in str(bound)
        major, minor = map(int, newest.split(".")[:2])
        assert newest in bound
        assert f"{major}.{minor + 1}.0" not in bound


def test_table_names_the_python_that_the_machine_lacked() -> None:
    rows = [Row(python=f"{minor}.1", ray="2.60.0", passed=7) for minor in stated_pythons()]
    assert "Not tried" not in table(rows)
    assert table(rows[1:]).endswith(f"Not tried, as the machine did not have it: Python {rows[0].minor}.")


def test_table_shows_what_failed_and_what_could_not_be_installed() -> None:
    rows = [Row(python="3.12.1", passed=2, failed=("a.b",)), Row(python="3.13.0", fault="no wheel")]
    assert re.findall(r"^\| 3.*", table(rows), re.MULTILINE) == [
        "| 3.12.1 | – | 2 | a.b |",
        "| 3.13.0 | – | 0 | no wheel |",
    ]
