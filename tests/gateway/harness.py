"""The real gateway and the real leader over one store, with agents that do what a test says.

The leader has its turns when a test, or a request to it, makes one. The store's events feed one World.
Every answer is held against the OpenAPI document: status, content type and body.
"""

import asyncio
import dataclasses
import json
import re
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, cast
from uuid import uuid4

import httpx
from gpubroker import __version__
from gpubroker.wire.policy import TaskMaximum
from gpubroker_server.adapters.secret_files import SecretFiles
from gpubroker_server.broker.dispatch import Dispatcher
from gpubroker_server.broker.inference_dispatch import InferenceDispatcher
from gpubroker_server.broker.loop import Leader
from gpubroker_server.broker.observe import Observer
from gpubroker_server.core.admission.defaults import Defaults, NamedDefaults
from gpubroker_server.core.admission.permissions import Permissions
from gpubroker_server.core.control.disk_guard import DiskGuard
from gpubroker_server.core.control.fleet import FleetSeen
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.device import Device, Node
from gpubroker_server.core.domain.leader_term import LeaderTerm
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.limits import ServiceLimits
from gpubroker_server.core.domain.orders import Ended, Ending, Failure, Gone, Heartbeat, Report, Started
from gpubroker_server.core.domain.policy import CustomLimit, Policy, Pool, TenantPolicy
from gpubroker_server.core.domain.progress import Progress
from gpubroker_server.core.domain.server_rules import ServerRules
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant, Mib, MonotonicSeconds, NodeName, Seconds, TaskId, Term
from gpubroker_server.core.lifecycle.reconcile import InventoryRules
from gpubroker_server.core.lifecycle.silent_nodes import PausedDetection
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.app import create_app, openapi_document
from gpubroker_server.gateway.parts import AppParts, OperatorRules
from gpubroker_server.http.identity import EVERY_SCOPE, Tokens, new_token
from gpubroker_server.http.waiters import Waiters
from gpubroker_server.inference.residency import ResidencyParts
from gpubroker_server.inference.server_choice import Residencies
from gpubroker_server.ports.last_values import LeaderSeen
from gpubroker_server.ports.models import ModelHost
from gpubroker_server.ports.store import CommitVerdict
from jsonschema import Draft202012Validator
from msgspec.structs import fields, replace

from tests.builders import NOW, a_device, a_node, a_sample
from tests.contracts.scenes import next_term
from tests.gateway.agents import Agents, Servers, answer_of
from tests.memory_blobs import Blobs
from tests.patience import PATIENCE_SECONDS
from tests.stores import SqliteStore

P = TypeVar("P")

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
"""The Python of the tests, in which clients pickle functions."""

DOCUMENT = openapi_document()
_OPERATIONS = [
    (re.compile(re.sub(r"\{[^}]+\}", "[^/]+", template)), operations)
    for template, operations in DOCUMENT["paths"].items()
]


POLICY = Policy(
    custom_limits=(
        CustomLimit("fpga", 2.0, per_node=True),
        CustomLimit("label:run=*", 1.0),
        CustomLimit("licence", 4.0),
        CustomLimit("pool:lab:gpus", 1.0),
        CustomLimit("seat", 2.0, priority_threshold=70),
    ),
    pools=(Pool("lab", kinds=("H100",), gpus=1),),
    maximum=TaskMaximum(memory_mb=Mib(128 * 1024)),
    tenants=(
        TenantPolicy("acme", "labs", guaranteed_mb=Mib(20 * 1024), borrow_mb=Mib(10 * 1024)),
        TenantPolicy("modest", max_priority=69),
        TenantPolicy("zeta", "labs", guaranteed_mb=Mib(40 * 1024), weight=2.0),
    ),
    streams=(("nightly", 0.5),),
)


class ManualClock:
    def __init__(self) -> None:
        self.at: Instant = NOW

    def now(self) -> Instant:
        return self.at

    def advance(self, seconds: float) -> None:
        self.at = Instant(self.at + seconds)


