"""Results and exceptions of user code, in a form that can travel."""

import json
from threading import Lock

import cloudpickle
import pytest
from gpubroker.runtime import Stopped
from gpubroker.runtime.messages import RunFault, RunOutcome
from gpubroker.runtime.outcome import NotStored, raised, succeeded

LIMIT = 1000


def fault_of(outcome: RunOutcome) -> RunFault:
    assert outcome.fault is not None
    return outcome.fault


def no_room(_data: bytes) -> str:
    raise NotStored("no room")


def caught(text: str) -> ValueError:
    try:
        raise ValueError(text)
    except ValueError as fault:
        return fault


def test_plain_data_travels_as_compact_json_in_its_own_letters() -> None:
    outcome = succeeded({"a": (1, 2.5, None, True), "ö": "ü"}, "json", LIMIT, no_room)
    assert outcome.result == '{"a":[1,2.5,null,true],"ö":"ü"}'.encode()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1}, b"bytes", object(), {(1, 2): 3}])
def test_value_json_cannot_carry_is_refused_naming_the_other_format(
    value: object,
) -> None:
    fault = fault_of(succeeded(value, "json", LIMIT, no_room))
    assert fault.kind == "unserializable_result"
    assert type(value).__name__ in fault.message
    assert "result_format=cloudpickle" in fault.message


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[object] = []
    value.append(value)
    assert fault_of(succeeded(value, "json", LIMIT, no_room)).kind == "unserializable_result"


def test_cloudpickle_carries_values_that_json_cannot() -> None:
    outcome = succeeded({1, 2}, "cloudpickle", LIMIT, no_room)
    assert outcome.result is not None
    assert cloudpickle.loads(outcome.result) == {1, 2}


def test_result_of_exactly_the_limit_is_carried_and_a_larger_one_is_stored() -> None:
    """One byte more makes it an object."""
    fits = "x" * (LIMIT - 2)
    assert succeeded(fits, "json", LIMIT, no_room).result == json.dumps(fits).encode()
    assert fault_of(succeeded(fits + "x", "json", LIMIT, no_room)).kind == "result_too_large"
    assert succeeded(fits + "x", "json", LIMIT, lambda _: "id").result == b'{"object":"id"}'


def test_a_stopped_run_has_not_failed() -> None:
    assert raised(Stopped()) == RunOutcome("stopped")


def test_a_long_traceback_keeps_its_beginning_and_its_end() -> None:
    fault = fault_of(raised(caught("x" * 200_000 + "the end")))
    assert len(fault.traceback.encode()) <= 64 * 1024
    assert fault.traceback.startswith("Traceback")
    assert fault.traceback.rstrip().endswith("the end")
    assert len(fault.message) <= 4096


def test_an_exception_that_cannot_be_printed_is_still_reported() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    fault = fault_of(raised(Mute()))
    assert "Mute" in fault.message


def test_an_exception_whose_text_exits_the_program_is_still_reported() -> None:
    class Deadly(Exception):
        def __str__(self) -> str:
            raise SystemExit

    assert "Deadly" in fault_of(raised(Deadly())).message


@pytest.mark.parametrize(("form", "value"), [("json", {1}), ("cloudpickle", Lock())])
def test_the_part_of_a_result_that_cannot_travel_is_named(form: str, value: object) -> None:
    fault = fault_of(succeeded({"model": [7, value]}, form, LIMIT, no_room))
    assert "because of the result['model'][1]: " in fault.message
    assert "because of" not in fault_of(succeeded(value, form, LIMIT, no_room)).message
