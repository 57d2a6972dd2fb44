"""The environments of runs on this node: prepared when the leader asks, kept for any number of runs, and
handed to each run that starts."""

import asyncio
import contextlib
import pwd
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import structlog
from gpubroker.runtime.messages import Report, RunKey, RunOrder
from gpubroker.user_places import home_directory

from gpubroker_server.adapters.environments.brought import Brought
from gpubroker_server.adapters.environments.builder import (
    build,
    build_user,
    compile_packages,
    lay_out,
    size_below,
)
from gpubroker_server.adapters.environments.cache import EnvironmentCache
from gpubroker_server.adapters.environments.containers import ContainerRun, container_words, fetch_image
from gpubroker_server.adapters.environments.interpreters import CannotPrepare, Interpreter, find_interpreter
from gpubroker_server.adapters.environments.processes import ProcessUser
from gpubroker_server.adapters.ray.agent.run_directories import work_directory
from gpubroker_server.adapters.ray.agent.shared_objects import Failed
from gpubroker_server.adapters.ray.options import AgentConfig
from gpubroker_server.core.domain.environment import (
    ENVIRONMENT_FAILED,
    Environment,
    EnvironmentKind,
    EnvironmentState,
    NodeEnvironment,
)
from gpubroker_server.core.domain.units import Instant

log = structlog.get_logger("gpubroker.agent")

BUILDS_AT_ONCE = 2
LEAST_PYTHON = (3, 11)
"""The first minor version of Python that calls functions. Commands run in any."""
PASSED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "GPUBROKER_ATTEMPT", "GPUBROKER_INSTANCE", "GPUBROKER_NODE",
    "GPUBROKER_RESUME_URI", "GPUBROKER_RUN", "GPUBROKER_TASK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOG_LEVEL",
    "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE",
)  # fmt: skip
"""The variables of a run's process that a container gets, besides those of the task and the operator."""
LOG_BYTES = 2**20
Do = Callable[[str, Callable[[], Coroutine[Any, Any, None]]], None]


def home_of(task_user: str) -> str:
    """Return the home directory of the user that runs tasks, by default that of this process; empty if the
    system knows none."""
    if not task_user:
        return str(home_directory() or "")
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(task_user).pw_dir
    return ""


