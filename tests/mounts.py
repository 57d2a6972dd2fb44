"""Mounts of a test's own."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def mounted(place: Path, *what: str, fds: Sequence[int] = ()) -> Iterator[None]:
    """`what`: arguments of `mount`. Needs the right to mount: without it nothing would be shown."""
    if not place.exists():
        place.mkdir(parents=True)
    command = ["mount", *what, str(place)]
    tried = subprocess.run(command, check=False, capture_output=True, text=True, pass_fds=fds)
    assert not tried.returncode, f"needs the right to mount (root, CAP_SYS_ADMIN): {tried.stderr}"
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextmanager
def hung_mount(place: Path) -> Iterator[IO[bytes]]:
    """A file system that does not answer, as that of a server that is away. Once this file is closed, it has
    a fault for all that is asked."""
    with open("/dev/fuse", "r+b", buffering=0) as server:
        about = f"fd={server.fileno()},rootmode=40000,user_id=0,group_id=0"
        command = ["-i", "-t", "fuse", "-o", about, "none"]
        with mounted(place, *command, fds=[server.fileno()]):
            yield server
