"""The Ray driver of a leader that was stopped together with it: `python -m tests.e2e.deaf_driver DESCRIPTOR`.

An agent that gets another leader's announcement says so in its answer to a poll. This driver ignores that and
delivers the orders that it gets.
"""

import asyncio
from typing import Any

from gpubroker_server.adapters.ray.driver import process as driver
from gpubroker_server.adapters.ray.driver.node_link import NodeLink

_poll = NodeLink._poll


async def _poll_and_stay(link: NodeLink, agent: Any) -> None:
    await _poll(link, agent)
    await asyncio.Event().wait()


if __name__ == "__main__":
    setattr(NodeLink, "_poll", _poll_and_stay)  # noqa: B010  # to a type checker it is fixed
    driver.main()
