"""Write a database with every kind of event and row of a release, for tests of later releases.

Run it with the software of that release, from an empty folder:

    PYTHONPATH=TREE/service:TREE/client python save.py NAME

`NAME.sql` is the SQLite database as text, `NAME.json` what that release reads from it. The script imports the
service alone, and uses what the release at hand knows.
"""

import asyncio
import dataclasses
import json
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpubroker_server.adapters.sql.store import open_store
from gpubroker_server.core.domain import decisions, task
from gpubroker_server.core.domain.decisions import Decision, Outcome, PledgeWrite, Request, write_move
from gpubroker_server.core.domain.demand import Demand, PlacementConstraints
from gpubroker_server.core.domain.device import Device, Node
from gpubroker_server.core.domain.estimates import Observation, Sketch, SketchKey, What
from gpubroker_server.core.domain.lease import (
    HolderKind,
    Lease,
    LeaseState,
    Pledge,
    PledgeEnd,
    Proof,
    mark_overused,
    move_lease,
    quarantine,
    release,
)
from gpubroker_server.core.domain.models import ModelTerms
from gpubroker_server.core.domain.orders import Checkpointed, Failure
from gpubroker_server.core.domain.task import Dependency, ExternalTerms, Member, Move, StopReason, Task
from gpubroker_server.ports.store import RunSpec, Submission, TokenRow

NOW, GIB, GPU = 1_000_000.0, 1024, "test/n1/gpu0"
NODE = Node("n1", 64.0, 256 * GIB, 64, "n1-1", "boot-1", labels=(("zone", "a"),), custom=(("licence", 2.0),))
WHERE = PlacementConstraints(("H100",), 5, 40 * GIB, (("zone", ("a", "b")),), ("gpu0",), ("H200",))
PLACED = {"fence": 1, "node": "n1", "admitted_at": NOW}
DEMAND = Demand(1, 10 * GIB, cpu=1.5, memory_mb=64, custom=(("licence", 1.0),), where=WHERE, pool="lab")
RANK = Demand(1, 5 * GIB)
PARTS = (
    "tasks", "leases", "pledges", "devices", "nodes", "requests", "pauses", "streams", "worker_sets",
)  # fmt: skip


def a_task(id: str, demand: Demand = DEMAND, **fields: Any) -> Task:
    return Task(id, "red", f"name of {id}", 50, demand, NOW, **fields)


def a_lease(holder: Task, kind: HolderKind = HolderKind.RUN, rank: int = 0) -> Lease:
    return Lease(kind, holder.id, 1, GPU, 5 * GIB, "red", 50, NOW, rank=rank, context_mb=100)


class Saved:
    """A store, and the newest of each of its tasks."""

    def __init__(self, store: Any, term: int) -> None:
        self.store, self.term = store, term
        self.tasks: dict[str, Task] = {}

    async def submit(self, new: Task, kind: str = "entrypoint", **spec: Any) -> None:
        run = RunSpec(kind, entrypoint="jobs:run", labels={"team": "x"}, **spec)
        await self.store.submit(Submission(new, run, f"key of {new.id}", "hash"))
        self.tasks[new.id] = new

    async def commit(self, **parts: Any) -> None:
        [verdict] = await self.store.commit(self.term, [Decision("saved", "saved", **parts)])
        assert verdict == "committed", (verdict, parts)

    async def move(self, id: str, what: Move, leases: Sequence[Lease] = (), **changes: Any) -> None:
        parts = {name: changes.pop(name) for name in ("outcome", "checkpoint") if name in changes}
        write = write_move(self.tasks[id], what, **changes)
        self.tasks[id] = write.task
        await self.commit(tasks=(write,), leases=tuple(leases), **parts)


