"""Reads the values that a Triton server shows only over HTTP: the whole configuration of a loaded model, and
the GPUs that the server sees."""

import json
import re
from typing import Any, Final
from urllib.parse import quote

from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.serving.batching import BatchRules
from gpubroker_server.ports.backends import ModelBackend, NotFetched, RequestHead, Trouble
from gpubroker_server.ports.models import HostFault, HostRefused

_GPU: Final = re.compile(rb'^nv_gpu_memory_total_bytes\{[^}]*gpu_uuid="([^"]+)"', re.MULTILINE)

_NOT_GROUPED: Final = frozenset({"dynamic_batching", "sequence_batching", "ensemble_scheduling"})
"""The fields by which a configuration itself says how requests are scheduled."""

_MICROSECONDS: Final = 1_000_000


async def visible_gpus(metrics: ModelBackend, within_seconds: Seconds) -> tuple[str, ...]:
    """Return the sorted UUIDs of the GPUs that the server sees; empty if its metrics list none. For a MIG
    instance Triton lists the whole GPU. Raises HostRefused."""
    try:
        body = await _get(metrics, "/metrics", within_seconds)
    except NotFetched as fault:
        message = f"the metrics of {metrics.name}, in which it lists its GPUs, cannot be read: {fault}"
        raise HostRefused(HostFault.UNREACHABLE, message) from None
    return tuple(sorted({uuid.decode("ascii", "replace") for uuid in _GPU.findall(body)}))


async def model_config(web: ModelBackend, model: str, within_seconds: Seconds) -> dict[str, Any]:
    """Return the configuration of a loaded model. Raises HostRefused."""
    try:
        config = json.loads(await _get(web, f"/v2/models/{quote(model, safe='')}/config", within_seconds))
    except (NotFetched, ValueError) as fault:
        message = f"{web.name} does not tell the configuration of {model}: {fault}"
        raise HostRefused(HostFault.UNKNOWN, message) from None
    if not isinstance(config, dict):
        raise HostRefused(HostFault.UNKNOWN, f"{web.name} has no configuration of {model}: {config!r:.200}")
    return config


def with_dynamic_batching(config: dict[str, Any], rules: BatchRules) -> str:
    """Return the whole configuration with dynamic batching, as JSON. It is empty if the model takes no
    batches, or if its configuration itself says how requests are scheduled."""
    most_rows = min(rules.most_rows, int(config.get("max_batch_size", 0)))
    is_decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
    if most_rows <= 1 or is_decoupled or config.keys() & _NOT_GROUPED:
        return ""
    delay_microseconds = round(rules.delay_seconds * _MICROSECONDS)
    batching = {"preferred_batch_size": [most_rows], "max_queue_delay_microseconds": delay_microseconds}
    return json.dumps({**config, "dynamic_batching": batching})


async def _get(web: ModelBackend, path: str, within_seconds: Seconds) -> bytes:
    """Return the body of the server's answer. Raises NotFetched for any status but 200."""
    response = await web.fetch(RequestHead(b"GET", path.encode(), (), 0), b"", within_seconds)
    if response.status != 200:
        raise NotFetched(Trouble.BROKEN, f"status {response.status} for {path}")
    return response.body
