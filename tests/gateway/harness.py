"""The real gateway over a store in memory, and a leader that decides like the real one, on demand.

Its events feed one World. Every answer is held against the OpenAPI document: status, content type and body.
"""

import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

import httpx
from gpubroker import __version__
from gpubroker_server.adapters.memory.store import MemoryStore
from gpubroker_server.adapters.memory.store_parts import MemorySecrets
from gpubroker_server.core.control.fleet import FleetSeen
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.orders import Ended, Ending, Failure, Gone, Report, Started
from gpubroker_server.core.domain.policy import CustomLimit, Policy, Pool, TaskMaximum, TenantPolicy
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, Seconds, TaskId, Term
from gpubroker_server.core.lifecycle.change_requests import carry_out_all
from gpubroker_server.core.lifecycle.deadlines import ObservationWindow, due
from gpubroker_server.core.lifecycle.runs import apply_reports
from gpubroker_server.core.lifecycle.silent_nodes import PausedDetection
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.core.world.dependencies import settle_dependencies
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.app import create_app, openapi_document
from gpubroker_server.gateway.http.bodies import RequestLimits
from gpubroker_server.gateway.http.identity import EVERY_SCOPE, Tokens, new_token
from gpubroker_server.gateway.http.waiters import Waiters
from gpubroker_server.gateway.parts import AppParts, OperatorRules
from gpubroker_server.gateway.submission.admission import Permissions
from gpubroker_server.gateway.submission.demand import Defaults, NamedDefaults
from gpubroker_server.ports.executor import Progress
from gpubroker_server.ports.last_values import LeaderSeen
from gpubroker_server.ports.store import CommitVerdict
from jsonschema import Draft202012Validator

from tests.builders import NOW, a_device, a_node, a_sample
from tests.contracts.scenes import next_term
from tests.memory_blobs import Blobs
from tests.patience import PATIENCE_SECONDS

P = TypeVar("P")

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
"""The tester's, in which clients pickle functions."""

DOCUMENT = openapi_document()


class ManualClock:
    def __init__(self) -> None:
        self.at: Instant = NOW

    def now(self) -> Instant:
        return self.at

    def advance(self, seconds: float) -> None:
        self.at = Instant(self.at + seconds)


