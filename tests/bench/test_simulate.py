"""The short form of `python -m bench simulate`: hours of a small cluster, again and under other policies."""

import json
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench import simulate
from bench.simulate.history import NoHistory, a_history
from bench.simulate.replay import Replay, Seen
from bench.simulate.work import Scene, Work, a_day, a_node
from service.core.codec import device_fields, node_fields
from service.core.demand import Demand
from service.core.events import NewEvent
from service.core.policy import Policy
from service.core.task import Task
from service.core.units import Instant, Mib, TaskId

GIB = 1024


def a_scene(*works: Work, gpus: int = 1) -> Scene:
    node, devices = a_node("n1", gpus, 64.0, 512 * GIB, "H100", 80 * GIB)
    return Scene("test", [node], devices, works)


def work(
    name: str, at: float, seconds: float, *, gib: int, priority: int = 50, checkpoints: bool = True
) -> Work:
    demand = Demand(gpus=1, gpu_mb=Mib(gib * GIB))
    return Work(Task(TaskId(name), "red", name, priority, demand, Instant(at)), seconds, checkpoints)


def test_one_device_of_work_is_used_as_long_as_it_takes() -> None:
    seen = Replay(a_scene(work("a", 0, 100, gib=40), work("b", 200, 1, gib=40)), Policy()).run()
    assert seen.ended == 2
    assert seen.seconds == 200
    assert seen.figures()["utilisation"][0] == pytest.approx(100 * 0.5 * 100.1 / 200)


def test_who_cannot_checkpoint_loses_what_he_did() -> None:
    def lost(*, checkpoints: bool) -> Seen:
        victim = work("low", 0, 1000, gib=60, priority=20, checkpoints=checkpoints)
        return Replay(a_scene(victim, work("high", 500, 10, gib=60, priority=90)), Policy()).run()

    assert (lost(checkpoints=True).preemptions, lost(checkpoints=True).lost_gpu_seconds) == (1, 0.0)
    assert lost(checkpoints=False).lost_gpu_seconds == pytest.approx(499.9)
    assert lost(checkpoints=False).drained_seconds > lost(checkpoints=True).drained_seconds + 400


def test_the_same_seed_is_the_same_day_and_another_policy_makes_another_of_it() -> None:
    scene = a_day(3, hours=3.0, gpus=8, load=1.5)
    shipped, again = Replay(scene, Policy()).run(), Replay(scene, Policy()).run()
    assert shipped == again
    assert shipped.preemptions > 0
    calm = Replay(scene, replace(Policy(), preemption=False)).run()
    assert calm.preemptions == 0
    assert calm.ended == shipped.ended == len(scene.works)
    assert calm.waits != shipped.waits


class Recorded(Replay):
    """Writes down what a service would have told of it."""

    def __init__(self, scene: Scene, policy: Policy) -> None:
        self.told: list[str] = []
        super().__init__(scene, policy)

    def _append(self, events: Iterable[NewEvent]) -> None:
        lines = list(events)
        for event in lines:
            told = {
                "kind": event.kind,
                "key": event.key,
                "at": float(self._now),
                "fields": dict(event.fields),
            }
            self.told.append(json.dumps(told))
        super()._append(lines)


def _inventory(scene: Scene) -> Iterator[str]:
    for node in scene.nodes:
        yield json.dumps({"kind": "node.seen", "key": node.name, "at": 0.0, "fields": node_fields(node)})
    for device in scene.devices:
        yield json.dumps(
            {"kind": "device.seen", "key": device.key, "at": 0.0, "fields": device_fields(device)}
        )


def test_what_a_service_did_can_be_replayed_from_its_events(tmp_path: Path) -> None:
    scene = a_day(4, hours=1.0, gpus=8, load=1.0)
    recorded = Recorded(scene, replace(Policy(), preemption=False))
    first = recorded.run()
    path = tmp_path / "may.ndjson"
    path.write_text("\n".join([*_inventory(scene), *recorded.told]))
    read = a_history(path)
    assert (read.name, len(read.devices), len(read.works)) == ("history-may", 8, len(scene.works))
    again = Replay(read, replace(Policy(), preemption=False)).run()
    assert again.waits == first.waits


def test_a_history_without_a_beginning_says_how_to_export_one(tmp_path: Path) -> None:
    path = tmp_path / "half.ndjson"
    path.write_text('{"kind": "task.started", "key": "t", "at": 1.0, "fields": {}}\n')
    with pytest.raises(NoHistory, match=r"0 devices and 0 tasks.*gpubroker events"):
        a_history(path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x:speed=3", "no setting 'speed'; known are ageing"),
        ("x:preemption=1", "true or false"),
        ("x:preemption_budget=a", "takes a int"),
    ],
)
def test_a_wrong_policy_says_what_there_is_to_set(text: str, why: str) -> None:
    with pytest.raises(ArgumentTypeError, match=why):
        simulate.named_policy(text)


def test_policies_stand_side_by_side() -> None:
    parser = ArgumentParser()
    simulate.add_options(parser)
    options = parser.parse_args(
        [
            "--day",
            "3",
            "--hours",
            "1",
            "--gpus",
            "8",
            "--policy",
            "shipped",
            "--policy",
            "calm:preemption=false",
        ]
    )
    figures = {figure.figure: figure.value for figure in simulate.measure(options)}
    assert figures["simulate.day3.calm.preemptions"] == 0
    assert figures["simulate.day3.shipped.utilisation"] > 0
