from gpubroker_server.core.domain.stored_objects import LEAST_BYTES, Counted, Quota, StoredObject
from gpubroker_server.core.domain.units import Instant, Seconds

DAY = Seconds(86_400.0)


def an_object(size_bytes: int = 10_000, expires_at: float = 0.0) -> StoredObject:
    return StoredObject("acme", "digest", size_bytes, Instant(0.0), Instant(expires_at))


def test_a_use_is_stored_once_a_tenth_of_the_retention_time_has_passed() -> None:
    kept = an_object(expires_at=DAY)
    assert kept.end_after_use(Instant(0.1 * DAY), DAY) is None
    assert kept.end_after_use(Instant(0.2 * DAY), DAY) == 1.2 * DAY


def test_a_small_object_counts_as_a_block_of_a_disk() -> None:
    assert (an_object(1).counted_bytes, an_object().counted_bytes) == (LEAST_BYTES, 10_000)


def test_a_quota_counts_bytes_and_objects_and_what_is_coming() -> None:
    quota = Quota(20_000, 3)
    assert quota.has_room(Counted(10_000, 2), an_object())
    assert not quota.has_room(Counted(10_000, 2), an_object(), coming_bytes=1)
    assert not quota.has_room(Counted(0, 3), an_object())


def test_a_full_quota_says_which_limit_it_is() -> None:
    quota = Quota(20_000, 3)
    of_bytes = quota.why_full(Counted(15_000, 2), an_object())
    assert "has objects of 15000 bytes, and may have 20000; this one counts 10000" in of_bytes
    assert of_bytes.endswith("raise limits.tenant_object_bytes")
    coming = quota.why_full(Counted(5_000, 2), an_object(), coming_bytes=6_000)
    assert "bytes, and uploads of 6000 bytes under way, and" in coming
    of_objects = quota.why_full(Counted(0, 3), an_object())
    assert of_objects.startswith('tenant "acme" has 3 objects, and may have 3.')
    assert of_objects.endswith("raise limits.tenant_objects")
