"""Each text backwards."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        out = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
            turned = np.array([text[::-1] for text in texts.reshape(-1)], dtype=np.object_)
            tensor = pb_utils.Tensor("text_output", turned.reshape(texts.shape))
            out.append(pb_utils.InferenceResponse([tensor]))
        return out
