"""The example of a gang does what its page says, with a process per rank and without any cluster."""

import socket
import subprocess
import sys

RANK = """
import sys
from types import SimpleNamespace
from examples import gang
rank, address = int(sys.argv[1]), sys.argv[2]
gang.current_task = lambda: SimpleNamespace(rank=rank, world_size=3, rank_zero_address=address)
print(gang.add_up(7))
"""


def test_every_rank_has_the_sum_whoever_comes_first() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), address], stdout=subprocess.PIPE, text=True)
        for rank in (1, 2, 0)
    ]
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["42.0\n"] * 3
