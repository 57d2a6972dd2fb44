"""All brokers on one database use one Ray: what is started in another one they could neither hear nor end."""

from collections.abc import Mapping
from typing import Any

from gpubroker_server.ports.last_values import LeaderSeen


def other_ray(here: Mapping[str, Any], leader: LeaderSeen) -> str:
    """Why the Ray of this process cannot be the leader's, and what to do; empty if it can. `here`: what its
    executor says of itself.

    A local Ray is known by its machine and data directory (`home`). One that was joined may have several
    addresses, so two of those are not compared.
    """
    there = leader.executor
    home, leaders = here.get("home"), there.get("home")
    if home is None or leaders is None or home == leaders:
        return ""
    if not home and there.get("address") in ("", here.get("address")):
        return ""
    mine = f"a local Ray of its own, {home}" if home else f"the Ray at {here.get('address')}"
    its = f"the local Ray of {leaders}" if leaders else f"the Ray at {there.get('address')}"
    return (
        f"this broker would use {mine}, and {leader.holder}, which leads on this database, uses {its}: what "
        "one of them starts, the other could neither hear nor end. Name one Ray for all of them with "
        "ray.address, give those on one machine one data_dir, or stop the other one first"
    )
