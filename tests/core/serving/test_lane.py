"""The queue in front of one model."""

from gpubroker_server.core.domain.units import Ticks
from gpubroker_server.core.serving.lane import Full, Lane, LaneRules, Outlook, Place, Queued
from hypothesis import given
from hypothesis import strategies as st

NOW = Ticks(1000.0)


def a_lane(slots: int = 1, *, places: int = 8, tenant_share: float = 0.75, busy: str = "") -> Lane:
    """`busy`: a letter for each tenant that has a slot."""
    lane = Lane(LaneRules(places, tenant_share), slots)
    for tenant in busy:
        assert lane.goes_now(tenant)
    return lane


def waits(lane: Lane, priority: int = 50, tenant: str = "a") -> Place:
    queued = lane.wait(tenant, priority)
    assert isinstance(queued, Queued)
    assert queued.displaced is None
    return queued.place


def is_full(lane: Lane, priority: int = 50, tenant: str = "a") -> Full:
    full = lane.wait(tenant, priority)
    assert isinstance(full, Full)
    return full


def all_that_go(lane: Lane) -> list[Place]:
    """Each one ends, and the next goes."""
    gone: list[Place] = []
    while (place := lane.next()) is not None:
        gone.append(place)
        lane.end(place.tenant, 1.0, NOW)
    return gone


def test_a_request_goes_at_once_while_a_slot_is_free() -> None:
    lane = a_lane(2)
    assert [lane.goes_now("a") for _ in range(3)] == [True, True, False]
    lane.end("a", 1.0, NOW)
    assert lane.goes_now("b")


def test_a_new_limit_holds_from_the_next_request_on() -> None:
    lane = a_lane(2, busy="ab")
    lane.limit(1)
    place = waits(lane)
    lane.end("a", 1.0, NOW)
    assert lane.next() is None
    lane.limit(2)
    assert lane.next() == place


def test_what_is_found_by_trying_is_no_limit_that_somebody_has_set() -> None:
    found, set_by_somebody = Lane(LaneRules()), Lane(LaneRules(), 2)
    assert (found.is_limited, set_by_somebody.is_limited) == (False, True)


def test_nobody_goes_at_once_past_those_who_wait() -> None:
    lane = a_lane(busy="a")
    first = waits(lane)
    lane.end("a", 1.0, NOW)
    assert not lane.goes_now("a")
    assert lane.next() == first
    assert lane.next() is None


def test_the_highest_priority_goes_first_and_among_equals_who_came_first() -> None:
    lane = a_lane(busy="z")
    low, high, as_high = waits(lane, 10), waits(lane, 90), waits(lane, 90, "b")
    assert lane.next() is None
    lane.end("z", 1.0, NOW)
    assert all_that_go(lane) == [high, as_high, low]
    assert lane.is_idle


def test_who_leaves_is_passed_over() -> None:
    lane = a_lane(busy="z")
    first, second = waits(lane), waits(lane)
    assert not lane.is_idle
    lane.leave(first)
    lane.end("z", 1.0, NOW)
    assert all_that_go(lane) == [second]


def test_a_tenant_that_holds_its_share_of_the_slots_comes_after_others_who_wait() -> None:
    lane = a_lane(4, busy="aaaa")
    urgent, other = waits(lane, 90, "a"), waits(lane, 10, "b")
    lane.end("a", 1.0, NOW)
    assert lane.next() == other
    lane.end("b", 1.0, NOW)
    assert lane.next() == urgent  # nobody else waits: no slot stays free


def test_a_tenant_has_its_share_of_the_places_and_the_rest_is_kept_for_others() -> None:
    lane = a_lane(busy="z", places=4)
    for _ in range(3):
        waits(lane)
    assert is_full(lane) == Full(Outlook(4, None), is_share=True)
    waits(lane, tenant="b")
    for tenant in "ac":
        assert is_full(lane, tenant=tenant) == Full(Outlook(5, None), is_share=False)


