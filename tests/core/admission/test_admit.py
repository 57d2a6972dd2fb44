"""From a submission to a task or its refusals."""

from functools import partial
from typing import Any

import pytest
from gpubroker_server.core.admission.admit import like, like_with, no_such, unknown_objects, with_run
from gpubroker_server.core.admission.submission import Asked, AskedTimes
from gpubroker_server.core.domain.demand import Demand, PlacementConstraints
from gpubroker_server.core.domain.estimates import SketchKey, What
from gpubroker_server.core.domain.holders import External, Model, WorkerSeat
from gpubroker_server.core.domain.reasons import Refusal
from gpubroker_server.core.domain.submission import ItemTerms, RunSpec, SeatTerms, StoredState, bytes_of
from gpubroker_server.core.domain.task import Dependency, TaskState
from gpubroker_server.core.domain.units import Mib, Seconds, TaskId
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_sketch
from tests.core.admission.scenes import CALL, NEW, RULES, OneNode, Token, admitted, refused

COMMAND = RunSpec("command", command=("true",))


def faults(*args: Any, **fields: Any) -> list[tuple[str, str]]:
    found = refused(*args, **fields)
    assert (found.code, found.detail, found.would_be) == ("validation-failed", "", None)
    return [(fault.code, fault.field) for fault in found.faults]


def test_what_a_submission_leaves_out_gets_the_defaults() -> None:
    new = admitted()
    task = new.task
    assert (task.id, task.tenant, task.submitted_at, task.subject) == (NEW, "default", NOW, CALL.entrypoint)
    assert (task.priority, task.max_retries, task.timeout_seconds, task.grace_seconds) == (50, 1, None, 30.0)
    assert (task.demand, new.spec, task.queued_bytes) == (Demand(cpu=1.0), CALL, 2)


def test_a_profile_goes_before_a_model_type_and_this_before_the_rest() -> None:
    spec = replace(CALL, model_type="llm", profile="scorer")
    new = admitted(spec=spec)
    assert new.task.demand == Demand(cpu=1.0, memory_mb=Mib(4096))
    assert (new.task.priority, new.task.max_retries, new.task.timeout_seconds) == (79, 2, 900.0)
    assert (new.spec.max_concurrency, new.task.subject) == (100, "llm")
    assert admitted(spec=replace(spec, max_concurrency=3)).spec.max_concurrency == 3


def test_what_a_submission_says_goes_before_all_defaults() -> None:
    limits = {"priority": 3, "max_retries": 0, "timeout_seconds": 9.0, "grace_seconds": 4.0}
    task = admitted(
        spec=replace(CALL, model_type="llm"), name="n", expected_seconds=7.0, held=True, **limits
    ).task
    assert {name: getattr(task, name) for name in limits} == limits
    assert (task.name, task.expected_seconds, task.held) == ("n", 7.0, True)


def test_all_that_is_invalid_is_reported_together() -> None:
    states = {
        TaskId("mine"): StoredState("default", TaskState.PENDING),
        TaskId("theirs"): StoredState("other", TaskState.PENDING),
    }
    after = tuple(Dependency(TaskId(id)) for id in ("mine", "theirs", "mine", "gone"))
    assert faults(
        spec=replace(CALL, profile="scorr"),
        stream="nightyl",
        after=after,
        times=AskedTimes(deadline_at=NOW - 1),
        known={"dependencies": states, "streams": ("nightly",)},
    ) == [
        ("unknown", "/stream"),
        ("unknown", "/profile"),
        ("unknown-task", "/after/1/task"),
        ("named-twice", "/after/2/task"),
        ("unknown-task", "/after/3/task"),
        ("deadline-passed", "/deadline_at"),
    ]


def test_a_task_waits_for_its_dependencies_and_its_queue_ttl_waits_too() -> None:
    after = (Dependency(TaskId("mine")),)
    states = {TaskId("mine"): StoredState("default", TaskState.PENDING)}
    task = admitted(
        after=after,
        stream="nightly",
        times=AskedTimes(queue_ttl_seconds=60.0),
        known={"dependencies": states, "streams": ("nightly",)},
    ).task
    assert (task.after, task.awaits, task.stream) == (after, True, "nightly")
    assert (task.queue_ttl_seconds, task.expires_at) == (60.0, None)


