"""Show the demo: on a terminal as one changing screen, elsewhere as lines."""

from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from gpubroker import Gpu, Task
from gpubroker.cli.gpu_commands import GpuTable
from gpubroker.cli.tasks.view import task_table
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from examples.demo.scenario import Result

_LINES_SHOWN = 14


class PlainScreen:
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def show(self, _gpus: Sequence[Gpu], _tasks: Sequence[Task], lines: Sequence[str], /) -> None:
        for line in lines:
            print(line, flush=True)


class LiveScreen:
    """A screen with GPU memory, the queue and the newest lines. The last one stays on the terminal."""

    def __init__(self, console: Console) -> None:
        self._lines: deque[str] = deque(maxlen=_LINES_SHOWN)
        first = Text("starting the service and a local Ray ...")
        self._live = Live(first, console=console, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, gpus: Sequence[Gpu], tasks: Sequence[Task], lines: Sequence[str], /) -> None:
        self._lines.extend(lines)
        picture = Group(
            Panel(GpuTable(gpus), title="GPU memory", title_align="left", border_style="dim"),
            Panel(task_table(tasks), title="tasks", title_align="left", border_style="dim"),
            *(Text(line, overflow="ellipsis", no_wrap=True) for line in self._lines),
        )
        self._live.update(picture, refresh=True)


def screen_on(console: Console) -> PlainScreen | LiveScreen:
    return LiveScreen(console) if console.is_terminal else PlainScreen()


def summary(result: Result) -> Table:
    table = Table(title="resumed runs reach what undisturbed runs reach", title_justify="left")
    for column in ("task", "preempted", "resumed at epoch", "accuracy", "undisturbed"):
        table.add_column(column)
    for name, accuracy in result.accuracy.items():
        reference = result.reference.get(name)
        table.add_row(
            name,
            str(result.preemptions.get(name, "")),
            str(result.resumed_at_epoch.get(name, "")),
            f"{accuracy:.6f}",
            "" if reference is None else f"{reference:.6f}",
        )
    return table
