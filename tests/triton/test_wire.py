"""Byte for byte: what a client gets through the broker is what Triton gives, whatever is asked."""

import gzip
import json
import struct
import zlib
from collections.abc import Callable

import pytest

from tests.e2e.service_process import ServiceProcess, until
from tests.triton.raw import Answer, Door, directly, through
from tests.triton.server import Triton


@pytest.fixture(scope="module")
def doors(triton: Triton, service: ServiceProcess) -> tuple[Door, Door]:
    return directly(triton), through(service)


Doors = tuple[Door, Door]


def same(doors: Doors, *args: object, **options: object) -> Answer:
    """What both say, which must be the same but for the order in which headers stand."""
    direct, proxied = (door.ask(*args, **options) for door in doors)  # type: ignore[arg-type]
    assert proxied.status == direct.status
    assert sorted(proxied.headers) == sorted(direct.headers)
    assert proxied.body == direct.body
    return direct


Body = tuple[bytes, dict[str, str]]


def infer(binary: bool, *, inputs: list[dict[str, object]], tensors: bytes = b"") -> Body:
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": binary}}).encode()
    return head + tensors, {"Inference-Header-Content-Length": str(len(head))} if tensors else {}


def fp32(count: int) -> Body:
    """Binary both ways."""
    given = {"name": "INPUT0", "datatype": "FP32", "shape": [1, count]}
    tensor: dict[str, object] = {**given, "parameters": {"binary_data_size": 4 * count}}
    return infer(True, inputs=[tensor], tensors=struct.pack("<f", 1.5) * count)


IDENTITY = "/v2/models/identity_fp32/infer"

PATHS = [
    ("GET", "/v2", 200),
    ("GET", "/v2?a=b", 200),
    ("GET", "/v2/", 404),
    ("GET", "/v2/health", 404),
    ("GET", "/v2/health/live", 200),
    ("GET", "/v2/health/ready", 200),
    ("GET", "/v2/health/ready/", 404),
    ("GET", "/v2/models/identity_fp32", 200),
    ("GET", "/v2/models/identity_fp32/versions/1", 200),
    ("GET", "/v2/models/identity_fp32/versions/one", 404),
    ("GET", "/v2/models/identity_fp32/versions/9", 404),
    ("GET", "/v2/models/identity%5Ffp32", 404),
    ("GET", "/v2//models/identity_fp32", 404),
    ("GET", "/v2/models/identity_fp32/", 404),
    ("GET", "/v2/models/identity_fp32/ready", 200),
    ("GET", "/v2/models/identity_fp32/config", 200),
    ("GET", "/v2/models/nope", 404),
    ("GET", "/v2/models/nope/ready", 400),
    ("GET", "/v2/models/nope/stats", 400),
    ("GET", "/v2/models/ready", 404),
    ("POST", "/v2/models/nope/infer", 404),
    ("POST", "/v2/models/identity%5Ffp32/infer", 404),
    ("POST", "/v2/models/identity_fp32/versions/9/infer", 404),
    ("GET", IDENTITY, 405),
    ("PUT", "/v2/health/live", 405),
    ("OPTIONS", "/v2", 405),
    ("HEAD", "/v2/health/live", 405),
    ("DELETE", "/v2/models/identity_fp32", 405),
    ("POST", "/v2/repository/index", 200),
    ("POST", "/v2/repository/there/index", 200),
    ("POST", "/v2/repository/models/nope/load", 500),
    ("POST", "/v2/repository/models/nope/unload", 200),
    ("POST", "/v2/repository/models/identity_fp32/load", 200),
    ("GET", "/v2/systemsharedmemory/status", 200),
    ("GET", "/v2/trace/setting", 200),
    ("GET", "/v2/logging", 200),
    ("GET", "/v2/nothing", 404),
]


def test_every_path_is_answered_as_triton_answers_it(doors: Doors) -> None:
    for method, path, status in PATHS:
        if method == "HEAD":  # Triton sends a body, which no client expects: each has its connection
            doors[0].connection.close()
        answered = [door.ask(method, path) for door in doors]
        assert [answer.status for answer in answered] == [status] * 2, path
        assert sorted(answered[0].headers) == sorted(answered[1].headers), path
        assert answered[0].body == answered[1].body, path
        if method == "HEAD":
            doors[0].connection.close()


def test_statistics_are_those_of_the_server(doors: Doors) -> None:
    direct, proxied = (json.loads(door.ask("GET", "/v2/models/stats").body) for door in doors)
    assert proxied == direct
    assert {"inference_stats", "response_stats", "batch_stats", "memory_usage"} <= direct["model_stats"][
        0
    ].keys()


