"""The model that a message names is found as protobuf's own library would find it."""

from typing import Any

import pytest
from gpubroker_server.inference.operation import Target
from gpubroker_server.inference.protocols.triton.operations import grpc_operation
from gpubroker_server.inference.protocols.triton_grpc.messages import last_bytes, target_of
from gpubroker_server.ports.triton_messages import _MESSAGES
from gpubroker_server.ports.triton_messages import messages as own
from tritonclient.grpc import model_config_pb2, service_pb2

from tests.gateway.protobuf import field

INFER = grpc_operation("/inference.GRPCInferenceService/ModelInfer")
LOAD = grpc_operation("/inference.GRPCInferenceService/RepositoryModelLoad")


def test_model_and_version_are_found_in_what_the_library_writes() -> None:
    infer = service_pb2.ModelInferRequest(model_name="m" * 300, model_version="3", id="x")
    infer.raw_input_contents.append(b"\x0a\x01z" * 1000)
    assert target_of(INFER, infer.SerializeToString()) == Target(INFER, b"m" * 300, b"3")
    load = service_pb2.RepositoryModelLoadRequest(model_name="m", repository_name="2")
    load.parameters["n"].int64_param = -1
    assert target_of(LOAD, load.SerializeToString()) == Target(LOAD, b"m")


def test_the_last_field_of_a_number_counts() -> None:
    message = field(1, "first") + field(2, "3") + field(1, "last") + field(1000, b"unheard of") + field(1, 7)
    assert last_bytes(message, 1) == b"last"
    assert service_pb2.ModelReadyRequest.FromString(message).name == "last"


def test_numbers_of_fixed_length_are_passed_over() -> None:
    message = b"\x09" + b"\1" * 8 + b"\x15" + b"\2" * 4 + field(3, "x")
    assert (last_bytes(message, 1), last_bytes(message, 2), last_bytes(message, 3)) == (b"", b"", b"x")


@pytest.mark.parametrize("message", [b"\x80", b"\x08", b"\x0a\x05ab", b"\x0b", b"\xff" * 11, b"\x09\x01"])
def test_bytes_that_are_no_message_name_nothing(message: bytes) -> None:
    assert last_bytes(field(1, "any") + message, 1) == b""


def test_the_table_of_messages_agrees_with_tritons_own_schema() -> None:
    compared = 0
    for name, fields in _MESSAGES.items():
        theirs: Any = getattr(service_pb2, name, None) or getattr(model_config_pb2, name, None)
        theirs = theirs or getattr(service_pb2.RepositoryIndexResponse, name, None)
        for field_name, (number, _) in fields.items() if theirs else ():
            described = theirs.DESCRIPTOR.fields_by_name[field_name]
            assert described.number == number
            assert described.type == getattr(own, name).DESCRIPTOR.fields_by_name[field_name].type
            compared += 1
    assert compared > 40
