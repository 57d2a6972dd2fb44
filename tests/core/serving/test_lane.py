"""The queue in front of one model."""

import pytest
from gpubroker_server.core.domain.units import MonotonicSeconds, Seconds
from gpubroker_server.core.serving.lane import LaneFull, LaneRules, ModelLane, Place, Queued, QueueEstimate
from hypothesis import given
from hypothesis import strategies as st

NOW = MonotonicSeconds(1000.0)


def a_lane(slots: int = 1, *, places: int = 8, tenant_share: float = 0.75, busy: str = "") -> ModelLane:
    """`busy`: a letter for each tenant that has a slot."""
    lane = ModelLane(LaneRules(places, tenant_share), slots)
    for tenant in busy:
        assert lane.try_start(tenant)
    return lane


def waits(lane: ModelLane, priority: int = 50, tenant: str = "a") -> Place:
    queued = lane.enqueue(tenant, priority, NOW)
    assert isinstance(queued, Queued)
    assert queued.displaced is None
    return queued.place


def is_full(lane: ModelLane, priority: int = 50, tenant: str = "a") -> LaneFull:
    full = lane.enqueue(tenant, priority, NOW)
    assert isinstance(full, LaneFull)
    return full


def all_in_order(lane: ModelLane) -> list[Place]:
    """Each one ends, and the next one starts."""
    started: list[Place] = []
    while (place := lane.start_next(NOW)) is not None:
        started.append(place)
        lane.finish(place.tenant, 1.0, NOW)
    return started


def test_a_request_starts_at_once_while_a_slot_is_free() -> None:
    lane = a_lane(2)
    assert [lane.try_start("a") for _ in range(3)] == [True, True, False]
    lane.finish("a", 1.0, NOW)
    assert lane.try_start("b")


def test_a_new_limit_applies_from_the_next_request_on() -> None:
    lane = a_lane(2, busy="ab")
    lane.limit(1)
    place = waits(lane)
    lane.finish("a", 1.0, NOW)
    assert lane.start_next(NOW) is None
    lane.limit(2)
    assert lane.start_next(NOW) == place


def test_a_number_of_slots_found_by_trying_is_no_given_limit() -> None:
    found, limited = ModelLane(LaneRules()), ModelLane(LaneRules(), 2)
    assert (found.is_limited, limited.is_limited) == (False, True)


def test_a_request_does_not_overtake_those_that_wait() -> None:
    lane = a_lane(busy="a")
    first = waits(lane)
    lane.finish("a", 1.0, NOW)
    assert not lane.try_start("a")
    assert lane.start_next(NOW) == first
    assert lane.start_next(NOW) is None


def test_lane_starts_the_highest_priority_first_and_equals_by_arrival() -> None:
    lane = a_lane(busy="z")
    low, high, as_high = waits(lane, 10), waits(lane, 90), waits(lane, 90, "b")
    assert lane.start_next(NOW) is None
    lane.finish("z", 1.0, NOW)
    assert all_in_order(lane) == [high, as_high, low]
    assert lane.is_idle


def test_a_withdrawn_request_is_passed_over() -> None:
    lane = a_lane(busy="z")
    first, second = waits(lane), waits(lane)
    assert not lane.is_idle
    lane.withdraw(first)
    lane.finish("z", 1.0, NOW)
    assert all_in_order(lane) == [second]


def test_tenant_that_holds_its_share_of_the_slots_comes_after_others() -> None:
    lane = a_lane(4, busy="aaaa")
    urgent, other = waits(lane, 90, "a"), waits(lane, 10, "b")
    lane.finish("a", 1.0, NOW)
    assert lane.start_next(NOW) == other
    lane.finish("b", 1.0, NOW)
    assert lane.start_next(NOW) == urgent  # no other tenant waits: no slot stays free


def test_tenant_has_its_share_of_the_places_and_the_rest_is_for_others() -> None:
    lane = a_lane(busy="z", places=4)
    for _ in range(3):
        waits(lane)
    assert is_full(lane) == LaneFull(QueueEstimate(4, None), is_share=True)
    waits(lane, tenant="b")
    for tenant in "ac":
        assert is_full(lane, tenant=tenant) == LaneFull(QueueEstimate(5, None), is_share=False)


def test_each_tenant_has_one_place_however_small_its_share() -> None:
    lane = a_lane(busy="z", places=4, tenant_share=0.01)
    waits(lane)
    assert is_full(lane).is_share


def test_a_higher_priority_takes_the_last_place_of_a_full_lane() -> None:
    lane = a_lane(busy="z", places=2, tenant_share=1.0)
    waits(lane, 40, "a")
    last = waits(lane, 10, "b")
    assert lane.enqueue("c", 10, NOW) == LaneFull(QueueEstimate(3, None), is_share=False)
    queued = lane.enqueue("c", 90, NOW)
    assert isinstance(queued, Queued)
    assert queued.displaced == last
    assert lane.waiting == 2


def test_tenant_with_a_full_share_loses_a_place_to_its_own_higher_priority() -> None:
    """A request of higher priority takes the last place of its own tenant."""
    lane = a_lane(busy="z", places=4, tenant_share=0.5)
    waits(lane, 5, "b")
    waits(lane, 30)
    last = waits(lane, 20)
    queued = lane.enqueue("a", 90, NOW)
    assert isinstance(queued, Queued)
    assert queued.displaced == last


