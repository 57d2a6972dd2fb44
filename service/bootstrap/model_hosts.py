"""From settings to the servers whose models are loaded and unloaded by the service."""

from service.host_ports import ModelHost
from service.settings import Settings


def hosts_of(settings: Settings) -> tuple[ModelHost, ...]:
    """Those that have a node. Their library is not small, and is loaded only for them. Raises StartRefused."""
    managed = [server for server in settings.triton.servers if server.node]
    if not managed:
        return ()
    from service.adapters.triton.host import TritonHost
    from service.bootstrap.calls import rpc_server_of

    return tuple(TritonHost(rpc_server_of(server), server.repository) for server in managed)
