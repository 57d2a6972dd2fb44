"""Limit PyTorch to the share of each GPU that its run has leased.

Standard library only, and nothing newer than Python 3.8: a run may start any Python.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Sequence  # noqa: UP035  # 3.8

FRACTIONS = "GPUBROKER_GPU_FRACTIONS"
"""The share of each visible GPU's memory that a process may take, in CUDA's order: `0.25,1`."""
LIMITS_MB = "GPUBROKER_GPU_LIMITS_MB"
"""The memory of each visible GPU that a process may take, in MiB, in CUDA's order."""


def limit_torch(fractions: str) -> None:
    """Limit torch from its import on, in this process and those forked from it. `fractions` has the form of
    FRACTIONS."""
    sys.meta_path.insert(0, _TorchFinder([float(fraction) for fraction in fractions.split(",")]))


class _TorchFinder(MetaPathFinder):
    def __init__(self, fractions: Sequence[float]) -> None:
        self._fractions = fractions

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = partial(self._execute, execute)  # type: ignore[method-assign]  # of one import
        return spec

    def _execute(self, execute: Any, module: ModuleType) -> None:
        execute(module)
        for device, fraction in enumerate(self._fractions):
            if fraction < 1:
                _limit(module.cuda, device, fraction)


def _limit(cuda: Any, device: int, fraction: float) -> None:
    def limit() -> None:
        # A limit that cannot be set is not worth a failed run: the memory in use is measured too.
        with contextlib.suppress(Exception):
            cuda.set_per_process_memory_fraction(fraction, device)

    # Set the limit when CUDA starts. Starting it here would keep this process from forking others that use
    # it.
    begin_with = getattr(cuda, "_lazy_call", None)
    if begin_with is not None:
        begin_with(limit)
    elif cuda.is_available():
        limit()
