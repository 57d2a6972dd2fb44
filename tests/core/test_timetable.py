"""What is due when, however often entries change."""

from hypothesis import given
from hypothesis import strategies as st

from service.core.timetable import Timetable
from service.core.units import Instant, TaskId

acts = st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 9))), max_size=300)


@given(acts, st.integers(0, 9))
def test_what_is_due_is_what_a_look_at_every_entry_finds(acts: list[tuple[int, int | None]], now: int):
    table = Timetable()
    for number, at in acts:
        if at is None:
            table.pop(TaskId(f"t{number}"), None)
        else:
            table[TaskId(f"t{number}")] = Instant(float(at))
        expected = sorted(
            (task for task in table if table[task] <= now), key=lambda task: (table[task], task)
        )
        assert table.due(Instant(float(now))) == expected
        assert table.due(Instant(float(now))) == expected


def test_entries_that_come_and_go_leave_nothing_behind():
    table = Timetable()
    table[TaskId("stays")] = Instant(1.0)
    for number in range(10_000):
        table[TaskId("goes")] = Instant(float(number))
        del table[TaskId("goes")]
    assert len(table._heap) < 200
    assert table.due(Instant(1.0)) == ["stays"]
