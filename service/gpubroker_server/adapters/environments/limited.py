"""Becomes a user under limits, then runs a program in place of itself. It is run as a script, and ends with
the process that started it.

Arguments: user id, group id (each -1 to keep the present one), MiB of memory for each process, seconds of
CPU time, then the program.
"""

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
_FILE_BYTES = 64 * 2**30
_NICENESS = 10


def main(uid: int, gid: int, memory_mb: int, seconds: int, program: list[str]) -> None:
    """Run the program. Raises OSError if the system refuses a step."""
    parent = os.getppid()
    os.nice(_NICENESS)
    for limit, most in (
        (resource.RLIMIT_DATA, memory_mb * 2**20),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    if gid >= 0:
        os.setgroups([gid])
        os.setgid(gid)
    if uid >= 0:
        os.setuid(uid)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a change of user would undo it
    if os.getppid() != parent:
        sys.exit("the process that started this one has ended")
    os.umask(0o022)
    try:
        os.execvp(program[0], program)  # noqa: S606  # its purpose
    except OSError as fault:
        sys.exit(f"{program[0]} cannot be started: {fault.strerror}")


if __name__ == "__main__":
    numbers = list(map(int, sys.argv[1:5]))
    main(numbers[0], numbers[1], numbers[2], numbers[3], sys.argv[5:])
