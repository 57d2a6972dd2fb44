"""Messages that are looked into: what protobuf's own library writes is read, and what we write it reads."""

import pytest
from gpubroker_server.ports.protowire import Malformed, field, fields
from tritonclient.grpc import service_pb2 as messages


def test_what_the_library_writes_is_read() -> None:
    load = messages.RepositoryModelLoadRequest(model_name="m")
    load.parameters["config"].string_param = "x" * 300
    load.parameters["n"].int64_param = -1
    found = list(fields(load.SerializeToString()))
    assert found[0] == (2, b"m")
    entries = {dict(fields(value))[1]: dict(fields(dict(fields(value))[2])) for n, value in found if n == 3}  # type: ignore[arg-type]
    assert entries == {b"config": {3: b"x" * 300}, b"n": {2: 2**64 - 1}}


def test_what_is_written_the_library_reads() -> None:
    written = field(1, "name") + field(2, "3") + field(4, 2**40) + field(1000, b"unheard of")
    read = messages.ModelReadyRequest.FromString(written)
    assert (read.name, read.version) == ("name", "3")


def test_numbers_of_fixed_length_are_passed_over() -> None:
    assert list(fields(b"\x09" + b"\1" * 8 + b"\x15" + b"\2" * 4 + b"\x18\x05")) == [
        (1, b"\1" * 8),
        (2, b"\2" * 4),
        (3, 5),
    ]


@pytest.mark.parametrize("message", [b"\x80", b"\x08", b"\x0a\x05ab", b"\x0b", b"\xff" * 11, b"\x09\x01"])
def test_what_is_no_message_is_told(message: bytes) -> None:
    with pytest.raises(Malformed):
        list(fields(message))
