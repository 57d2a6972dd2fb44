"""Objects as arguments on two Ray nodes: each fetches an object once, and its runs read that copy."""

from typing import Any

import numpy as np

from tests.e2e.hands import PATIENCE_SECONDS
from tests.e2e.service_process import ServiceProcess
from tests.e2e.work import where_it_lies


def test_each_node_fetches_an_object_once_and_its_runs_share_that_copy(two_nodes: ServiceProcess) -> None:
    broker = two_nodes.broker
    array = np.arange(500_000.0)
    stored = broker.put(array)
    names = [node.name for node in broker.nodes()]
    bytes_on_disk = next(two_nodes.data_dir.glob(f"**/{stored.id}"))

    def one_on_each() -> list[dict[str, Any]]:
        tasks = [broker.submit(where_it_lies, stored, cpu=1, nodes={"node": [name]}) for name in names]
        return [broker.result(task, timeout_seconds=PATIENCE_SECONDS) for task in tasks]

    first = one_on_each()
    bytes_on_disk.unlink()
    found = [*first, *one_on_each()]
    assert len({each["pid"] for each in found}) == 4
    assert {each["sum"] for each in found} == {float(array.sum())}
    assert {each["refused"] for each in found} == {"assignment destination is read-only"}
    lies = [(each["node"], *each["file"]) for each in found]
    assert lies[:2] == lies[2:], "at the same place of the file that is the node's object store"
    assert len({inode for _, inode, _ in lies}) == len({node for node, *_ in lies}) == 2
    broker.delete_object(stored)
