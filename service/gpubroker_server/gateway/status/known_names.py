"""Finds misspelled names of tenants and work streams."""

from gpubroker_server.core.admission.admit import no_such
from gpubroker_server.core.domain.decisions import known_streams
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.suggestions import did_you_mean
from gpubroker_server.core.world.world import World
from gpubroker_server.http.identity import Tokens


def unknown_tenant(name: str, world: World, policy: Policy, tokens: Tokens) -> str:
    """Return a text that says why there is no tenant of this name; empty if there is one. A tenant exists if
    it has a rule, a token, or tasks."""
    with_rule = {rule.name for rule in policy.tenants} - {"*"}
    tenants = {
        *with_rule,
        *tokens.tenants(),
        *world.accounts,
        *(name for name, count in world.pending.items() if count),
    }
    if name in tenants:
        return ""
    suggestion = did_you_mean(name, tenants, otherwise="GET /tenants lists them")
    return f'there is no tenant "{name[:100]}": it has no rule, no token and no tasks; {suggestion}'


def unknown_stream(name: str, world: World, policy: Policy) -> str:
    """Return a text that says why there is no work stream of this name; empty if there is one."""
    streams = known_streams(policy.streams, world.streams)
    return "" if name in streams else no_such("work stream", name, streams)
