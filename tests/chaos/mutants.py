"""Faults that are planted on purpose, each in a copy of the source, and the test that sees it.

A test suite that lets one of these through would let the real mistake through as well.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.evidence import FOLDER, ROOT, commit

_SECONDS = 300


@dataclass(frozen=True)
class Mutant:
    """In `file`, `right` becomes `wrong`; `test` is to fail then."""

    name: str
    file: str
    right: str
    wrong: str
    test: str


MUTANTS = (
    Mutant(
        "reports of an older claim are taken for those of the newest",
        "service/gpubroker_server/core/lifecycle/task_update.py",
        "if task is None or not task.is_active or task.fence != fence:",
        "if task is None or not task.is_active:",
        "tests/core/lifecycle/test_runs.py",
    ),
    Mutant(
        "what a task has come to is overwritten by a later report",
        "service/gpubroker_server/core/lifecycle/task_update.py",
        "if task is None or not task.is_active or task.fence != fence:",
        "if task is None or task.fence != fence:",
        "tests/core/lifecycle/test_runs.py",
    ),
    Mutant(
        "memory is free once nobody has confirmed for long enough that its process is gone",
        "service/gpubroker_server/core/lifecycle/deadlines.py",
        "leases=tuple(quarantine(lease, now) for lease in leases),\n        outcome",
        "leases=tuple(move_lease(lease, LeaseState.RELEASED) for lease in leases),\n        outcome",
        "tests/core/lifecycle/test_deadlines.py",
    ),
    Mutant(
        "memory is free when the code has ended, and not when its process is gone",
        "service/gpubroker_server/core/lifecycle/runs.py",
        "LeaseState.RELEASING)\n    fold.orders.append(forget)",
        "LeaseState.RELEASED)\n    fold.orders.append(forget)",
        "tests/simulation/test_day.py::test_the_same_seed_is_the_same_day",
    ),
    Mutant(
        "the fence counts attempts that failed, and not claims",
        "service/gpubroker_server/core/planning/deciding.py",
        "fence = Fence(task.fence + 1)",
        "fence = Fence(task.failures + 1)",
        "tests/simulation/test_day.py::test_the_same_seed_is_the_same_day",
    ),
    Mutant(
        "what is freed for one task counts as free for all",
        "service/gpubroker_server/core/world/ledger.py",
        "                free -= self.claim_mb(pledge)\n",
        "                free -= 0\n",
        "tests/core/world/test_ledger.py",
    ),
    Mutant(
        "orders leave before the decision is committed",
        "service/gpubroker_server/broker/loop.py",
        "        written = await self._commit(writing) if writing else ()\n",
        "        await self._dispatcher.send(writing)\n"
        "        written = await self._commit(writing) if writing else ()\n",
        "tests/broker/test_leader.py",
    ),
    Mutant(
        "a row is written over a newer one",
        "service/gpubroker_server/adapters/sql/statements.py",
        "where(*same, table.c.version == r.c.version - _ONE)",
        "where(*same)",
        "tests/contracts/test_store_commit.py",
    ),
    Mutant(
        "a write that changes no row is taken for done",
        "service/gpubroker_server/adapters/sql/sqlite.py",
        "if statement.exact and written != len(rows):",
        "if statement.exact and written > len(rows):",
        "tests/contracts/test_store_commit.py",
    ),
    Mutant(
        "the term of a leader is not checked (SQLite)",
        "service/gpubroker_server/adapters/sql/sqlite.py",
        "        if current != term:\n",
        "        if current > term + 1000:\n",
        "tests/contracts/test_store_commit.py::test_a_new_term_ends_every_older_one",
    ),
    Mutant(
        "the term of a leader is not checked (PostgreSQL)",
        "service/gpubroker_server/adapters/sql/postgres.py",
        "                if current != term:\n",
        "                if current > term + 1000:\n",
        "tests/contracts/test_store_commit.py::test_a_new_term_ends_every_older_one",
    ),
    Mutant(
        "commits are not synced to disk",
        "service/gpubroker_server/adapters/sql/sqlite.py",
        "PRAGMA synchronous = FULL",
        "PRAGMA synchronous = NORMAL",
        "tests/contracts/test_sqlite_file.py",
    ),
    Mutant(
        "a client is told that its task is accepted although the database refused it",
        "service/gpubroker_server/adapters/sql/writer.py",
        "                    unit.on_failed(error)\n                break",
        "                    unit.on_written()\n                break",
        "sweep: submit",
    ),
    Mutant(
        "a commit whose answer was lost is taken for done, unread",
        "service/gpubroker_server/adapters/sql/writer.py",
        "if not unknown.events or self._was_committed(unknown.events[0]):",
        "if True:",
        "sweep: submit on PostgreSQL",
    ),
    Mutant(
        "a commit whose answer was lost is done again, unread",
        "service/gpubroker_server/adapters/sql/writer.py",
        "if not unknown.events or self._was_committed(unknown.events[0]):",
        "self._session.reconnect()\n                if not unknown.events:",
        "sweep: admit on PostgreSQL",
    ),
    Mutant(
        "one key makes two tasks",
        "migrations/versions/0001_first_schema.py",
        "        unique=True,\n",
        "        unique=False,\n",
        "tests/contracts/test_store_submit.py",
    ),
    Mutant(
        "the log skips a position",
        "service/gpubroker_server/adapters/sql/sqlite.py",
        "SET position = position + ? WHERE",
        "SET position = position + ? + 1 WHERE",
        "tests/contracts/test_store_submit.py::test_positions_have_no_gap_and_listeners_hear_each_once",
    ),
    Mutant(
        "events are written in a transaction of their own",
        "service/gpubroker_server/adapters/sql/group.py",
        "    if numbered:\n        session.write(sql.INSERT_EVENTS, numbered)\n",
        "    session.commit()\n    session.begin()\n    session.write(sql.INSERT_EVENTS, numbered)\n",
        "sweep: admit",
    ),
    Mutant(
        "an agent carries out orders of an older term",
        "service/gpubroker_server/adapters/ray/agent/node_agent.py",
        "outdated = term < self._term",
        "outdated = False",
        "tests/contracts/test_ray_agent.py",
    ),
    Mutant(
        "an agent starts a claim that it has started before",
        "service/gpubroker_server/adapters/ray/agent/run_table.py",
        "return key.fence > self._fences.get((key.task, key.rank), 0)",
        "return True",
        "tests/e2e/lab/test_ray_executor.py::TestRayExecutor::test_a_claim_starts_once",
    ),
    Mutant(
        "a run that was given up with its node is given up again",
        "service/gpubroker_server/core/lifecycle/runs.py",
        "if node is not None and node.incarnation == report.incarnation:",
        "if node is not None:",
        "tests/core/lifecycle/test_node_loss.py",
    ),
    Mutant(
        "what is taken out of the queue leaves its outcome behind",
        "service/gpubroker_server/adapters/sql/pruning.py",
        '    _of_tasks(tables.outcome, "task"),\n',
        "",
        "sweep: take out what is over",
    ),
    Mutant(
        "what an agent does not have is waited for all the same",
        "service/gpubroker_server/core/lifecycle/reconcile.py",
        "react(world, _absences(world, seen), now, policy)",
        "react(world, (), now, policy)",
        "simulation: 3 seeds",
    ),
    Mutant(
        "a leader that is asked to stop goes on",
        "service/gpubroker_server/broker/leadership.py",
        "        try:\n"
        "            ended, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)\n"
        "        finally:\n",
        "        ended = set()\n        with suppress(asyncio.CancelledError):\n"
        "            ended, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)\n"
        "        if parts:\n",
        "simulation: 30 seeds",
    ),
)


def try_all(mutants: Sequence[Mutant] = MUTANTS) -> Iterator[tuple[Mutant, bool]]:
    """Each with whether its test saw it."""
    with tempfile.TemporaryDirectory(prefix="gpb-mutants-") as place:
        copy = Path(place)
        _copy_to(copy)
        for mutant in mutants:
            with _Planted(copy, mutant):
                yield mutant, not _passes(copy, mutant.test)


def unhealthy(mutants: Sequence[Mutant]) -> list[str]:
    """Tests that fail without any mutant: they would prove nothing."""
    return [test for test in sorted({mutant.test for mutant in mutants}) if not _passes(ROOT, test)]


def keep(tried: Mapping[str, str]) -> None:
    """As evidence. Mutant -> the test that saw it, or nothing."""
    FOLDER.mkdir(exist_ok=True)
    seen = sum(bool(test) for test in tried.values())
    whole = {"commit": commit(), "planted": len(tried), "seen": seen, "by": dict(tried)}
    (FOLDER / "mutants.json").write_text(json.dumps(whole, indent=1) + "\n")


class _Planted:
    def __init__(self, copy: Path, mutant: Mutant) -> None:
        self._file, self._mutant = copy / mutant.file, mutant

    def __enter__(self) -> None:
        self._text = self._file.read_text()
        assert self._text.count(self._mutant.right) == 1, f"{self._mutant.name}: its place has changed"
        self._file.write_text(self._text.replace(self._mutant.right, self._mutant.wrong))

    def __exit__(self, *_: object) -> None:
        self._file.write_text(self._text)


def _copy_to(copy: Path) -> None:
    git = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(git, capture_output=True, check=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    _copy_bytecode(copy)


def _copy_bytecode(copy: Path) -> None:
    """Each of its sources is as old as the one it was compiled from, and what is planted is newer."""
    for folder in {path.parent for path in copy.rglob("*.py")}:
        compiled = ROOT / folder.relative_to(copy) / "__pycache__"
        if compiled.exists():
            shutil.copytree(compiled, folder / "__pycache__")


def _passes(tree: Path, test: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    if test.startswith("sweep: "):
        operation, _, database = test.removeprefix("sweep: ").partition(" on ")
        command = [sys.executable, "-m", "tests.chaos", "sweep", "--fault", "cut", "--operation", operation]
        command += ["--database", "postgres" if database else "sqlite"]
    if test.startswith("simulation: "):
        seeds = test.removeprefix("simulation: ").removesuffix(" seeds")
        command = [sys.executable, "-m", "tests.chaos", "simulation", "--seeds", seeds, "--no-evidence"]
    env = {
        **os.environ,
        "PYTHONPATH": f"{tree}:{tree / 'service'}:{tree / 'client'}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, timeout=_SECONDS)
    return done.returncode == 0
