"""One small file per run that has a process of its own: what a later agent must know to take it over."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

from gpubroker.runtime.messages import RunKey

from service.adapters.ray.processes import ProcessId

KEPT_LOGS = 1000


@dataclass(frozen=True, slots=True)
class Card:
    """Written before the run's process hears of the run, removed when no process of it is left."""

    task: str
    fence: int
    rank: int
    leases: tuple[tuple[str, int], ...]
    """(device UUID, MiB)"""
    runner: str
    """Name of its Ray actor."""
    pid: int
    start_ticks: int
    boot_id: str
    ray_node: str
    """Ray's id of the node: another one means that the Ray it belonged to is gone."""

    @property
    def key(self) -> RunKey:
        return RunKey(self.task, self.fence, self.rank)

    @property
    def process(self) -> ProcessId:
        return ProcessId(self.pid, self.start_ticks)


class RunFiles:
    """Cards and logs of one node's runs, in one directory of mode 0700."""

    def __init__(self, directory: Path) -> None:
        """Raises PermissionError if somebody else owns the directory."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_uid != os.geteuid():
            raise PermissionError(f"{directory} belongs to another user; remove it or give it to this one")
        # As the kernel spells it, because leftovers are found by the log they print to.
        self._directory = directory.resolve()

    def log_of(self, key: RunKey) -> Path:
        return self._directory / f"{_stem(key)}.log"

    def write_card(self, card: Card) -> None:
        draft = self._card_of(card.key).with_suffix(".new")
        draft.write_text(json.dumps(asdict(card)))
        draft.replace(self._card_of(card.key))

    def remove_card(self, key: RunKey) -> None:
        self._card_of(key).unlink(missing_ok=True)

    def cards(self) -> Iterator[Card]:
        for path in sorted(self._directory.glob("*.json")):
            given = json.loads(path.read_text())
            leases = tuple((uuid, mb) for uuid, mb in given.pop("leases"))
            yield Card(leases=leases, **given)

    def prune_logs(self) -> None:
        """Only the newest logs stay, and those of runs whose card is still here."""
        over = [path for path in self._directory.glob("*.log") if not path.with_suffix(".json").exists()]
        over.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in over[KEPT_LOGS:]:
            path.unlink(missing_ok=True)

    def _card_of(self, key: RunKey) -> Path:
        return self._directory / f"{_stem(key)}.json"


def _stem(key: RunKey) -> str:
    return quote(f"{key.task}-{key.fence}-{key.rank}", safe="")
