"""Ids sort by time and never repeat."""

import uuid

from gpubroker_server.core.domain.units import Instant
from gpubroker_server.http.ids import Ids, is_task_id
from hypothesis import given
from hypothesis import strategies as st

CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"


def uuid_of(task_id: str) -> uuid.UUID:
    value = 0
    for character in task_id.removeprefix("task_"):
        value = value * 32 + CROCKFORD.index(character)
    return uuid.UUID(int=value)


@given(st.lists(st.floats(0, 4e9), min_size=1, max_size=50))
def test_ids_ascend_even_when_the_clock_does_not(instants: list[float]) -> None:
    ids = Ids()
    made = [ids.task(Instant(at)) for at in instants]
    assert made == sorted(set(made))


def test_more_ids_than_the_counter_holds_in_one_millisecond_still_ascend() -> None:
    ids = Ids()
    made = [ids.task(Instant(1000.0)) for _ in range(5000)]
    assert made == sorted(set(made))


def test_an_id_is_a_uuid_of_version_7_that_holds_its_time() -> None:
    value = uuid_of(Ids().task(Instant(1_763_719_331.412)))
    assert (value.version, value.variant) == (7, uuid.RFC_4122)
    assert value.int >> 80 == 1_763_719_331_412


def test_http_requests_and_leader_requests_have_different_id_prefixes() -> None:
    ids = Ids()
    assert ids.exchange().startswith("req_")
    assert ids.request(Instant(1.0)).startswith("ask_")


def test_only_our_ids_are_task_ids() -> None:
    made = Ids().task(Instant(1.0))
    assert is_task_id(made)
    for other in (
        made[:-1],
        made + "0",
        made + "\n",
        made.upper(),
        made.replace("task_", "req_"),
        "task_" + "8" * 26,
    ):
        assert not is_task_id(other)
