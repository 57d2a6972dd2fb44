"""Python imports this module at its start. It limits PyTorch, and then runs the `sitecustomize` that it
hides."""

import contextlib
import importlib
import os
import sys


def _limit_torch() -> None:
    # This module lies beside this file. This Python need not have the package gpubroker.
    limit = importlib.import_module("gpubroker_memory_limit")
    limit.limit_torch(os.environ[limit.FRACTIONS])


def _make_way() -> None:
    own_directory = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != own_directory]
    this = sys.modules.pop(__name__)
    try:
        importlib.import_module(__name__)
    except ModuleNotFoundError:
        sys.modules[__name__] = this


if __name__ == "sitecustomize":
    with contextlib.suppress(Exception):
        _limit_torch()
    _make_way()
