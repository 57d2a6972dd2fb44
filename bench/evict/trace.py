"""Requests for models and load times of models, as published by alibaba/clusterdata (v2026-GenAI).

The files are not part of this repository; `--data` names their folder.
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
    """The time in seconds since 1970."""
    model: str


def read_uses(data: Path) -> list[Use]:
    """Return the requests in order of time, and within one second in the order of the file. Requests that
    name no model count as requests for one model with an empty name, since that service has a default
    model."""
    with open(data / REQUESTS, newline="") as file:
        uses = [
            Use(instant(row["gmt_create"]), row["checkpoint_model_version_id"])
            for row in csv.DictReader(file)
        ]
    return sorted(uses, key=lambda use: use.at)


def instant(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def read_loads(data: Path) -> list[float]:
    """Return the load times in seconds, ascending. The file gives milliseconds, and does not name the
    models."""
    with open(data / LOADS, newline="") as file:
        return sorted(float(row["value"]) / 1000 for row in csv.DictReader(file))


def spread(models: Collection[str], loads: Sequence[float]) -> dict[str, float]:
    """Return a load time for each model: evenly spaced published times, assigned by a digest of the model's
    name. The assignment is made up; the distribution is the published one."""
    order = sorted(models, key=lambda model: hashlib.sha256(model.encode()).digest())
    return {model: loads[(2 * at + 1) * len(loads) // (2 * len(order))] for at, model in enumerate(order)}
