"""What a World knows of past runs, and the most that each present run was measured to use."""

from collections.abc import Mapping

from gpubroker_server.core.domain.estimates import Sketch, Topic, What
from gpubroker_server.core.domain.units import Mib
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.ledger import Holding


class RunHistory:
    """Mutable, owned by one World.

    Peaks live in memory only: after a restart those of the present runs begin anew.
    """

    def __init__(self) -> None:
        self.sketches: dict[Topic, Sketch] = {}
        """The one that learned last comes last."""
        self.peaks: dict[str, Mib] = {}
        """Lease key -> the most that its holder was measured to use of its device."""
        self.above: dict[str, Holding] = {}
        """Lease key -> the holding, where its holder was last measured to use more than its lease."""

    def put(self, topic: Topic, sketch: Sketch) -> None:
        self.sketches.pop(topic, None)
        self.sketches[topic] = sketch

    def sketch(self, topic: Topic) -> Sketch:
        """Empty if nothing was learned about it."""
        return self.sketches.get(topic, Sketch())

    def apply(self, event: Event, what: str) -> None:
        for kind, about, value in event.fields["values"]:
            topic = Topic(event.tenant, event.key, kind, What(about))
            if what == "learned":
                self.put(topic, self.sketch(topic).add(value))
            else:
                self.sketches.pop(topic, None)

    def measure(self, holdings: Mapping[str, Holding]) -> None:
        """Look at the holdings of a device after it was measured."""
        for key, holding in holdings.items():
            if holding.measured_mb > self.peaks.get(key, 0):
                self.peaks[key] = holding.measured_mb
            if holding.measured_mb > holding.lease.mb:
                self.above[key] = holding
            else:
                self.above.pop(key, None)

    def drop(self, lease: str) -> None:
        """Its lease is released."""
        self.peaks.pop(lease, None)
        self.above.pop(lease, None)
