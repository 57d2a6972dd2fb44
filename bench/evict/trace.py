"""Requests for models and the load times of models, as alibaba/clusterdata published them (v2026-GenAI).

The files are read where the operator keeps them; they are no part of this repository.
"""

import csv
import hashlib
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

REQUESTS = "lora_request_trace.csv"
LOADS = "basemodel_update_latency_anon.csv"


class Use(NamedTuple):
    at: float
    """Seconds since 1970."""
    model: str


def read_uses(data: Path) -> list[Use]:
    """In order of time; of those in one second, in the order of the file. A request that names no model is
    one for the model without a name: the service has a default."""
    with open(data / REQUESTS, newline="") as file:
        uses = [
            Use(instant(row["gmt_create"]), row["checkpoint_model_version_id"])
            for row in csv.DictReader(file)
        ]
    return sorted(uses, key=lambda use: use.at)


def instant(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def read_loads(data: Path) -> list[float]:
    """Seconds, the shortest first. The file tells milliseconds, and not of which model."""
    with open(data / LOADS, newline="") as file:
        return sorted(float(row["value"]) / 1000 for row in csv.DictReader(file))


def spread(models: Collection[str], loads: Sequence[float]) -> dict[str, float]:
    """Each model's own load time: the models, in the order of a digest of their names, get evenly spaced ones
    of the published times. Which model has which is made up; how much they differ is not."""
    order = sorted(models, key=lambda model: hashlib.sha256(model.encode()).digest())
    return {model: loads[(2 * at + 1) * len(loads) // (2 * len(order))] for at, model in enumerate(order)}
