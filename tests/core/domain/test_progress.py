from gpubroker_server.core.domain.progress import FORESEEN_SECONDS, Progress, first_progress
from gpubroker_server.core.domain.units import Instant


def told(*reports: tuple[float, float | None]) -> Progress:
    """The progress after these reports of (time, fraction)."""
    (at, fraction), *rest = reports
    progress = first_progress(Instant(at), fraction, "")
    for later, done in rest:
        progress = progress.followed_by(Instant(later), done, "")
    return progress


def test_the_rate_is_the_average_since_the_first_fraction() -> None:
    progress = told((100.0, 0.2), (110.0, 0.3), (120.0, 0.6))
    assert round(progress.rate_per_second or 0.0, 9) == 0.02
    assert progress.eta_at == 140.0


def test_eta_of_a_resumed_run_counts_its_progress_since_it_began_or_fell() -> None:
    """A resumed run does not begin at 0, and one that falls back begins anew."""
    assert told((100.0, 0.5), (110.0, 0.6)).eta_at == 150.0
    assert told((100.0, 0.5), (110.0, 0.1), (120.0, 0.2)).eta_at == 200.0


def test_without_a_second_higher_fraction_the_end_is_unknown() -> None:
    for reports in (
        [(100.0, None)],
        [(100.0, 0.5)],
        [(100.0, 0.5), (110.0, 0.5)],
        [(100.0, 0.5), (110.0, None)],
    ):
        progress = told(*reports)
        assert (progress.rate_per_second, progress.eta_at) == (None, None)
    assert told((100.0, None), (110.0, 0.5)).first_at == 110.0


def test_an_end_that_is_too_far_away_is_not_told() -> None:
    assert told((0.0, 0.0), (FORESEEN_SECONDS, 0.4)).eta_at is None
    assert told((0.0, 0.0), (FORESEEN_SECONDS, 0.6)).eta_at is not None