def test_each_tenant_has_one_place_however_small_its_share() -> None:
    lane = a_lane(busy="z", places=4, tenant_share=0.01)
    waits(lane)
    assert is_full(lane).is_share


def test_a_higher_priority_takes_the_last_place_of_a_full_lane() -> None:
    lane = a_lane(busy="z", places=2, tenant_share=1.0)
    waits(lane, 40, "a")
    last = waits(lane, 10, "b")
    assert lane.wait("c", 10) == Full(Outlook(3, None), is_share=False)
    queued = lane.wait("c", 90)
    assert isinstance(queued, Queued)
    assert queued.displaced == last
    assert lane.waiting == 2


def test_a_tenant_whose_share_is_full_loses_a_place_of_its_own_to_its_higher_priority() -> None:
    lane = a_lane(busy="z", places=4, tenant_share=0.5)
    waits(lane, 5, "b")
    waits(lane, 30)
    last = waits(lane, 20)
    queued = lane.wait("a", 90)
    assert isinstance(queued, Queued)
    assert queued.displaced == last


def test_what_is_to_be_expected_is_the_position_and_how_long_requests_took_lately() -> None:
    lane = a_lane(2, busy="zz")
    lane.end("z", 4.0, NOW)
    assert lane.goes_now("z")
    places = [waits(lane, priority, tenant) for priority, tenant in ((50, "a"), (60, "b"), (10, "a"))]
    assert [lane.outlook(place) for place in places] == [Outlook(2, 4.0), Outlook(1, 2.0), Outlook(3, 6.0)]
    lane.end("z", 12.0, NOW)
    assert lane.outlook(places[1]) == Outlook(1, 2.5)


def test_a_lane_without_a_number_of_slots_finds_one() -> None:
    lane = Lane(LaneRules())
    first = lane.slots
    for tenant in "a" * first:
        assert lane.goes_now(tenant)
    for moment in range(20):
        waits(lane)
        lane.end("a", 1.0, Ticks(moment))
        assert lane.next() is not None
    assert lane.slots > first


PRIORITIES, TENANTS = st.integers(0, 100), st.sampled_from("abc")
COMING = st.tuples(st.just("come"), PRIORITIES, TENANTS)
OTHERS = st.tuples(st.sampled_from(["end", "leave"]), st.integers(0, 10), TENANTS)
COURSES = st.lists(COMING | COMING | OTHERS, max_size=60)


@given(COURSES, st.integers(1, 4), st.integers(1, 6), st.sampled_from([0.25, 0.75, 1.0]))
def test_whatever_comes_no_slot_is_given_twice_and_none_stays_free_while_somebody_waits(
    course: list[tuple[str, int, str]], slots: int, places: int, share: float
) -> None:
    lane = a_lane(slots, places=places, tenant_share=share)
    waiting: list[Place] = []
    going: list[str] = []
    for event, number, tenant in course:
        if event == "come" and lane.goes_now(tenant):
            assert not waiting
            going.append(tenant)
        elif event == "come":
            queued = lane.wait(tenant, number)
            if isinstance(queued, Queued):
                waiting.append(queued.place)
                if queued.displaced is not None:
                    assert queued.displaced.order > queued.place.order
                    waiting.remove(queued.displaced)
        elif event == "leave" and waiting:
            lane.leave(waiting.pop(number % len(waiting)))
        elif event == "end" and going:
            lane.end(going.pop(number % len(going)), 1.0, NOW)
        while (place := lane.next()) is not None:
            better = [other for other in waiting if other < place]
            assert all(other.tenant != place.tenant for other in better)
            most = lane._share_of(slots)
            assert all(going.count(other.tenant) >= most for other in better)
            waiting.remove(place)
            going.append(place.tenant)
        assert lane.in_flight == len(going) <= slots
        assert lane.waiting == len(waiting) <= places
        assert not waiting or len(going) == slots
        positions = sorted(lane.outlook(place).position for place in waiting)
        assert positions == list(range(1, len(waiting) + 1))
