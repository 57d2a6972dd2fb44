"""`broker.logs`: line by line, through lost connections and from one attempt to the next."""

import pytest
from gpubroker import Broker
from gpubroker.errors import Refused, Unreachable, WrongArgument

from tests.client.command_line import Run
from tests.client.conftest import Do
from tests.client.recorded_service import FULL_ID, RecordedService, Reply, Request, a_problem, a_task, outcome

PRINTED = "[... bytes 0 to 99999 were not kept ...]\n"
LONGER = {"Content-Length": "1000"}
"""The connection is closed before the answer is complete."""


def at(attempt: int, state: str = "running") -> Reply:
    return Reply(200, a_task(FULL_ID, state, attempt=attempt))


def printed(text: str, **headers: str) -> Reply:
    return Reply(200, text.encode(), headers)


def asked(service: RecordedService) -> list[dict[str, str]]:
    """The parameters of each call, besides a mark that cannot be guessed."""
    found = [dict(request.params) for request in service.requests if request.path.endswith("/logs")]
    assert all(len(params.pop("mark")) >= 32 for params in found)
    return found


def test_what_is_kept_comes_line_by_line(service: RecordedService, do: Do) -> None:
    service.reply_with(printed("10 %\r20 %\rdone\r\nüber\n\nrest"))
    lines = do("logs", FULL_ID, stream="stderr", attempt=2, rank=1, offset=7)
    assert lines == ["10 %\r", "20 %\r", "done\r\n", "über\n", "\n", "rest"]
    [request] = service.requests
    assert request.path == f"/tasks/{FULL_ID}/logs"
    assert asked(service) == [{"stream": "stderr", "attempt": "2", "rank": "1", "offset": "7"}]


def test_followed_log_goes_on_with_the_next_attempt_and_ends_with_the_task(
    service: RecordedService, do: Do
) -> None:
    service.reply_with(
        *(at(0, "pending"), printed("one\n")),
        *(at(1, "pending"), printed("two\n")),  # over before this answer began, so it was the last
        *(at(2, "running"), printed("three\n")),
        *(at(2, "succeeded"), printed("")),
        at(2, "succeeded"),
    )
    assert do("logs", FULL_ID, follow=True, stream="stdout") == ["one\n", "two\n", "three\n"]
    places = [(given["attempt"], given.get("offset")) for given in asked(service)]
    assert places == [("1", None), ("1", "4"), ("2", None), ("2", "6")]


def test_of_one_attempt_only_that_one_is_followed(service: RecordedService, do: Do) -> None:
    service.reply_with(at(2, "running"), printed("one\n"), at(2, "running"))
    assert do("logs", FULL_ID, follow=True, attempt=1, stream="stdout") == ["one\n"]


def test_a_connection_that_is_lost_costs_no_line_and_repeats_none(service: RecordedService, do: Do) -> None:
    def cut(request: Request) -> bytes:
        """With a line of the service, and one that the run has printed."""
        ours = "[... bytes 4 to 100 were not kept ...]" + dict(request.params)["mark"]
        return f"one\n\n{ours}\ntwo\n{PRINTED}thr".encode()

    service.reply_with(
        *(at(1), Reply(200, cut, LONGER)),
        *(at(1, "succeeded"), printed("three\n")),
        at(1, "succeeded"),
    )
    lines = do("logs", FULL_ID, follow=True, stream="stdout")
    said = "[... bytes 4 to 100 were not kept ...]\n"
    assert lines == ["one\n", "\n", said, "two\n", PRINTED, "three\n"]
    assert [given.get("offset") for given in asked(service)] == [None, str(104 + len(PRINTED))]


def test_a_log_that_is_not_followed_is_read_on_too(service: RecordedService, do: Do) -> None:
    service.reply_with(printed("one\ntw", **LONGER), at(1), printed("two\n"))
    assert do("logs", FULL_ID, stream="stdout") == ["one\n", "two\n"]
    out = {"stream": "stdout"}
    assert asked(service) == [out, {**out, "attempt": "1", "offset": "4"}]


