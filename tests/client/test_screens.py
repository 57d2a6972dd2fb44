"""What a person sees at 80 columns with 2,000 waiting tasks, and what a pipe gets."""

import re

import pytest

from tests.client.screens import COLUMNS, COMMANDS, PAGE, page, shown

IDS = re.compile(r"^[0-9a-z]{8}  ")


async def test_the_page_of_screens_is_current() -> None:
    """Else write it again: python -m tests.client.screens."""
    assert PAGE.read_text(encoding="utf-8") == await page()


async def test_every_screen_fits_80_columns_and_no_heading_is_cut() -> None:
    for line, text in (await shown(*COMMANDS)).items():
        rows = text.splitlines()
        assert rows, line
        assert max(map(len, rows)) <= COLUMNS, line
        headings = [row for row in rows if re.match(r"[A-Z]{2,}[A-Z0-9 ,/p…]* ", row)]
        assert not [row for row in headings if "…" in row], line


async def test_ps_shows_what_runs_then_the_queue_in_its_order_then_what_ended() -> None:
    screens = await shown("ps --all -o json --limit 499", "ps --limit 30")
    rows = [row for row in screens["ps --limit 30"].splitlines() if IDS.match(row)]
    states = [row.split()[2] for row in rows]
    assert states == sorted(states, reverse=True), "running before pending"
    positions = [int(found[1]) for row in rows if (found := re.search(r" (\d+)\. ", row))]
    assert positions == list(range(1, len(positions) + 1))
    assert len(positions) == 20, "the reasons of the first that wait"


@pytest.mark.parametrize("command", ["ps --limit 30", "tenants", "explain sweep-0007", "gpus"])
async def test_a_pipe_gets_every_cell_whole(command: str) -> None:
    text = (await shown(command, columns=None))[command]
    assert "…" not in text.replace("of-the-…", "")
    if command.startswith("ps"):
        assert all(IDS.match(row) for row in text.splitlines()[2:])