CODES = {
    "BOOL": "?", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b", "INT16": "h",
    "INT32": "i", "INT64": "q", "FP16": "e", "FP32": "f", "FP64": "d",
}  # fmt: skip
TYPES: dict[str, tuple[str, list[object]]] = {
    name: (code, [True, False] if code == "?" else [1, 100]) for name, code in CODES.items()
}


def test_every_type_goes_as_json_as_binary_and_mixed(doors: Doors) -> None:
    texts = [b"", b"one", b"\xff\x00\xfe"]
    binary: list[tuple[dict[str, object], bytes]] = []
    for name, (code, values) in TYPES.items():
        data = struct.pack(f"<2{code}", *values)
        binary.append(({"name": f"IN_{name}", "datatype": name, "shape": [2]}, data))
    data = b"".join(struct.pack("<I", len(text)) + text for text in texts)
    binary.append(({"name": "IN_STRING", "datatype": "BYTES", "shape": [3]}, data))
    as_binary = [{**head, "parameters": {"binary_data_size": len(data)}} for head, data in binary]
    body, headers = infer(True, inputs=as_binary, tensors=b"".join(data for _, data in binary))
    answer = same(doors, "POST", "/v2/models/any_type/infer", body, headers)
    length = int(dict(answer.headers)["Inference-Header-Content-Length"])
    sent = {str(head["name"])[3:]: data for head, data in binary}
    order = [output["name"][4:] for output in json.loads(answer.body[:length])["outputs"]]
    assert sorted(order) == sorted(sent)
    assert answer.body[length:] == b"".join(sent[name] for name in order)
    as_json: list[dict[str, object]] = [
        {"name": f"IN_{name}", "datatype": name, "shape": [2], "data": values}
        for name, (_, values) in TYPES.items()
        if name != "FP16"
    ]
    answer = same(doors, "POST", "/v2/models/any_type/infer", *infer(False, inputs=as_json))
    assert answer.status == 200
    assert [output["data"] for output in json.loads(answer.body)["outputs"]] == [
        one["data"] for one in as_json
    ]
    mixed = [as_json[0], as_binary[5], as_json[8]]
    answer = same(
        doors, "POST", "/v2/models/any_type/infer", *infer(True, inputs=mixed, tensors=binary[5][1])
    )
    assert answer.status == 200


def test_a_body_that_is_the_tensor_alone_is_one(doors: Doors) -> None:
    tensor, raw = struct.pack("<3f", 1, 2, 3), {"Inference-Header-Content-Length": "0"}
    answer = same(doors, "POST", "/v2/models/line_fp32/infer", tensor, raw)
    assert (answer.status, answer.body[-12:]) == (200, tensor)


PACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
UNPACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.decompress, "deflate": zlib.decompress}


@pytest.mark.parametrize("asked", ["", "gzip", "deflate", "identity", "gzip, deflate, br", "br"])
@pytest.mark.parametrize("sent", ["", "gzip", "deflate", "br"])
def test_compression_is_a_matter_between_client_and_triton(doors: Doors, sent: str, asked: str) -> None:
    body, headers = fp32(2000)
    if sent in PACK:
        body = PACK[sent](body)
    headers |= {"Content-Encoding": sent} if sent else {}
    headers |= {"Accept-Encoding": asked} if asked else {}
    answers = [door.ask("POST", IDENTITY, body, headers) for door in doors]
    assert [answer.status for answer in answers] == [501 if sent == "br" else 200] * 2
    packed = {dict(answer.headers).get("Content-Encoding", "") for answer in answers}
    assert len(packed) == 1
    unpack = UNPACK.get(packed.pop(), bytes)
    assert unpack(answers[0].body) == unpack(answers[1].body)  # a packed one holds the time, in gzip
    if not asked:
        assert "Content-Encoding" not in dict(answers[1].headers)


