"""Objects that runs of one node open, without Ray: fetched once, and the leader is asked each time."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from gpubroker.runtime.messages import RunKey, ended, failed, part, wanted

from tests.contracts.fake_runners import FakeRunners, Leader, a_leader

BYTES = b"0123456789"
ID = hashlib.sha256(BYTES).hexdigest()


class Node:
    """One agent and its leader; `opens` has a run ask for an object."""

    def __init__(self, runners: FakeRunners, folder: Path) -> None:
        self.runners = runners
        self.leader: Leader = a_leader(runners, folder, spares=1)

    async def opens(self, task: str, id: str = ID, tenant: str = "acme") -> None:
        if task not in self.runners.started:
            await self.leader.start(task, tenant=tenant)
            await self.leader.until(lambda: task in self.runners.started)
        self.runners.runner_of(task).report(wanted(RunKey(task, 1, 0), id))

    async def asked(self, task: str, number: int = 1) -> Any:
        """The place from which on the agent asks for its object on behalf of this run."""

        def asked() -> list[Any]:
            return [report for report in self.leader.received if report[0] == "wanted" and report[1] == task]

        while len(asked()) < number:
            await self.leader._poll()
        return asked()[number - 1][5:]

    async def answer(
        self, task: str, first_byte: int, data: bytes, *, id: str = ID, failure: str = ""
    ) -> None:
        size_bytes = 0 if failure else len(BYTES)
        await self.leader.order("object", task, 1, 0, id, size_bytes, first_byte, data, failure)

    async def given(self, task: str) -> Any:
        """What the run got: by what it reads the object, or why it does not get it."""
        items = self.runners.runner_of(task).items
        await self.leader.until(lambda: any(item[0] == "object" for item in items))
        return next(item[3:] for item in items if item[0] == "object")


@pytest.fixture
async def node(runners: FakeRunners, tmp_path: Path) -> Node:
    node = Node(runners, tmp_path)
    await node.leader.announce()
    return node


async def test_an_object_comes_in_parts_once_for_all_runs_that_wait_for_it(node: Node) -> None:
    await node.opens("a")
    assert await node.asked("a") == (ID, 0)
    await node.opens("b")
    await node.answer("a", 0, BYTES[:6])
    assert await node.asked("a", 2) == (ID, 6)
    await node.answer("a", 0, BYTES[:6])  # a part that came before counts once
    await node.answer("a", 6, BYTES[6:])
    assert await node.given("a") == (1, None) == await node.given("b")
    assert node.runners.shared == [BYTES]


async def test_kept_object_is_not_fetched_again_but_access_is_checked_each_time(
    node: Node,
) -> None:
    await node.opens("a")
    await node.answer("a", (await node.asked("a"))[1], BYTES)
    await node.given("a")
    await node.opens("b")
    assert await node.asked("b") == (ID, len(BYTES))
    await node.answer("b", len(BYTES), b"")
    assert await node.given("b") == (1, None)
    await node.opens("c")
    await node.asked("c")
    await node.answer("c", len(BYTES), b"", failure="it was deleted")
    assert await node.given("c") == (None, ("object_missing", "it was deleted"))
    await node.opens("d")
    assert await node.asked("d") == (ID, 0), "what was deleted is not kept"
    assert node.runners.shared == [BYTES]


async def test_a_tenant_gets_nothing_that_was_fetched_for_another(node: Node) -> None:
    await node.opens("a")
    await node.answer("a", (await node.asked("a"))[1], BYTES)
    await node.given("a")
    await node.opens("b", tenant="zeta")
    assert await node.asked("b") == (ID, 0)
    await node.answer("b", 0, b"", failure="zeta has no such object")
    assert (await node.given("b"))[0] is None


async def test_the_least_used_object_is_forgotten_when_others_need_its_room(node: Node) -> None:
    large = [bytes([number]) * 60 for number in range(2)]
    for task, data in zip("ab", large, strict=True):
        id = hashlib.sha256(data).hexdigest()
        await node.opens(task, id)
        await node.asked(task)
        await node.leader.order("object", task, 1, 0, id, 60, 0, data, "")
        assert (await node.given(task))[1] is None
    await node.opens("c", hashlib.sha256(large[0]).hexdigest())
    assert (await node.asked("c"))[1] == 0
    await node.opens("d", hashlib.sha256(large[1]).hexdigest())
    assert (await node.asked("d"))[1] == 60


async def test_damaged_bytes_are_given_to_no_run(node: Node) -> None:
    await node.opens("a")
    await node.asked("a")
    await node.answer("a", 0, b"9876543210")
    shared, (kind, message) = await node.given("a")
    assert (shared, kind) == (None, "object_missing")
    assert "damaged" in message


async def test_an_object_that_ends_too_early_is_damaged_and_not_asked_for_again(node: Node) -> None:
    await node.opens("a")
    await node.asked("a")
    await node.answer("a", 0, BYTES[:4])
    assert await node.asked("a", 2) == (ID, 4)
    await node.answer("a", 4, b"")
    shared, (kind, message) = await node.given("a")
    assert (shared, kind) == (None, "object_missing")
    assert "damaged" in message


async def test_of_the_objects_that_come_in_parts_one_is_gathered_at_a_time(node: Node) -> None:
    """Four of 1 GiB would take more memory in the agent than a small node has."""
    second = hashlib.sha256(BYTES[::-1]).hexdigest()
    small = hashlib.sha256(b"small").hexdigest()
    await node.opens("a")
    await node.answer("a", (await node.asked("a"))[1], BYTES[:4])
    assert await node.asked("a", 2) == (ID, 4)
    await node.opens("b", second)
    await node.answer("b", (await node.asked("b"))[1], BYTES[::-1][:4], id=second)
    await node.opens("c", small)
    await node.asked("c")
    await node.leader.order("object", "c", 1, 0, small, 5, 0, b"small", "")
    assert (await node.given("c"))[1] is None, "what comes at once waits for none"
    assert len([each for each in node.leader.received if tuple(each[:2]) == ("wanted", "b")]) == 1
    await node.answer("a", 4, BYTES[4:])
    assert (await node.given("a"))[1] is None
    assert await node.asked("b", 2) == (second, 4)
    await node.answer("b", 4, BYTES[::-1][4:], id=second)
    assert (await node.given("b"))[1] is None


async def test_object_that_no_run_waits_for_any_longer_makes_room_for_the_next(node: Node) -> None:
    second = hashlib.sha256(BYTES[::-1]).hexdigest()
    await node.opens("a")
    await node.answer("a", (await node.asked("a"))[1], BYTES[:4])
    await node.asked("a", 2)
    await node.opens("b", second)
    await node.answer("b", (await node.asked("b"))[1], BYTES[::-1][:4], id=second)
    node.runners.runner_of("a").report(ended(RunKey("a", 1, 0), failed("exception", "no"), b""))
    assert await node.asked("b", 2) == (second, 4)


async def test_bytes_that_the_node_cannot_keep_fail_the_run_with_the_reason(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_self: FakeRunners, _tenant: str, _id: str, _data: bytearray) -> int:
        raise MemoryError("the object store is full")

    node.leader.agent._runs.objects._store = full.__get__(node.runners)  # type: ignore[union-attr]
    await node.opens("a")
    await node.asked("a")
    await node.answer("a", 0, BYTES)
    _, (kind, message) = await node.given("a")
    assert kind == "object_unreadable"
    assert "the object store is full" in message


async def test_another_leader_is_asked_what_the_last_one_did_not_answer(node: Node) -> None:
    await node.opens("a")
    await node.answer("a", (await node.asked("a"))[1], BYTES[:4])
    assert await node.asked("a", 2) == (ID, 4)
    node.leader.received.clear()
    node.leader.term += 1
    await node.leader.announce()
    assert await node.asked("a") == (ID, 4)
    await node.answer("a", 4, BYTES[4:])
    assert (await node.given("a"))[1] is None


async def test_the_question_of_a_run_that_ends_is_asked_for_the_next_that_waits(node: Node) -> None:
    await node.opens("a")
    await node.asked("a")
    await node.opens("b")
    node.runners.runner_of("a").report(ended(RunKey("a", 1, 0), failed("exception", "no"), b""))
    assert await node.asked("b") == (ID, 0)
    node.runners.runner_of("b").report(ended(RunKey("b", 1, 0), failed("exception", "no"), b""))
    await node.leader.receive("gone", "b")
    await node.answer("b", 0, BYTES)
    assert node.runners.shared == [], "no run waits for it any longer"


async def test_a_part_of_a_result_is_passed_on_and_its_answer_is_passed_back(node: Node) -> None:
    await node.leader.start("a")
    await node.leader.until(lambda: "a" in node.runners.started)
    runner = node.runners.runner_of("a")
    runner.report(part(RunKey("a", 1, 0), ID, 10, 0, BYTES))
    assert (await node.leader.receive("part", "a"))[5:] == (ID, 10, 0, BYTES)
    node.leader.received.clear()
    node.leader.term += 1
    await node.leader.announce()
    assert (await node.leader.receive("part", "a"))[5:] == (ID, 10, 0, BYTES), "for another leader"
    await node.leader.order("part", "a", 1, 0, ID, 10, "")
    await node.leader.until(lambda: ("part", ("a", 1, 0), ID, 10, "") in runner.items)
