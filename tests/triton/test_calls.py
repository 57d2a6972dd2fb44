"""gRPC: an unmodified client, and bare stubs, are told through the broker what Triton tells them."""

import queue
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
from msgspec import Struct
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.e2e.service_process import ServiceProcess, until
from tests.patience import PATIENCE_SECONDS
from tests.triton.script import given, told
from tests.triton.server import Triton

_UNBOUND = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Side(Struct, frozen=True):
    address: str
    token: dict[str, str]

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return tuple(self.token.items())


@pytest.fixture
def direct(triton: Triton) -> Side:
    return Side(f"127.0.0.1:{triton.grpc_port}", {})


@pytest.fixture
def proxied(service: ServiceProcess, call_port: int) -> Side:
    return Side(f"127.0.0.1:{call_port}", {"authorization": f"Bearer {service.token}"})


def test_the_blocking_client_gets_the_same_answers(direct: Side, proxied: Side) -> None:
    kit: ModuleType = tritonclient.grpc
    answers = []
    for side in (direct, proxied):
        with kit.InferenceServerClient(side.address) as client:
            answers.append(_now(told(kit, client, side.token)))
    assert answers[1] == answers[0]
    assert sum(1 for answer in answers[0] if answer[0] == "infer" and len(answer) == 2) == 6


