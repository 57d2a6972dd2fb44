"""Doubles what it is given, says of how many rows its request was, and fails all of it at a negative number.
With a number of 1000 or more it sleeps so many milliseconds first."""

import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(pb_utils.get_input_tensor_by_name(one, "INPUT0").as_numpy()) for one in requests]

    def _answer(self, values):
        if values.min() < 0:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("doubles takes no negative numbers"))
        if values.max() >= 1000:
            time.sleep(float(values.max()) / 1000)
        rows = np.full(values.shape, len(values), np.int32)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", values * 2), pb_utils.Tensor("ROWS", rows)]
        )