ERRORS: dict[str, tuple[int, dict[str, object]]] = {
    "wrong shape": (400, {"name": "INPUT0", "datatype": "FP32", "shape": [2], "data": [1, 2]}),
    "wrong type": (400, {"name": "INPUT0", "datatype": "INT32", "shape": [1, 1], "data": [1]}),
    "unknown input": (400, {"name": "NOPE", "datatype": "FP32", "shape": [1, 1], "data": [1]}),
    "too few values": (500, {"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "data": [1]}),
    "two sources": (400, {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1],
                          "parameters": {"binary_data_size": 4}}),
}  # fmt: skip


@pytest.mark.parametrize("mistake", ERRORS)
def test_errors_are_in_tritons_words_and_the_connection_goes_on(doors: Doors, mistake: str) -> None:
    status, tensor = ERRORS[mistake]
    assert same(doors, "POST", IDENTITY, *infer(False, inputs=[tensor])).status == status
    assert same(doors, "POST", IDENTITY, *fp32(1)).status == 200


@pytest.mark.parametrize(
    ("status", "path", "body", "headers"),
    [
        (500, IDENTITY, b"{nonsense", {}),
        (400, IDENTITY, b"{}", {"Inference-Header-Content-Length": "99999"}),
        (400, IDENTITY, b"{}", {"Inference-Header-Content-Length": "-1"}),
        (501, "/v2/models/stream_n/infer", b'{"inputs":[]}', {}),
        (200, "/v2/models/stream_n/generate", b'{"text_input":"a","N":3}', {}),
        (200, "/v2/models/echo_bytes/generate", b'{"text_input":"abc","id":"7"}', {}),
        (404, "/v2/models/nope/generate_stream", b"{}", {}),
        (400, "/v2/models/stream_n/generate_stream", b'{"text_input":"a","FAIL_AT":0}', {}),
        (200, "/v2/models/stream_n/generate_stream", b'{"text_input":"a","N":0}', {}),
        (200, "/v2/models/stream_n/generate_stream", b'{"text_input":"a","N":3,"FAIL_AT":2}', {}),
        (400, "/v2/repository/models/fails_at_load/load", b"{}", {}),
        (500, "/v2/repository/models/identity_fp32/load", b'{"parameters":{"config":"{"}}', {}),
    ],
)
def test_odd_statuses_stay_odd(
    doors: Doors, status: int, path: str, body: bytes, headers: dict[str, str]
) -> None:
    assert same(doors, "POST", path, body, headers).status == status


def test_a_full_queue_of_triton_is_its_answer(service: ServiceProcess) -> None:
    inputs: list[dict[str, object]] = [
        {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]},
        {"name": "SLEEP_MS", "datatype": "INT32", "shape": [1, 1], "data": [600]},
    ]
    body, headers = infer(False, inputs=inputs)
    senders = [through(service) for _ in range(12)]
    for sender in senders:
        sender.connection.request("POST", "/v2/models/queued/infer", body, {**sender._headers, **headers})
    answers = [sender.connection.getresponse() for sender in senders]
    said = {(answer.status, answer.read().decode().partition('"error":')[2]) for answer in answers}
    assert {status for status, _ in said} == {200, 503}
    assert any("Exceeds maximum queue size" in error for _, error in said)


def test_first_event_of_a_long_stream_comes_at_once_and_leaving_cancels_it(
    service: ServiceProcess, triton: Triton
) -> None:
    connection = through(service).connection
    minutes = b'{"text_input":"long","N":10000,"DELAY_MS":20}'
    headers = {"Authorization": f"Bearer {service.token}"}
    connection.request("POST", "/v2/models/stream_n/generate_stream", minutes, headers)
    answer = connection.getresponse()
    for number in range(3):
        event = answer.readline() + answer.readline()
        assert json.loads(event.removeprefix(b"data: "))["index"] == number
    before = triton.log().count("stream_n: cancelled")
    answer.close()
    connection.close()
    until(lambda: triton.log().count("stream_n: cancelled") > before, "the model hears of it")


@pytest.mark.parametrize("size", [0, 1, 2**14 - 1, 2**14, 2**14 + 1, 2**18 + 1, 5 * 2**20])
def test_tensors_of_any_size_pass(doors: Doors, size: int) -> None:
    answer = same(doors, "POST", IDENTITY, *fp32(size))
    assert answer.status == 200
    assert len(answer.body) >= 4 * size


def test_a_body_of_65537_chunks_is_taken(service: ServiceProcess) -> None:
    """Newer Tritons refuse so many; here they are joined on their way."""
    body, headers = fp32(2**14)
    connection = through(service).connection
    sent = {"Authorization": f"Bearer {service.token}", "Transfer-Encoding": "chunked", **headers}
    connection.request("POST", IDENTITY, chunked(body, 65_537), sent)
    assert connection.getresponse().status == 200


def chunked(body: bytes, count: int) -> bytes:
    """So many chunks of one byte, and the rest."""
    single = b"".join(b"1\r\n%c\r\n" % byte for byte in body[:count])
    return single + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body) - count, body[count:])
