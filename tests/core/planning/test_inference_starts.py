"""When a queued inference is expected to be sent, and that nothing is told where nobody can tell."""

from gpubroker_server.core.domain.model_orders import ModelState
from gpubroker_server.core.domain.policy import InferenceServers, Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.explain.blockers import expected_send_at
from gpubroker_server.core.planning.forecasts.forecast_rounds import ExpectedStart
from gpubroker_server.core.planning.forecasts.reservations import Basis, Forecast
from gpubroker_server.core.planning.inferences import admissions
from gpubroker_server.core.world.world import World

from tests.builders import a_world, commit, submit
from tests.core.served import LLM, a_model, an_inference, at, index, plan, the

POLICY = Policy(serving=InferenceServers(ledger=("main",), at_once=2))


def a_timed_model() -> Task:
    return a_model(terms={"load_seconds": Seconds(20.0)})


def start(world: World, seconds: float, *forecasts: Forecast, task: str = "ask") -> ExpectedStart | None:
    return expected_send_at(world, the(world, task), POLICY, forecasts, at(seconds))


def test_inference_waiting_for_its_model_starts_when_that_is_expected() -> None:
    world = a_world()
    submit(world, a_timed_model(), an_inference())
    assert start(world, 1.0) is None, "nobody can tell when there is room"
    forecast = Forecast(LLM, (), at(60), at(90), at(400), 7, Basis.LEARNED)
    assert start(world, 1.0, forecast) == ExpectedStart(at(80), at(110), 7, Basis.LEARNED)
    plan(world, 5.0)
    assert start(world, 6.0) == ExpectedStart(at(25), at(25), 0, Basis.STATED)
    assert start(world, 30.0) == ExpectedStart(at(30), at(30), 0, Basis.STATED), "any moment"


def test_a_model_that_was_never_loaded_has_no_expected_start() -> None:
    world = a_world()
    submit(world, a_model(), an_inference())
    plan(world, 5.0)
    assert start(world, 6.0) is None


def test_inferences_that_wait_for_answers_have_no_expected_start() -> None:
    world = a_world()
    submit(world, a_timed_model(), *(an_inference(f"ask{number}") for number in range(3)))
    plan(world, 5.0)
    assert start(world, 6.0, task="ask0") is None, "two are sent at once, and three wait"
    index(world, {"llm": ModelState.READY})
    commit(world, admissions(world, POLICY, at(7)), at(7))
    assert start(world, 8.0, task="ask2") is None, "its model is there, and busy"


def test_an_inference_that_may_not_begin_yet_has_no_expected_start() -> None:
    world = a_world()
    submit(world, a_timed_model(), an_inference(not_before=at(100)))
    plan(world, 5.0)
    assert start(world, 6.0) is None