def test_estimate_is_the_position_times_the_recent_duration_of_requests() -> None:
    lane = a_lane(2, busy="zz")
    lane.finish("z", 4.0, NOW)
    assert lane.try_start("z")
    places = [waits(lane, priority, tenant) for priority, tenant in ((50, "a"), (60, "b"), (10, "a"))]
    assert [lane.estimate(place) for place in places] == [
        QueueEstimate(2, Seconds(4.0)),
        QueueEstimate(1, Seconds(2.0)),
        QueueEstimate(3, Seconds(6.0)),
    ]
    lane.finish("z", 12.0, NOW)
    assert lane.estimate(places[1]) == QueueEstimate(1, Seconds(2.5))


def test_a_lane_without_a_number_of_slots_finds_one() -> None:
    lane = ModelLane(LaneRules())
    first = lane.slots
    for tenant in "a" * first:
        assert lane.try_start(tenant)
    for moment in range(20):
        waits(lane)
        lane.finish("a", 1.0, MonotonicSeconds(moment))
        assert lane.start_next(NOW) is not None
    assert lane.slots > first


def test_tenants_of_one_priority_take_turns() -> None:
    lane = a_lane(busy="z")
    firsts = [waits(lane, tenant=tenant) for tenant in "aaab"]
    lane.finish("z", 1.0, NOW)
    assert all_in_order(lane) == [firsts[0], firsts[3], firsts[1], firsts[2]]


def test_a_tenant_that_comes_back_has_no_turns_saved() -> None:
    lane = a_lane(busy="z")
    many = [waits(lane) for _ in range(4)]
    lane.finish("z", 1.0, NOW)
    for place in many[:2]:
        assert lane.start_next(NOW) == place
        lane.finish("a", 1.0, NOW)
    late = [waits(lane, tenant="b") for _ in range(2)]
    order = all_in_order(lane)
    assert order.index(late[0]) < order.index(many[3])
    assert order.index(late[1]) > order.index(many[2])


@pytest.mark.parametrize(
    ("priority", "waited", "is_first"), [(69, 480.0, False), (69, 540.0, True), (70, 1e6, False)]
)
def test_waiting_long_gains_order_up_to_the_top_of_the_band(
    priority: int, waited: float, is_first: bool
) -> None:
    lane, now = a_lane(busy="z"), MonotonicSeconds(NOW + waited)
    old = waits(lane, 60)
    assert isinstance(lane.enqueue("b", priority, now), Queued)
    lane.finish("z", 1.0, now)
    assert (lane.start_next(now) == old) is is_first


def test_lone_tenant_may_fill_the_lane_and_another_still_gets_a_place() -> None:
    lane = a_lane(busy="a", places=4)
    places = [waits(lane, 90) for _ in range(4)]
    assert not is_full(lane, 90).is_share
    queued = lane.enqueue("b", 10, NOW)
    assert isinstance(queued, Queued)
    assert queued.displaced == places[-1]
    lone = a_lane(busy="a", places=4)
    low = [waits(lone, 10) for _ in range(4)]
    own = lone.enqueue("a", 90, NOW)
    assert isinstance(own, Queued)
    assert own.displaced == low[-1]
    assert is_full(lane, 90) == LaneFull(QueueEstimate(4, None), is_share=False)


PRIORITIES, TENANTS = st.integers(0, 100), st.sampled_from("abc")
COMING = st.tuples(st.just("come"), PRIORITIES, TENANTS)
OTHERS = st.tuples(st.sampled_from(["end", "leave"]), st.integers(0, 10), TENANTS)
COURSES = st.lists(COMING | COMING | OTHERS, max_size=60)


@given(COURSES, st.integers(1, 4), st.integers(1, 6), st.sampled_from([0.25, 0.75, 1.0]))
def test_no_slot_is_given_twice_and_none_stays_free_while_a_request_waits(
    course: list[tuple[str, int, str]], slots: int, places: int, share: float
) -> None:
    lane = a_lane(slots, places=places, tenant_share=share)
    waiting: list[Place] = []
    going: list[str] = []
    for event, number, tenant in course:
        if event == "come" and lane.try_start(tenant):
            assert not waiting
            going.append(tenant)
        elif event == "come":
            queued = lane.enqueue(tenant, number, NOW)
            if isinstance(queued, Queued):
                waiting.append(queued.place)
                if queued.displaced is not None:
                    mine = sum(other.tenant == queued.displaced.tenant for other in waiting)
                    is_beyond = mine > lane._share_of(places)
                    assert is_beyond or queued.displaced.order > queued.place.order
                    waiting.remove(queued.displaced)
        elif event == "leave" and waiting:
            lane.withdraw(waiting.pop(number % len(waiting)))
        elif event == "end" and going:
            lane.finish(going.pop(number % len(going)), 1.0, NOW)
        while (place := lane.start_next(NOW)) is not None:
            better = [other for other in waiting if other < place]
            assert all(other.tenant != place.tenant for other in better)
            most = lane._share_of(slots)
            above = [other for other in better if other.order < place.order]
            assert all(going.count(other.tenant) >= most for other in above)
            waiting.remove(place)
            going.append(place.tenant)
        assert lane.in_flight == len(going) <= slots
        assert lane.waiting == len(waiting) <= places
        assert not waiting or len(going) == slots
        positions = sorted(lane.estimate(place).position for place in waiting)
        assert positions == list(range(1, len(waiting) + 1))
