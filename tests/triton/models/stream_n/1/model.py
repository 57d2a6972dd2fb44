"""N answers to each request, DELAY_MS apart; told to, it fails at one. A cancelled one is noted in the log.

They are sent from a thread of each request, so that several streams overlap on one instance.
"""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def number(request, name, default):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else int(tensor.as_numpy().reshape(-1)[0])


class TritonPythonModel:
    def initialize(self, args):
        self.lock = threading.Lock()
        self.under_way = 0

    def execute(self, requests):
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(-1)[0]
            plan = (
                text,
                number(request, "N", 3),
                number(request, "DELAY_MS", 0),
                number(request, "FAIL_AT", -1),
            )
            with self.lock:
                self.under_way += 1
            threading.Thread(
                target=self.emit, args=(request.get_response_sender(), *plan), daemon=True
            ).start()

    def emit(self, sender, text, n, delay_ms, fail_at):
        try:
            for i in range(n):
                if sender.is_cancelled():
                    pb_utils.Logger.log_warn(f"stream_n: cancelled at {i}")
                    fail(sender, "cancelled")
                    return
                if i == fail_at:
                    fail(sender, "stream_n: told to fail")
                    return
                texts = np.array([text + b" %d" % i], dtype=np.object_)
                index = np.array([i], dtype=np.int32)
                tensors = [pb_utils.Tensor("text_output", texts), pb_utils.Tensor("index", index)]
                sender.send(pb_utils.InferenceResponse(tensors))
                time.sleep(delay_ms / 1000)
            sender.send(flags=FINAL)
        finally:
            with self.lock:
                self.under_way -= 1

    def finalize(self):
        while self.under_way:
            time.sleep(0.05)


def fail(sender, why):
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(why)), flags=FINAL)
