"""The parameters with which a node of Ray is started. They are apart from `start`, because that module loads
Ray."""

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct, field

LOCALHOST = "127.0.0.1"


class NodeToStart(Struct, frozen=True):
    object_store_bytes: int
    temp_dir: Path | None = None
    """The directory of a head, which the other nodes of its cluster share."""
    head: str = ""
    """The `host:port` of the head to join; empty if this node is the head."""
    name: str = LOCALHOST
    port: int = 0
    """The port of the head; 0 for any free port."""
    dashboard: bool = False
    """True if a head starts its dashboard."""
    cpus: int | None = None
    """The number of CPUs that Ray may assign; None for all CPUs of this machine."""
    gpus: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the node's processes, besides those that they inherit."""
    chooses_ports: bool = False
    """True if the ports of the node's agents are chosen before the start, so that the raylet need not wait
    for the agents. Otherwise the raylet ends if an agent has not written its port within 15 s, which is too
    short on a busy machine."""

    @property
    def vital(self) -> frozenset[str]:
        """The names of the processes without which the node is lost."""
        return frozenset({"raylet"} if self.head else {"gcs_server", "raylet"})
