"""Objects as arguments and as results, in the process of a run."""

import json
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
from gpubroker.runtime import run_objects
from gpubroker.runtime.host import RunHost
from gpubroker.runtime.journal import START_OVER, Journal
from gpubroker.runtime.messages import Report, RunKey, RunOrder
from gpubroker.runtime.objects import (
    ObjectRef,
    UnreadableObject,
    named_object,
    object_buffers,
    opened_object,
    pickled_buffers,
)

from tests.client.test_runtime_host import PYTHON
from tests.patience import PATIENCE_SECONDS

ID = "ab" * 32


def written(value: Any) -> bytes:
    return b"".join(object_buffers(value))


class Asked:
    """A host with one run; the test answers for its agent."""

    def __init__(self) -> None:
        self._wake = threading.Event()
        self.journal = Journal(lambda _delay: self._wake.set())
        self.host = RunHost(self.journal)
        self._seen = 0

    def call(self, function: Callable[..., Any], *args: Any, **order: Any) -> RunKey:
        packed = cloudpickle.dumps((function, args, {}))
        given = {"kind": "function", "python": PYTHON, "arguments": packed, **order}
        self.host.start_shared(RunOrder(task="t", fence=1, **given))
        return RunKey("t", 1, 0)

    def enter(self, name: str, *args: Any) -> RunKey:
        return self.call(
            len, kind="entrypoint", entrypoint=name, arguments=json.dumps({"args": args}).encode()
        )

    def next(self, kind: str) -> Report:
        """The next report of this kind."""
        while True:
            for number, report in self.journal.take(START_OVER, 10**9):
                if number > self._seen and report[0] == kind:
                    self._seen = number
                    return report
            assert self._wake.wait(PATIENCE_SECONDS), f"nothing {kind}"
            self._wake.clear()

    def give(self, key: RunKey, value: Any) -> None:
        assert self.next("wanted")[5] == ID
        self.host.take_object(key, ID, memoryview(written(value)), None)

    def result(self) -> Any:
        report = self.next("ended")
        assert report[5] == "succeeded", report
        return json.loads(report[6])

    def failure(self) -> tuple[str, str]:
        report = self.next("ended")
        kind, message, _ = report[8]
        return kind, message


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_argument_names_an_object_by_reference_or_by_a_mapping_of_it_alone() -> None:
    assert named_object(ObjectRef(ID, 5)) == ID == named_object({"object": ID})
    others = [{"object": ID, "more": 1}, {"object": "chair"}, {"object": 1}, {}, ID, None]
    assert [named_object(value) for value in others] == [None] * len(others)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(3, 4),
        np.asfortranarray(np.arange(6, dtype="<i2").reshape(2, 3)),
        np.array(5),
        np.zeros((0, 3)),
        np.array([(1, 2.0)], dtype=[("a", "<i4"), ("ü", "<f8")]),
        np.arange(12).reshape(3, 4)[:, ::2],
        np.array(["2026-11-26"], "M8[D]"),
    ],
    ids=["2d", "fortran", "scalar", "empty", "named", "strided", "dates"],
)
def test_an_array_is_opened_where_it_lies_and_cannot_be_changed(array: "np.ndarray[Any, Any]") -> None:
    view = memoryview(bytearray(written(array)))
    found = opened_object(view, unpickles=False)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(found, array)
    if found.size:
        assert np.shares_memory(found, np.frombuffer(view, np.uint8))
        with pytest.raises(ValueError, match="WRITEABLE"):
            found.setflags(write=True)


def test_arrays_in_a_pickled_value_share_its_bytes_and_are_read_only() -> None:
    value = {"weights": np.arange(1000), "name": "a", "more": [np.ones((3, 3))]}
    view = memoryview(bytearray(written(value)))
    found = opened_object(view, unpickles=True)
    assert found["name"] == "a"
    shared = np.frombuffer(view, np.uint8)
    for array in (found["weights"], found["more"][0]):
        assert np.shares_memory(array, shared)
        assert array.ctypes.data % 8 == 0
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
    found["name"] = "b"
    assert opened_object(view, unpickles=True)["name"] == "a", "each run opens a value of its own"


def test_an_array_whose_description_fits_into_no_file_is_pickled() -> None:
    array = np.array([(1,)], dtype=[("日", "<i4")])
    np.testing.assert_array_equal(opened_object(memoryview(written(array)), unpickles=True), array)


def test_a_large_array_is_not_copied_when_it_is_stored() -> None:
    array = np.arange(1000.0)
    assert np.shares_memory(np.frombuffer(object_buffers(array)[1], np.uint8), array)
    assert any(np.shares_memory(np.frombuffer(b, np.uint8), array) for b in object_buffers([array]) if len(b))


