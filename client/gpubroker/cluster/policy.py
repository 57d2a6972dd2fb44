"""What the operator of a service has chosen; see `Broker.policy`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpubroker.transport.decoding import Raw, filled

Rows = tuple[Mapping[str, Any], ...]
_LISTS = ("bands", "kinds", "pools", "custom_limits", "max_running", "model_types", "tenants")


@dataclass(frozen=True, slots=True)
class Policy:
    """Rows are mappings with the names of the HTTP API. Of tenants only those that this token may know."""

    placement: str = ""
    bands: Rows = ()
    ageing_seconds_per_point: float = 0.0
    preemption: Mapping[str, Any] = field(default_factory=dict)
    overuse: str = ""
    """`report` or `stop`: what becomes of runs above their lease."""
    overuse_tolerance: float = 0.0
    learned_margin: float = 0.0
    kinds: Rows = ()
    pools: Rows = ()
    custom_limits: Rows = ()
    max_running: Rows = ()
    maximum: Mapping[str, Any] = field(default_factory=dict)
    """The most that one task may ask for; None is no limit."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    model_types: Rows = ()
    tenants: Rows = ()
    streams: Mapping[str, float] = field(default_factory=dict)
    body_bytes: int = 0
    batch_body_bytes: int = 0
    raw: Raw = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, raw: Raw) -> "Policy":
        return filled(cls, raw, **{name: tuple(raw.get(name) or ()) for name in _LISTS})
