"""A model server that holds nothing: loads and unloads only take time. For tests and demonstrations."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from gpubroker_server.core.domain.units import MIB_BYTES, DeviceKey, Mib, Seconds
from gpubroker_server.ports.models import (
    Described,
    HostFault,
    HostRefused,
    Index,
    IndexedModel,
    ModelHost,
    ModelState,
)
from msgspec import Struct, field


class SimulatedModel(Struct):
    """A model of the repository."""

    name: str
    size_mb: Mib = Mib(0)
    load_seconds: Seconds = Seconds(0.0)
    steps: tuple[str, ...] = ()
    fails: HostRefused | None = None
    """How each load of it ends."""
    stuck: bool = False
    """An unload does not finish: a request of it never ends."""
    dead: bool = False
    """Its process was killed, and the server did not notice: it stays ready until it is unloaded."""
    revision: str = ""
    on_cpu: bool = False
    most_rows: int = 0
    unreadable: bool = False
    """Its configuration cannot be read."""


class _Residency(Struct):
    stage: ModelState = ModelState.ABSENT
    reason: str = ""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    load: asyncio.TimerHandle | None = None


class SimulatedHost(ModelHost):
    """A ModelHost. `restart` and `go_away` do what a real server may do."""

    def __init__(self, name: str, models: Iterable[SimulatedModel]) -> None:
        self._name = name
        self.models = {model.name: model for model in models}
        self._residencies: dict[str, _Residency] = {}
        self._starts = 1
        self._is_away = False
        self.asked: list[tuple[str, str]] = []
        """Each load and unload that it got, in order: (`load` or `unload`, model)."""
        self.devices: dict[str, tuple[DeviceKey, ...]] = {}
        """The devices of the last load of each model."""
        self.tried: list[tuple[str, int]] = []
        """The model and the rows of each request of `try_out`."""
        self.seen: tuple[str, ...] = ()
        """UUIDs of the GPUs that it says it sees."""

    @property
    def name(self) -> str:
        return self._name

    @property
    def address(self) -> str:
        return f"simulated:{self._name}"

    @property
    def ready(self) -> list[str]:
        return sorted(
            name for name, residency in self._residencies.items() if residency.stage is ModelState.READY
        )

    @property
    def used_mb(self) -> int:
        """The size of all models that are not absent."""
        here = (
            name for name, residency in self._residencies.items() if residency.stage is not ModelState.ABSENT
        )
        return sum(self.models[name].size_mb for name in here)

    def restart(self) -> None:
        """The server ends and starts again, with no model loaded."""
        self._starts += 1
        for residency in self._residencies.values():
            if residency.load is not None:
                residency.load.cancel()
            residency.ready.set()
        self._residencies.clear()

    def go_away(self) -> None:
        self._is_away = True

    def come_back(self) -> None:
        self._is_away = False

    def let_go(self, model: str) -> None:
        """The request that held up an unload ends."""
        self.models[model].stuck = False
        if self._residency(model).stage is ModelState.UNLOADING:
            self._leave(model)

    async def load(self, model: str, devices: Sequence[DeviceKey], within_seconds: Seconds) -> None:
        self._reach()
        leased = {device.rpartition("/")[2] for device in devices}
        if self.seen and leased and leased != {*self.seen}:
            raise HostRefused(HostFault.OTHER_GPUS, f"{self._name} sees {self.seen}, not {sorted(leased)}")
        self.asked.append(("load", model))
        self.devices[model] = tuple(devices)
        for step in self._known(model).steps:
            await self._bring(step, within_seconds)
        await self._bring(model, within_seconds)

    async def unload(self, model: str, within_seconds: Seconds) -> None:  # it answers at once
        self._reach()
        self.asked.append(("unload", model))
        if model not in self.models:
            return
        for name in (model, *self.models[model].steps):
            residency = self._residency(name)
            if residency.stage is ModelState.READY and self.models[name].stuck:
                residency.stage = ModelState.UNLOADING
            elif residency.stage is ModelState.READY:
                self._leave(name)

    async def index(self, within_seconds: Seconds) -> Index:
        self._reach()
        return Index({name: self._indexed(name) for name in self.models}, f"{self._name}-{self._starts}")

    async def describe(self, model: str, within_seconds: Seconds) -> Described:
        self._reach()
        known = self._known(model)
        if known.unreadable:
            raise HostRefused(HostFault.FAILED, f"the configuration of {model} cannot be read")
        size_bytes = known.size_mb * MIB_BYTES
        return Described(
            size_bytes, known.steps, revision=known.revision, on_cpu=known.on_cpu, seen=self.seen
        )

    async def answers(self, model: str, within_seconds: Seconds) -> bool:
        self._reach()
        if self._residency(model).stage is not ModelState.READY:
            raise HostRefused(HostFault.NOT_FOUND, f"Request for unknown model: '{model}' is not found")
        return not self.models[model].dead

    async def most_rows(self, model: str, within_seconds: Seconds) -> int:
        await self.answers(model, within_seconds)
        return self.models[model].most_rows

    async def try_out(
        self,
        model: str,
        rows: int,
        shapes: Mapping[str, Sequence[int]],  # it has no inputs
        within_seconds: Seconds,
    ) -> None:
        await asyncio.sleep(0)  # others run meanwhile, as while a server answers
        self.tried.append((model, rows))
        if not await self.answers(model, within_seconds):
            raise HostRefused(HostFault.FAILED, f"the process of {model} is gone")
        if rows > self.models[model].most_rows:
            raise HostRefused(HostFault.FAILED, f"batch-size must be <= {self.models[model].most_rows}")

    async def close(self) -> None:
        for residency in self._residencies.values():
            if residency.load is not None:
                residency.load.cancel()

    async def _bring(self, model: str, within_seconds: Seconds) -> None:
        """Joins a load that is under way."""
        residency, known = self._residency(model), self._known(model)
        if residency.stage is ModelState.READY:
            return
        if known.fails is not None:
            residency.reason = str(known.fails)
            raise known.fails
        if residency.stage is not ModelState.LOADING:
            residency.stage, residency.reason = ModelState.LOADING, ""
            residency.ready.clear()
            residency.load = asyncio.get_running_loop().call_later(known.load_seconds, self._arrive, model)
        try:
            async with asyncio.timeout(within_seconds):
                await residency.ready.wait()
        except TimeoutError:
            raise HostRefused(HostFault.UNKNOWN, f"{model} was not ready in {within_seconds:g} s") from None
        if residency.stage is not ModelState.READY:
            raise HostRefused(HostFault.UNKNOWN, f"the server ended while it loaded {model}")

    def _arrive(self, model: str) -> None:
        residency = self._residency(model)
        residency.stage, residency.load = ModelState.READY, None
        residency.ready.set()

    def _leave(self, model: str) -> None:
        residency = self._residency(model)
        residency.stage, residency.reason = ModelState.ABSENT, ""
        self.models[model].dead = False

    def _residency(self, model: str) -> _Residency:
        return self._residencies.setdefault(model, _Residency())

    def _known(self, model: str) -> SimulatedModel:
        if model not in self.models:
            raise HostRefused(HostFault.NOT_FOUND, f"failed to load '{model}', no version is available")
        return self.models[model]

    def _indexed(self, model: str) -> IndexedModel:
        residency = self._residencies.get(model, _Residency())
        versions = ("1",) if residency.stage is ModelState.READY else ()
        return IndexedModel(model, residency.stage, versions, residency.reason)

    def _reach(self) -> None:
        if self._is_away:
            raise HostRefused(HostFault.UNREACHABLE, f"{self._name} does not answer")
