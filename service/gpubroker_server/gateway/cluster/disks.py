"""How full a node's disks are, and what of the operator's roots may go."""

import json
from typing import Annotated, Any

from fastapi import Response
from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.units import Instant, NodeName, Seconds
from gpubroker_server.gateway.cluster.nodes import known_node
from gpubroker_server.gateway.http.bodies import Body
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.http.routing import Call, Resource, answer
from gpubroker_server.gateway.http.times import Time, rfc3339
from gpubroker_server.gateway.parts import Parts

resource = Resource("cluster")

WAIT_SECONDS = Seconds(25.0)
"""A look may take longer, and goes on then."""


class DiskUse(TypedDict):
    path: str
    total_bytes: int
    free_bytes: int
    level: Annotated[str, Field(description="`roomy`, `warn`, `clean` or `block`.")]


RootView = TypedDict("RootView", {"path": str, "class": str})
"""A directory below which the guard may delete files."""

CleanedFile = TypedDict(
    "CleanedFile",
    {
        "path": str,
        "class": Annotated[str, Field(description="`log`, `empty_database`, `checkpoint` or `redundant`.")],
        "size_bytes": int,
        "modified_at": Time,
    },
)


class NodeDiskView(TypedDict):
    node: str
    taken_at: Time
    disks: Annotated[list[DiskUse], Field(description="Those that are watched, as last measured.")]
    roots: Annotated[list[RootView], Field(description="Empty: the guard only reports.")]
    deleted: Annotated[bool, Field(description="Whether `files` are gone, or would go.")]
    first_pass: Annotated[
        bool,
        Field(description="The first pass after a change of configuration, which deletes nothing."),
    ]
    files: Annotated[list[CleanedFile], Field(description="In the order in which they go; at most 1000.")]
    freed_bytes: int
    kept: Annotated[dict[str, int], Field(description="Why other files stay, and how many for each reason.")]
    message: Annotated[str, Field(description="What went wrong; empty if nothing did.")]


class CleanNode(Body):
    dry_run: Annotated[bool, Field(description="Only say what would go.")] = True


ERRORS = "not-found disk-unavailable tenant-waits follower-stale validation-failed leader-outdated"


@resource.route(
    "GET /nodes/{node}/disk",
    "nodes_disk",
    Scope.CLUSTER_READ,
    NodeDiskView,
    f"{ERRORS} store-unavailable",
)
async def get_disk(call: Call, parts: Parts, node: str) -> Response:
    """Read how full a node's disks are, which files the disk guard would delete, and why the others stay.

    Sync commands aren't run, so nothing redundant is among them.
    """
    return await _ask(call, parts, node, "disk", {})


@resource.route(
    "POST /nodes/{node}/disk/clean",
    "nodes_disk_clean",
    Scope.CLUSTER_WRITE,
    NodeDiskView,
    f"malformed-json {ERRORS} store-unavailable",
)
async def clean_disk(
    call: Call,
    parts: Parts,
    node: str,
    body: CleanNode = CleanNode(),  # noqa: B008  # frozen
) -> Response:
    """Delete what a node's disk guard may delete, until no more than `warn_percent` of the disk is used. Only
    says what would go unless `dry_run` is false; runs the sync commands of redundant data in both cases.

    Each file is in the audit log before it goes.
    """
    return await _ask(call, parts, node, "clean", {"dry_run": body.dry_run})


async def _ask(call: Call, parts: Parts, name: str, what: str, about: dict[str, Any]) -> Response:
    node = await known_node(parts, name)
    fields = {**about, "by": call.identity.name}
    digest = await parts.requests.ask_for(node, call.identity.tenant, what, fields, WAIT_SECONDS)
    if not digest:
        raise Problem("disk-unavailable", node=node, seconds=f"{WAIT_SECONDS:g}")
    told = json.loads(await parts.blobs.get(digest))
    return answer(_view(node, told))


def _view(node: NodeName, told: dict[str, Any]) -> NodeDiskView:
    files: list[CleanedFile] = [
        {
            "path": file["path"],
            "class": file["class"],
            "size_bytes": file["size_bytes"],
            "modified_at": rfc3339(Instant(file["modified_at"])),
        }
        for file in told["files"]
    ]
    return {
        "node": node,
        "taken_at": rfc3339(Instant(told["at"])),
        "disks": told["disks"],
        "roots": told["roots"],
        "deleted": told["deleted"],
        "first_pass": told["first_pass"],
        "files": files,
        "freed_bytes": sum(file["size_bytes"] for file in files),
        "kept": told["kept"],
        "message": told["message"],
    }
