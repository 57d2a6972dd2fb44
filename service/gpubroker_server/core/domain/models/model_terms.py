"""The terms on which a server of models holds memory for one of them."""

from dataclasses import dataclass
from typing import NamedTuple

from gpubroker_server.core.domain.models.residency import NEVER_USED, Usage
from gpubroker_server.core.domain.units import Instant, Seconds

KIND = "model"
"""What stands where others have the kind of their run."""


class Home(NamedTuple):
    """A model on a server. Of each home there is one holder at a time."""

    server: str
    model: str
    """Empty: the server itself, with what it takes before it has loaded anything."""


@dataclass(frozen=True, slots=True)
class ModelTerms:
    """A model that is wanted, or in memory: its server loads and unloads it, no node agent knows it."""

    server: str
    model: str
    wanted_seconds: Seconds = Seconds(300.0)
    """So long after each request for it, it is wanted: until then it waits for room, and then it stays with
    the priority of those who ask for it."""
    asked_priority: int = 50
    """The highest of those who want it."""
    asked_at: Instant = Instant(0.0)
    """When it was last wanted at that priority."""
    queued: bool = False
    """It is inferences in the queue that want it so: when they no longer do, the leader knows."""
    pinned: bool = False
    """Somebody said that it stays."""
    load_seconds: Seconds = Seconds(0.0)
    """How long loading it took, or is expected to take."""
    usage: Usage = NEVER_USED
    steps: tuple[str, ...] = ()
    """Of an ensemble the models that come and go with it; its size is theirs as well."""
    versions: tuple[str, ...] = ()
    """Those that its server had loaded when it was last there, sorted; empty: nobody has said."""

    @property
    def home(self) -> Home:
        return Home(self.server, self.model)