@pytest.mark.parametrize("follow", [False, True])
def test_answers_that_break_off_are_retried_with_pauses_but_not_for_ever(
    service: RecordedService, follow: bool
) -> None:
    service.always = at(1)
    service.always_at = {"/logs": printed("half a line", **LONGER)}
    with (
        Broker(service.url, "gpb_secret", retry_seconds=0.5) as broker,
        pytest.raises(Unreachable, match="from byte 0"),
    ):
        list(broker.logs(FULL_ID, follow=follow, stream="stdout"))
    assert 2 <= len(asked(service)) <= 8


def test_answers_that_break_off_after_a_line_are_read_on_without_end(service: RecordedService) -> None:
    service.reply_with(*(at(1), printed("one\n", **LONGER)) * 9)
    service.always = at(1, "succeeded")
    service.always_at = {"/logs": printed("end")}
    with Broker(service.url, "gpb_secret", retry_seconds=0) as broker:
        assert list(broker.logs(FULL_ID, follow=True, stream="stdout")) == ["one\n"] * 9 + ["end"]


def test_both_streams_are_read_and_each_line_names_its_own(service: RecordedService, do: Do) -> None:
    service.reply_with(printed("one\nrest"), printed("wrong\n"))
    lines = do("logs", FULL_ID)
    assert [(line.stream, line) for line in lines] == [
        ("stdout", "one\n"), ("stdout", "rest"), ("stderr", "wrong\n"),
    ]  # fmt: skip
    assert [given["stream"] for given in asked(service)] == ["stdout", "stderr"]


def test_both_streams_are_followed_in_turns_over_all_attempts(service: RecordedService, do: Do) -> None:
    service.reply_with(
        *(at(1), printed("one\nha"), at(1), printed("")),
        *(at(1), printed("half\n"), at(1), printed("wrong\n")),
        *(at(2, "pending"), printed(""), at(2, "running"), printed("")),  # the first attempt is over
        *(at(2), printed("two\n"), at(2), printed("")),
        *(at(2, "succeeded"), printed("end"), at(2, "succeeded"), printed("bad\n")),
        *(at(2, "succeeded"), at(2, "succeeded")),
    )
    lines = do("logs", FULL_ID, follow=True)
    assert [line for line in lines if line.stream == "stdout"] == ["one\n", "half\n", "two\n", "end"]
    assert [line for line in lines if line.stream == "stderr"] == ["wrong\n", "bad\n"]
    assert not any("follow" in given for given in asked(service))


def test_an_offset_needs_the_stream_whose_bytes_it_counts(service: RecordedService, do: Do) -> None:
    with pytest.raises(WrongArgument, match="name it"):
        do("logs", FULL_ID, offset=7)
    assert service.requests == []


def test_a_refusal_is_raised(service: RecordedService, do: Do) -> None:
    service.reply_with(a_problem(404, "not-found"))
    with pytest.raises(Refused, match="no"):
        do("logs", FULL_ID)


def test_the_command_prints_each_stream_to_its_own(service: RecordedService, run: Run) -> None:
    service.reply_with(printed("out\n"), printed("err\n"))
    ran = run("logs", FULL_ID, "--attempt", "1")
    assert (ran.out, ran.err) == ("out\n", "err\n")
    assert [given["stream"] for given in asked(service)] == ["stdout", "stderr"]
    service.reply_with(printed("err\n"))
    ran = run("logs", FULL_ID, "--stream", "stderr", "--rank", "1")
    assert (ran.out, ran.err) == ("", "err\n")
    assert run("logs", FULL_ID, "--stream", "both").code == 2


def test_submit_follow_prints_the_log_then_the_result(service: RecordedService, run: Run) -> None:
    ended = at(1, "succeeded")
    service.always = ended
    service.reply_with(Reply(202, a_task(FULL_ID)))
    service.always_at = {
        "/logs": printed(""),
        "/result": outcome("succeeded", result=7, log_tail="printed before\n"),
    }
    ran = run("submit", "jobs:train", "--follow")
    assert (ran.code, ran.out) == (0, "7\n")
    assert "printed before" not in ran.err, "it was printed when it came"
    assert {given["stream"] for given in asked(service)} == {"stdout", "stderr"}