def test_bytes_are_a_read_only_view() -> None:
    found = opened_object(memoryview(bytearray(b"plain")), unpickles=False)
    assert found == b"plain"
    assert found.readonly


@pytest.mark.parametrize(
    "data",
    [b"\x93NUMPY", b"\x93NUMPY\x01\x00\x05\x00{}   ", written(np.arange(9))[:-1]],
    ids=["cut off", "no description", "too short"],
)
def test_bytes_that_only_begin_as_an_array_are_refused(data: bytes) -> None:
    with pytest.raises(UnreadableObject, match="begins as a numpy array"):
        opened_object(memoryview(data), unpickles=False)


def test_an_array_of_python_objects_is_not_unpickled() -> None:
    with pytest.raises(UnreadableObject, match="Python objects"):
        opened_object(memoryview(written(np.arange(2)).replace(b"'<i8'", b"'|O' ")), unpickles=True)


def test_a_pickle_of_another_python_or_one_that_is_damaged_is_refused() -> None:
    whole = b"".join(pickled_buffers([1, 2]))
    with pytest.raises(UnreadableObject, match=r"Python 2\.7 pickled it"):
        opened_object(memoryview(whole.replace(PYTHON.encode(), b"2.7 "[: len(PYTHON)], 1)), unpickles=True)
    with pytest.raises(UnreadableObject, match="cannot be opened"):
        opened_object(memoryview(whole[:-4]), unpickles=True)


def test_a_function_gets_objects_in_place_of_the_arguments_that_name_them(asked: Asked) -> None:
    key = asked.call(lambda array, more: [int(array.sum()), array.flags.writeable, more], ObjectRef(ID), 3)
    asked.give(key, np.arange(5))
    assert asked.result() == [10, False, 3]


def test_an_entrypoint_gets_objects_too_and_nothing_is_unpickled_for_it(asked: Asked) -> None:
    key = asked.enter("gpubroker.runtime.objects:named_object", {"object": ID})
    asked.give(key, b"bytes")
    assert asked.result() is None, "it got the bytes, and not what named them"
    key = asked.enter("gpubroker.runtime.objects:named_object", {"object": ID})
    asked.give(key, {"a": "pickled"})
    kind, message = asked.failure()
    assert kind == "object_unreadable"
    assert "only a task that is a function" in message


def test_run_whose_object_is_missing_fails_with_the_reason_before_its_code(
    asked: Asked,
) -> None:
    key = asked.call(print, ObjectRef(ID))
    asked.next("wanted")
    asked.host.take_object(key, ID, None, ("object_missing", "it was deleted"))
    assert asked.failure() == ("object_missing", "it was deleted")


def test_a_question_is_asked_again_for_another_agent(asked: Asked) -> None:
    key = asked.call(len, ObjectRef(ID))
    assert asked.next("wanted")[5] == ID
    asked.host.report_again(key)
    asked.give(key, b"four")
    assert asked.result() == 4


def test_a_run_that_has_to_stop_does_not_wait_for_its_object(asked: Asked) -> None:
    key = asked.call(len, ObjectRef(ID))
    asked.next("wanted")
    asked.host.stop(key)
    assert asked.next("ended")[5] == "stopped"


@pytest.mark.parametrize("form", ["json", "cloudpickle"])
def test_a_result_beyond_the_limit_becomes_an_object(
    asked: Asked, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_objects, "PART_BYTES", 100)
    value = "x" * 250
    key = asked.call(lambda: value, result_format=form, result_limit_bytes=64)
    stored = bytearray()
    while True:
        digest, size_bytes, first_byte, data = asked.next("part")[5:]
        if first_byte == 100 and not stored[100:]:  # once a part is lost
            asked.host.report_again(key)
            digest, size_bytes, first_byte, data = asked.next("part")[5:]
        assert first_byte == len(stored)
        stored += data
        asked.host.answer_part(key, digest, len(stored), "")
        if len(stored) == size_bytes:
            break
    ended = asked.next("ended")
    assert (ended[5], json.loads(ended[6]), ended[7]) == ("succeeded", {"object": digest}, "object")
    read = json.loads if form == "json" else lambda data: opened_object(memoryview(data), unpickles=True)
    assert read(bytes(stored)) == value


def test_a_large_result_without_room_for_it_fails_and_says_so(asked: Asked) -> None:
    key = asked.call(lambda: "x" * 99, result_limit_bytes=64)
    digest = asked.next("part")[5]
    asked.host.answer_part(key, digest, 0, "the tenant has no room")
    kind, message = asked.failure()
    assert kind == "result_too_large"
    assert "the tenant has no room" in message


def test_a_large_result_is_given_up_when_the_run_has_to_stop(asked: Asked) -> None:
    key = asked.call(lambda: "x" * 99, result_limit_bytes=64)
    asked.next("part")
    asked.host.stop(key)
    assert asked.next("ended")[5] == "stopped"
