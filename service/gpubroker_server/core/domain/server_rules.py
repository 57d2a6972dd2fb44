"""The rules of the settings for model servers whose models are in the ledger."""

from collections.abc import Mapping

from msgspec import Struct, field

from gpubroker_server.core.domain.models import ModelRules
from gpubroker_server.core.domain.policy import DIRECT_PRIORITY
from gpubroker_server.core.domain.units import Mib, Seconds


class ServerRules(Struct, frozen=True):
    """The rules of one server. Its defaults are those of the settings."""

    name: str
    node: str
    devices: tuple[str, ...] = ()
    """The UUIDs of the server's GPUs; empty if it has all GPUs of the node."""
    tells_gpus: bool = False
    """True if the server's metrics tell which GPUs it sees."""
    tenant: str = "default"
    priority: int = DIRECT_PRIORITY
    grace_seconds: Seconds = Seconds(30.0)
    base_mb: Mib = Mib(0)
    """The MiB that the server itself takes of each of its GPUs."""
    least_mb: Mib = Mib(512)
    cold_seconds: Seconds = Seconds(55.0)
    wanted_seconds: Seconds = Seconds(300.0)
    models: Mapping[str, ModelRules] = field(default_factory=dict)
