"""Devices and nodes count as idle once they have done next to nothing for the whole grace time."""

from gpubroker_server.core.control.idle import Idle, IdleRules, Reading, follow, idle
from gpubroker_server.core.domain.units import Instant

RULES = IdleRules()


def after(*steps: tuple[float, float | None]) -> dict[str, Idle]:
    quiet: dict[str, Idle] = {}
    for at, utilization in steps:
        quiet = follow(quiet, [Reading("gpu0", utilization)], Instant(at), RULES)
    return quiet


def test_it_is_idle_once_the_grace_time_is_over() -> None:
    quiet = after((0, 0.04), (2, 0.01))
    assert idle(quiet, Instant(299.9), RULES) == []
    assert idle(quiet, Instant(300.0), RULES) == [Idle("gpu0", 0.01, Instant(0.0))]


def test_the_threshold_itself_is_work() -> None:
    assert after((0, 0.05)) == {}
    assert after((0, 0.0), (100, 0.5), (102, 0.0)) == {"gpu0": Idle("gpu0", 0.0, Instant(102.0))}


def test_a_measurement_that_is_missing_changes_nothing() -> None:
    assert after((0, 0.0), (2, None)) == {"gpu0": Idle("gpu0", 0.0, Instant(0.0))}
    assert after((0, None)) == {}


def test_the_work_of_templates_does_not_make_it_busy() -> None:
    quiet = follow({}, [Reading("gpu0", 1.0, fills_itself=True)], Instant(0.0), RULES)
    assert quiet == {"gpu0": Idle("gpu0", 0.0, Instant(0.0))}


def test_what_is_gone_is_forgotten_and_a_clock_set_back_begins_anew() -> None:
    assert follow(after((0, 0.0)), [], Instant(9.0), RULES) == {}
    assert after((100, 0.0), (50, 0.0)) == {"gpu0": Idle("gpu0", 0.0, Instant(50.0))}


def test_what_is_idle_comes_in_name_order() -> None:
    quiet = {name: Idle(name, 0.0, Instant(0.0)) for name in ("b", "a")}
    assert [one.name for one in idle(quiet, Instant(300.0), RULES)] == ["a", "b"]
