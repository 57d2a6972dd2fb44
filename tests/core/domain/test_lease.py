"""A lease goes forward only, and nothing releases it but a proof."""

import pytest
from gpubroker_server.core.domain.errors import IllegalTransition
from gpubroker_server.core.domain.lease import LeaseState, Proof, move_lease, quarantine, release

from tests.builders import NOW, a_lease, a_task


@pytest.mark.parametrize("state", [LeaseState.RESERVED, LeaseState.HELD, LeaseState.RELEASING])
def test_no_lease_is_released_without_a_proof(state: LeaseState) -> None:
    lease = a_lease(a_task("run"), "gpu0", 1, state=state)
    with pytest.raises(IllegalTransition, match="without a proof"):
        move_lease(lease, LeaseState.RELEASED)
    assert release(lease, Proof.PROCESS_ABSENT).proof == Proof.PROCESS_ABSENT


def test_a_lease_in_quarantine_ends_by_a_proof_as_well() -> None:
    lease = quarantine(a_lease(a_task("run"), "gpu0", 1, state=LeaseState.RELEASING), NOW)
    with pytest.raises(IllegalTransition, match="without a proof"):
        move_lease(lease, LeaseState.RELEASED)
    assert release(lease, Proof.STATEMENT).state is LeaseState.RELEASED


def test_a_released_lease_does_not_change_again() -> None:
    lease = release(a_lease(a_task("run"), "gpu0", 1), Proof.NEVER_STARTED)
    with pytest.raises(IllegalTransition, match="is released"):
        release(lease, Proof.PROCESS_ABSENT)
