"""The times at which findings were first seen, which one leader hands on to the next."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gpubroker_server.core.domain.units import Instant

MAX_DATED = 500
"""A leader publishes the dates of no more findings."""


class FindingDate(NamedTuple):
    """The time at which a finding was first seen, which one leader hands on to the next."""

    kind: str
    subject: str
    since: Instant


def dates_of(known: Mapping[tuple[str, str], Instant]) -> tuple[FindingDate, ...]:
    """Return the oldest of them, MAX_DATED at most."""
    dates = sorted(
        (FindingDate(*about, since) for about, since in known.items()), key=lambda date: date.since
    )
    return tuple(dates[:MAX_DATED])


def known_dates(dates: Iterable[FindingDate]) -> dict[tuple[str, str], Instant]:
    return {(date.kind, date.subject): date.since for date in dates}
