"""The example of a gang, with a process per rank and no cluster."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator

from tests.patience import PATIENCE_SECONDS

RANK = """
import sys
from types import SimpleNamespace
from examples import gang
rank, address = int(sys.argv[1]), sys.argv[2]
gang.current_task = lambda: SimpleNamespace(rank=rank, world_size=3, rank_zero_address=address)
print(gang.add_up(7))
"""


def test_every_rank_gets_the_sum_whichever_starts_first() -> None:
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(a_reserved_address())
        ranks = [a_rank(stack, rank, address) for rank in (1, 2, 0)]
        assert [rank.communicate(timeout=PATIENCE_SECONDS)[0] for rank in ranks] == ["42.0\n"] * 3


@contextlib.contextmanager
def a_reserved_address() -> Iterator[str]:
    """Reserve a port: this socket does not listen, so that rank 0 can."""
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{keeper.getsockname()[1]}"


def a_rank(stack: contextlib.ExitStack, rank: int, address: str) -> "subprocess.Popen[str]":
    """It is killed if another one fails."""
    process = stack.enter_context(
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), address], stdout=subprocess.PIPE, text=True)
    )
    stack.callback(process.kill)
    return process
