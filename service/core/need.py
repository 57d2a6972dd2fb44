"""How much of one device a demand comes to."""

import math

from service.core.demand import Demand
from service.core.device import Device
from service.core.units import Mib


def need_mb(demand: Demand, device: Device) -> Mib | None:
    """MiB to lease on this device; None if the device could not give that much even when empty.

    A whole device is all that may be leased of it, so that nobody else fits beside, and no stranger beyond
    what the operator declared. A fraction is of the same amount, rounded down.
    """
    room = device.allocatable_mb
    if demand.takes_whole_devices:
        return room if room >= (demand.gpu_mb or 1) else None
    if demand.gpu_mb is not None:
        return demand.gpu_mb if room >= demand.gpu_mb else None
    assert demand.gpu_fraction is not None
    part = Mib(max(1, math.floor(demand.gpu_fraction * room)))
    return part if part <= room else None
