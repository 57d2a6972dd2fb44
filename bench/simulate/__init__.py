"""The same work under different policies: waits, use, preemptions, simulated with the service's core.

The work is a generated day (`--day SEED`), a trace (`--openb DIR`), or the history of a service (`--history
FILE`): the events that `gpubroker events --after 0 -o ndjson` prints. Each `--policy NAME:setting=value,...`
or `--policy NAME:@FILE`, with a service's configuration file, is one column of the table; `shipped` is the
default policy. How to read the table: docs/how-to/compare-policies.md.
"""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpubroker_server.bootstrap.compose import policy_of
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.settings.loading import SettingsRefused, load_settings
from msgspec.structs import fields, replace

from bench.measuring import Figure, report
from bench.simulate.history import a_history
from bench.simulate.replay import Outcome, Replay
from bench.simulate.workload import Workload, a_day, an_openb_day

Named = tuple[str, Policy]
SHIPPED: Named = ("shipped", Policy())


def add_options(parser: ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--day", type=int, metavar="SEED", help="generate a day from this seed; 1 if no source is given"
    )
    source.add_argument("--openb", type=Path, metavar="DIR", help="folder with the openb_*.csv files")
    source.add_argument(
        "--history", type=Path, metavar="FILE", help="events of a service, one JSON object per line"
    )
    parser.add_argument("--trace", default="default", help="trace in the folder, such as gpushare60")
    parser.add_argument("--hours", type=float, default=24.0, help="length of the generated day")
    parser.add_argument("--gpus", type=int, default=64, help="GPUs of the generated day, 8 per node")
    parser.add_argument("--nodes", type=int, default=12, help="nodes of the trace, the largest ones")
    parser.add_argument(
        "--load", type=float, default=1.2, help="requested share of the GPU memory of the day"
    )
    parser.add_argument(
        "--stated", type=float, default=0.5, help="share of the generated tasks that state their run time"
    )
    parser.add_argument(
        "--policy",
        type=named_policy,
        action="append",
        help="NAME:setting=value,... or NAME:@FILE (may be repeated)",
    )


def named_policy(text: str) -> Named:
    """Return a policy and its name. Raises ArgumentTypeError, which names the settings."""
    name, _, settings = text.partition(":")
    if settings.startswith("@"):
        try:
            return name, policy_of(load_settings(Path(settings[1:])))
        except SettingsRefused as refused:
            raise ArgumentTypeError(str(refused)) from None
    return name, replace(Policy(), **dict(_setting(part) for part in settings.split(",") if part))


def _setting(text: str) -> tuple[str, Any]:
    name, _, given = text.partition("=")
    plain = {f.name: f.default for f in fields(Policy) if isinstance(f.default, bool | int | float | str)}
    if name not in plain:
        raise ArgumentTypeError(f"no setting {name!r}; settings: {', '.join(plain)}")
    if isinstance(plain[name], bool):
        if given not in ("true", "false"):
            raise ArgumentTypeError(f"{name} is true or false, not {given!r}")
        return name, given == "true"
    try:
        return name, type(plain[name])(given)
    except ValueError:
        raise ArgumentTypeError(f"{name} takes a {type(plain[name]).__name__}, not {given!r}") from None


def measure(options: Namespace) -> Iterator[Figure]:
    workload = _workload(options)
    hours = workload.seconds / 3600.0
    report(
        f"{workload.name}: {len(workload.jobs):,} tasks over {hours:.1f} h on {len(workload.devices):,} GPUs"
    )
    outcomes = {
        name: Replay(workload, policy).run(lambda done, name=name: report(f"{name}: {done}"))  # type: ignore[misc]
        for name, policy in options.policy or [SHIPPED]
    }
    for line in table(outcomes):
        report(line)
    for name, outcome in outcomes.items():
        for metric, (value, unit) in outcome.figures().items():
            yield Figure(
                "simulate", f"simulate.{workload.name}.{name}.{metric}", value, unit, len(workload.jobs)
            )


def _workload(options: Namespace) -> Workload:
    if options.openb is not None:
        return an_openb_day(options.openb, options.nodes, options.trace)
    if options.history is not None:
        return a_history(options.history)
    return a_day(
        1 if options.day is None else options.day, options.hours, options.gpus, options.load, options.stated
    )


def table(outcomes: dict[str, Outcome]) -> Iterator[str]:
    """Yield the lines of a table with one row per figure and one column per policy; a dash if no task of that
    band waited."""
    names = list(outcomes)
    widest = max(len(metric) for outcome in outcomes.values() for metric in outcome.figures())
    columns = [max(12, len(name)) for name in names]
    yield (
        " " * widest
        + "  "
        + "  ".join(f"{name:>{width}}" for name, width in zip(names, columns, strict=True))
    )
    figures = [outcome.figures() for outcome in outcomes.values()]
    units = {metric: unit for one in figures for metric, (_, unit) in one.items()}
    for metric, unit in units.items():
        values = (f"{one[metric][0]:,.1f}" if metric in one else "-" for one in figures)
        cells = (f"{value:>{width}}" for value, width in zip(values, columns, strict=True))
        yield f"{metric:<{widest}}  {'  '.join(cells)} {unit}"
