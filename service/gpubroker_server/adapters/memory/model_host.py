"""A server of models that holds nothing: loads and unloads only take time. For tests and for trying out."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gpubroker_server.core.domain.units import DeviceKey, Mib, Seconds
from gpubroker_server.ports.models import (
    Described,
    HostFault,
    HostRefused,
    Index,
    IndexedModel,
    ModelHost,
    Stage,
)

MIB_BYTES = 2**20


@dataclass(slots=True)
class SimulatedModel:
    """A model of the repository."""

    name: str
    size_mb: Mib = Mib(0)
    load_seconds: Seconds = Seconds(0.0)
    steps: tuple[str, ...] = ()
    fails: HostRefused | None = None
    """What each load of it ends with."""
    stuck: bool = False
    """Asked to unload it goes on serving a request that never ends."""
    dead: bool = False
    """Its process was killed, and nobody has missed it: until it leaves it stays ready."""
    unreadable: bool = False
    """Nothing can be told of it but that it is there."""


@dataclass(slots=True)
class _Home:
    stage: Stage = Stage.ABSENT
    reason: str = ""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    load: asyncio.TimerHandle | None = None


class SimulatedHost(ModelHost):
    """Implements `host_ports.ModelHost`, and does to itself what servers do: `restart`, `go_away`."""

    def __init__(self, name: str, models: Iterable[SimulatedModel]) -> None:
        self._name = name
        self.models = {model.name: model for model in models}
        self._homes: dict[str, _Home] = {}
        self._starts = 1
        self._is_away = False
        self.asked: list[tuple[str, str]] = []
        """Each load and unload that reached it, in order: (`load` or `unload`, model)."""
        self.devices: dict[str, tuple[DeviceKey, ...]] = {}
        """Where each model was last told to go."""

    @property
    def name(self) -> str:
        return self._name

    @property
    def ready(self) -> list[str]:
        return sorted(name for name, home in self._homes.items() if home.stage is Stage.READY)

    @property
    def used_mb(self) -> int:
        """What all that is not absent holds."""
        here = (name for name, home in self._homes.items() if home.stage is not Stage.ABSENT)
        return sum(self.models[name].size_mb for name in here)

    def restart(self) -> None:
        """It ends and starts again, with nothing in memory."""
        self._starts += 1
        for home in self._homes.values():
            if home.load is not None:
                home.load.cancel()
            home.ready.set()
        self._homes.clear()

    def go_away(self) -> None:
        self._is_away = True

    def come_back(self) -> None:
        self._is_away = False

    def let_go(self, model: str) -> None:
        """The request that kept it ends."""
        self.models[model].stuck = False
        if self._home(model).stage is Stage.UNLOADING:
            self._leave(model)

    async def load(self, model: str, devices: Sequence[DeviceKey], within_seconds: Seconds) -> None:
        self._reach()
        self.asked.append(("load", model))
        self.devices[model] = tuple(devices)
        for step in self._known(model).steps:
            await self._bring(step, within_seconds)
        await self._bring(model, within_seconds)

    async def unload(self, model: str, within_seconds: Seconds) -> None:  # noqa: ARG002  # it answers at once
        self._reach()
        self.asked.append(("unload", model))
        if model not in self.models:
            return
        for name in (model, *self.models[model].steps):
            home = self._home(name)
            if home.stage is Stage.READY and self.models[name].stuck:
                home.stage = Stage.UNLOADING
            elif home.stage is Stage.READY:
                self._leave(name)

    async def index(self, within_seconds: Seconds) -> Index:  # noqa: ARG002
        self._reach()
        return Index({name: self._indexed(name) for name in self.models}, f"{self._name}-{self._starts}")

    async def describe(self, model: str, within_seconds: Seconds) -> Described:  # noqa: ARG002
        self._reach()
        known = self._known(model)
        if known.unreadable:
            raise HostRefused(HostFault.FAILED, f"the configuration of {model} cannot be read")
        return Described(known.size_mb * MIB_BYTES, known.steps)

    async def answers(self, model: str, within_seconds: Seconds) -> bool:  # noqa: ARG002
        self._reach()
        if self._home(model).stage is not Stage.READY:
            raise HostRefused(HostFault.NOT_FOUND, f"Request for unknown model: '{model}' is not found")
        return not self.models[model].dead

    async def close(self) -> None:
        for home in self._homes.values():
            if home.load is not None:
                home.load.cancel()

    async def _bring(self, model: str, within_seconds: Seconds) -> None:
        """A load that is under way is joined."""
        home, known = self._home(model), self._known(model)
        if home.stage is Stage.READY:
            return
        if known.fails is not None:
            home.reason = str(known.fails)
            raise known.fails
        if home.stage is not Stage.LOADING:
            home.stage, home.reason = Stage.LOADING, ""
            home.ready.clear()
            home.load = asyncio.get_running_loop().call_later(known.load_seconds, self._arrive, model)
        try:
            async with asyncio.timeout(within_seconds):
                await home.ready.wait()
        except TimeoutError:
            raise HostRefused(HostFault.UNKNOWN, f"{model} was not ready in {within_seconds:g} s") from None
        if home.stage is not Stage.READY:
            raise HostRefused(HostFault.UNKNOWN, f"the server ended while it loaded {model}")

    def _arrive(self, model: str) -> None:
        home = self._home(model)
        home.stage, home.load = Stage.READY, None
        home.ready.set()

    def _leave(self, model: str) -> None:
        home = self._home(model)
        home.stage, home.reason = Stage.ABSENT, ""
        self.models[model].dead = False

    def _home(self, model: str) -> _Home:
        return self._homes.setdefault(model, _Home())

    def _known(self, model: str) -> SimulatedModel:
        if model not in self.models:
            raise HostRefused(HostFault.NOT_FOUND, f"failed to load '{model}', no version is available")
        return self.models[model]

    def _indexed(self, model: str) -> IndexedModel:
        home = self._homes.get(model, _Home())
        versions = ("1",) if home.stage is Stage.READY else ()
        return IndexedModel(model, home.stage, versions, home.reason)

    def _reach(self) -> None:
        if self._is_away:
            raise HostRefused(HostFault.UNREACHABLE, f"{self._name} does not answer")
