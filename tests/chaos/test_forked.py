"""What forks services for the long runs."""

from pathlib import Path

from tests.chaos.forked import LATE, ForkedService


def test_a_forked_service_imports_nothing_of_ours_any_more(tmp_path: Path) -> None:
    with ForkedService(tmp_path / "data", engine="simulated") as service:
        assert service.broker.stats().tasks is not None
    assert LATE not in service.log()
