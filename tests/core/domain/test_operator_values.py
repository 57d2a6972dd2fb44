"""Values of the operator that contradict themselves are refused where they are made."""

from collections.abc import Callable

import pytest
from gpubroker_server.core.admission.defaults import Profile
from gpubroker_server.core.control.alarm import Threshold
from gpubroker_server.core.control.disk_guard import DiskRules
from gpubroker_server.core.domain.policy import TenantPolicy
from gpubroker_server.core.domain.setting_marks import ELSEWHERE, alone, by_name, check, prepare, written
from gpubroker_server.core.domain.units import Mib


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Threshold(5.0, 5.0), "low 5 is not below high 5; make it smaller"),
        (lambda: DiskRules(0.66), "warn_percent 66 is not below clean_percent 65"),
        (lambda: DiskRules(clean=0.7), "clean_percent 70 is not below block_percent 70"),
        (lambda: TenantPolicy("acme", "lab"), "cohort 'lab' needs guaranteed_mb"),
        (lambda: TenantPolicy("acme", borrow_mb=Mib(1)), "borrow_mb 1 without a cohort"),
        (lambda: Profile(gpus=0, gpu_mb=Mib(1)), "gpus is 0 and gpu_mb is 1; leave one of them out"),
    ],
)
def test_a_contradiction_is_refused_with_both_values(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_marks_say_how_a_field_is_written() -> None:
    marks = (
        ELSEWHERE,
        by_name(alone="limit"),
        alone("*"),
        written("per", {"node": True}),
        check(int),
        prepare(str),
    )
    assert [mark.extra for mark in marks] == [
        {"elsewhere": True},
        {"by_name": True, "alone": "limit"},
        {"alone": "*"},
        {"name": "per", "choices": {"node": True}},
        {"check": int},
        {"prepare": str},
    ]
