"""Passes of the disk guard: a node lists files that may be deleted, the audit log notes them, then the node
deletes them."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from gpubroker_server.core.control.disk_guard import DiskGuard, level_of, nodes_to_clean
from gpubroker_server.core.domain.decisions import AuditNote, Decision, Notice, Request
from gpubroker_server.core.domain.device import DiskOrder, DiskReport, FoundFile
from gpubroker_server.core.domain.interval import Interval
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Instant, NodeName, Seconds
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import BlobStore

DISK_REQUESTS: Final = frozenset({"disk", "clean"})
GIVEN_UP_SECONDS = Seconds(3600.0)
"""The time after which a request that no agent has answered is settled without an answer."""
INHERITED = "asked before this leader led: what an earlier one has ordered to delete is in the audit log"
SETTINGS_TENANT = "default"
"""The tenant of passes that the operator's configuration asks for."""


_FILE_URI = re.compile("file:(?://[^/]*)?(/.*)", re.DOTALL | re.IGNORECASE)


def local_paths(uri: str) -> set[str]:
    """Return the paths that the URI of a checkpoint may name on its node. A plain path is taken as it is;
    the path in a `file:` URI may be percent-encoded or not."""
    if (match := _FILE_URI.fullmatch(uri)) is None:
        paths = {uri} if uri.startswith("/") else set()
    else:
        paths = {match[1], unquote(match[1]), unquote(re.split("[?#]", match[1])[0])}
    return {path.rstrip("/") for path in paths if path.strip("/")}


@dataclass(slots=True)
class _Pass:
    node: NodeName
    at: Instant
    tenant: str
    actor: str
    deletes: bool
    caveat: str = ""
    """A caveat that is added to the answer."""
    found: DiskReport | None = None
    """The report that lists the files whose deletion is ordered; None before that."""


