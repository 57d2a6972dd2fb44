"""What the leader relies on of a server of models, asked of a real one, which may be killed at any moment."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from gpubroker_server.adapters.triton.grpc_backend import TritonRpcServer
from gpubroker_server.adapters.triton.host import TritonHost, fault_of_load
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.ports.models import HostFault, HostRefused, ModelState

from tests.e2e.service_process import until
from tests.patience import PATIENCE_SECONDS
from tests.triton.server import Triton

SOON = Seconds(PATIENCE_SECONDS)


@pytest.fixture(scope="module")
def own_triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    """Its models come and go."""
    with Triton(tmp_path_factory.mktemp("host")) as running:
        yield running


@pytest.fixture
async def host(own_triton: Triton) -> AsyncIterator[TritonHost]:
    address = f"127.0.0.1:{own_triton.grpc_port}"
    made = TritonHost(TritonRpcServer("main", address), own_triton.repository)
    yield made
    for model in (await made.index(SOON)).models.values():
        if model.stage is not ModelState.ABSENT:
            await made.unload(model.model, SOON)
            await gone(made, model.model)
    await made.close()


async def stage_of(host: TritonHost, model: str) -> ModelState:
    return (await host.index(SOON)).models[model].stage


async def gone(host: TritonHost, model: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (stage := await stage_of(host, model)) is not ModelState.ABSENT:
        assert time.monotonic() < deadline, f"{model} is still {stage}"
        await asyncio.sleep(0.02)


async def test_load_is_over_when_the_index_says_ready_and_an_unload_when_gone(
    host: TritonHost,
) -> None:
    assert await stage_of(host, "identity_fp32") is ModelState.ABSENT
    for _ in range(2):
        await host.load("identity_fp32", (), SOON)
    found = (await host.index(SOON)).models["identity_fp32"]
    assert (found.stage, found.versions, found.reason) == (ModelState.READY, ("1",), "")
    await host.unload("identity_fp32", SOON)
    await gone(host, "identity_fp32")
    assert (await host.index(SOON)).models["identity_fp32"].reason == ""
    await host.unload("identity_fp32", SOON)
    await host.unload("never heard of", SOON)


async def test_all_versions_of_a_model_are_one(host: TritonHost) -> None:
    await host.load("two_versions", (), SOON)
    found = (await host.index(SOON)).models["two_versions"]
    assert (found.stage, found.versions) == (ModelState.READY, ("1", "2"))
    for model in ("two_versions", "echo_bytes"):
        await host.load(model, (), SOON)
        told = await host.describe(model, SOON)
        assert told.versions == (await host.index(SOON)).models[model].versions, "as its files tell"


async def test_an_ensemble_comes_and_goes_with_its_steps(host: TritonHost) -> None:
    assert (await host.describe("chain", SOON)).steps == ("identity_fp32",)
    await host.load("chain", (), SOON)
    assert await stage_of(host, "identity_fp32") is ModelState.READY
    await host.unload("chain", SOON)
    await gone(host, "chain")
    await gone(host, "identity_fp32")


async def test_a_load_that_fails_says_why_and_so_does_the_index(host: TritonHost) -> None:
    with pytest.raises(HostRefused, match="cannot allocate 12345 bytes") as refused:
        await host.load("fails_at_load", (), SOON)
    assert refused.value.fault is HostFault.FAILED, "the model says so, not the server"
    found = (await host.index(SOON)).models["fails_at_load"]
    assert found.stage is ModelState.ABSENT
    assert "cannot allocate 12345 bytes" in found.reason


def unavailable(version: int, said: str) -> str:
    return f"version {version} is at UNAVAILABLE state: Internal: {said};\n"


OF_A_USER = "RuntimeError: out of memory\n\nAt:\n  /m/1/model.py(6): initialize\n"


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        (unavailable(1, "CUDA error: out of memory"), HostFault.OUT_OF_MEMORY),
        ("memory limit set for CUDA 0 has exceeded, model loading is rejected.", HostFault.OUT_OF_MEMORY),
        (f"load failed for model 'out_of_memory': {unavailable(1, 'no such file')}", HostFault.FAILED),
        (unavailable(1, OF_A_USER), HostFault.FAILED),
        (unavailable(1, OF_A_USER) + unavailable(2, "failed to allocate"), HostFault.OUT_OF_MEMORY),
    ],
)
def test_only_the_words_of_the_server_say_that_there_is_no_memory(said: str, fault: HostFault) -> None:
    assert fault_of_load(said) is fault


async def test_changed_files_are_another_model_revision_and_a_load_is_none(
    host: TritonHost, own_triton: Triton
) -> None:
    before = await host.describe("line_fp32", SOON)
    assert before.revision
    await host.load("line_fp32", (), SOON)
    assert (await host.describe("line_fp32", SOON)).revision == before.revision
    os.utime(own_triton.repository / "line_fp32" / "1" / "model.py")
    assert (await host.describe("line_fp32", SOON)).revision != before.revision


async def test_a_model_that_is_not_in_the_repository_is_not_found(host: TritonHost) -> None:
    for call in (host.load("nope", (), SOON), host.describe("nope", SOON), host.answers("nope", SOON)):
        with pytest.raises(HostRefused) as refused:
            await call
        assert refused.value.fault is HostFault.NOT_FOUND


async def test_model_is_described_by_its_files_or_by_the_server_that_loaded_it(
    host: TritonHost, own_triton: Triton
) -> None:
    seen = await host.describe("queued", SOON)
    files = [file for file in (own_triton.repository / "queued").rglob("*") if file.is_file()]
    assert seen.file_bytes == sum(file.stat().st_size for file in files)
    from_afar = TritonHost(TritonRpcServer("main", f"127.0.0.1:{own_triton.grpc_port}"))
    assert await from_afar.describe("queued", SOON) != seen
    for model in ("queued", "chain"):
        await host.load(model, (), SOON)
        told, seen = await from_afar.describe(model, SOON), await host.describe(model, SOON)
        assert told.file_bytes is None
        assert told.steps == seen.steps
    with pytest.raises(HostRefused) as refused:
        await from_afar.describe("nope", SOON)
    assert refused.value.fault is HostFault.NOT_FOUND
    await from_afar.close()


@pytest.mark.parametrize("seen", [True, False])
async def test_a_model_on_cpus_is_known_by_its_configuration(
    host: TritonHost, own_triton: Triton, seen: bool
) -> None:
    """`seen`: its file; else the server says so once it is loaded."""
    from_afar = TritonHost(TritonRpcServer("main", f"127.0.0.1:{own_triton.grpc_port}"))
    told = {}
    for model in ("two_versions", "queued"):
        await host.load(model, (), SOON)
        told[model] = (await (host if seen else from_afar).describe(model, SOON)).on_cpu
    await from_afar.close()
    assert told == {"two_versions": True, "queued": True}
    assert not (await host.describe("fails_at_load", SOON)).on_cpu, "it does not say"
    assert not (await host.describe("chain", SOON)).on_cpu


async def test_whether_a_load_that_took_too_long_was_done_is_unknown(
    host: TritonHost, own_triton: Triton
) -> None:
    with own_triton.slow_to_load(seconds=1):
        with pytest.raises(HostRefused) as refused:
            await host.load("slow", (), Seconds(0.3))
        assert refused.value.fault is HostFault.UNKNOWN
        assert await stage_of(host, "slow") is ModelState.LOADING
        await host.load("slow", (), SOON)
        assert await stage_of(host, "slow") is ModelState.READY


@pytest.mark.parametrize(
    "model", ["any_type", "echo_bytes", "line_fp32", "queued", "slow", "stream_n", "two_versions"]
)
async def test_any_model_is_asked_whether_it_answers(host: TritonHost, model: str) -> None:
    await host.load(model, (), SOON)
    assert await host.answers(model, SOON)


async def test_a_model_whose_process_was_killed_is_found_and_cured(
    host: TritonHost, own_triton: Triton
) -> None:
    await host.load("identity_fp32", (), SOON)
    [stub] = psutil.Process(own_triton.pid).children()
    stub.kill()
    until(lambda: stub.status() == psutil.STATUS_ZOMBIE, "it has ended; its server does not look")
    await host.load("identity_fp32", (), SOON)
    assert await stage_of(host, "identity_fp32") is ModelState.READY
    assert not await host.answers("identity_fp32", SOON)
    await host.unload("identity_fp32", SOON)  # which this server never ends, having asked a dead process
    await host.load("identity_fp32", (), SOON)
    assert await stage_of(host, "identity_fp32") is ModelState.READY
    assert await host.answers("identity_fp32", SOON)


async def test_a_server_that_is_killed_loses_all_and_says_that_it_is_another(
    host: TritonHost, own_triton: Triton
) -> None:
    await host.load("identity_fp32", (), SOON)
    before = await host.index(SOON)
    with own_triton.slow_to_load(seconds=60):
        loading = asyncio.create_task(host.load("slow", (), SOON))
        while await stage_of(host, "slow") is not ModelState.LOADING:  # noqa: ASYNC110  # only asking tells
            await asyncio.sleep(0.02)
        own_triton.kill()
        with pytest.raises(HostRefused) as refused:
            await loading
        assert refused.value.fault is HostFault.UNKNOWN
        for call in (host.load("slow", (), SOON), host.unload("slow", SOON), host.index(SOON)):
            with pytest.raises(HostRefused) as refused:
                await call
            assert refused.value.fault is HostFault.UNREACHABLE
    await asyncio.to_thread(own_triton.start)
    after: Any = await until_answered(host)
    assert before.incarnation
    assert after.incarnation not in ("", before.incarnation)
    assert {model.stage for model in after.models.values()} == {ModelState.ABSENT}


async def until_answered(host: TritonHost) -> object:
    """The library tries anew after a moment."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return await host.index(SOON)
        except HostRefused:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


async def test_a_server_that_loads_by_itself_refuses_loads(tmp_path: Path) -> None:
    with Triton(tmp_path, mode="none", options=["--exit-on-error=false"]) as other:
        host = TritonHost(TritonRpcServer("main", f"127.0.0.1:{other.grpc_port}"))
        with pytest.raises(HostRefused) as refused:
            await host.load("identity_fp32", (), SOON)
        assert refused.value.fault is HostFault.NOT_ALLOWED
        await host.close()
