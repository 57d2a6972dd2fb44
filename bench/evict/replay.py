"""A trace against so many slots for models of which each holds one."""

from collections.abc import Sequence

from bench.evict.policies import Policy
from bench.evict.trace import Use


def misses(uses: Sequence[Use], slots: int, policy: Policy) -> list[int]:
    """The numbers of the requests whose model had to be loaded, counted from 0. One after the other, and
    each is served: what is asked for is loaded, into a free slot or in the place of a victim."""
    resident: set[str] = set()
    missed: list[int] = []
    for number, use in enumerate(uses):
        if use.model not in resident:
            missed.append(number)
            if len(resident) == slots:
                resident.remove(policy.victim(resident, use.at))
            resident.add(use.model)
            policy.loaded(use.model, number)
        policy.used(use, number)
    return missed
