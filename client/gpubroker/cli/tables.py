"""Tables that fit the terminal, and sizes, times and ids in words."""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from gpubroker.cli import SHOWN_ID_LENGTH

_LEAST_CELLS = 8
_WHOLE_ID = re.compile(r"task_[0-9a-z]{26}")


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    from_width: int = 0
    """A narrower terminal does not show the column."""
    share: float = 1.0
    """The largest part of the width it takes; longer text ends in an ellipsis."""
    wraps: bool = False


@dataclass(frozen=True, slots=True)
class PlainTable:
    """A table without lines that shows as much as the width allows."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str | Text]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        shown = [at for at, column in enumerate(self.columns) if width >= column.from_width]
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in (self.columns[at] for at in shown):
            table.add_column(
                column.title,
                no_wrap=not column.wraps,
                overflow="fold" if column.wraps else "ellipsis",
                max_width=max(_LEAST_CELLS, int(width * column.share)),
            )
        for row in self.rows:
            table.add_row(*(row[at] for at in shown))
        yield table


def details(rows: Iterable[tuple[str, object]]) -> Table:
    """One line per name and value; empty values are left out."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        if value:
            table.add_row(Text(name, style="dim"), value if isinstance(value, Text) else Text(str(value)))
    return table


def short_id(task: str | None) -> str:
    """The end of an id, which differs even between tasks of one moment; its beginning is a time.

    The service does not send the id of another tenant's task.
    """
    return task[-SHOWN_ID_LENGTH:] if task else "another tenant"


def with_short_ids(message: str) -> str:
    return _WHOLE_ID.sub(lambda found: short_id(found[0]), message)


def gib(mb: float) -> str:
    return f"{mb / 1024:.1f}"


def size(mb: float) -> str:
    """In GiB; in MiB if that would round to zero."""
    return f"{mb:.0f} MiB" if 0 < mb < 103 else f"{gib(mb)} GiB"


def size_of_bytes(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    return f"{count / 1024:.0f} KiB" if count < 1024**2 else size(count / 1024**2)


def ago(at: datetime | None) -> str:
    return "" if at is None else duration(max(0.0, time.time() - at.timestamp()))


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


def executor_in_words(executor: Mapping[str, Any]) -> str:
    """What runs the tasks, and its state."""
    return " ".join(str(value) for value in executor.values() if value)
