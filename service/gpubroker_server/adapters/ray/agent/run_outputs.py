"""The files that runs leave. A process of the run's user collects them, and they are sent to the leader in
parts."""

import asyncio
import contextlib
import hashlib
import json
import os
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import gpubroker
import structlog
from gpubroker.runtime.messages import Report, RunKey

from gpubroker_server.adapters.ray.options import AgentConfig

log = structlog.get_logger("gpubroker.agent")

COLLECT_SECONDS = 600.0
"""The time limit for collecting the files of one run."""
PART_BYTES = 4 * 2**20
AT_ONCE = 2
"""The number of runs whose files are collected at the same time."""

_SOFTWARE = str(Path(gpubroker.__file__).parents[1])
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from gpubroker.runtime.collecting import main; main()"
)
"""The program that collects files. It imports only the standard library and this software; no environment
variable and no file of a user has an influence on that."""


class _Archive(NamedTuple):
    """The collected files of a run, on their way to the leader. `id` is empty if there are none."""

    path: Path
    id: str
    size_bytes: int
    files: int
    message: str


class RunOutputs:
    """Collects the outputs of runs into archives and sends these. The leader says how many bytes of an
    archive are stored, and the next part is sent from there on."""

    def __init__(
        self,
        config: AgentConfig,
        directory: Path,
        report: Callable[[Report], None],
        on_sent: Callable[[RunKey], None],
    ) -> None:
        self._config = config
        self._directory = directory
        self._report = report
        self._on_sent = on_sent
        self._archives: dict[RunKey, _Archive] = {}
        self._stored: dict[RunKey, int] = {}
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def collect(self, key: RunKey, directory: str, patterns: Sequence[str]) -> None:
        """Collect the outputs of a run into an archive, and send its first part. Raises OSError."""
        async with self._turns:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._path_of(key)
            files, message = await self._collected(path, directory, patterns)
            id, size_bytes = ("", 0) if not files else await asyncio.to_thread(_digest_of, path)
            self._archives[key] = _Archive(path, id, size_bytes, files, message)
            self._stored[key] = 0
            self._report(self._part(key))

    def give_up(self, key: RunKey, message: str) -> None:
        """Report that no outputs of this run are collected, with the reason."""
        self._archives[key] = _Archive(self._path_of(key), "", 0, 0, message)
        self._stored[key] = 0
        self._report(self._part(key))

    def answer(self, key: RunKey, id: str, stored_bytes: int, *, is_over: bool) -> None:
        """Take the leader's answer that `stored_bytes` of an archive are stored, and send the next part.
        `is_over` is True if the leader needs no further part. A repeated call changes nothing."""
        archive = self._archives.get(key)
        if archive is None or archive.id != id:
            return
        if is_over:
            del self._archives[key], self._stored[key]
            archive.path.unlink(missing_ok=True)
            self._on_sent(key)
        elif stored_bytes != self._stored[key]:
            self._stored[key] = stored_bytes
            self._report(self._part(key))

    def questions(self) -> Iterator[Report]:
        for key in self._archives:
            yield self._part(key)

    def _path_of(self, key: RunKey) -> Path:
        return self._directory / f"{hashlib.sha256(str(key).encode()).hexdigest()}.tar"

    def _part(self, key: RunKey) -> Report:
        archive, begin = self._archives[key], self._stored[key]
        data = b""
        if archive.id:
            with archive.path.open("rb") as file:
                data = os.pread(file.fileno(), PART_BYTES, begin)
        about = archive.id, archive.size_bytes, begin, data, archive.files, archive.message
        return ("output", *key, time.time(), *about, self._config.node)

    async def _collected(self, path: Path, directory: str, patterns: Sequence[str]) -> tuple[int, str]:
        """Write the archive, and return the number of its files and a message about missing ones. A process
        of the run's user reads the files, so that it can read no more than the run could."""
        config = self._config
        limits = str(config.output_bytes), str(config.output_files)
        program = (sys.executable, "-I", "-c", _PROGRAM, _SOFTWARE)
        with path.open("wb") as archive:
            child = await asyncio.create_subprocess_exec(
                *program, config.task_user, directory, *limits, *patterns,
                stdin=asyncio.subprocess.DEVNULL, stdout=archive, stderr=PIPE,
                cwd="/", env={"LANG": "C.UTF-8"}, start_new_session=True,
            )  # fmt: skip
        try:
            async with asyncio.timeout(COLLECT_SECONDS):
                _, said = await child.communicate()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
            return 0, f"nothing was collected: the files could not be read within {COLLECT_SECONDS:g} s"
        try:
            summary = json.loads(said.decode(errors="replace").strip().splitlines()[-1])
            return int(summary["files"]), str(summary["message"])[:1000]
        except (ValueError, LookupError, TypeError):
            log.error("the outputs of a run were not collected", fault=said.decode(errors="replace")[-2000:])
            return 0, f"nothing was collected: the program that reads the files ended with {child.returncode}"


def _digest_of(path: Path) -> tuple[str, int]:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), file.tell()
