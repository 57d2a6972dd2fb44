"""Tenants as a table for people."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from gpubroker.cli.layout import Column, Rows, gib, size
from gpubroker.cluster.fleet import Tenant

_COLUMNS = (
    Column("TENANT", share=0.4),
    Column("COHORT", share=0.2),
    Column("HELD"),
    Column("GUARANTEED"),
    Column("BORROWED"),
    Column("USED"),
    Column("FAIR SHARE"),
    Column("LEVEL"),
    Column("PENDING"),
    Column("ACTIVE"),
)
"""USED is in GiB-hours, as they count now. LEVEL is what it has had of its share: the lowest goes first."""


def tenants(listed: Sequence[Tenant]) -> RenderableType:
    rows = [
        (
            tenant.name,
            tenant.cohort or "",
            size(tenant.held_mb),
            "no quota" if tenant.guaranteed_mb is None else size(tenant.guaranteed_mb),
            size(tenant.borrowed_mb) if tenant.borrowed_mb else "",
            f"{gib(tenant.usage_mb_seconds / 3600)} GiBh",
            f"{tenant.fair_share:.0%}",
            f"{tenant.level:.2f}",
            str(tenant.pending),
            str(tenant.active),
        )
        for tenant in listed
    ]
    return Rows(_COLUMNS, rows) if rows else Text("no tenants yet")