def test_a_name_that_is_meant_is_offered_else_those_that_there_are() -> None:
    assert no_such("profile", "scorr", ["scorer"]) == 'there is no profile "scorr"; did you mean "scorer"?'
    assert no_such("profile", "x", ["scorer", "a"]) == 'there is no profile "x"; there are: a, scorer'
    assert no_such("work stream", "x", ()) == 'there is no work stream "x"; there are: none'


def test_a_learned_size_is_kept_with_how_it_was_learned() -> None:
    sketches = {
        SketchKey("default", CALL.entrypoint, "H100", What.GPU_MB): a_sketch(8.0 * GIB for _ in range(9))
    }
    new = admitted(demand=Asked(gpu_mb="learned"), fleet=OneNode(sketches))
    assert new.spec.sizing is not None
    assert new.task.demand.gpu_mb == new.spec.sizing.gpu_mb == pytest.approx(1.15 * 8 * GIB, rel=0.02)
    assert admitted(demand=Asked(gpus=1), fleet=OneNode(sketches)).task.demand == Demand(gpus=1)


def test_a_pool_that_does_not_fit_is_refused_where_the_body_names_it() -> None:
    found = refused(demand=Asked(gpus=1, pool="attic"))
    assert (found.code, found.faults[0].field, found.would_be) == ("pool-mismatch", "/resources/pool", None)
    inside = admitted(demand=Asked(gpus=1, pool="lab")).task.demand
    assert (inside.pool, inside.slots) == ("lab", (("pool:lab:gpus", 1.0),))


@pytest.mark.parametrize(
    ("spec", "demand", "is_shareable"),
    [
        (CALL, Asked(cpu=0.5), True),
        (CALL, Asked(cpu=1.0), False),
        (CALL, Asked(cpu=0.5, gpu_mb=1), False),
        (CALL, Asked(cpu=0.5, memory_mb=1), False),
        (CALL, Asked(bundles=(Asked(cpu=0.1),)), False),
        (replace(CALL, env={"SEED": "1"}), Asked(cpu=0.5), False),
        (replace(CALL, roles=("train",)), Asked(cpu=0.5), False),
        (COMMAND, Asked(cpu=0.5), False),
    ],
)
def test_only_a_small_entrypoint_without_variables_shares_a_process(
    spec: RunSpec, demand: Asked, is_shareable: bool
) -> None:
    assert admitted(spec=spec, demand=demand).task.shareable is is_shareable


def test_a_worker_of_an_array_is_restarted_by_the_service() -> None:
    spec = replace(CALL, items=ItemTerms(NEW))
    task = admitted(spec=spec, demand=Asked(cpu=0.1)).task
    assert (task.holder, task.max_retries, task.shareable) == (WorkerSeat(NEW), 10, False)


def test_a_worker_of_a_set_stays_until_its_set_is_ended() -> None:
    spec = replace(CALL, model_type="llm", seat=SeatTerms(NEW))
    task = admitted(spec=spec, max_retries=2**31 - 1).task
    assert (task.max_retries, task.timeout_seconds, task.held) == (2**31 - 1, None, True)


def test_an_external_lease_asks_for_memory_and_gets_no_defaults_of_runs() -> None:
    terms = External(Seconds(60.0), 7)
    where = PlacementConstraints(nodes=(("node", ("n1",)),))
    asked = Asked(gpus=1, gpu_mb=GIB, cpu=0.0, memory_mb=0, where=where)
    times = AskedTimes(deadline_seconds=60.0)
    task = admitted(spec=RunSpec("external"), demand=asked, times=times, holder=terms, name="vllm").task
    assert task.demand == Demand(gpus=1, gpu_mb=Mib(GIB), where=where)
    assert (task.priority, task.max_retries, task.grace_seconds, task.subject) == (50, 0, 30.0, "")
    assert (task.holder, task.deadline_at) == (terms, NOW + 60)
    large = refused(spec=RunSpec("external"), demand=Asked(gpus=1, gpu_mb=999 * GIB), holder=terms)
    assert large.faults[0].field == "/gpu_mb"


