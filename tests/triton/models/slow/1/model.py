"""Sleeps SLEEP_MS in each request, and as it loads: `load_ms`, or until there is a file `load_until`."""

import json
import os
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"]).get("parameters", {})
        time.sleep(int(parameters.get("load_ms", {}).get("string_value", "0")) / 1000)
        awaited = parameters.get("load_until", {}).get("string_value", "")
        while awaited and not os.path.exists(awaited):
            time.sleep(0.02)

    def execute(self, requests):
        out = []
        for request in requests:
            asked = pb_utils.get_input_tensor_by_name(request, "SLEEP_MS")
            time.sleep((200 if asked is None else int(asked.as_numpy().reshape(-1)[0])) / 1000)
            tensor = pb_utils.get_input_tensor_by_name(request, "INPUT0")
            out.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", tensor.as_numpy())]))
        return out
