"""Says that there is no memory for it."""


class TritonPythonModel:
    def initialize(self, args):
        raise RuntimeError("out of memory: cannot allocate 12345 bytes")

    def execute(self, requests):
        return []
