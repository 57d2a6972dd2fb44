"""What operators and clients tell of work streams: weights that are put, signals, and what is forgotten."""

from collections.abc import Mapping
from math import exp
from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision, Request, StreamState, known_streams
from gpubroker_server.core.domain.policy import Policy, StreamRules
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.lifecycle.change_requests import carry_out_all, with_signal
from gpubroker_server.core.world.world import World

from tests.builders import NOW, a_task, a_world, commit

POLICY = Policy(streams=(("nightly", 0.5),))
HOUR = 3600.0


def put(name: str, weight: float | None, by: str = "ada") -> tuple[str, str, dict[str, Any]]:
    return name, "stream", {"curriculum": weight, "by": by, "reason": "harder now"}


def signal(name: str, **told: float) -> tuple[str, str, dict[str, Any]]:
    return name, "stream_signal", told


def ask(world: World, *asked: tuple[str, str, dict[str, Any]], at: float = NOW) -> list[Decision]:
    """All in one cycle."""
    for n, (name, what, fields) in enumerate(asked):
        world.add_request(Request(f"r{n}", TaskId(name), "ops", what, fields, Instant(at)))
    decisions = carry_out_all(world, list(world.requests.values()), Instant(at), POLICY)
    commit(world, decisions)
    assert world.requests == {}
    return decisions


def weights(world: World) -> Mapping[str, float | None]:
    known = known_streams(POLICY.streams, world.streams)
    return {name: stream.curriculum for name, stream in known.items()}


def test_stream_weight_by_request_replaces_the_setting_or_makes_a_stream() -> None:
    world = a_world()
    assert weights(world) == {"nightly": 0.5}
    ask(world, put("nightly", 2.0), put("ladder", 3.0))
    assert weights(world) == {"nightly": 2.0, "ladder": 3.0}


def test_what_is_deleted_has_the_weight_of_the_settings_again_or_is_gone() -> None:
    world = a_world()
    ask(world, put("nightly", 2.0), put("ladder", 3.0), signal("nightly", quality=0.5))
    ask(world, put("nightly", None), put("ladder", None))
    assert (weights(world), world.streams) == ({"nightly": 0.5}, {})


def test_stream_weight_changes_are_audited_with_their_actor_unlike_signals() -> None:
    world = a_world()
    [put_, told] = ask(world, put("ladder", 3.0), signal("nightly", quality=0.5))
    [note] = put_.audit
    assert (note.tenant, note.actor, note.action, note.subject, note.reason) == (
        "ops", "ada", "stream.put", "ladder", "harder now",
    )  # fmt: skip
    assert (told.audit, len(told.streams)) == ((), 1)
    [deleted] = ask(world, put("ladder", None))
    assert [note.action for note in deleted.audit] == ["stream.delete"]


def test_what_is_so_already_changes_nothing() -> None:
    world = a_world()
    ask(world, put("ladder", 3.0))
    [again] = ask(world, put("ladder", 3.0, by="bob"))
    assert (again.streams, again.audit, again.requests_done) == ((), (), ("r0",))
    [nothing] = ask(world, put("nightly", None))
    assert (nothing.streams, nothing.audit) == ((), ())


def test_signals_of_one_cycle_all_count() -> None:
    world = a_world()
    [decision] = ask(world, put("ladder", 3.0), signal("ladder", quality=0.5), signal("ladder", progress=9.0))
    assert decision.requests_done == ("r0", "r1", "r2")
    assert world.streams["ladder"] == StreamState("ladder", 3.0, 9.0, NOW, quality=0.5)


def test_stream_signal_leaves_the_weight_to_the_settings_after_a_restart() -> None:
    world = a_world()
    ask(world, signal("nightly", quality=0.5))
    assert world.streams["nightly"].curriculum is None
    assert known_streams((("nightly", 7.0),), world.streams)["nightly"].curriculum == 7.0
    assert known_streams((), world.streams) == {}


def test_signals_of_a_stream_that_does_not_exist_any_more_are_dropped() -> None:
    world = a_world()
    ask(world, put("ladder", 3.0))
    [dropped, unknown] = ask(
        world, put("ladder", None), signal("ladder", quality=0.5), signal("none", quality=1)
    )
    assert (world.streams, unknown.streams) == ({}, ())
    assert (dropped.requests_done, unknown.requests_done) == (("r0", "r1"), ("r2",))


def test_requests_about_tasks_are_carried_out_beside_them() -> None:
    world = a_world(a_task("t1"))
    decisions = ask(world, put("ladder", 3.0), ("t1", "cancel", {}), signal("ladder", quality=0.5))
    assert sorted(decision.why for decision in decisions) == ["cancel", "stream"]
    assert "t1" not in world.tasks


def told(*signals: tuple[float, Mapping[str, Any]]) -> StreamState:
    """The stream after each (hour, signal)."""
    stream = StreamState("ladder", 1.0)
    for hour, fields in signals:
        stream = with_signal(stream, fields, Instant(hour * HOUR), StreamRules())
    return stream


def test_velocity_follows_progress_and_forgets() -> None:
    rising = told((1, {"progress": 1000.0}), (2, {"progress": 1080.0}))
    assert rising.velocity_per_hour == pytest.approx(80 * (1 - exp(-1)))
    slower = told((1, {"progress": 1000.0}), (2, {"progress": 1080.0}), (3, {"progress": 1080.0}))
    assert slower.velocity_per_hour == pytest.approx(80 * (1 - exp(-1)) * exp(-1))


def test_progress_told_twice_for_one_instant_replaces_itself() -> None:
    stream = told((1, {"progress": 5.0}), (1, {"progress": 9.0}))
    assert (stream.progress, stream.velocity_per_hour) == (9.0, 0.0)


def test_progress_counts_from_its_measurement_but_never_from_the_future() -> None:
    late = told((1, {"progress": 0.0}), (3, {"progress": 60.0, "progress_at": 2 * HOUR}))
    assert (late.progress_at, late.velocity_per_hour) == (2 * HOUR, pytest.approx(60 * (1 - exp(-1))))
    early = told((1, {"progress": 60.0, "progress_at": 9 * HOUR}))
    assert early.progress_at == HOUR


def test_progress_of_an_earlier_time_than_what_is_known_is_dropped() -> None:
    stream = told((2, {"progress": 9.0}), (3, {"progress": 1.0, "progress_at": HOUR, "quality": 0.5}))
    assert (stream.progress, stream.progress_at, stream.quality) == (9.0, 2 * HOUR, 0.5)


def test_the_age_of_data_is_kept_as_the_time_that_they_are_of() -> None:
    assert told((1, {"data_age_seconds": 600.0})).data_at == HOUR - 600.0
