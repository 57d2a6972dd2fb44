"""A real Triton for as long as a benchmark needs it: the one of the tests, which `make triton` installs."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.triton.server import Triton


@contextmanager
def triton(models: Sequence[str]) -> Iterator[Triton]:
    """With these models of `tests/triton/models` loaded."""
    with tempfile.TemporaryDirectory(prefix="gpb-triton-") as folder, Triton(Path(folder), models) as running:
        yield running
