"""What a node agent tells of its machine, and that files which do not answer hold nothing up."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from gpubroker_server.adapters.ray.agent import host_meter
from gpubroker_server.adapters.ray.agent.host_meter import RaySession
from gpubroker_server.core.domain.device import DiskSample, NodeSample, StoreSample
from structlog.testing import capture_logs

from tests.contracts.fake_runners import FakeRunners, Leader, a_leader
from tests.nvml.heard import next_node_sample

MIB = 2**20
OpenLeader = Callable[..., Leader]


@pytest.fixture
def open_leader(runners: FakeRunners, tmp_path: Path) -> OpenLeader:
    """Of an agent that samples often; its Ray keeps its session in a directory of its own."""
    session = tmp_path / "session"
    (session / "spilled").mkdir(parents=True)
    runners.session = RaySession(str(session), str(session / "spilled"), 100 * MIB)
    return partial(a_leader, runners, tmp_path, sample_period_seconds=0.05)


class HungMount:
    """In place of `os.statvfs`: it does not answer about one path while it hangs."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.asked = threading.Event()
        self.answers = threading.Event()
        self._statvfs = os.statvfs

    def __call__(self, path: str) -> os.statvfs_result:
        if path == self.path:
            self.asked.set()
            self.answers.wait()
        return self._statvfs(path)


@pytest.fixture
def hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HungMount]:
    mount = HungMount(str(tmp_path))
    monkeypatch.setattr(os, "statvfs", mount)
    yield mount
    mount.answers.set()


def paths(sample: NodeSample) -> list[str]:
    return [disk.path for disk in sample.disks]


async def until(leader: Leader, true: Callable[[NodeSample], bool]) -> NodeSample:
    while not true(sample := await next_node_sample(leader)):
        pass
    return sample


