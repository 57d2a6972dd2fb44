"""An unmodified tritonclient runs one script directly and through the broker, and is told the same."""

from types import ModuleType
from typing import Any

import pytest
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from tests.e2e.service_process import ServiceProcess
from tests.triton.script import steps, told
from tests.triton.server import Triton


def address(url: str) -> str:
    return url.removeprefix("http://")


async def test_the_blocking_client_gets_the_same_answers(triton: Triton, service: ServiceProcess) -> None:
    kit: ModuleType = tritonclient.http
    with (
        kit.InferenceServerClient(address(triton.url)) as direct,
        kit.InferenceServerClient(address(service.url)) as proxied,
    ):
        expected = await told(kit, direct, {})
        assert await told(kit, proxied, {"Authorization": f"Bearer {service.token}"}) == expected
    assert len(expected) == len(list(steps(kit)))
    assert len([1 for answer in list[Any](expected) if answer[0] == "infer" and len(answer) == 3]) > 10


async def test_the_asynchronous_client_gets_the_same_answers(triton: Triton, service: ServiceProcess) -> None:
    kit: ModuleType = tritonclient.http.aio
    async with (
        kit.InferenceServerClient(address(triton.url)) as direct,
        kit.InferenceServerClient(address(service.url)) as proxied,
    ):
        expected = await told(kit, direct, {})
        assert await told(kit, proxied, {"Authorization": f"Bearer {service.token}"}) == expected


def test_a_client_that_is_refused_while_it_sends_32_mib_reads_why(service: ServiceProcess) -> None:
    """It sends all of its request before it looks at any answer."""
    import numpy as np

    reader = service.broker.create_token("reader", scopes=["tasks:read"]).token
    tensor = tritonclient.http.InferInput("INPUT0", [1, 8 * 2**20], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 8 * 2**20), np.float32))
    with tritonclient.http.InferenceServerClient(address(service.url)) as client:
        for _ in range(2):
            with pytest.raises(InferenceServerException, match="lacks the scope models:infer"):
                client.infer("identity_fp32", [tensor], headers={"Authorization": f"Bearer {reader}"})
