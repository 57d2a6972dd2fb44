"""The default limits fit together."""

from gpubroker_server.core.domain.limits import ServiceLimits


def test_what_a_row_keeps_fits_into_an_object_and_a_task_into_a_batch() -> None:
    limits = ServiceLimits()
    assert limits.inline_bytes <= limits.checkpoint_bytes <= limits.result_bytes <= limits.object_bytes
    assert limits.head_bytes < limits.body_bytes <= limits.batch_body_bytes <= limits.tenant_pending_bytes
    assert limits.unauthenticated_connections < limits.connections
