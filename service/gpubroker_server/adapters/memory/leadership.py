"""The leader's row, in memory."""

from collections.abc import Callable

from gpubroker_server.core.domain.leader_term import LeaderRow, next_lineage
from gpubroker_server.core.domain.units import Instant, Lineage, Seconds, Term
from gpubroker_server.ports.store import StaleTerm


class LeaderInMemory:
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._term = Term(0)
        self._leader = ""
        self._lease_until = Instant(0.0)
        self._lineage = Lineage(0)

    async def leader(self) -> LeaderRow:
        return LeaderRow(self._term, self._leader, self._lease_until, Instant(self._now()), self._lineage)

    async def take_term(
        self, holder: str, ttl_seconds: Seconds, *, instead_of: LeaderRow, has_lost_commits: bool = False
    ) -> Term | None:
        if (instead_of.term, instead_of.lease_until) != (self._term, self._lease_until):
            return None
        if has_lost_commits:
            self._lineage = next_lineage(self._lineage, Instant(self._now()))
        self._term = Term(self._term + 1)
        self._leader = holder
        self._lease_until = Instant(self._now() + ttl_seconds)
        return self._term

    async def renew(self, term: Term, ttl_seconds: Seconds) -> None:
        self._require(term)
        self._lease_until = Instant(self._now() + ttl_seconds)

    async def resign(self, term: Term) -> None:
        if term == self._term:
            self._lease_until = Instant(0.0)

    async def database_time(self) -> Instant:
        return Instant(self._now())

    async def held_back(self) -> None:
        return None

    def _require(self, term: Term) -> None:
        if term != self._term:
            raise StaleTerm(f"term {term} is over: {self._leader} leads term {self._term}; stop leading")
