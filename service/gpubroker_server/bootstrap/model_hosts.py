"""From settings to the servers whose models the leader loads and unloads."""

from gpubroker_server.ports.models import ModelHost
from gpubroker_server.settings.loading import Settings


def hosts_of(settings: Settings) -> list[ModelHost]:
    """Those that have a node: their models' memory is in the ledger. Raises StartRefused."""
    managed = [given for given in settings.triton.servers if given.node]
    if not managed:
        return []
    from gpubroker_server.adapters.triton.host import TritonHost  # with a library that is not small
    from gpubroker_server.bootstrap.grpc_proxy import rpc_server_of

    return [TritonHost(rpc_server_of(given), given.repository) for given in managed]