class DiskPasses:
    """The passes of the disk guard that this leader has ordered. The next leader asks for them again."""

    def __init__(self, world: World, policy: Policy, guard: DiskGuard, blobs: BlobStore) -> None:
        self._world = world
        self._policy = policy
        self._guard = guard
        self._blobs = blobs
        self._pace = Interval(policy.sample_period_seconds)
        self._passes: dict[str, _Pass] = {}
        """The pass of each request. The key of a pass that the leader began itself is `auto/` and the
        node."""
        self._since = Instant(0.0)
        """The time when this leader first looked at requests."""

    def carry_out(self, now: Instant) -> list[Decision]:
        """Return the decisions that begin the passes that clients request, or settle requests without an
        answer."""
        self._since = self._since or now
        requests = self._world.requests
        known = self._passes.items()
        self._passes = {id: disk_pass for id, disk_pass in known if id in requests or id.startswith("auto/")}
        decisions = []
        for request in requests.values():
            if request.what in DISK_REQUESTS:
                is_over = now > request.made_at + GIVEN_UP_SECONDS
                if is_over or NodeName(request.task) not in self._world.nodes:
                    decisions.append(Decision(request.task, request.what, requests_done=(request.id,)))
                elif request.id not in self._passes:
                    decisions.append(self._begin(request, now))
        return decisions

    def due(self, now: Instant) -> list[Decision]:
        """Return the decisions to clean the nodes with a disk that is too full."""
        if not self._pace.is_due(now):
            return []
        self._pace.done(now)
        fresh_since = Instant(now - 3 * self._policy.sample_period_seconds)
        decisions = []
        for name in nodes_to_clean(self._world, self._guard, fresh_since):
            id, last = f"auto/{name}", self._passes.get(f"auto/{name}")
            if last is None or now - last.at >= self._guard.clean_every_seconds:
                self._passes[id] = _Pass(name, now, SETTINGS_TENANT, "settings", deletes=True)
                above = self._guard.rules_of(self._world.nodes[name]).clean
                order = self._order(id, name, runs_sync=True, above=above)
                decisions.append(Decision(name, "clean", orders=(order,)))
        return decisions

    async def answered(self, report: DiskReport, now: Instant) -> list[Decision]:
        """Return the decisions that a node's report leads to. A repeated report leads to the same decisions.
        Raises StoreUnavailable."""
        asked = self._passes.get(report.request)
        if asked is None or asked.node != report.node:
            return []
        finds = asked.found in (None, report)
        if finds and asked.deletes and report.files and not report.is_first:
            asked.found = report
            return [self._delete(asked, report, now)]
        if report.request not in self._world.requests:
            if not (finds and asked.deletes and report.files):
                return []
            notice = Notice("fleet.DISK_DRY_RUN", report.node, _sum_of(report))
            return [Decision(report.node, "clean", notices=(notice,))]
        stored = self._told(report, None if finds else asked.found, asked.caveat)
        digest = await self._blobs.put(json.dumps(stored).encode(), owner=report.node)
        return [Decision(report.node, "disk", requests_done=(report.request,), answer=digest)]

    def _begin(self, request: Request, now: Instant) -> Decision:
        node, cleans = NodeName(request.task), request.what == "clean"
        deletes = cleans and not request.fields.get("dry_run", True)
        actor = str(request.fields.get("by", ""))
        caveat = INHERITED if deletes and request.made_at < self._since else ""
        self._passes[request.id] = _Pass(node, now, request.tenant, actor, deletes, caveat)
        return Decision(node, request.what, orders=(self._order(request.id, node, runs_sync=cleans),))

    def _delete(self, asked: _Pass, report: DiskReport, now: Instant) -> Decision:
        """Return the decision that deletes the files. Each file is in the audit log before it is deleted."""
        audit = tuple(
            AuditNote(now, asked.tenant, asked.actor, "disk.delete", f"{report.node}:{file.whole_path}",
                      f"{file.file_class.value}, {file.size_bytes} bytes")
            for file in report.files
        )  # fmt: skip
        order = self._order(report.request, report.node, runs_sync=False, deletes=report.files)
        notice = Notice("fleet.DISK_CLEANED", report.node, _sum_of(report))
        return Decision(report.node, "clean", audit=audit, notices=(notice,), orders=(order,))

    def _order(
        self,
        request: str,
        node: NodeName,
        *,
        runs_sync: bool,
        deletes: tuple[FoundFile, ...] | None = None,
        above: float = 0.0,
    ) -> DiskOrder:
        guard = self._guard
        warn = guard.rules_of(self._world.nodes[node]).warn
        about = guard.roots, guard.spared, warn, guard.old_seconds
        return DiskOrder(request, *about, deletes, runs_sync, above=above, node=node)

    def _told(self, report: DiskReport, found: DiskReport | None, caveat: str) -> Mapping[str, Any]:
        """Return the answer to the client. If `report` is that of a deletion, `found` is the report that
        listed the files before it."""
        looked = (report,) if found is None else (found, report)
        kept: Counter[str] = Counter()
        for answer in looked:
            kept.update(dict(answer.kept))
        node, sample = self._world.nodes.get(report.node), self._world.node_samples.get(report.node)
        disks = () if node is None or sample is None else sample.disks
        rules = self._guard if node is None else self._guard.rules_of(node)
        return {
            "at": report.at,
            "deleted": found is not None,
            "first_pass": report.is_first,
            "message": "; ".join(filter(None, [*(answer.message for answer in looked), caveat])),
            "kept": dict(kept),
            "roots": [{"path": root.path, "class": root.file_class.value} for root in self._guard.roots],
            "disks": [
                {
                    "path": disk.path,
                    "total_bytes": disk.total_bytes,
                    "free_bytes": disk.free_bytes,
                    "level": level_of(disk.used_share, rules).name.lower(),
                }
                for disk in disks
            ],
            "files": [
                {
                    "path": file.whole_path,
                    "class": file.file_class.value,
                    "size_bytes": file.size_bytes,
                    "modified_at": file.modified_ns / 1e9,
                }
                for file in report.files
            ],
        }


def _sum_of(report: DiskReport) -> Mapping[str, int]:
    return {"files": len(report.files), "bytes": sum(file.size_bytes for file in report.files)}
