"""The parameters with which a node of Ray is started, apart from `start`, which loads Ray."""

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct, field

LOCALHOST = "127.0.0.1"


class NodeToStart(Struct, frozen=True):
    object_store_bytes: int
    temp_dir: Path | None = None
    """The directory of a head; the other nodes of its cluster share it."""
    head: str = ""
    """`host:port` of the head to join; empty: this node is the head."""
    name: str = LOCALHOST
    port: int = 0
    """The port of the head; 0: any free one."""
    dashboard: bool = False
    """True if a head starts its dashboard."""
    cpus: int | None = None
    """The CPUs that Ray may give out; None for all of this machine."""
    gpus: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the node's processes, besides those that they inherit."""
    chooses_ports: bool = False
    """Give the agents of the node their ports, so that the raylet waits for none of them. It ends if one has
    not written its port within 15 s, which on a busy machine is not enough to load an agent."""

    @property
    def vital(self) -> frozenset[str]:
        """Processes without which the node is lost."""
        return frozenset({"raylet"} if self.head else {"gcs_server", "raylet"})
