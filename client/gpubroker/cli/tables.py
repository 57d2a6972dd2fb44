"""Tables that fit the terminal, and sizes, times and ids in words."""

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import inf
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from gpubroker.cli import SHOWN_ID_LENGTH
from gpubroker.cli.own_words import with_commands

if TYPE_CHECKING:
    from gpubroker.wire.stats import ExecutorState

_LEAST_CELLS = 8
_WHOLE_ID = re.compile(r"task_[0-9a-z]{26}")


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    from_width: int = 0
    """A terminal narrower than this does not show the column."""
    until_width: float = inf
    """A terminal of at least this width does not show the column, but others instead."""
    share: float = 1.0
    """The largest part of the width that the column takes; longer text ends in an ellipsis. By default a
    column is shown whole."""
    wraps: bool = False


@dataclass(frozen=True, slots=True)
class PlainTable:
    """A table without lines that shows as much as the width allows."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str | Text]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        columns = self.columns
        shown = [
            index for index, column in enumerate(columns) if column.from_width <= width < column.until_width
        ]
        table = Table(box=None, pad_edge=False, header_style="dim")
        for index in shown:
            column = columns[index]
            is_whole = not column.wraps and column.share == 1.0
            cells = [cell_len(column.title), *(cell_len(str(row[index])) for row in self.rows)]
            table.add_column(
                column.title,
                no_wrap=not column.wraps,
                overflow="fold" if column.wraps else "ellipsis",
                min_width=max(cells) if is_whole else None,
                max_width=max(_LEAST_CELLS, int(width * column.share)),
            )
        for row in self.rows:
            table.add_row(*(row[index] for index in shown))
        yield table


def details(rows: Iterable[tuple[str, object]]) -> Table:
    """Return a table with one line per name and value. Empty values are left out."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        if value:
            table.add_row(Text(name, style="dim"), value if isinstance(value, Text) else Text(str(value)))
    return table


def short_id(task: str | None) -> str:
    """Return the end of an id, which differs even between tasks of one moment, whereas the beginning is a
    time.

    None stands for a task of another tenant, whose id the service does not send.
    """
    return task[-SHOWN_ID_LENGTH:] if task else "another tenant"


def with_short_ids(message: str) -> str:
    """Return a message of the service with ids and commands as a person at a terminal uses them."""
    return _WHOLE_ID.sub(lambda found: short_id(found[0]), with_commands(message))


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def gib(mb: float) -> str:
    return f"{mb / 1024:.1f}"


def gib_of(mb: float, of_mb: float, between: str = "/", unit: str = "") -> str:
    """Return `9.5/10.0` in GiB, or in MiB if the two differ and would read the same."""
    if mb != of_mb and gib(mb) == gib(of_mb):
        return f"{mb:.0f}{between}{of_mb:.0f} MiB"
    return f"{gib(mb)}{between}{gib(of_mb)}{unit}"


def size(mb: float) -> str:
    """Return the size in GiB, or in MiB if GiB would round to zero."""
    return f"{mb:.0f} MiB" if 0 < mb < 103 else f"{gib(mb)} GiB"


def size_of_bytes(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    return f"{count / 1024:.0f} KiB" if count < 1024**2 else size(count / 1024**2)


def ago(at: datetime | None) -> str:
    return "" if at is None else duration(max(0, round(time.time() - at.timestamp())))


def duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.2g}s"
    if seconds < 100:
        return f"{seconds:.0f}s"
    if seconds < 6000:
        return f"{seconds / 60:.0f}m"
    return f"{seconds / 3600:.0f}h" if seconds < 360_000 else f"{seconds / 86400:.0f}d"


def timestamp(at: datetime | None) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S}Z" if at else ""


def executor_in_words(executor: "ExecutorState") -> str:
    """Say what runs the tasks, and its state."""
    words = ": ".join(value for value in (executor.state, executor.message) if value)
    return f"{words} ({executor.address})" if executor.address else words
