"""The disk guard on a real node, with the audit log in SQLite. `test_processes.py` has it on PostgreSQL."""

from gpubroker import Broker

from tests.e2e.guarded_disk import GuardedDisk, audited
from tests.e2e.service_process import ServiceProcess


def test_a_full_node_is_closed_cleaned_and_open_again(
    service: ServiceProcess, broker: Broker, guarded: GuardedDisk
) -> None:
    guarded.is_cleaned(broker, audited(f"sqlite:///{service.data_dir}/gpubroker.db"))
