"""Servers of models as the API answers them."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.proxy.residency.residencies import Residencies
from gpubroker_server.gateway.proxy.residency.server_rules import place_fault
from gpubroker_server.gateway.proxy.servers import Endpoint, Server


class WayView(TypedDict):
    up: Annotated[bool, Field(description="It is asked; false after several failures in a row.")]
    fault: Annotated[str, Field(description="What the last request or check met; empty if an answer.")]


class ModelServerView(TypedDict):
    """A server of models, as the gateway that answers sees it."""

    name: str
    node: Annotated[str | None, Field(description="Null if its models are not in the ledger.")]
    node_fault: Annotated[
        str, Field(description="What is wrong with where it is said to be; empty if nothing is.")
    ]
    http: WayView
    grpc: Annotated[WayView | None, Field(description="Null where gRPC is not spoken.")]
    requests_in_flight: Annotated[int, Field(description="Sent to it, and not over.")]


def model_server_views(
    servers: Sequence[Server], residencies: Residencies | None, world: World
) -> list[ModelServerView]:
    """In the order of the settings."""
    return [_view(server, residencies, world) for server in servers]


def _view(server: Server, residencies: Residencies | None, world: World) -> ModelServerView:
    residency = None if residencies is None else residencies.at(server.name)
    return {
        "name": server.name,
        "node": None if residency is None else residency.rules.node,
        "node_fault": "" if residency is None else place_fault(world, residency.rules),
        "http": _way(server.http),
        "grpc": None if server.calls is None else _way(server.grpc),
        "requests_in_flight": server.in_flight,
    }


def _way(way: Endpoint) -> WayView:
    return {"up": not way.breaker.is_open, "fault": way.breaker.fault}
