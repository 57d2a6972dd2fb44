"""Checks of loads over Triton's protocols. A load may bring files, which Triton would write into its
repository and run. Unless the operator allows that, the whole body of a load is read before anything of it is
sent."""

import json

from gpubroker_server.inference.body_buffer import BUFFER_BYTES
from gpubroker_server.inference.operation import Operation
from gpubroker_server.inference.plane import Plane
from gpubroker_server.inference.refusals import body_too_large


def check_size(plane: Plane, operation: Operation, body_bytes: int) -> None:
    """Check the size of a body. Raises Problem payload-too-large if the body is longer than it may be."""
    if body_bytes > plane.most_body_bytes:
        raise body_too_large(
            f"a request to a model may have {plane.most_body_bytes} bytes",
            body_bytes,
            "send less at once, or raise triton.body_bytes",
        )
    if operation.loads and body_bytes > BUFFER_BYTES and not plane.takes_files:
        raise body_too_large(
            f"a load without files may have {BUFFER_BYTES} bytes",
            body_bytes,
            "put files into the model repository, or have the operator set triton.load_files",
        )


def reads_load(plane: Plane, operation: Operation) -> bool:
    """Return True if the whole body must be searched for files before anything is sent."""
    return operation.loads and not plane.takes_files


class _FileFound(Exception):
    pass


def brings_files(body: bytes) -> bool:
    """Return True if the body of a load over HTTP brings files, or cannot be read. No name at any depth may
    be that of a file: of two equal names, Triton's parser may take another one than ours."""
    if not body:
        return False
    try:
        json.loads(body.decode("latin-1"), strict=False, object_pairs_hook=_refuse_files)
    except (ValueError, RecursionError, _FileFound):
        return True
    return False


def _refuse_files(pairs: list[tuple[str, object]]) -> None:
    if any(name.startswith("file:") for name, _ in pairs):
        raise _FileFound
