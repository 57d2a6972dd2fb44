"""The metrics of a Triton that sees GPUs, as its documentation shows them: the one of the tests sees none."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

_TEXT = """# HELP nv_gpu_utilization GPU utilization rate [0.0 - 1.0)
# TYPE nv_gpu_utilization gauge
{utilization}
# HELP nv_gpu_memory_total_bytes GPU total memory, in bytes
# TYPE nv_gpu_memory_total_bytes gauge
{memory}
"""


@contextmanager
def gpu_metrics(*uuids: str) -> Iterator[int]:
    """The port."""
    utilization = "\n".join(f'nv_gpu_utilization{{gpu_uuid="{uuid}"}} 0' for uuid in uuids)
    memory = "\n".join(f'nv_gpu_memory_total_bytes{{gpu_uuid="{uuid}"}} 25757220864' for uuid in uuids)
    text = _TEXT.format(utilization=utilization, memory=memory).encode()

    class Metrics(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            found = self.path == "/metrics"
            self.send_response(200 if found else 404)
            self.send_header("Content-Length", str(len(text) if found else 0))
            self.end_headers()
            self.wfile.write(text if found else b"")

        def log_message(self, *_args: object) -> None:
            """Nothing to the terminal."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
