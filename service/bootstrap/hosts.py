"""From settings to the servers whose models the leader loads and unloads."""

from service.adapters.triton.host import TritonHost
from service.bootstrap.calls import rpc_server_of
from service.settings import Settings


def hosts_of(settings: Settings) -> list[TritonHost]:
    """Those that can be spoken to over gRPC. Raises StartRefused."""
    servers = settings.triton.servers
    return [TritonHost(rpc_server_of(given), given.repository) for given in servers if given.grpc_url]
