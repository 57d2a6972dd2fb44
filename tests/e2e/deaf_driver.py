"""The Ray driver of a leader that was stopped together with it: `python -m tests.e2e.deaf_driver DESCRIPTOR`.

An agent that hears another leader's announcement says so to whoever asks it for reports. This driver does not
hear that, and delivers what it is given.
"""

import asyncio
from typing import Any

from gpubroker_server.adapters.ray.driver import process as driver
from gpubroker_server.adapters.ray.driver.node_link import NodeLink

_listen = NodeLink._listen


async def _listen_and_hear_nothing_of_it(link: NodeLink, agent: Any) -> None:
    await _listen(link, agent)
    await asyncio.Event().wait()


if __name__ == "__main__":
    setattr(NodeLink, "_listen", _listen_and_hear_nothing_of_it)  # noqa: B010  # to a type checker it is fixed
    driver.main()
