"""A model's slots are divided among gateways, and never used twice."""

from dataclasses import dataclass, field

from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.serving.slots import (
    AWAY_SECONDS,
    FRESH_SECONDS,
    HOLD_SECONDS,
    Claim,
    SlotShares,
    goal_shares,
)
from hypothesis import example, given
from hypothesis import strategies as st

NOW = Instant(1000.0)
LATER = Instant(NOW + 2 * FRESH_SECONDS)


def a_claim(gateway: str, at: float = LATER, holds: int = 1, wants: int = 0) -> Claim:
    return Claim(gateway, Instant(at), {"m": holds}, {"m": wants})


def given_to(shares: SlotShares, *claims: Claim, at: float = LATER) -> dict[str, int]:
    return dict(shares.give(claims, Instant(at))["m"])


def leading(slots: int = 8) -> SlotShares:
    return SlotShares({"m": slots}, NOW)


def test_one_gateway_gets_all_slots() -> None:
    assert given_to(leading(), a_claim("a")) == {"a": 8}


def test_gateway_that_wants_more_gets_more_and_spare_slots_are_shared() -> None:
    assert goal_shares(8, {"a": 0, "b": 0}) == {"a": 4, "b": 4}
    assert goal_shares(8, {"a": 100, "b": 0}) == {"a": 7, "b": 1}
    assert goal_shares(8, {"a": 100, "b": 100, "c": 50}) == {"a": 3, "b": 3, "c": 2}
    assert goal_shares(8, {"a": 3, "b": 1}) == {"a": 5, "b": 3}
    assert goal_shares(2, {"a": 9, "b": 9, "c": 9}) == {"a": 1, "b": 1, "c": 1}, "each may ask one at a time"
    assert goal_shares(8, {}) == {}


def test_slots_that_a_gateway_may_still_use_are_given_to_no_other() -> None:
    shares = leading()
    assert given_to(shares, a_claim("a", holds=8), a_claim("b", wants=9)) == {"a": 1, "b": 1}
    assert given_to(shares, a_claim("a", holds=5), a_claim("b", wants=9), at=LATER + 1) == {"a": 1, "b": 3}
    assert given_to(shares, a_claim("a", holds=1), a_claim("b", holds=3, wants=9), at=LATER + 2) == {
        "a": 1,
        "b": 7,
    }


def test_given_shares_count_until_no_gateway_acts_upon_them() -> None:
    shares = leading()
    assert given_to(shares, a_claim("a")) == {"a": 8}
    both = a_claim("a", wants=1), a_claim("b", wants=9)
    assert given_to(shares, *both, at=LATER + 1) == {"a": 1, "b": 1}, "a may be about to claim its share"
    assert given_to(shares, *both, at=LATER + 3) == {"a": 1, "b": 1}
    later = LATER + 2 + 2 * FRESH_SECONDS
    assert given_to(shares, a_claim("a", later), a_claim("b", later, wants=9), at=later) == {"a": 1, "b": 7}


def test_new_leader_gives_no_slots_until_shares_of_older_leaders_are_stale() -> None:
    claims = a_claim("a", NOW, holds=4), a_claim("b", NOW, wants=9)
    assert given_to(leading(), *claims, at=NOW) == {"a": 1, "b": 1}


def test_silent_gateway_keeps_its_slots_until_it_falls_to_one_by_itself() -> None:
    shares = leading()
    gone = LATER - AWAY_SECONDS
    assert given_to(shares, a_claim("a", gone, holds=6), a_claim("b", wants=9)) == {"b": 2}
    at = gone + HOLD_SECONDS
    assert given_to(shares, a_claim("a", gone, holds=6), a_claim("b", at, holds=2), at=at) == {"b": 8}


@dataclass
class Gateway:
    """What `gateway/slot_leases.py` does, step by step."""

    name: str
    claimed: int = 1
    uses: int = 1
    written_at: Instant = LATER
    heard: list[tuple[Instant, int]] = field(default_factory=list)

    def claim(self, wants: int) -> Claim:
        return Claim(self.name, self.written_at, {"m": self.claimed}, {"m": wants})

    def act(self, now: Instant) -> None:
        """On the newest word that it has heard."""
        at, share = self.heard[-1]
        if at < now - FRESH_SECONDS:
            return
        self.uses = min(self.uses, share)
        self.claimed, self.written_at = share, now
        self.uses = share


SOME = st.sets(st.sampled_from("abc"))
ROUNDS = st.lists(
    st.tuples(
        st.fixed_dictionaries(dict.fromkeys("abc", st.sampled_from((0, 12)))),
        SOME,
        SOME,
        st.sampled_from((0.0, 1.0, 2.0, 7.0)),
    ),
    max_size=20,
)


A, B = {"a": 12, "b": 0, "c": 0}, {"a": 0, "b": 12, "c": 0}


@given(ROUNDS, st.integers(3, 12))
@example([(A, {"a"}, set(), 1.0), (B, {"b"}, {"a", "b"}, 0.0)], 8)
def test_all_gateways_together_never_use_more_than_the_slots(
    rounds: list[tuple[dict[str, int], set[str], set[str], float]], slots: int
) -> None:
    """In each round the leader speaks, some hear it, and some act upon what they have heard last."""
    gateways = {name: Gateway(name) for name in "abc"}
    shares, now = SlotShares({"m": slots}, NOW), LATER
    for wants, hear, act, seconds in rounds:
        word = shares.give([one.claim(wants[one.name]) for one in gateways.values()], now)["m"]
        for name in hear & word.keys():
            gateways[name].heard.append((now, word[name]))
        now = Instant(now + seconds)
        for gateway in gateways.values():
            if gateway.name in act and gateway.heard:
                gateway.act(now)
            if now >= gateway.written_at + HOLD_SECONDS:
                gateway.uses = 1
        assert sum(one.uses for one in gateways.values()) <= slots
