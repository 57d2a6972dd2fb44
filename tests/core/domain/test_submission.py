"""What many tasks are together."""

import json
from typing import Any

import pytest
from gpubroker.wire.forecasts import Sizing
from gpubroker_server.core.domain.submission import (
    AdmittedTask,
    BatchSubmission,
    ItemTerms,
    RunSpec,
    SeatTerms,
    bytes_of,
    secrets_named,
    state_of_array,
    told_variables,
    with_told,
)
from gpubroker_server.core.domain.task import ON_FAILURE, TaskState
from gpubroker_server.core.domain.units import TaskId
from msgspec.structs import replace

from tests.builders import a_task
from tests.core.arrays import terms


def test_a_batch_is_named_by_its_first_task() -> None:
    tasks = [a_task("t1", tenant="lab"), a_task("t2", tenant="lab")]
    batch = BatchSubmission([AdmittedTask(task, RunSpec("entrypoint")) for task in tasks])
    assert (batch.first, batch.tenant) == ("t1", "lab")


def test_secrets_are_named_by_the_values_of_variables() -> None:
    env = {"WANDB_KEY": "secret:wandb", "MODE": "secret", "EMPTY": ""}
    assert secrets_named(env) == {"WANDB_KEY": "wandb"}


TERMS: dict[str, Any] = {
    "roles": ("generate", "train"), "profile": "scorer", "max_concurrency": 3, "retry_of": TaskId("old"),
    "items": ItemTerms(TaskId("a"), 1, item_timeout_seconds=9.0, pickled=True, retry_on=ON_FAILURE),
    "seat": SeatTerms(TaskId("s"), 4, 60.0, {"method": "ping"}, {"judge": {"args": [1]}}),
}  # fmt: skip


@pytest.mark.parametrize("name", TERMS)
def test_specification_told_to_a_process_is_read_back_from_a_stored_row(name: str) -> None:
    spec = RunSpec("entrypoint", env={"SEED": "4"}, **{name: TERMS[name]})
    assert spec.is_told_more
    told = told_variables(spec)
    assert len(told) == 1
    assert with_told(replace(RunSpec("entrypoint"), env={**spec.env, **told})) == spec


def test_a_task_is_told_nothing_that_it_does_not_use() -> None:
    spec = RunSpec("entrypoint", env={"SEED": "4"})
    assert (spec.is_told_more, told_variables(spec), with_told(spec) is spec) == (False, {}, True)


def test_workers_of_earlier_releases_are_read_from_their_variables() -> None:
    """As release 0.3.0.dev0 before these fields wrote them."""
    limits = {"id": "a", "item_retries": 2, "item_timeout_seconds": None, "pickled": False}
    terms = {"id": "s", "max_concurrency": 2, "start_seconds": 3600.0, "health": None, "roles": {}}
    env = {"GPUBROKER_ARRAY": json.dumps(limits), "GPUBROKER_WORKER_SET": json.dumps(terms)}
    spec = with_told(RunSpec("entrypoint", env=env))
    assert (spec.items, spec.seat) == (ItemTerms(TaskId("a"), 2), SeatTerms(TaskId("s"), 2))
    assert {name: json.loads(text) for name, text in told_variables(spec).items()} == {
        "GPUBROKER_ARRAY": {**limits, "retry_on": ["failure", "timeout"]},
        "GPUBROKER_WORKER_SET": terms,
    }


def test_an_unknown_kind_of_a_size_is_none_in_rows_of_earlier_releases_too() -> None:
    learned = Sizing(None, None, 4, "", "it gets whole GPUs")
    assert with_told(RunSpec("entrypoint", sizing=learned)).sizing == replace(learned, kind=None)


def test_what_a_process_is_told_counts_among_the_bytes_that_its_task_keeps() -> None:
    spec = RunSpec("entrypoint", arguments=b"12", env={"A": "b"}, labels={"c": "d"}, profile="scorer")
    assert bytes_of(spec) == 2 + 2 + 2 + len("GPUBROKER_PROFILE") + len("scorer")


PENDING, RUNNING, SUCCEEDED, CANCELLED = (
    TaskState.PENDING,
    TaskState.RUNNING,
    TaskState.SUCCEEDED,
    TaskState.CANCELLED,
)


@pytest.mark.parametrize(
    ("done", "failed", "workers", "state"),
    [
        (0, 0, [PENDING, PENDING], "pending"),
        (0, 0, [PENDING, RUNNING], "running"),
        (0, 0, [PENDING, SUCCEEDED], "running"),
        (1, 0, [PENDING, PENDING], "running"),
        (4, 0, [SUCCEEDED, RUNNING], "succeeded"),
        (4, 1, [SUCCEEDED, SUCCEEDED], "failed"),
        (3, 0, [SUCCEEDED, SUCCEEDED], "failed"),
        (3, 0, [SUCCEEDED, CANCELLED], "cancelled"),
        (0, 0, [], "failed"),
    ],
)
def test_the_state_of_an_array_follows_from_its_items_and_its_workers(
    done: int, failed: int, workers: list[TaskState], state: str
) -> None:
    assert state_of_array(terms(4), done, failed, workers) == state


@pytest.mark.parametrize(
    ("spec", "brings_code"),
    [
        (RunSpec(kind="entrypoint", entrypoint="team:fit"), False),
        (RunSpec(kind="entrypoint", entrypoint="team:fit", upload="a" * 64), True),
        (RunSpec(kind="function"), True),
        (RunSpec(kind="command", command=("true",)), True),
    ],
)
def test_code_of_a_run_comes_with_its_task_or_is_the_operators(spec: RunSpec, brings_code: bool) -> None:
    assert spec.brings_code is brings_code
