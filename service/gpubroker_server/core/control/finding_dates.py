"""The dates of findings. A new leader goes on with those that the last one has published."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gpubroker_server.core.domain.units import Instant

MAX_DATED = 500
"""A leader publishes the dates of no more findings."""


class FindingDate(NamedTuple):
    """The time at which a finding was first seen."""

    kind: str
    subject: str
    since: Instant


def dates_of(known: Mapping[tuple[str, str], Instant]) -> tuple[FindingDate, ...]:
    """Return at most MAX_DATED dates, the oldest first. `known` maps the kind and the subject of a finding to
    its date."""
    dates = sorted(
        (FindingDate(kind, subject, since) for (kind, subject), since in known.items()),
        key=lambda date: date.since,
    )
    return tuple(dates[:MAX_DATED])


def known_dates(dates: Iterable[FindingDate]) -> dict[tuple[str, str], Instant]:
    """Return the dates by kind and subject, as `dates_of` takes them."""
    return {(date.kind, date.subject): date.since for date in dates}