async def test_the_machine_is_measured(
    runners: FakeRunners, open_leader: OpenLeader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pressure := tmp_path / "memory").write_text(
        "some avg10=12.50 avg60=0.00 avg300=0.00 total=9\nfull ...\n"
    )
    monkeypatch.setattr(host_meter, "PRESSURE", pressure)
    (Path(runners.session.spill_directory) / "objects").write_bytes(bytes(3 * MIB))
    leader = open_leader(watched_directories=(str(tmp_path),))
    await leader.announce()
    sample = await next_node_sample(leader)
    assert (sample.node, sample.memory_total_mb) == ("n1", psutil.virtual_memory().total // MIB)
    assert 0 < sample.memory_available_mb < sample.memory_total_mb
    assert 0 <= sample.cpu <= 1
    assert sample.memory_pressure == 0.125
    assert paths(sample) == [runners.session.directory, str(tmp_path)]
    room = os.statvfs(tmp_path)
    assert {disk.total_bytes for disk in sample.disks} == {room.f_blocks * room.f_frsize}, "in memory"
    assert all(0 < disk.free_bytes < disk.total_bytes for disk in sample.disks)
    assert sample.store == StoreSample(100, 3)
    assert sample.gpus == {}, "simulated devices have no driver"


async def test_a_disk_is_as_full_as_df_says(open_leader: OpenLeader) -> None:
    """Many file systems reserve a part for root, which no other user can fill."""
    leader = open_leader(watched_directories=("/",))
    await leader.announce()
    disk = (await next_node_sample(leader)).disks[-1]
    assert 100 * disk.used_share == pytest.approx(psutil.disk_usage("/").percent, abs=0.5)


async def test_network_bytes_are_counted_without_loopback(
    open_leader: OpenLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interface(received: int, sent: int) -> object:
        return psutil._ntuples.snetio(sent, received, 0, 0, 0, 0, 0, 0)

    found = {"lo": interface(9, 9), "eth0": interface(5, 1), "ib0": interface(7, 2)}
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic: found if pernic else None)
    leader = open_leader()
    await leader.announce()
    sample = await next_node_sample(leader)
    assert (sample.received_bytes, sample.sent_bytes) == (12, 3)


@pytest.mark.parametrize("text", ["", "some avg10=high", None])
async def test_what_the_kernel_does_not_say_is_none(
    runners: FakeRunners,
    open_leader: OpenLeader,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str | None,
) -> None:
    monkeypatch.setattr(host_meter, "PRESSURE", tmp_path / "memory")
    if text is not None:
        (tmp_path / "memory").write_text(text)
    (Path(runners.session.spill_directory) / "deleted meanwhile").symlink_to("nothing")
    leader = open_leader()
    await leader.announce()
    sample = await next_node_sample(leader)
    assert (sample.memory_pressure, sample.store) == (None, StoreSample(100, 0))


@pytest.mark.parametrize(("path", "spilled_mb"), [("not yet made", 0), ("a file", None)])
async def test_spilled_objects_are_none_that_are_known_or_not_known(
    runners: FakeRunners, open_leader: OpenLeader, tmp_path: Path, path: str, spilled_mb: int | None
) -> None:
    (tmp_path / "a file").touch()
    runners.session = runners.session._replace(spill_directory=str(tmp_path / path))
    leader = open_leader()
    await leader.announce()
    assert (await next_node_sample(leader)).store == StoreSample(100, spilled_mb)


async def test_without_an_object_store_nothing_is_said_of_it(
    runners: FakeRunners, open_leader: OpenLeader
) -> None:
    runners.session = runners.session._replace(object_store_bytes=0)
    leader = open_leader()
    await leader.announce()
    assert (await next_node_sample(leader)).store is None


async def test_hung_mount_is_left_out_and_costs_one_thread_until_it_answers(
    runners: FakeRunners, open_leader: OpenLeader, hung: HungMount
) -> None:
    leader = open_leader(watched_directories=(hung.path,))
    with capture_logs() as logs:
        await leader.announce()
        await until(leader, lambda sample: paths(sample) == [runners.session.directory])
        assert hung.asked.is_set()
        threads = set(threading.enumerate())
        for _ in range(5):
            assert paths(await next_node_sample(leader)) == [runners.session.directory]
        assert set(threading.enumerate()) <= threads
        hung.answers.set()
        await until(leader, lambda sample: paths(sample) == [runners.session.directory, hung.path])
    told = [(line["path"], line["fault"]) for line in logs if "path" in line]
    assert told == [(hung.path, "it does not answer")]


async def test_a_hung_mount_holds_up_neither_samples_of_devices_nor_runs(
    runners: FakeRunners, open_leader: OpenLeader, hung: HungMount
) -> None:
    leader = open_leader(watched_directories=(hung.path,))
    await leader.announce()
    await leader.until(hung.asked.is_set)
    await leader.start("run")
    await leader.until(lambda: "run" in runners.started)
    del leader.received[:]
    await leader.receive("sampled")


async def test_a_directory_that_is_missing_is_left_out_and_named_once(
    runners: FakeRunners, open_leader: OpenLeader, tmp_path: Path
) -> None:
    later = tmp_path / "later"
    leader = open_leader(watched_directories=(str(later),))
    with capture_logs() as logs:
        await leader.announce()
        for _ in range(3):
            assert paths(await next_node_sample(leader)) == [runners.session.directory]
    assert [(line["path"], line["fault"]) for line in logs if "path" in line] == [
        (str(later), "No such file or directory")
    ]
    later.mkdir()
    sample = await until(leader, lambda sample: len(sample.disks) > 1)
    assert sample.disks[1] == DiskSample(str(later), sample.disks[0].total_bytes, sample.disks[1].free_bytes)


async def test_an_older_leader_is_not_told(open_leader: OpenLeader) -> None:
    leader = open_leader()
    leader.protocol = 8
    await leader.announce()
    for _ in range(3):
        await leader.receive("sampled")
        leader.received = [report for report in leader.received if report[0] != "sampled"]
        await asyncio.sleep(0)
    assert "node_sampled" not in {report[0] for report in leader.received}


def test_a_file_system_of_eight_exbibytes_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As AWS EFS says of itself."""
    blocks = 2**63 // 2**20 - 1
    told = os.statvfs_result((2**20, 2**20, blocks, blocks, blocks, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: told)
    assert host_meter.room_of("/efs") == (2**62, 2**62)
