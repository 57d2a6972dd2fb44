"""Starts as they are told."""

from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.planning.forecasts.forecast_rounds import ExpectedStart
from gpubroker_server.core.planning.forecasts.reservations import Basis

from tests.builders import NOW


def starting_in(p50: float, p90: float | None = None, n: int = 0) -> ExpectedStart:
    """In so many seconds, by runs that ended or by what was stated."""
    p90_at = NOW + (p50 if p90 is None else p90)
    return ExpectedStart(Instant(NOW + p50), Instant(p90_at), n, Basis.LEARNED if n else Basis.STATED)
