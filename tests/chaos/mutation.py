"""Mutation testing: known faults, each planted in a copy of the source, and the test that has to fail.

A test suite that misses one of these would miss the real mistake as well.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from tests.chaos.evidence import FOLDER, ROOT, add_no_evidence, commit

_SECONDS = 300


class Mutant(Struct, frozen=True):
    """In `file`, `right` is replaced by `wrong`; then `test` has to fail."""

    name: str
    file: str
    right: str
    wrong: str
    test: str


MUTANTS = (
    Mutant(
        "a report of an older claim counts for the newest claim",
        "service/gpubroker_server/core/lifecycle/task_update.py",
        "if task is None or not task.is_active or task.fence != fence:",
        "if task is None or not task.is_active:",
        "tests/core/lifecycle/test_runs.py",
    ),
    Mutant(
        "a later report overwrites the outcome of a task",
        "service/gpubroker_server/core/lifecycle/task_update.py",
        "if task is None or not task.is_active or task.fence != fence:",
        "if task is None or task.fence != fence:",
        "tests/core/lifecycle/test_runs.py",
    ),
    Mutant(
        "memory without a proof that its process is gone is released after a timeout",
        "service/gpubroker_server/core/domain/lease.py",
        "return move_lease(lease, LeaseState.QUARANTINED, quarantined_at=now)",
        "return move_lease(lease, LeaseState.RELEASED, proof=Proof.PROCESS_ABSENT)",
        "tests/core/lifecycle/test_deadlines.py",
    ),
    Mutant(
        "memory is released when the code has ended, before its process is gone",
        "service/gpubroker_server/core/lifecycle/runs.py",
        "LeaseState.RELEASING)\n    update.orders.append(forget)",
        "LeaseState.RELEASED, Proof.PROCESS_ABSENT)\n    update.orders.append(forget)",
        "tests/simulation/test_day.py::test_the_same_seed_is_the_same_day",
    ),
    Mutant(
        "the fence counts failed attempts instead of claims",
        "service/gpubroker_server/core/world/world.py",
        "return Fence(max(holder.fence, self.lineage) + 1)",
        "return Fence(max(holder.failures, self.lineage) + 1)",
        "tests/simulation/test_day.py::test_the_same_seed_is_the_same_day",
    ),
    Mutant(
        "memory pledged to one task counts as free for all",
        "service/gpubroker_server/core/world/ledger.py",
        "                free -= self.pledge_claim_mb(pledge)\n",
        "                free -= 0\n",
        "tests/core/world/test_ledger.py",
    ),
    Mutant(
        "orders are sent before the decision is committed",
        "service/gpubroker_server/broker/commit.py",
        "        written = await self._commit(writing) if writing else ()\n",
        "        await self.dispatcher.send(writing)\n"
        "        written = await self._commit(writing) if writing else ()\n",
        "tests/broker/test_leader.py",
    ),
    Mutant(
        "an older row overwrites a newer one",
        "service/gpubroker_server/adapters/sql/statements.py",
        "where(*same, table.c.version == r.c.version - ONE)",
        "where(*same)",
        "tests/contracts/test_store_commit.py",
    ),
    Mutant(
        "a write that changes no row counts as done",
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
        "a client is answered that its task is accepted although the database refused it",
        "service/gpubroker_server/adapters/sql/writer.py",
        "                    unit.on_failed(error)\n                break",
        "                    unit.on_written()\n                break",
        "sweep: submit",
    ),
    Mutant(
        "a commit whose answer was lost counts as done without a check",
        "service/gpubroker_server/adapters/sql/writer.py",
        "is_done = self._was_committed(partial(self._session.has_event, unknown.events[0]))",
        "is_done = True",
        "sweep: submit on PostgreSQL",
    ),
    Mutant(
        "a commit whose answer was lost is repeated without a check",
        "service/gpubroker_server/adapters/sql/writer.py",
        "is_done = self._was_committed(partial(self._session.has_event, unknown.events[0]))",
        "self._session.reconnect()\n            is_done = False",
        "sweep: admit on PostgreSQL",
    ),
    Mutant(
        "one idempotency key makes two tasks",
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
        "events are written in a separate transaction",
        "service/gpubroker_server/adapters/sql/group.py",
        "    if numbered:\n        session.write(sql.INSERT_EVENTS, numbered)\n",
        "    session.commit()\n    session.begin()\n    session.write(sql.INSERT_EVENTS, numbered)\n",
        "sweep: admit",
    ),
    Mutant(
        "an agent executes orders of an older term",
        "service/gpubroker_server/adapters/ray/agent/node_agent.py",
        "is_over = LineageTerm(lineage, term) < self._term",
        "is_over = False",
        "tests/contracts/test_ray_agent.py",
    ),
    Mutant(
        "an agent starts a claim twice",
        "service/gpubroker_server/adapters/ray/agent/runner_process.py",
        "return key.fence > self._fences.get((key.task, key.rank), 0)",
        "return True",
        "tests/e2e/lab/test_ray_executor.py::TestRayExecutor::test_a_claim_starts_once",
    ),
    Mutant(
        "a run on a lost node is given up twice",
        "service/gpubroker_server/core/lifecycle/runs.py",
        "if node is None or node.incarnation != report.incarnation:",
        "if node is None:",
        "tests/core/lifecycle/test_node_loss.py",
    ),
    Mutant(
        "a pruned task leaves its outcome behind",
        "service/gpubroker_server/adapters/sql/pruning.py",
        '    delete_rows(tables.outcome, ("task",)),\n',
        "",
        "sweep: prune",
    ),
    Mutant(
        "a run that the agent does not know is waited for",
        "service/gpubroker_server/core/lifecycle/reconcile.py",
        "apply_reports(world, _absences(world, seen), now, policy)",
        "apply_reports(world, (), now, policy)",
        "simulation: 3 seeds",
    ),
    Mutant(
        "a leader that is asked to stop continues",
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
    """Each with whether its test failed."""
    with tempfile.TemporaryDirectory(prefix="gpb-mutants-") as place:
        copy = Path(place)
        _copy_to(copy)
        for mutant in mutants:
            with _Planted(copy, mutant):
                yield mutant, not _passes(copy, mutant.test)


def failing_tests(mutants: Sequence[Mutant]) -> list[str]:
    """The tests that fail without a mutant."""
    return [test for test in sorted({mutant.test for mutant in mutants}) if not _passes(ROOT, test)]


def keep(tried: Mapping[str, str]) -> None:
    """Write the evidence. `tried`: mutant -> the test that failed, or an empty string."""
    FOLDER.mkdir(exist_ok=True)
    found = sum(bool(test) for test in tried.values())
    whole = {"commit": commit(), "planted": len(tried), "found": found, "by": dict(tried)}
    (FOLDER / "mutation.json").write_text(json.dumps(whole, indent=1) + "\n")


class _Planted:
    def __init__(self, copy: Path, mutant: Mutant) -> None:
        self._file, self._mutant = copy / mutant.file, mutant

    def __enter__(self) -> None:
        self._text = self._file.read_text()
        assert self._text.count(self._mutant.right) == 1, (
            f"{self._mutant.name}: {self._mutant.file} does not have the text to replace"
        )
        self._file.write_text(self._text.replace(self._mutant.right, self._mutant.wrong))

    def __exit__(self, *_: object) -> None:
        self._file.write_text(self._text)


def _copy_to(copy: Path) -> None:
    git = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(git, capture_output=True, check=True, text=True).stdout.split("\0"):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    _copy_bytecode(copy)


def _copy_bytecode(copy: Path) -> None:
    """Copied sources keep their times, so their bytecode stays valid, except for the mutated file."""
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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--first", type=int, help="only the first N mutants")
    add_no_evidence(parser)


def command(options: argparse.Namespace) -> None:
    planted = MUTANTS[: options.first]
    if failing := failing_tests(planted):
        sys.exit(f"these tests fail without a mutant: {failing}")
    tried: dict[str, str] = {}
    for mutant, is_found in try_all(planted):
        tried[mutant.name] = mutant.test if is_found else ""
        print(f"{mutant.name}: {f'found by {mutant.test}' if is_found else 'NOT FOUND'}", flush=True)
    if not options.no_evidence:
        keep(tried)
    if not all(tried.values()):
        sys.exit(1)