async def save_tasks(saved: Saved) -> None:
    """Runs in every state, with what each leaves behind."""
    more = {
        "max_retries": 2,
        "timeout_seconds": 60.0,
        "deadline_at": NOW + 1e6,
        "stream": "s",
        "subject": "x",
    }
    await saved.submit(a_task("first", **more, expires_at=NOW + 5.0, queued_bytes=7), env={"A": "b"})
    after = (Dependency("first"), Dependency("gone", task.OnFailure.IGNORE))
    await saved.submit(a_task("waits", after=after, awaits=True, held=True))
    lease = a_lease(saved.tasks["first"])
    await saved.move("first", Move.ADMITTED, [lease], **PLACED)
    held = move_lease(lease, LeaseState.HELD)
    await saved.move("first", Move.STARTED, [held], started_at=NOW + 2.0)
    overused = mark_overused(held, 6 * GIB)
    await saved.commit(leases=(overused,))
    checkpoint = Checkpointed("first", 1, NOW, 1, "digest", b"state", None)
    await saved.move("first", Move.CHANGED, checkpoint=checkpoint, checkpoint_at=NOW + 3.0)
    stop = {"stop_reason": StopReason.PREEMPT, "stop_deadline_at": NOW + 30.0, "freeing_for": "waits"}
    await saved.move("first", Move.STOPPING, **stop)
    left = quarantine(overused, NOW)
    failed = Outcome("first", 1, "failed", NOW, failure=Failure("exception", "as written", "trace"))
    await saved.move("first", Move.FAILED, [left], outcome=failed, finished_at=NOW + 9.0)
    await saved.submit(a_task("again", shareable=True))
    await saved.move("again", Move.ADMITTED, **PLACED)
    back = {"failures": 1, "preemptions": 1, "not_before": NOW + 60.0, "node": None}
    await saved.move("again", Move.REQUEUED, **back)
    await saved.submit(a_task("over"))
    over = a_lease(saved.tasks["over"])
    await saved.move("over", Move.ADMITTED, [over], **PLACED)
    await saved.move("over", Move.STARTED, [held := move_lease(over, LeaseState.HELD)], started_at=NOW)
    ended = Outcome("over", 1, "succeeded", NOW, result=b"42", log_tail=b"tail")
    await saved.move(
        "over", Move.SUCCEEDED, [release(held, Proof.PROCESS_ABSENT)], outcome=ended, finished_at=NOW
    )


async def save_holders(saved: Saved) -> None:
    """A gang, an external holder, a model and an inference."""
    gang = Demand(bundles=(RANK, RANK), strategy="spread", min_ranks=1, slots=(("tenant:red", 1.0),))
    await saved.submit(a_task("gang", gang))
    placed = (Member(0, "n1"), Member(1, "n1"))
    leases = [a_lease(saved.tasks["gang"], HolderKind.GANG_MEMBER, rank) for rank in (0, 1)]
    await saved.move("gang", Move.ADMITTED, leases, members=placed, **PLACED)
    states = task.MemberState
    ready = Member(0, "n1", states.READY, address="127.0.0.1:9")
    leaves = Member(1, "n1", states.LEAVING, True, "127.0.0.1:8", "waits", NOW + 30.0)
    await saved.move("gang", Move.STARTED, members=(ready, leaves), started_at=NOW)
    names = {field.name for field in dataclasses.fields(Member)}
    if "bundle" in names:
        late = Member(2, "n1", stop_deadline_at=NOW + 9.0, bundle=1)
        await saved.move("gang", Move.CHANGED, members=(ready, leaves, late))
    await saved.submit(a_task("lease", external=ExternalTerms(60.0, 4711)), "external")
    await saved.move("lease", Move.STARTED, [a_lease(saved.tasks["lease"], HolderKind.EXTERNAL)], **PLACED)
    terms = ModelTerms("triton", "bert", 30.0, 60, NOW, steps=("a",), versions=("1",), address="h:1")
    await saved.submit(a_task("model", RANK, model=terms, expires_at=NOW + 9.0), "model")
    terms = dataclasses.replace(terms, usage=terms.usage.used(NOW), pinned=True, left_at=NOW)
    await saved.move(
        "model", Move.ADMITTED, [a_lease(saved.tasks["model"], HolderKind.MODEL)], model=terms, **PLACED
    )
    await saved.submit(a_task("inference", Demand(answered_by="bert")), "inference")


async def save_rest(saved: Saved) -> None:
    """Pledges, requests, estimates, notices, tokens, and what came with later releases."""
    store = saved.store
    pledges = [Pledge("waits", GPU, mb, 80, "red", NOW, NOW + 30.0, (0, 1)) for mb in (GIB, 2 * GIB)]
    await saved.commit(pledges=(PledgeWrite(pledges[0]),))
    await saved.commit(pledges=(PledgeWrite(pledges[0], PledgeEnd.CONSUMED),))
    await saved.commit(pledges=(PledgeWrite(pledges[1]),))
    await store.request(Request("r1", "first", "red", "cancel", {"grace_seconds": None}, NOW))
    await store.request(Request("r2", "waits", "red", "change", {"priority": 60, "held": False}, NOW))
    await saved.commit(requests_done=("r1",))
    topics = [SketchKey("red", "x", "H100", what) for what in (What.GPU_MB, What.SECONDS)]
    lessons = tuple(Observation(topic, 5.0, Sketch().add(5.0), NOW) for topic in topics)
    await saved.commit(lessons=lessons, devices=(a_device(version=2),))
    await saved.commit(forgotten=(topics[1],), devices=(a_device(version=3),))
    await saved.commit(notices=(decisions.Notice("memory.fragmented", "cluster", {"waiting": 3}),))
    await store.put_token(
        TokenRow(
            name="ci", sha256="hash", tenant="red", scopes=("tasks:read",), max_priority=50, created_at=NOW
        ),
        by="admin",
    )
    if hasattr(decisions, "StreamState"):
        await save_later(saved)


