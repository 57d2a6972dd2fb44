"""Routes about the disks of nodes: how full they are, and which files below the operator's roots may be
deleted."""

import json
from typing import Annotated, Any

from fastapi import Response
from gpubroker.wire.answered import Time
from gpubroker.wire.nodes import CleanedFile, DiskRoot, DiskUse, NodeDisk
from msgspec import convert
from pydantic import Field

from gpubroker_server.core.domain.units import NodeName, Seconds
from gpubroker_server.gateway.cluster.nodes import known_node
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.http.bodies import Body, JsonBody
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.problems import Problem
from gpubroker_server.http.routing import Caller, Resource, answer

resource = Resource("cluster")

WAIT_SECONDS = Seconds(25.0)
"""How long a request waits for the node agent, which may take longer and then goes on."""


class CleanNode(Body):
    dry_run: Annotated[bool, Field(description="Only say what would go.")] = True


ERRORS = "not-found disk-unavailable tenant-waits follower-stale leader-outdated"


@resource.route(
    "GET /nodes/{node}/disk",
    "nodes_disk",
    Scope.CLUSTER_READ,
    NodeDisk,
    f"{ERRORS} store-unavailable",
)
async def get_disk(caller: Caller, parts: Parts, node: str) -> Response:
    """Read how full a node's disks are, which files the disk guard would delete, and why the others stay.

    Sync commands are not run, so redundant data is not among the files to delete.
    """
    return await _ask(caller, parts, node, "disk", {})


@resource.route(
    "POST /nodes/{node}/disk/clean",
    "nodes_disk_clean",
    Scope.CLUSTER_WRITE,
    NodeDisk,
    f"malformed-json {ERRORS} store-unavailable",
)
async def clean_disk(
    caller: Caller,
    parts: Parts,
    node: str,
    body: JsonBody[CleanNode] = CleanNode(),  # noqa: B008  # frozen
) -> Response:
    """Delete what a node's disk guard may delete, until no more than `warn_percent` of the disk is used.
    Unless `dry_run` is false, the answer only says what would be deleted.

    The sync commands of redundant data are run in both cases. Each file is written to the audit log before it
    is deleted.
    """
    return await _ask(caller, parts, node, "clean", {"dry_run": body.dry_run})


async def _ask(caller: Caller, parts: Parts, name: str, what: str, about: dict[str, Any]) -> Response:
    node = await known_node(parts, name)
    fields = {**about, "by": caller.name}
    digest = await parts.requests.ask_for(node, caller.tenant, what, fields, WAIT_SECONDS)
    if not digest:
        raise Problem("disk-unavailable", node=node, seconds=f"{WAIT_SECONDS:g}")
    return answer(_shown(node, json.loads(await parts.blobs.get(digest))))


def _shown(node: NodeName, told: dict[str, Any]) -> NodeDisk:
    files = tuple(
        CleanedFile(file["path"], file["class"], file["size_bytes"], Time.at(file["modified_at"]))
        for file in told["files"]
    )
    return NodeDisk(
        node=node,
        taken_at=Time.at(told["at"]),
        disks=convert(told["disks"], tuple[DiskUse, ...]),
        roots=convert(told["roots"], tuple[DiskRoot, ...]),
        deleted=told["deleted"],
        first_pass=told["first_pass"],
        files=files,
        freed_bytes=sum(file.size_bytes for file in files),
        kept=told["kept"],
        message=told["message"],
    )