class RunEnvironments:
    """Prepares the environments of one node. All methods run on one event loop."""

    def __init__(self, config: AgentConfig, report: Callable[[Report], None], do: Do) -> None:
        """`do` runs a job in the background and repeats it until it succeeds."""
        self._config = config
        self._rules = config.environments
        root = work_directory(config) / "environments"
        self._cache = EnvironmentCache(root, self._rules.cache_mb * 2**20)
        self._brought = Brought(root)
        self._report = report
        self._do = do
        self._states: dict[str, NodeEnvironment] = {}
        self._turns = asyncio.Semaphore(BUILDS_AT_ONCE)

    async def adopt(self) -> None:
        """Take over what an earlier agent has prepared."""
        try:
            await asyncio.to_thread(self._cache.adopt)
        except OSError as fault:
            log.error("environments of earlier runs cannot be used", fault=str(fault))
        now = Instant(time.time())
        for key, known in self._cache.items().items():
            self._states[key] = NodeEnvironment(key, EnvironmentState.READY, now, python=known.python)

    def prepare(self, key: str, tenant: str, definition: str, project: bytes) -> None:
        """Begin to prepare an environment. For one that is ready or under way, only its state is reported
        again; one that has failed is tried again."""
        state = self._states.get(key)
        is_ready = state is not None and state.state is EnvironmentState.READY
        if is_ready and self._cache.find(key) is None:
            is_ready, state = False, None
        if state is not None and state.state is not EnvironmentState.FAILED:
            self._report(_reported(state))
            return
        self._set(key, EnvironmentState.PREPARING, "waiting for its turn to build")
        environment = msgspec.json.decode(definition, type=Environment)
        self._do(f"preparing environment {key}", partial(self._prepare, key, tenant, environment, project))

    def states(self) -> list[tuple[Any, ...]]:
        """Return the state of each environment, as the answer to an announcement contains it."""
        return [_values(state) for state in self._states.values()]

    def take(self, order: RunOrder) -> RunOrder | Failed | None:
        """Return the order with the environment of its run filled in, and keep the environment until `leave`.
        Returns a failure if the environment cannot run this kind of run, and None if the node no longer has
        it; the leader then has it prepared again."""
        known = self._cache.find(order.environment)
        if known is None:
            self._states.pop(order.environment, None)
            self._report(("environment", time.time(), order.environment, None, "", "", ""))
            return None
        if order.kind != "command" and (why := _why_no_functions(known)):
            return ENVIRONMENT_FAILED, why
        try:
            brought = self._brought.for_commands if order.kind == "command" else self._brought.for_functions
            path = brought()
        except OSError as fault:
            return ENVIRONMENT_FAILED, f"its node cannot copy gpubroker.runtime for its environment: {fault}"
        self._cache.use(order.environment, order.key)
        return replace(
            order,
            interpreter=known.interpreter,
            prefix=known.prefix,
            brought=path,
            container=self._container_words(order, known),
        )

    def _container_words(self, order: RunOrder, known: Interpreter) -> tuple[str, ...]:
        if not known.container:
            return ()
        engine, image = known.container
        user = ProcessUser.named(self._config.task_user)
        name = f"gpubroker-{order.task}-{order.fence}-{order.rank}"
        variables = sorted({*order.env, *PASSED_VARIABLES, *(name for name, _ in self._config.task_env)})
        run = ContainerRun(
            name, order.working_directory, f"{user.uid}:{user.gid}" if user.uid >= 0 else "",
            [uuid for uuid, _ in order.leases], self._rules.container_mounts, variables,
        )  # fmt: skip
        return container_words(engine, image, run)

    def keep(self, order: RunOrder) -> None:
        """Keep the environment of a run that an earlier agent started."""
        if order.environment:
            self._cache.use(order.environment, order.key)

    def leave(self, run: RunKey) -> None:
        """Note that a run is gone, so that its environment may be removed."""
        self._cache.leave(run)

    def setup_log(self, key: str) -> Path:
        """Return the file with what the preparation of an environment has printed."""
        return self._cache.log_of(key)

    async def _prepare(self, key: str, tenant: str, environment: Environment, project: bytes) -> None:
        async with self._turns:
            try:
                prepared = await self._prepared(key, tenant, environment, project)
                removed = await asyncio.to_thread(self._cache.add, key, prepared)
            except (CannotPrepare, OSError, KeyError) as fault:
                log.warning("an environment cannot be prepared", environment=key, fault=str(fault))
                message = str(fault) if isinstance(fault, CannotPrepare) else f"its node cannot: {fault}"
                await asyncio.to_thread(self._cache.clear_work, key)
                self._set(key, EnvironmentState.FAILED, message=message)
                return
            await asyncio.to_thread(self._cache.clear_work, key)
        self._set(key, EnvironmentState.READY, python=prepared.python)
        if prepared.size_bytes:
            self._do(
                f"compiling environment {key}", partial(compile_packages, prepared, self._user(), self._rules)
            )
        for gone in removed:
            self._states.pop(gone, None)
            self._report(("environment", time.time(), gone, None, "", "", ""))

    async def _prepared(self, key: str, tenant: str, environment: Environment, project: bytes) -> Interpreter:
        """Return how runs use the environment. Raises CannotPrepare, OSError and KeyError."""
        node, rules = self._config.node, self._rules
        await asyncio.to_thread(self._cache.open)
        # The log tells later runs of the environment how it was prepared.
        match environment.kind:
            case EnvironmentKind.INTERPRETER:
                self._set(key, EnvironmentState.PREPARING, "looking for its interpreter")
                user = ProcessUser.named(self._config.task_user)
                return await find_interpreter(
                    environment, rules.conda_roots, home_of(self._config.task_user), user, node
                )
            case EnvironmentKind.CONTAINER:
                self._set(key, EnvironmentState.PREPARING, "fetching its image")
                return Interpreter(container=await fetch_image(environment.container, rules, node))
            case _:
                return await self._built(key, tenant, environment, project)

    async def _built(self, key: str, tenant: str, environment: Environment, project: bytes) -> Interpreter:
        place = self._cache.place(key, tenant)
        user = self._user()
        await asyncio.to_thread(lay_out, environment, project, place, user)
        with self._cache.log_of(key).open("wb") as file:
            prepared = await build(
                environment, place, self._rules, user, self._config.node,
                partial(_write, file), partial(self._step, key), asyncio.sleep,
            )  # fmt: skip
        size_bytes = await asyncio.to_thread(size_below, place.target)
        return msgspec.structs.replace(prepared, size_bytes=max(1, size_bytes))

    def _user(self) -> ProcessUser:
        return build_user(self._rules, self._config.task_user)

    def _step(self, key: str, step: str) -> None:
        if self._states[key].step != step:
            self._set(key, EnvironmentState.PREPARING, step)

    def _set(
        self, key: str, state: EnvironmentState, step: str = "", *, python: str = "", message: str = ""
    ) -> None:
        entry = NodeEnvironment(key, state, Instant(time.time()), step, python, message)
        self._states[key] = entry
        self._report(_reported(entry))


def _values(entry: NodeEnvironment) -> tuple[Any, ...]:
    return entry.key, entry.state.value, entry.since, entry.step, entry.python, entry.message


def _reported(entry: NodeEnvironment) -> Report:
    key, state, since, *rest = _values(entry)
    return ("environment", since, key, state, *rest)


def _why_no_functions(known: Interpreter) -> str:
    """Return why no function can be called in an environment; empty if one can."""
    if not known.interpreter:
        return "its environment has no Python that calls functions; submit a command instead"
    if tuple(map(int, known.python.split("."))) < LEAST_PYTHON:
        least = ".".join(map(str, LEAST_PYTHON))
        return (
            f"its environment has Python {known.python}, and functions need {least} or newer; submit a "
            "command (python -m your_module), or choose another Python"
        )
    return ""


def _write(file: BinaryIO, line: str) -> None:
    if file.tell() < LOG_BYTES:
        file.write(line.encode(errors="replace"))
        file.flush()
