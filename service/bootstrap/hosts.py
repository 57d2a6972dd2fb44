"""From settings to the servers whose models the leader loads and unloads."""

from service.host_ports import ModelHost
from service.settings import Settings


def hosts_of(settings: Settings) -> list[ModelHost]:
    """Those that have a node: their models' memory is in the ledger. Raises StartRefused."""
    managed = [given for given in settings.triton.servers if given.node]
    if not managed:
        return []
    from service.adapters.triton.host import TritonHost  # with a library that is not small
    from service.bootstrap.calls import rpc_server_of

    return [TritonHost(rpc_server_of(given), given.repository) for given in managed]
