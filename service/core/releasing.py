"""Runs that are over and whose devices are not given back yet."""

from service.core.lease import Lease, LeaseState
from service.core.orders import RunId
from service.core.units import Instant, TaskId


class Releasing(dict[RunId, Instant]):
    """Each with when its end was heard of; rows tell only that it was. A run gives all back together."""

    def note(self, lease: Lease, at: Instant) -> None:
        run = (TaskId(lease.holder), lease.fence, lease.rank)
        if lease.state is LeaseState.RELEASING:
            self.setdefault(run, at)
        else:
            self.pop(run, None)
