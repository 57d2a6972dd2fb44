"""What comes in goes out, of whatever type it is."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [
                    pb_utils.Tensor(tensor.name().replace("IN_", "OUT_"), tensor.as_numpy())
                    for tensor in request.inputs()
                ]
            )
            for request in requests
        ]