def _now(coroutine: Any) -> Any:
    """Of a script that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError


async def test_the_asynchronous_client_gets_the_same_answers(direct: Side, proxied: Side) -> None:
    kit: ModuleType = tritonclient.grpc.aio
    answers = []
    for side in (direct, proxied):
        async with kit.InferenceServerClient(side.address) as client:
            answers.append(await told(kit, client, side.token))
    assert answers[1] == answers[0]


@pytest.fixture
def stubs(direct: Side, proxied: Side) -> Iterator[list[tuple[Side, grpc.Channel]]]:
    channels = [(side, grpc.insecure_channel(side.address, _UNBOUND)) for side in (direct, proxied)]
    yield channels
    for _, channel in channels:
        channel.close()


Stubs = list[tuple[Side, grpc.Channel]]

CALLS: list[tuple[str, object]] = [
    ("ServerLive", messages.ServerLiveRequest()),
    ("ServerReady", messages.ServerReadyRequest()),
    ("ServerMetadata", messages.ServerMetadataRequest()),
    ("ModelReady", messages.ModelReadyRequest(name="identity_fp32")),
    ("ModelReady", messages.ModelReadyRequest(name="nope")),
    ("ModelMetadata", messages.ModelMetadataRequest(name="identity_fp32", version="1")),
    ("ModelMetadata", messages.ModelMetadataRequest(name="nope")),
    ("ModelConfig", messages.ModelConfigRequest(name="echo_bytes")),
    ("ModelStatistics", messages.ModelStatisticsRequest()),
    ("ModelStatistics", messages.ModelStatisticsRequest(name="nope")),
    ("ModelInfer", messages.ModelInferRequest(model_name="nope")),
    ("ModelInfer", messages.ModelInferRequest(model_name="stream_n")),
    ("RepositoryIndex", messages.RepositoryIndexRequest()),
    ("RepositoryIndex", messages.RepositoryIndexRequest(repository_name="there", ready=True)),
    ("RepositoryModelLoad", messages.RepositoryModelLoadRequest(model_name="identity_fp32")),
    ("RepositoryModelLoad", messages.RepositoryModelLoadRequest(model_name="fails_at_load")),
    ("RepositoryModelLoad", messages.RepositoryModelLoadRequest(model_name="nope")),
    ("RepositoryModelUnload", messages.RepositoryModelUnloadRequest(model_name="nope")),
    ("SystemSharedMemoryStatus", messages.SystemSharedMemoryStatusRequest()),
    ("CudaSharedMemoryStatus", messages.CudaSharedMemoryStatusRequest()),
    ("TraceSetting", messages.TraceSettingRequest()),
    ("LogSettings", messages.LogSettingsRequest()),
]


def test_every_call_is_answered_byte_for_byte_as_triton_answers_it(stubs: Stubs) -> None:
    for name, message in CALLS:
        path = f"/inference.GRPCInferenceService/{name}"
        answers = [_told(channel, path, message.SerializeToString(), side) for side, channel in stubs]  # type: ignore[attr-defined]
        if name in ("TraceSetting", "LogSettings"):  # a map, which Triton writes in any order
            answers = [getattr(messages, f"{name}Response").FromString(answer) for answer in answers]
        assert answers[1] == answers[0], name
    check = [_told(channel, "/grpc.health.v1.Health/Check", b"", side) for side, channel in stubs]
    assert check == [b"\x08\x01"] * 2


def test_the_twenty_calls_and_no_other_are_those_that_are_known() -> None:
    from gpubroker_server.inference.protocols.triton.operations import grpc_operation

    of_triton = set(messages.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name)
    assert len(of_triton) == 20
    known = {grpc_operation(f"/inference.GRPCInferenceService/{name}").name for name in of_triton}
    assert known == of_triton


def _told(channel: grpc.Channel, path: str, message: bytes, side: Side) -> object:
    try:
        return channel.unary_unary(path)(message, metadata=side.metadata, timeout=PATIENCE_SECONDS)
    except grpc.RpcError as error:
        return error.code(), error.details()


def test_an_unknown_call_is_unimplemented_as_in_triton(stubs: Stubs) -> None:
    for path in ("/inference.GRPCInferenceService/Unheard", "/other.Service/Call"):
        for side, channel in stubs:
            told = _told(channel, path, b"", side)
            assert isinstance(told, tuple)
            assert told[0] is grpc.StatusCode.UNIMPLEMENTED


def request(text: bytes, count: int, *, number: str = "", fail_at: int = -1, **options: Any) -> Any:
    """Of the model that answers as often as it is told."""
    made = messages.ModelInferRequest(model_name="stream_n", id=number, **options)
    for name, datatype in (("text_input", "BYTES"), ("N", "INT32"), ("FAIL_AT", "INT32")):
        made.inputs.add(name=name, datatype=datatype, shape=[1])
    made.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
    made.raw_input_contents.extend(n.to_bytes(4, "little", signed=True) for n in (count, fail_at))
    return made


STREAMS: dict[str, tuple[Iterable[Any], tuple[tuple[str, str], ...]]] = {
    "three answers": ([request(b"a", 3, number="7")], ()),
    "no answer": ([request(b"a", 0)], ()),
    "nothing asked": ([], ()),
    "a mistake in band": ([request(b"a", 3, number="7", fail_at=1)], ()),
    "an unknown model in band": ([messages.ModelInferRequest(model_name="nope", id="3")], ()),
    "a mistake that ends it": (
        [messages.ModelInferRequest(model_name="nope")],
        (("triton_grpc_error", "true"),),
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_answered_message_for_message(stubs: Stubs, name: str) -> None:
    requests, metadata = STREAMS[name]
    answers = []
    for side, channel in stubs:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(
            iter(requests), metadata=(*side.metadata, *metadata), timeout=PATIENCE_SECONDS
        )
        seen: list[object] = []
        try:
            seen.extend(answer.SerializeToString(deterministic=True) for answer in call)
        except grpc.RpcError as error:
            seen.append((error.code(), error.details()))
        answers.append(seen)
    assert answers[1] == answers[0]


def test_the_last_answer_of_a_stream_may_be_empty(stubs: Stubs) -> None:
    asked = request(b"a", 2)
    asked.parameters["triton_enable_empty_final_response"].bool_param = True
    for side, channel in stubs:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = [one.infer_response for one in stub.ModelStreamInfer(iter([asked]), metadata=side.metadata)]
        assert [len(one.outputs) for one in answers] == [2, 2, 0]
        assert answers[-1].parameters["triton_final_response"].bool_param


def test_each_answer_of_a_stream_comes_before_the_next_is_asked_for(proxied: Side) -> None:

    asked: queue.Queue[Any] = queue.Queue()
    with grpc.insecure_channel(proxied.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(
            iter(asked.get, None), metadata=proxied.metadata, timeout=PATIENCE_SECONDS
        )
        for number in range(3):
            asked.put(request(b"%d" % number, 1, number=str(number)))
            assert next(call).infer_response.id == str(number)
        asked.put(None)
        assert list(call) == []


def test_a_stream_whose_client_leaves_is_cancelled_in_triton(proxied: Side, triton: Triton) -> None:

    endless = request(b"long", 10_000)
    endless.inputs.add(name="DELAY_MS", datatype="INT32", shape=[1])
    endless.raw_input_contents.append((20).to_bytes(4, "little"))
    before = triton.log().count("stream_n: cancelled")
    asked: queue.Queue[Any] = queue.Queue()
    asked.put(endless)
    with grpc.insecure_channel(proxied.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(iter(asked.get, None), metadata=proxied.metadata)
        next(call)
        call.cancel()
        asked.put(None)
        until(lambda: triton.log().count("stream_n: cancelled") > before, "the model hears of it")


def test_tensors_of_64_mib_pass(stubs: Stubs) -> None:
    array = np.arange(2**24, dtype=np.float32).reshape(1, -1)
    kit = tritonclient.grpc
    for side, _ in stubs:
        with kit.InferenceServerClient(side.address) as client:
            answer = client.infer("identity_fp32", [given(kit, "INPUT0", "FP32", array)], headers=side.token)
            assert np.array_equal(answer.as_numpy("OUTPUT0"), array)


def test_shared_memory_is_refused_in_tritons_words(proxied: Side) -> None:
    with tritonclient.grpc.InferenceServerClient(proxied.address) as client:
        with pytest.raises(InferenceServerException, match="Client shared memory is disabled") as refused:
            client.register_system_shared_memory("in0", "/in0", 16, headers=proxied.token)
        assert refused.value.status() == "StatusCode.UNIMPLEMENTED"


def test_a_load_brings_files_over_neither_protocol(proxied: Side, service: ServiceProcess) -> None:
    for kit, address in (
        (tritonclient.grpc, proxied.address),
        (tritonclient.http, service.url.removeprefix("http://")),
    ):
        files = {"file:1/model.py": b"raise SystemExit"}
        client = kit.InferenceServerClient(address)
        with client, pytest.raises(InferenceServerException, match="file:"):
            client.load_model("identity_fp32", headers=proxied.token, config="{}", files=files)


def test_a_server_that_was_killed_and_comes_again_is_called_again(proxied: Side, triton: Triton) -> None:
    with tritonclient.grpc.InferenceServerClient(proxied.address) as client:
        assert client.is_model_ready("identity_fp32", headers=proxied.token)
        triton.kill()
        try:
            until(
                lambda: "cannot be reached and was sent nothing" in _refusal(client, proxied), "it is noticed"
            )
        finally:
            triton.start()
        until(lambda: _is_live(client), "it is called again")


def _refusal(client: Any, side: Side) -> str:
    """What is under way while it ends may have been sent, which its client reads."""
    try:
        client.get_server_metadata(headers=side.token)
    except InferenceServerException as refused:
        return str(refused)
    return ""


def _is_live(client: Any) -> bool:
    try:
        return bool(client.is_server_live())
    except InferenceServerException:
        return False
