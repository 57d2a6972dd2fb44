"""The learned use of past runs, and the measured peaks of present runs."""

from collections.abc import Mapping

from gpubroker_server.core.domain.estimates import Sketch, SketchKey, What
from gpubroker_server.core.domain.units import Mib
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.ledger import Holding


class RunHistory:
    """The learned sketches by topic, and the measured peaks by lease. The peaks live in memory only: after a
    restart those of present runs start from 0."""

    def __init__(self) -> None:
        self.sketches: dict[SketchKey, Sketch] = {}
        """The sketches by topic; the least recently updated is first."""
        self.peaks: dict[str, Mib] = {}
        """Maps a lease key to the holder's peak use of the device."""
        self.above: dict[str, Holding] = {}
        """Maps a lease key to its holding, if the last measurement exceeds the lease."""

    def put(self, topic: SketchKey, sketch: Sketch) -> None:
        self.sketches.pop(topic, None)
        self.sketches[topic] = sketch

    def sketch(self, topic: SketchKey) -> Sketch:
        return self.sketches.get(topic, Sketch())

    def apply(self, event: Event, change: str) -> None:
        for kind, about, value in event.fields["values"]:
            topic = SketchKey(event.tenant, event.key, kind, What(about))
            if change == "learned":
                self.put(topic, self.sketch(topic).add(value))
            else:
                self.sketches.pop(topic, None)

    def measure(self, holdings: Mapping[str, Holding]) -> None:
        """Update peaks after a sample of a device."""
        for key, holding in holdings.items():
            if holding.measured_mb > self.peaks.get(key, 0):
                self.peaks[key] = holding.measured_mb
            if holding.measured_mb > holding.lease.mb:
                self.above[key] = holding
            else:
                self.above.pop(key, None)

    def drop(self, lease: str) -> None:
        self.peaks.pop(lease, None)
        self.above.pop(lease, None)