def test_an_inference_needs_nothing_of_nodes_and_no_grace() -> None:
    asked = Asked(gpus=0, cpu=0.0, memory_mb=0, answered_by="resnet")
    task = admitted(spec=RunSpec("inference", "resnet", model_type="llm"), demand=asked).task
    assert task.demand == Demand(answered_by="resnet")
    assert (task.priority, task.max_retries, task.timeout_seconds, task.grace_seconds) == (79, 1, 900.0, 0.0)


def a_model(sender: None = None, **fields: Any) -> Any:
    terms = Model("triton", fields.pop("model_name", "resnet"), Seconds(300.0))
    usual = {"spec": RunSpec("model"), "max_retries": 9, "grace_seconds": 1.0, "priority": 100}
    return {**usual, "sender": sender, "holder": terms, **fields}


def test_model_is_wanted_as_long_as_its_terms_say_and_needs_no_permission() -> None:
    task = admitted(**a_model(demand=Asked(gpus=1, gpu_mb=GIB, cpu=0.0), tenant="modest")).task
    assert (task.priority, task.max_retries, task.timeout_seconds, task.expires_at) == (
        100,
        9,
        None,
        NOW + 300,
    )
    base = admitted(**a_model(model_name="", demand=Asked(gpus=1, gpu_mb=GIB), held=True)).task
    assert (base.expires_at, base.held) == (None, True)


def test_model_that_fits_nowhere_is_refused_unless_it_is_already_loaded() -> None:
    large = a_model(demand=Asked(gpus=1, gpu_mb=999 * GIB, cpu=0.0))
    found = refused(**large)
    assert (found.code, found.faults[0].field) == ("exceeds-capacity", "/gpu_mb")
    assert admitted(**large, held=True).task.demand.gpu_mb == 999 * GIB


def test_autoscaler_admits_tasks_that_no_node_could_take_but_no_models() -> None:
    policy = replace(RULES.permissions.policy, autoscaler="keda")
    rules = replace(RULES, permissions=replace(RULES.permissions, policy=policy))
    large = Asked(gpus=1, gpu_mb=999 * GIB, cpu=0.0)
    assert refused(demand=large).code == "exceeds-capacity"
    assert admitted(demand=large, rules=rules).task.demand.gpu_mb == 999 * GIB
    assert refused(**a_model(demand=large), rules=rules).code == "exceeds-capacity"


def test_a_task_that_is_done_again_keeps_its_demand_and_its_limits() -> None:
    demand = Demand(gpus=1, pool="gone", slots=(("pool:gone:gpus", 1.0),))
    again = replace(CALL, model_type="llm", retry_of=TaskId("old"))
    task = admitted(spec=again, demand=demand, priority=3, max_retries=2, grace_seconds=5.0).task
    assert task.demand is demand
    assert (task.max_retries, task.timeout_seconds, task.shareable) == (2, None, False)


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"spec": COMMAND}, "forbidden", ""),
        ({"spec": replace(CALL, entrypoint="os:system")}, "entrypoint-not-allowed", "/run/entrypoint"),
        ({"spec": replace(CALL, env={"PATH": "/"})}, "forbidden", "/env/PATH"),
        ({"priority": 81}, "priority-not-allowed", "/priority"),
        ({"spec": replace(CALL, env={"SEED": "secret:seed"})}, "forbidden", ""),
    ],
)
def test_submission_the_token_forbids_is_refused_with_the_task_it_would_be(
    fields: dict[str, Any], code: str, field: str
) -> None:
    found = refused(Token(("tasks:write",), max_priority=80), **fields)
    assert (found.code, [fault.field for fault in found.faults]) == (code, [field] if field else [])
    assert found.would_be is not None
    assert found.would_be.task.id == NEW


def test_a_default_priority_is_lowered_to_the_cap_of_the_token() -> None:
    low, high = Token(("tasks:write",), max_priority=20), Token(("tasks:write",), max_priority=80)
    assert [admitted(token, spec=CALL).task.priority for token in (low, high)] == [20, 50]
    assert refused(low, spec=CALL, priority=50).code == "priority-not-allowed"


