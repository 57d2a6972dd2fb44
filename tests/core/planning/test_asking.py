"""What answers keep for one another is told as if each had looked for itself."""

from typing import Any

from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.explain.advice import advise
from gpubroker_server.core.explain.diagnosis import diagnose
from gpubroker_server.core.explain.explain import explain_pending
from gpubroker_server.core.explain.survey import Survey, SurveyCache, survey_nodes
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.world.world import World
from hypothesis import given, settings

from tests.builders import NOW, a_device, a_sample, a_task, a_world, commit, holding, submit
from tests.core.scenarios import POLICY, Chapter, Story, clusters, stories


def told(seen: Survey) -> tuple[Any, ...]:
    found = diagnose(seen)
    advice = advise(found)
    told = advice.preemption, advice.remedies, advice.free_in
    return explain_pending(found), advice.way, advice.start, *told


def who_waits(world: World) -> list[Task]:
    """The newest and the oldest."""
    waiting = sorted(name for name, task in world.tasks.items() if task.state is TaskState.PENDING)
    return [world.tasks[name] for name in dict.fromkeys(waiting[-1:] + waiting[:1])]


@given(clusters(), stories)
@settings(max_examples=12, deadline=None)
def test_survey_answers_do_not_depend_on_earlier_questions_or_events(
    world: World, story: list[Chapter]
) -> None:
    """The cache answers as a fresh survey does, whatever was asked before and happened since."""
    course, asking = Story(world), SurveyCache()
    for chapter in story:
        for _ in course.happens(chapter):
            now = Instant(course.now)
            for task in who_waits(world):
                kept = told(asking.survey_nodes(world, task, POLICY, now))
                assert kept == told(survey_nodes(Draft(world), task, POLICY, now))
        commit(world, plan_cycle(world, POLICY, Instant(course.now), budget=10_000).decisions)
        course.measure()


def test_survey_of_a_node_is_reused_until_the_node_changes() -> None:
    world, asking = a_world(holding(a_task("run", gpu_mb=60), "gpu0"), a_device(mb=80)), SurveyCache()
    small, large = a_task("small", gpu_mb=20), a_task("large", gpu_mb=80)
    submit(world, small, large)
    for now in (NOW, Instant(NOW + 1.0)):
        for task in (small, large):
            assert told(asking.survey_nodes(world, task, POLICY, now)) == told(
                survey_nodes(Draft(world), task, POLICY, now)
            )
        world.measure([a_sample("gpu0", now, by_holder={"run:1": 70})])