class Gateway:
    """`async with Gateway() as gateway:` has one node with one 80 GiB device, and an admin's client."""

    def __init__(self, **limits: Any) -> None:
        self.clock = ManualClock()
        self.store, self.world = MemoryStore(now=self.clock.now), World()
        self.blobs, self.secrets = Blobs(), MemorySecrets()
        self.policy = Policy(
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
        llm = NamedDefaults(
            priority=79, gpu_mb=8192, cpu=2.0, memory_mb=4096, timeout_seconds=900.0, max_retries=1
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
            waiters=Waiters((limited := RequestLimits(**limits)).tenant_waits),
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
                    env_allowed=("WANDB_*", "SEED"),
                    cloudpickle="3.1",
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

    def change(self, *, policy: Policy | None = None, **changes: Any) -> None:
        """Change fields of AppParts, of OperatorRules, or the policy, for all clients from here on."""
        rules = self.parts.rules
        if policy is not None:
            self.policy = policy
            changes["permissions"] = replace(rules.permissions, policy=policy)
        names = {field.name for field in fields(OperatorRules)}
        of_rules = {name: changes.pop(name) for name in list(changes) if name in names}
        self.parts = replace(self.parts, rules=replace(rules, **of_rules), **changes)
        changed = create_app(self.parts)
        self.app.middleware_stack, self.app.state.parts = changed.middleware_stack, changed.state.parts

    def parts_of(self, resource: type[P]) -> P:
        """What the routes of a resource get."""
        found: P = self.app.state.parts[resource]
        return found

    async def __aenter__(self) -> "Gateway":
        self.store.listen(self._on_events)
        self.term = await next_term(self.store, "test")
        await self.commit(Decision("n1", "node_seen", nodes=(a_node(),), devices=(a_device(),)))
        self.world.measure([a_sample("gpu0")])
        self.admin = await self.client("admin")
        return self

    async def __aexit__(self, *_exit: object) -> None:
        for client in self.clients:
            await client.aclose()

    async def client(
        self,
        name: str,
        *scopes: str,
        tenant: str = "default",
        max_priority: int = 100,
        expires_at: Instant | None = None,
    ) -> "Client":
        """A client with a token of its own; every scope unless given otherwise."""
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

    def _on_events(self, events: list[Event]) -> None:
        if not self.hears:
            return
        self.world.apply(events)
        self.parts.waiters.on_events(events)
        if self.leads and any(event.kind == "request.made" for event in events):
            asyncio.get_running_loop().call_soon(asyncio.ensure_future, self.carry_out_requests())

    async def carry_out_requests(self) -> None:
        requests = list(self.world.requests.values())
        await self.commit(*carry_out_all(self.world, requests, self.clock.now(), self.policy))

    async def commit(self, *decisions: Decision) -> None:
        verdicts = await self.store.commit(self.term, decisions)
        assert set(verdicts) <= {CommitVerdict.COMMITTED}, verdicts

    def task(self, task_id: str) -> Task:
        return self.world.tasks[TaskId(task_id)]

    async def plan(self, task_id: str) -> None:
        """Commit what the planner decides for this task: its admission, or room for it. Others keep waiting.

        A run cannot be preempted at the moment of its admission: advance the clock before.
        """
        decisions = plan_cycle(self.world, self.policy, self.clock.now()).decisions
        about_it = [decision for decision in decisions if decision.subject == task_id]
        assert about_it, f"the planner does nothing for {task_id}"
        await self.commit(*about_it)

    async def hear(self, *reports: Report) -> None:
        """Commit what follows from these reports. Large results go to the blobs before their row."""
        for decision in apply_reports(self.world, reports, self.clock.now(), self.policy):
            outcome = decision.outcome
            if outcome is not None and len(outcome.result or b"") > self.parts.rules.limits.inline_bytes:
                assert outcome.result is not None
                digest = await self.blobs.put(outcome.result, owner=outcome.task)
                outcome = replace(outcome, result=None, result_digest=digest)
                decision = replace(decision, outcome=outcome)
            if not decision.is_empty():
                await self.commit(decision)

    async def reopen(self) -> None:
        """The agents of all nodes answer again, and have not looked for any process yet."""
        known = self.world.nodes.values()
        nodes = tuple(replace(node, ready=True, version=node.version + 1) for node in known)
        await self.commit(Decision("cluster", "node_seen", nodes=nodes))

    async def settle_dependencies(self) -> None:
        """Release and fail tasks after the end of their dependencies, as far as the World has it."""
        while decisions := settle_dependencies(self.world.awaited, self.world.tasks, self.clock.now()):
            await self.commit(*decisions)

    async def pass_time(self) -> None:
        """Commit what has become due, with a leader that was there all along. Advance the clock before."""
        now = self.clock.now()
        await self.commit(*due(self.world, now, self.policy, ObservationWindow(since=Instant(0.0), last=now)))

    async def admit(self, task_id: str) -> None:
        """Give the task what it asks for and let it start."""
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
        """The run has ended, and its process is gone unless given otherwise. Admits a waiting task first."""
        if self.task(task_id).state is TaskState.PENDING:
            await self.admit(task_id)
        task, now = self.task(task_id), self.clock.now()
        ending = Ending.SUCCEEDED if failure is None else Ending.FAILED
        await self.hear(Ended(task.id, task.fence, now, ending, result, form, failure, log_tail))
        if is_gone:
            await self.hear(Gone(task.id, task.fence, now, "process_absent"))

    async def next_task(self) -> str:
        """The id of the first task that is submitted."""
        await until(lambda: bool(self.world.tasks))
        return next(iter(self.world.tasks))

    async def waits(self, task_id: str) -> None:
        """Until some request waits for the end of this task."""
        await until(lambda: task_id in self.parts.waiters._waiting)


class Client(httpx.AsyncClient):
    """Checks every answer against the OpenAPI document."""

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        response = await super().send(request, **options)
        check_answer(request.method, request.url.path, response)
        return response

    async def submit(self, run: Mapping[str, Any] | None = None, **fields: Any) -> str:
        """Submit a task that must be accepted; its id."""
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
        schema = content[given]["schema"]
        whole = {**schema, "components": DOCUMENT["components"]}
        faults = [fault.message for fault in Draft202012Validator(whole).iter_errors(response.json())]
        assert faults == [], f"{method} {path} {status}: {faults}"


def operation_of(method: str, path: str) -> dict[str, Any] | None:
    for template, operations in DOCUMENT["paths"].items():
        pattern = re.sub(r"\{[^}]+\}", "[^/]+", template)
        if re.fullmatch(pattern, path.rstrip("/") or "/"):
            found: dict[str, Any] | None = operations.get(method.lower())
            if found is not None:
                return found
    return None


def problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The problem document of a refusal, which must be of this status and code."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = json.loads(response.content)
    assert document["code"] == code
    assert document["request_id"] == response.headers["request-id"]
    return document


def fault(response: httpx.Response, pointer: str) -> str:
    """The detail of the fault at this place, in a request that does not fit its schema."""
    faults = {
        found["pointer"]: found["detail"] for found in problem(response, 422, "validation-failed")["errors"]
    }
    assert pointer in faults, faults
    return str(faults[pointer])


async def until(true: Callable[[], bool]) -> None:
    """Run the event loop until this is true; fail the test after a deadline."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not true():  # noqa: ASYNC110  # turns of the loop, not time
            await asyncio.sleep(0)


async def before(deadline_seconds: float, awaitable: Awaitable[Any]) -> Any:
    async with asyncio.timeout(deadline_seconds):
        return await awaitable
