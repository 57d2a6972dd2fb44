"""Find misspelled names of tenants and work streams."""

from gpubroker_server.core.admission.admit import no_such
from gpubroker_server.core.domain.decisions import known_streams
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.suggestions import did_you_mean
from gpubroker_server.core.world.world import World
from gpubroker_server.http.identity import Tokens


def unknown_tenant(name: str, world: World, policy: Policy, tokens: Tokens) -> str:
    """Return why there is no tenant of this name; empty if there is one. A misspelled one has no tasks and no
    rules."""
    listed = {rule.name for rule in policy.tenants} - {"*"}
    known = {*listed, *tokens.tenants(), *world.accounts, *(name for name, n in world.pending.items() if n)}
    if name in known:
        return ""
    suggestion = did_you_mean(name, known, otherwise="GET /tenants lists them")
    return f'there is no tenant "{name[:100]}": it has no rule, no token and no tasks; {suggestion}'


def unknown_stream(name: str, world: World, policy: Policy) -> str:
    """Return why there is no work stream of this name; empty if there is one."""
    known = known_streams(policy.streams, world.streams)
    return "" if name in known else no_such("work stream", name, known)
