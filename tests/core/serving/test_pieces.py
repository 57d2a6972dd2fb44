from gpubroker_server.core.serving.pieces import JOINED_BYTES, joined


def test_small_parts_leave_as_one_piece() -> None:
    assert list(joined([b"head", b"body"])) == [b"headbody"]
    assert list(joined([b"alone"])) == [b"alone"]


def test_a_large_last_part_is_not_copied() -> None:
    large = b"x" * (JOINED_BYTES + 1)
    head, body = joined([b"head", large])
    assert (head, body is large) == (b"head", True)
    assert joined([large])[0] is large
