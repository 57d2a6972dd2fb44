"""For how long what is over stays readable."""

from gpubroker_server.core.domain.policy import Cutoffs, Retention
from gpubroker_server.core.domain.units import Instant, Position, Seconds

from tests.builders import NOW


def test_each_kind_of_record_has_its_own_time() -> None:
    retention = Retention(Seconds(100.0), Seconds(10.0), Seconds(1000.0))
    assert retention.cutoffs(NOW, Position(7)) == Cutoffs(
        Instant(NOW - 100), Instant(NOW - 10), Instant(NOW - 1000), NOW, Position(7)
    )
