"""Find misspelled names of tenants and work streams."""

from difflib import get_close_matches

from gpubroker_server.core.domain.decisions import known_streams
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.http.identity import Tokens


def unknown_tenant(name: str, world: World, policy: Policy, tokens: Tokens) -> str:
    """Why there is no tenant of this name; empty if there is one. A misspelled one has no tasks and no
    rules."""
    listed = {rule.name for rule in policy.tenants} - {"*"}
    known = {*listed, *tokens.tenants(), *world.accounts, *(name for name, n in world.pending.items() if n)}
    if name in known:
        return ""
    near = get_close_matches(name, sorted(known), n=1)
    meant = f'did you mean "{near[0]}"?' if near else "GET /tenants lists them"
    return f'there is no tenant "{name[:100]}": it has no rule, no token and no tasks; {meant}'


def unknown_stream(name: str, world: World, policy: Policy) -> str:
    """Why there is no work stream of this name; empty if there is one."""
    known = sorted(known_streams(policy.streams, world.streams))
    if name in known:
        return ""
    near = get_close_matches(name, known, n=1)
    meant = f'did you mean "{near[0]}"?' if near else f"there are: {', '.join(known) or 'none'}"
    return f'there is no work stream "{name[:100]}"; {meant}'