class Gateway:
    """`async with Gateway() as gateway:` has one node with one 80 GiB device, and an admin's client."""

    _served: Sequence[tuple[ServerRules, ModelHost]] = ()

    def __init__(self, **limits: Any) -> None:
        self.clock = ManualClock()
        self.store, self.world = SqliteStore(self.clock), World()
        self.blobs, self.secrets = Blobs(), SecretFiles(self.store.path.with_name(f"secrets-{uuid4()}"))
        self.policy = POLICY
        llm = NamedDefaults(
            priority=79,
            gpu_mb=8192,
            cpu=2.0,
            memory_mb=Mib(4096),
            timeout_seconds=Seconds(900.0),
            max_retries=1,
        )
        self.progress: dict[TaskId, Progress] = {}
        self.executor: dict[str, Any] = {"state": "connected", "address": "here", "message": ""}
        self.age, self.leader_release = 0.0, __version__
        self.shutdowns: list[bool] = []
        self.forecast_starts: list[Forecast] = []
        self.term, self.leads, self.has_leader = Term(0), True, True
        self.paused_nodes: PausedDetection | None = None
        self.silent: dict[NodeName, Instant] = {}
        self.fleet: FleetSeen | None = None
        self.full, self.hears, self.is_clock_contradicted = "", True, False
        self.parts = AppParts(
            waiters=Waiters((limited := ServiceLimits(**limits)).tenant_waits),
            store=self.store,
            blobs=self.blobs,
            secrets=self.secrets,
            follower=self,
            leadership=self,
            tokens=Tokens(self.store, self.clock),
            rules=OperatorRules(
                permissions=Permissions(
                    self.policy,
                    ("myteam.*:*", "tools:resize", "tools:Image.*"),
                    PYTHON,
                    cloudpickle="3.1",
                    env_allowed=("WANDB_*", "SEED"),
                ),
                defaults=Defaults(model_types={"llm": llm}),
                limits=limited,
                allowed_hosts=("broker.example",),
            ),
            shutdown=self.shutdowns.append,
            disk_full=lambda: self.full,
        )
        self.app = create_app(self.parts)
        self.clients: list[httpx.AsyncClient] = []
        self.agents, self.servers = Agents(), Servers()
        self.inventory, self.guard = InventoryRules("test"), DiskGuard()
        self.leading = self._new_leader()
        self._one_turn, self._turns = asyncio.Lock(), set[asyncio.Task[None]]()
        self._plans = False

    def age_seconds(self) -> float:
        return self.age

    def why_stale(self) -> str:
        return ""

    def leader(self) -> LeaderSeen | None:
        seen = LeaderSeen(
            self.term, "here:1", self.clock.now(), self.executor, paused=self.paused_nodes,
            silent=self.silent, fleet=self.fleet, lease_seconds=Seconds(2.0), release=self.leader_release,
        )  # fmt: skip
        return seen if self.has_leader else None

    def executor_status(self) -> dict[str, Any]:
        return self.executor

    def last_fleet(self) -> FleetSeen | None:
        return self.fleet

    def paused(self) -> PausedDetection | None:
        return self.paused_nodes

    def forecasts(self) -> list[Forecast]:
        return self.forecast_starts

    def change(
        self,
        *,
        policy: Policy | None = None,
        inventory: InventoryRules | None = None,
        guard: DiskGuard | None = None,
        **changes: Any,
    ) -> None:
        """Change fields of AppParts, of OperatorRules, the policy, or what the operator says of nodes and of
        their disks, for the leader and for all clients from here on."""
        rules, self.inventory = self.parts.rules, inventory or self.inventory
        self.guard = guard or self.guard
        if policy is not None:
            self.policy = policy
            changes["permissions"] = replace(rules.permissions, policy=policy)
        names = {field.name for field in fields(OperatorRules)}
        self._served = changes.pop("served", self._served)
        of_rules = {name: changes.pop(name) for name in list(changes) if name in names}
        self.parts = dataclasses.replace(self.parts, rules=replace(rules, **of_rules), **changes)
        self.parts = dataclasses.replace(self.parts, residencies=self.residencies_of(self._served))
        if any(given is not None for given in (policy, inventory, guard)):
            self.leading = self._new_leader()
        changed = create_app(self.parts)
        self.app.middleware_stack, self.app.state.parts = changed.middleware_stack, changed.state.parts

    def residencies_of(self, served: Sequence[tuple[ServerRules, ModelHost]]) -> Residencies | None:
        parts = self.parts
        mine = ResidencyParts(
            world=parts.world,
            policy=parts.policy,
            clock=parts.clock,
            store=parts.store,
            ids=parts.ids,
            waiters=parts.waiters,
            fleet=parts.capacity,
            admission=parts.rules.admission,
            forecasts=parts.leadership.forecasts,
            settle_seconds=parts.limits.settle_seconds,
        )
        return Residencies(mine, served) if served else None

    @property
    def residencies(self) -> Residencies | None:
        """Return the models of the servers that `change` has set."""
        found = self.parts.residencies
        assert found is None or isinstance(found, Residencies)
        return found

    def parts_of(self, resource: type[P]) -> P:
        """Return the object that the routes of a resource get."""
        found: P = self.app.state.parts[resource]
        return found

    async def __aenter__(self) -> "Gateway":
        self.store.listen(self._on_events)
        self.term = await next_term(self.store, "test")
        self.leading = self._new_leader()
        await self.join(a_device())
        self.world.measure([a_sample("gpu0")])
        self.admin = await self.client("admin")
        return self

    async def __aexit__(self, *_exit: object) -> None:
        await asyncio.gather(*self._turns)
        for client in self.clients:
            await client.aclose()
        await self.store.close()

    async def client(
        self,
        name: str,
        *scopes: str,
        tenant: str = "default",
        max_priority: int = 100,
        expires_at: Instant | None = None,
    ) -> "Client":
        """Return a client with a token of its own, which has every scope unless scopes are given."""
        secret, row = new_token(
            name,
            tenant=tenant,
            scopes=scopes or [EVERY_SCOPE],
            max_priority=max_priority,
            now=self.clock.now(),
            expires_at=expires_at,
        )
        await self.store.put_token(row, by="test")
        await self.parts.tokens.load()
        return self.with_secret(secret)

    def with_secret(self, secret: str | None) -> "Client":
        headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        client = Client(transport=transport, base_url="http://127.0.0.1:8470", headers=headers)
        self.clients.append(client)
        return client

    def _on_events(self, events: Sequence[Event]) -> None:
        if not self.hears:
            return
        self.world.apply(events)
        self.parts.waiters.on_events(events)
        self.parts.subscriptions.on_events(events)
        self.leading.on_events(events)
        if self.leads and any(event.kind == "request.made" for event in events):
            turn = asyncio.ensure_future(self.turn())
            self._turns.add(turn)
            turn.add_done_callback(self._turns.discard)

    def _new_leader(self) -> Leader:
        def ticks() -> MonotonicSeconds:
            return MonotonicSeconds(self.clock.at)

        rules, world, agents = self.inventory, self.world, self.agents
        inline_bytes = self.parts.limits.inline_bytes
        entrypoints = self.parts.rules.permissions.entrypoints
        leader = Leader(
            leader_term=LeaderTerm(self.term),
            ticks=ticks,
            world=world,
            policy=self.policy,
            store=self.store,
            executor=agents,
            observer=Observer(
                world, self.policy, self.blobs, rules, inline_bytes, self.progress, ticks, guard=self.guard
            ),
            dispatcher=Dispatcher(
                self.store,
                self.blobs,
                agents,
                world,
                self.clock,
                entrypoints,
                inferences=cast(InferenceDispatcher, self.servers),
                secrets=self.secrets,
            ),
            clock=self.clock,
        )
        plan = leader.planner.plan

        async def plan_if_told(stop: Callable[[], bool]) -> None:
            if self._plans:
                await plan(stop)

        # Tests say when tasks begin to get what they wait for: on an idle GPU none would wait.
        leader.planner.plan = plan_if_told  # type: ignore[method-assign]
        return leader

    async def turn(self, *reports: Report, plans: bool = False) -> None:
        """Make one cycle of the leader, which hears these reports and a heartbeat of each ready node."""
        async with self._one_turn:
            self._plans = plans
            now = self.clock.now()
            beats = [Heartbeat(node.name, now) for node in self.world.nodes.values() if node.ready]
            self.leading.hear([*reports, *beats])
            await self.leading.cycle()

    async def commit(self, *decisions: Decision) -> None:
        """Commit what no report, request or passing of time makes the leader decide."""
        verdicts = await self.store.commit(self.term, decisions)
        assert set(verdicts) <= {CommitVerdict.COMMITTED}, verdicts

    def task(self, task_id: str) -> Task:
        return self.world.tasks[TaskId(task_id)]

    async def plan(self, task_id: str) -> None:
        """Have the leader plan: this task is admitted, or gets room made for it.

        A run cannot be preempted at the moment of its admission: advance the clock before.
        """
        before = self.task(task_id), dict(self.world.pledges.get(TaskId(task_id), {}))
        await self.turn(plans=True)
        after = self.task(task_id), self.world.pledges.get(TaskId(task_id), {})
        assert before != after, f"the planner does nothing for {task_id}"

    async def hear(self, *reports: Report) -> None:
        """Make a cycle of the leader with these reports, in which nothing is planned."""
        await self.turn(*reports)

    async def join(self, *devices: Device, node: Node | None = None) -> None:
        """Have the agent of a node, or of n1, answer that these are all its devices."""
        await self.turn(answer_of(self.world, self.clock.now(), node or a_node(), devices))

    async def reopen(self) -> None:
        """Have the agents of all nodes answer again."""
        for node in list(self.world.nodes.values()):
            devices = [self.world.ledgers[key].device for key in self.world.by_node.get(node.name, ())]
            await self.join(*devices, node=node)

    async def pass_time(self, seconds: float = 0.0) -> None:
        """Let time pass for a leader that makes a cycle after each heartbeat interval."""
        end = self.clock.now() + seconds
        while True:
            await self.turn()
            left = end - self.clock.now()
            if left <= 0.0:
                return
            self.clock.advance(min(left, self.policy.beat_seconds))

    async def admit(self, task_id: str) -> None:
        """Give the task what it asks for and let it start."""
        if self.task(task_id).state is TaskState.PENDING:
            await self.plan(task_id)
        task = self.task(task_id)
        assert task.state is TaskState.ADMITTED
        await self.hear(Started(task.id, task.fence, self.clock.now(), pid=1))

    async def end(
        self,
        task_id: str,
        result: bytes = b"null",
        *,
        failure: Failure | None = None,
        form: str = "json",
        log_tail: bytes = b"",
        is_gone: bool = True,
    ) -> None:
        """Have the run end and, unless `is_gone` is false, its process go. Admit a waiting task first."""
        if self.task(task_id).state in (TaskState.PENDING, TaskState.ADMITTED):
            await self.admit(task_id)
        task, now = self.task(task_id), self.clock.now()
        ending = Ending.SUCCEEDED if failure is None else Ending.FAILED
        await self.hear(Ended(task.id, task.fence, now, ending, result, form, failure, log_tail))
        if is_gone:
            await self.hear(Gone(task.id, task.fence, now, Proof.PROCESS_ABSENT))

    async def next_task(self) -> str:
        """Wait for the first task that is submitted, and return its id."""
        await until(lambda: bool(self.world.tasks))
        return next(iter(self.world.tasks))

    async def waits(self, task_id: str) -> None:
        """Wait until some request waits for the end of this task."""
        await until(lambda: task_id in self.parts.waiters._waiting)


