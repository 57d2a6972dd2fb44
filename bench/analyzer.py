"""Triton's own load generator, in C++, for gRPC: one in Python would be slower than what it measures."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.load import Measured
from tests.triton.analyzer import analyzed, analyzer_libraries


class Analyzer:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._libraries = analyzer_libraries(folder / "libraries")
        self._runs = 0

    def measure(
        self, port: int, model: str, floats: int, *, clients: int, requests: int, token: str = ""
    ) -> Measured:
        """Raises RuntimeError if anything was refused."""
        self._runs += 1
        options = [
            "-i", "grpc", "-u", f"127.0.0.1:{port}", "-m", model, "--shape", f"INPUT0:1,{floats}",
            "--concurrency-range", str(clients), "--request-count", str(requests),
        ]  # fmt: skip
        if token:
            options += ["-H", f"authorization: Bearer {token}"]
        asked = analyzed(self._libraries, self._folder / f"run-{self._runs}.json", *options)
        spans = [(one["timestamp"], one["response_timestamps"][-1]) for one in asked]
        seconds = (max(end for _, end in spans) - min(begin for begin, _ in spans)) / 1e9
        return Measured(seconds, {"200": len(spans)}, [(end - begin) / 1e6 for begin, end in spans])


@contextmanager
def analyzer() -> Iterator[Analyzer]:
    with tempfile.TemporaryDirectory(prefix="gpb-analyzer-") as folder:
        yield Analyzer(Path(folder))