async def save_later(saved: Saved) -> None:
    """Pauses, work streams, worker sets, cordons and items of arrays: after 0.2.0."""
    from gpubroker_server.core.domain.submission import Scaling, WorkerSet

    late: Any = decisions
    cordoned = dataclasses.replace(NODE, version=2, cordoned=True, cordon_reason="broken", draining_since=NOW)
    about = {"cordon_reason": "broken", "draining_since": NOW, "drain_deadline_at": None}
    await saved.commit(nodes=(cordoned,), notices=(decisions.Notice("cordon.changed", "n1", about),))
    paused = [late.QueuePause(queue, NOW, "olga", "why") for queue in ("tenant:red", "stream:s")]
    await saved.commit(paused=tuple(paused))
    await saved.commit(resumed=(paused[1],))
    told = late.StreamState("s", 2.0, 0.5, NOW, 0.1, NOW, 0.9)
    await saved.commit(streams=(told, late.StreamState("t", 3.0)))
    await saved.commit(streams=(late.StreamState("t"),))
    await saved.submit(a_task("w1", array="w1", ordered_at=NOW), objects=("object",))
    workers = WorkerSet("w1", "red", "set", ("w1",), 0, 2, 1, 4, NOW, Scaling("calls", 2.0, 60.0))
    await saved.commit(worker_sets=(late.WorkerSetWrite(workers, "formed"),))
    workers = dataclasses.replace(workers, count=2, signal=0.5)
    await saved.commit(worker_sets=(late.WorkerSetWrite(workers, "changed", ("count", "signal")),))
    ended = dataclasses.replace(workers, id="w2", workers=("w2",))
    await saved.commit(worker_sets=(late.WorkerSetWrite(ended, "formed"),))
    await saved.commit(worker_sets=(late.WorkerSetWrite(ended, "over"),))
    page = late.ItemPage("w1", 0, 1, "red", 2, 1, NOW, b"{}\n{}\n")
    changed = write_move(saved.tasks["w1"], Move.CHANGED, held=True)
    await saved.commit(tasks=(changed,), items=(page,))


def a_device(**fields: Any) -> Device:
    rest = {"reserve_mb": 512, "declared_foreign_mb": 100, "power": 2000, "context_mb": 100, **fields}
    return Device(GPU, "n1", "gpu0", "H100", 0, 80 * GIB, **rest)


def fields_of(value: Any) -> dict[str, Any]:
    """Without what is computed of other fields."""
    computed = {field.name for field in dataclasses.fields(value) if not field.init}
    return {name: part for name, part in dataclasses.asdict(value).items() if name not in computed}


async def save(name: str) -> dict[str, Any]:
    """Fill the database; what is read from it."""
    store = await open_store(f"sqlite:///{name}.db")
    term = await store.take_term("leader", 3600.0, instead_of=await store.leader())
    saved = Saved(store, term)
    await saved.commit(nodes=(NODE,), devices=(a_device(),))
    await save_tasks(saved)
    await save_holders(saved)
    await save_rest(saved)
    snapshot = await store.snapshot()
    read = {
        part: [fields_of(one) for one in getattr(snapshot, part)]
        for part in (
            "tasks",
            "leases",
            "pledges",
            "devices",
            "nodes",
            "requests",
            "pauses",
            "streams",
            "worker_sets",
        )
        if hasattr(snapshot, part)
    }
    read["specs"] = {id: fields_of(spec) for id, spec in (await store.specs(list(saved.tasks))).items()}
    read["kinds"] = sorted({event.kind for event in await store.events(0, 10_000)})
    await store.close()
    return read


def keep(name: str, read: dict[str, Any]) -> None:
    Path(f"{name}.json").write_text(json.dumps(read, indent=1, default=bytes.decode) + "\n")
    with sqlite3.connect(f"{name}.db") as connection:
        [mark] = connection.execute("PRAGMA application_id").fetchone()
        text = (f"PRAGMA application_id={mark};", *connection.iterdump())
        Path(f"{name}.sql").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    keep(sys.argv[1], asyncio.run(save(sys.argv[1])))