def test_secrets_and_objects_that_the_tenant_lacks_are_reported_together() -> None:
    spec = replace(CALL, env={"A": "secret:here", "B": "secret:gone"})
    known = {"secrets": ("here",), "missing_objects": {"/run/args/0": "ab"}, "object_seconds": 60.0}
    found = refused(spec=spec, known=known)
    assert [(fault.code, fault.field) for fault in found.faults] == [
        ("unknown-object", "/run/args/0"),
        ("unknown-secret", "/env/B"),
    ]
    assert "or name one that it has: here" in found.faults[1].message
    assert "one that it has: none yet" in refused(spec=spec).faults[0].message
    assert admitted(spec=replace(CALL, env={"A": "secret:here"}), known=known | {"missing_objects": {}})


def test_of_many_missing_objects_ten_are_named() -> None:
    missing = {f"/items/{at}": str(at) for at in range(12)}
    assert [fault.field for fault in unknown_objects(missing, 60.0)] == [f"/items/{at}" for at in range(10)]


def test_submission_over_the_quota_or_the_maximum_is_refused() -> None:
    """So is one of a lower priority for a resource that is kept for higher ones."""
    seat = Asked(custom=(("seat", 1.0),))
    found = refused(demand=seat, priority=3)
    assert (found.code, found.faults[0].field) == ("priority-too-low", "/resources/custom/seat")
    assert admitted(demand=seat, priority=70)
    found = refused(Token(tenant="acme"), demand=Asked(gpu_mb=30 * GIB))
    assert (found.code, found.faults[0].field) == ("exceeds-quota", "/resources/gpu_mb")
    assert admitted(Token(tenant="acme"), demand=Asked(gpu_mb=GIB))
    found = refused(max_retries=6)
    assert (found.code, found.faults[0].field) == ("exceeds-maximum", "/max_retries")
    assert refused(demand=Asked(cpu=1e6)).faults[0].field == "/resources/cpu"


def test_alike_tasks_share_all_but_their_ids_and_their_runs() -> None:
    first = admitted(spec=replace(CALL, labels={"team": "x"}))
    other = like_with(first, TaskId("other"), b"[1,2,3]")
    assert (other.task.id, other.spec.arguments, other.like) == ("other", b"[1,2,3]", first)
    assert other.task.queued_bytes == bytes_of(other.spec)
    assert like(first, TaskId("other"), other.spec) == other


def test_a_task_that_gets_its_arguments_later_keeps_their_bytes() -> None:
    new = admitted()
    filled = with_run(new, replace(new.spec, arguments=b"12345"))
    assert (filled.task.queued_bytes, filled.task.id) == (5, new.task.id)


def test_rank_may_name_a_profile_and_an_unknown_one_is_refused() -> None:
    gang = Asked(bundles=(Asked(profile="trainer"), Asked(cpu=2.0)))
    assert [rank.gpus for rank in admitted(demand=gang).task.demand.bundles] == [1, 0]
    unknown = Asked(bundles=(Asked(profile="nobody"), Asked(cpu=2.0)))
    assert faults(demand=unknown) == [("unknown", "/resources/bundles")]


class TooSmall(OneNode, frozen=True):
    """A fleet that no demand with GPUs fits."""

    def refusal(self, demand: Demand) -> Refusal | None:
        return Refusal("exceeds-capacity", "there are no 9 GPUs", "gpus")


def test_refusal_names_ranks_with_gpus_only_by_the_profile_of_the_task() -> None:
    spec, ask = replace(CALL, profile="trainer"), partial(refused, fleet=TooSmall())
    found = ask(spec=spec, demand=Asked(bundles=(Asked(gpus=9), Asked(cpu=2.0))))
    hint = (
        "there are no 9 GPUs; ranks that state no GPUs have those of profile trainer (rank 1): give gpus: 0"
    )
    assert found.faults[0].message.startswith(hint)
    for stated in (Asked(bundles=(Asked(gpus=9), Asked(cpu=2.0, gpus=0))), Asked(gpus=9), Demand(gpus=9)):
        assert ask(spec=spec, demand=stated).faults[0].message == "there are no 9 GPUs"
    assert ask(demand=Asked(gpus=9)).faults[0].message == "there are no 9 GPUs"
