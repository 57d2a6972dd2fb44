"""Gangs on the command line."""

import pytest
from gpubroker import Task
from gpubroker.cli.tasks.view import demand
from gpubroker.transport.decoding import decode

from tests.client.command_line import Run
from tests.client.recorded_service import FULL_ID, RecordedService, Reply, a_task

RANKS = [
    {
        "rank": 0,
        "node": "n1",
        "state": "running",
        "devices": [{"uuid": "GPU-a", "gpu_mb": 1024, "state": "held"}],
    },
    {"rank": 1, "node": "n2", "state": "succeeded", "devices": []},
]


def test_bundles_are_read_with_their_sizes(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(202, a_task(FULL_ID)))
    words = "--bundle count=4,gpu_mb=18GiB,kinds=H100/A100 --bundle cpu=2,min_device_mb=40GiB,custom.fpga=1"
    assert run(f"submit a:b {words} --strategy spread --min-ranks 3").code == 0
    assert service.requests[0].body["resources"] == {
        "bundles": [
            {"count": 4, "gpu_mb": 18432, "kinds": ["H100", "A100"]},
            {"cpu": 2, "min_device_mb": 40960, "custom": {"fpga": 1}},
        ],
        "strategy": "spread",
        "min_ranks": 3,
    }


def test_a_bundle_without_a_field_name_is_refused(service: RecordedService, run: Run) -> None:
    ended = run("submit a:b --bundle 4")
    assert ended.code == 2
    assert "write NAME=VALUE" in ended.err


def test_a_gang_is_shown_rank_by_rank(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(200, a_task(FULL_ID, "running", ranks=RANKS)))
    shown = run(f"show {FULL_ID}").out
    assert "0: running on n1 GPU-a" in shown
    assert "1: succeeded on n2" in shown


def test_the_ranks_of_a_task_are_decoded() -> None:
    task = decode(Task, a_task(FULL_ID, "running", ranks=RANKS))
    assert task.ranks is not None
    assert [(rank.rank, rank.node, rank.state) for rank in task.ranks] == [
        (0, "n1", "running"), (1, "n2", "succeeded"),
    ]  # fmt: skip
    assert task.ranks[0].devices[0].gpu_mb == 1024
    assert decode(Task, a_task(FULL_ID)).ranks is None


@pytest.mark.parametrize(
    ("bundles", "shown"),
    [
        ([{"count": 4, "gpus": 1, "gpu_mb": 1024}], "4 ranks of 1.0 GiB"),
        ([{"count": 2, "gpus": 1}, {"count": 1, "gpus": 0}], "2 ranks of 1 whole + 1 rank"),
    ],
)
def test_the_demands_of_ranks_are_shown_in_one_line(bundles: list[dict[str, int]], shown: str) -> None:
    assert demand({"bundles": bundles}) == shown


def test_an_elastic_gang_shows_its_least_number_of_ranks() -> None:
    bundles = [{"count": 4, "gpus": 1, "gpu_mb": 1024}]
    assert demand({"bundles": bundles, "min_ranks": 2}) == "4 ranks of 1.0 GiB, at least 2"
    assert demand({"bundles": bundles, "min_ranks": 4}) == "4 ranks of 1.0 GiB"
