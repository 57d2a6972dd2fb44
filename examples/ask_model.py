"""Ask a model on Triton without Triton's client: text in, text out.

    python -m examples.ask_model "how are you"

asks `echo_bytes` of the service on this machine, a model of this project's tests (tests/triton/models) that
returns each word reversed. One function prepares the request and processes the answer; both run here.
"""

import sys
from collections.abc import Mapping
from typing import Any

from gpubroker import BrokerError, inference


@inference(model_name="echo_bytes", model_type="chat", priority="interactive")
def ask(prompt: str) -> dict[str, Any]:
    def process_outputs(outputs: Mapping[str, Any]) -> str:
        words: list[bytes] = outputs["text_output"].tolist()
        return b" ".join(words).decode()

    return {"inputs": {"text_input": prompt.split()}, "process_outputs": process_outputs}


if __name__ == "__main__":
    try:
        print(ask(" ".join(sys.argv[1:]) or "hello"))
    except BrokerError as fault:
        hint = "" if fault.retry_after_seconds is None else f"; try again in {fault.retry_after_seconds:g} s"
        sys.exit(f"{fault}{hint}")
