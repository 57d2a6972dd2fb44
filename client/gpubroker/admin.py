"""Operations for administrators: tokens, secrets, idle templates, nodes, quarantine, shutdown."""

import json
from collections.abc import Sequence
from typing import Any

from gpubroker.cluster.cluster_api import Gpu
from gpubroker.errors import WrongArgument
from gpubroker.tasks.submission import AnySubmission, body_of
from gpubroker.tasks.task import AnyTask, id_of
from gpubroker.transport.decoding import decode
from gpubroker.transport.exchange import Call, Steps
from gpubroker.transport.operations import Operations, operation, path_part, without_none
from gpubroker.wire.administration import NewToken, Secret, Token
from gpubroker.wire.fleet import IdleTemplate
from gpubroker.wire.nodes import Node, NodeDisk
from gpubroker.wire.quarantine import Detection, Released
from gpubroker.wire.queues import Queue


class AdminApi(Operations):
    @operation
    def release_quarantine(
        self,
        holder: AnyTask,
        reason: str,
        *,
        attempts: Sequence[int] = (),
        ranks: Sequence[int] = (),
        devices: Sequence[str] = (),
    ) -> Steps[Released]:
        """State that the holder of quarantined memory is gone, or only the given attempts, ranks and device
        UUIDs of it.

        The service does not check the statement; it records the token's name and the reason. Raises Refused
        (`nothing-quarantined`, `still-in-use`).
        """
        limits = {"attempts": list(attempts), "ranks": list(ranks), "devices": list(devices)}
        body = {"reason": reason, **{name: values for name, values in limits.items() if values}}
        answer = yield from self._ask_once("POST", f"/quarantine/{path_part(id_of(holder))}/release", body)
        return decode(Released, answer.json())

    @operation
    def resume(self, reason: str) -> Steps[Detection]:
        """State that the nodes which fell silent together are lost, so that their tasks start elsewhere.
        Raises Refused (`nothing-paused`)."""
        answer = yield from self._ask_once("POST", "/detection/resume", {"reason": reason})
        return decode(Detection, answer.json())

    @operation
    def pause_queue(
        self, *, tenant: str | None = None, stream: str | None = None, reason: str = ""
    ) -> Steps[Queue]:
        """Pause a tenant or a work stream: none of its tasks start, and running ones go on. Give one of the
        two."""
        return (yield from self._change_queue("pause", tenant, stream, reason))

    @operation
    def resume_queue(
        self, *, tenant: str | None = None, stream: str | None = None, reason: str = ""
    ) -> Steps[Queue]:
        """End the pause of a tenant or of a work stream. Give one of the two."""
        return (yield from self._change_queue("resume", tenant, stream, reason))

    def _change_queue(self, verb: str, tenant: str | None, stream: str | None, reason: str) -> Steps[Queue]:
        if (tenant is None) is (stream is None):
            raise WrongArgument("give either tenant= or stream=")
        kind, name = ("streams", stream) if tenant is None else ("tenants", tenant)
        path = f"/{kind}/{path_part(str(name))}/{verb}"
        return decode(Queue, (yield from self._ask("POST", path, {"reason": reason})))

    @operation
    def cordon(self, node: str, reason: str = "") -> Steps[Node]:
        """Start nothing new on the node; runs there go on."""
        return (yield from self._ask_node(node, "cordon", reason=reason))

    @operation
    def drain(self, node: str, reason: str = "", *, deadline_seconds: float | None = None) -> Steps[Node]:
        """Cordon the node and ask the runs there to leave, with notice and without using a retry.

        Critical and protected runs stay until `deadline_seconds` from now, or without a deadline as long as
        they run. `nodes()` says when the drain is done.
        """
        return (yield from self._ask_node(node, "drain", reason=reason, deadline_seconds=deadline_seconds))

    @operation
    def uncordon(self, node: str, reason: str = "") -> Steps[Node]:
        """Let tasks start on the node again."""
        return (yield from self._ask_node(node, "uncordon", reason=reason))

    @operation
    def close_gpu(self, gpu: str, reason: str = "") -> Steps[Gpu]:
        """Start nothing new on the GPU, named by its UUID or as `node/gpu0`; runs there go on."""
        return (yield from self._ask_gpu(gpu, "close", reason))

    @operation
    def reopen_gpu(self, gpu: str, reason: str = "") -> Steps[Gpu]:
        """Let tasks start on the GPU again, whoever has closed it. A fault that still exists does not close
        the GPU again; another fault does."""
        return (yield from self._ask_gpu(gpu, "reopen", reason))

    def _ask_gpu(self, gpu: str, what: str, reason: str) -> Steps[Gpu]:
        answer = yield from self._ask_once("POST", f"/gpus/{path_part(gpu)}/{what}", {"reason": reason})
        return decode(Gpu, answer.json())

    @operation
    def disk(self, node: str) -> Steps[NodeDisk]:
        """Return how full the node's disks are, which files its disk guard would delete, and why others
        stay."""
        return decode(NodeDisk, (yield from self._ask("GET", f"/nodes/{path_part(node)}/disk")))

    @operation
    def clean(self, node: str, *, dry_run: bool = True) -> Steps[NodeDisk]:
        """Delete the files that the node's disk guard may delete, until its disks are no fuller than they
        should be. With `dry_run`, only return which files would be deleted. Sync commands are run in both
        cases."""
        path = f"/nodes/{path_part(node)}/disk/clean"
        return decode(NodeDisk, (yield from self._ask_once("POST", path, {"dry_run": dry_run})).json())

    def _ask_node(self, node: str, action: str, **body: Any) -> Steps[Node]:
        answer = yield from self._ask_once("POST", f"/nodes/{path_part(node)}/{action}", without_none(body))
        return decode(Node, answer.json())

    @operation
    def tokens(self) -> Steps[tuple[Token, ...]]:
        """Return all tokens, without their secrets."""
        raw = yield from self._ask("GET", "/tokens")
        return tuple(decode(Token, item) for item in raw["items"])

    @operation
    def create_token(
        self,
        name: str,
        *,
        scopes: Sequence[str],
        tenant: str | None = None,
        new_tenant: bool = False,
        max_priority: int | str | None = None,
        expires_in_seconds: float | None = None,
    ) -> Steps[NewToken]:
        """Create a token. Its secret is in `.token` of this answer and is not stored. Set `new_tenant` if
        neither the settings nor other tokens name the tenant yet."""
        body = {
            "name": name,
            "scopes": list(scopes),
            "tenant": tenant,
            "new_tenant": new_tenant or None,
            "max_priority": max_priority,
            "expires_in_seconds": expires_in_seconds,
        }
        answer = yield from self._ask_once("POST", "/tokens", without_none(body))
        return decode(NewToken, answer.json())

    @operation
    def revoke_token(self, name: str) -> Steps[None]:
        """Make a token invalid at once."""
        yield from self._ask_once("DELETE", f"/tokens/{path_part(name)}")

    @operation
    def set_secret(self, name: str, text: str) -> Steps[None]:
        """Set a secret of your tenant. A task gets it in a variable of its `env` whose value is
        `secret:NAME`, from its next start on."""
        headers = {"Content-Type": "text/plain; charset=utf-8"}
        path = f"/secrets/{path_part(name)}"
        yield from self._send(Call("PUT", path, body=text.encode(), headers=headers))

    @operation
    def secrets(self) -> Steps[tuple[Secret, ...]]:
        """Return your tenant's secrets without their texts, which the service gives to runs only."""
        raw = yield from self._ask("GET", "/secrets")
        return tuple(decode(Secret, item) for item in raw["items"])

    @operation
    def delete_secret(self, name: str) -> Steps[None]:
        """Delete a secret. Tasks that name it and have not started fail at their start."""
        yield from self._ask_once("DELETE", f"/secrets/{path_part(name)}")

    @operation
    def create_idle_template(
        self, name: str, task: AnySubmission, *, max_running: int, weight: int = 1
    ) -> Steps[IdleTemplate]:
        """Submit tasks like this one as long as devices are idle, one for each device, at the lowest
        priority. Raises Refused (`idle-template-exists`)."""
        about = {"name": name, "max_running": max_running, "weight": weight}
        body = {**about, "task": json.loads(body_of(task))}
        return decode(IdleTemplate, (yield from self._ask_once("POST", "/idle-templates", body)).json())

    @operation
    def idle_templates(self) -> Steps[tuple[IdleTemplate, ...]]:
        """Return your tenant's idle templates, or all with the scope admin."""
        raw = yield from self._ask("GET", "/idle-templates")
        return tuple(decode(IdleTemplate, item) for item in raw["items"])

    @operation
    def delete_idle_template(self, name: str) -> Steps[None]:
        """Delete an idle template. No more tasks of it are submitted; running ones go on."""
        yield from self._ask_once("DELETE", f"/idle-templates/{path_part(name)}")

    @operation
    def shutdown(self, *, stop_cluster: bool = False) -> Steps[None]:
        """Stop the service, and with `stop_cluster` the local Ray that it started."""
        yield from self._ask_once("POST", "/shutdown", {"stop_cluster": stop_cluster})
