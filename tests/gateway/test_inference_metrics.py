"""Queued inferences in the metrics."""

from gpubroker_server.core.domain.orders import Failure
from gpubroker_server.core.serving.batching import InferenceResponse
from gpubroker_server.core.serving.tensors import tensor_of

from tests.gateway.harness import Gateway
from tests.gateway.test_inferences_queued import OPEN, a_gateway, ask, end, send


async def told(gateway: Gateway, *lines: str) -> None:
    found = (await gateway.admin.get("/metrics")).text.splitlines()
    assert not set(lines) - set(found), [line for line in found if "_inference" in line]


async def test_queued_inferences_are_counted_as_they_wait_run_and_end() -> None:
    async with a_gateway(serving=OPEN) as gateway:
        good, bad = await ask(gateway, 1), await ask(gateway, 2)
        await told(gateway, "gpubroker_inferences_waiting 2.0", "gpubroker_inferences_running 0.0")
        gateway.clock.advance(10.0)
        await send(gateway)
        await told(
            gateway,
            "gpubroker_inferences_waiting 0.0",
            "gpubroker_inferences_running 2.0",
            'gpubroker_inference_wait_seconds_bucket{le="5.0"} 0.0',
            'gpubroker_inference_wait_seconds_bucket{le="15.0"} 2.0',
            "gpubroker_inference_wait_seconds_count 2.0",
            "gpubroker_inference_wait_seconds_sum 20.0",
        )
        await end(gateway, good, InferenceResponse("llm", "1", (tensor_of("y", "FP32", [1], [1]),)))
        await end(gateway, bad, failure=Failure("inference_refused", "no"))
        await told(
            gateway,
            "gpubroker_inferences_running 0.0",
            'gpubroker_inferences_finished_total{state="succeeded"} 1.0',
            'gpubroker_inferences_finished_total{state="failed"} 1.0',
            'gpubroker_inferences_finished_total{state="expired"} 0.0',
        )