class Client(httpx.AsyncClient):
    """A client that checks every answer against the OpenAPI document."""

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        response = await super().send(request, **options)
        check_answer(request.method, request.url.path, response)
        return response

    async def submit(self, run: Mapping[str, Any] | None = None, **fields: Any) -> str:
        """Submit a task that must be accepted, and return its id."""
        response = await self.post("/tasks", json=a_body(run, **fields))
        assert response.status_code == 202, response.text
        return str(response.json()["id"])


def a_body(run: Mapping[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"run": run or {"entrypoint": "myteam.training:train"}, **fields}


def check_answer(method: str, path: str, response: httpx.Response) -> None:
    assert response.headers["request-id"].startswith("req_")
    operation = operation_of(method, path)
    if operation is None:
        assert response.headers["content-type"] in {"application/problem+json", "application/json"}
        return
    known = operation["responses"]
    status = str(response.status_code)
    assert status in known or status in {"404", "405", "413", "415", "421", "500", "503"}, (
        f"{method} {path} answered {status}, which its operation does not declare"
    )
    content = known.get(status, known.get("default", {})).get("content", {})
    given = response.headers.get("content-type", "").partition(";")[0]
    assert (given in content) if content else not response.content, f"{status} came as {given!r}"
    if given.endswith("json") and not given.endswith("ndjson"):
        validator = _validator(json.dumps(content[given]["schema"]))
        faults = [fault.message for fault in validator.iter_errors(response.json())]
        assert faults == [], f"{method} {path} {status}: {faults}"


@cache
def _validator(schema: str) -> Draft202012Validator:
    """Return the validator of a schema, whose references point into the document.

    It is kept, because making it takes longer than using it.
    """
    return Draft202012Validator({**json.loads(schema), "components": DOCUMENT["components"]})


def operation_of(method: str, path: str) -> dict[str, Any] | None:
    for pattern, operations in _OPERATIONS:
        if pattern.fullmatch(path.rstrip("/") or "/"):
            found: dict[str, Any] | None = operations.get(method.lower())
            if found is not None:
                return found
    return None


def problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Return the problem document of a refusal, which must have this status and code."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = json.loads(response.content)
    assert document["code"] == code
    assert document["request_id"] == response.headers["request-id"]
    return document


def fault(response: httpx.Response, pointer: str) -> str:
    """Return the detail of the fault at this place of a request that does not fit its schema."""
    faults = {
        found["pointer"]: found["detail"] for found in problem(response, 422, "validation-failed")["errors"]
    }
    assert pointer in faults, faults
    return str(faults[pointer])


async def until(true: Callable[[], object]) -> None:
    """Run the event loop until this is true; fail the test after a deadline."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not true():  # noqa: ASYNC110  # turns of the loop, not time
            await asyncio.sleep(0)


async def before(deadline_seconds: float, awaitable: Awaitable[Any]) -> Any:
    async with asyncio.timeout(deadline_seconds):
        return await awaitable
