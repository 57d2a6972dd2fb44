"""Ports of the gateway to the data plane: which model servers there are, and which models they have in
memory. The data plane implements these Protocols, and neither side imports the other."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from gpubroker_server.core.admission.submission import Asked
from gpubroker_server.core.domain.model_orders import IndexedModel
from gpubroker_server.core.domain.models import ModelRules
from gpubroker_server.core.domain.server_rules import ServerRules
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.serving.circuit_breaker import Breaker
from gpubroker_server.ports.models import Described, ModelHost


class UnknownModel(Exception):
    """The server has no such model."""


class ServerEndpoint(Protocol):
    """One of the protocols over which a server is asked."""

    @property
    def protocol(self) -> str: ...

    @property
    def breaker(self) -> Breaker: ...

    @property
    def open_seconds(self) -> Seconds:
        """The time for which the server has not answered; 0 if it answers."""
        ...

    @property
    def refusal(self) -> str:
        """The server's last refusal of the service's credentials, in words; empty if the server accepts
        them."""


class KnownServer(Protocol):
    """A model server as this process sees it."""

    @property
    def name(self) -> str: ...

    @property
    def is_managed(self) -> bool:
        """True if the server's models are in the ledger."""

    @property
    def is_up(self) -> bool:
        """True if the server answers at one endpoint at least."""

    @property
    def endpoints(self) -> Sequence[ServerEndpoint]: ...

    @property
    def in_flight(self) -> int:
        """The number of requests that were sent to the server and are not answered."""

    async def index(self, within_seconds: Seconds) -> Mapping[str, IndexedModel] | None:
        """Ask the server for its models. Returns None if the answer is no index. Raises NotFetched."""

    async def change(self, model: str, *, loads: bool, within_seconds: Seconds) -> None:
        """Have the server load or unload a model. Raises Problem."""

    def lists(self, model: str) -> bool:
        """Return True if the server's last index had the model."""

    async def may_have(self, model: str) -> bool:
        """Ask the server for its models. Returns False only if the server says that its repository lacks this
        model."""

    async def close(self) -> None: ...


class ModelResidency(Protocol):
    """The models of one server in the ledger."""

    @property
    def rules(self) -> ServerRules: ...

    @property
    def host(self) -> ModelHost: ...

    def of(self, model: str) -> Task | None:
        """Return the task that holds the model, or waits for its memory."""

    def holders(self) -> Sequence[Task]:
        """Return the tasks of all models of this server, without the server's own base cost."""

    async def repository(self) -> Mapping[str, IndexedModel] | None:
        """Return the server's index, or None while the server does not answer."""

    def priority_of(self, model: str) -> int:
        """Return the priority of requests that state none."""

    def rules_of(self, model: str) -> ModelRules: ...

    def try_again(self, model: str) -> None:
        """Forget that the model's load has failed lately."""

    async def demand_of(self, model: str) -> tuple[Asked, Described, bool]:
        """Return what a load would ask for, the server's description of the model, and True if the model's
        size is known. Raises Problem, UnknownModel."""

    async def want(self, model: str, priority: int, *, queued: bool = False, measured: bool = False) -> Task:
        """Return the model's holder, made if there is none. Raises Problem, UnknownModel or
        StoreUnavailable."""

    async def ready(self, model: str, priority: int, seconds: Seconds | None = None) -> Task:
        """Have the model brought, and wait until it is in memory. Raises Problem."""

    async def unloaded(self, model: str, by: str) -> None:
        """Have the model unloaded at the request of this token, and wait until it is gone. Raises Problem."""

    def ensemble_of(self, model: str) -> Task | None:
        """Return the holder of an ensemble that has the model in memory, or is loading it, as a step."""

    def check_unload(self, model: str) -> None:
        """Raise Problem model-is-step if a loaded ensemble needs the model."""

    async def ask_leader(self, task: Task, what: str, **fields: object) -> bool:
        """Ask the leader for a change. Returns True if the leader has carried it out in time. Raises
        StoreUnavailable."""


class ModelResidencies(Protocol):
    """The models of all servers in the ledger."""

    def __iter__(self) -> Iterator[ModelResidency]:
        """Yield the residencies in the order of the settings."""

    def at(self, server: str) -> ModelResidency | None: ...

    def holding(self, model: str) -> Sequence[ModelResidency]:
        """Return the residencies of the servers where the model is in memory, or waits for memory."""

    def priority_of(self, model: str, asked: int | None = None) -> int:
        """Return the priority of requests that state none."""

    def try_again(self, model: str) -> None:
        """Forget that the model's load has failed lately."""

    async def want(self, model: str, priority: int, *, queued: bool = False) -> tuple[ModelResidency, Task]:
        """Return the model's holder, made if there is none, and the residency that it belongs to. Raises
        Problem, UnknownModel, StoreUnavailable."""
