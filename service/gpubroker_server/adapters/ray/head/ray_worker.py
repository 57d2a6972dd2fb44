"""What the head runs for each of its workers: Ray's own worker, which begins at two thirds of the cost.

Every run in a process of its own begins with `import ray`, and two fifths of that are libraries of which Ray
calls a function only where a machine is a TPU and where a runtime environment is checked.

Copied into the head's directory and run from there, so that a head outlives the upgrade of what started it:
nothing but the standard library and Ray is imported here.
"""

import contextlib
import importlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

SELDOM_USED = ("jsonschema", "requests")
USERS = ("ray", "ray._common.usage.usage_lib")
"""What of Ray imports them in every worker. If it is elsewhere in another release, a worker costs more."""


class Later(ModuleType):
    """Stands for a module until something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


@contextlib.contextmanager
def put_off(names: Sequence[str]) -> Iterator[None]:
    """Who imports one of these meanwhile gets it at its first use, and all others the module itself."""
    stand_ins = {name: Later(name) for name in names if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, stand_in in stand_ins.items():
            if sys.modules.get(name) is stand_in:
                del sys.modules[name]


def main() -> None:
    # Found without being imported.
    ray = importlib.util.find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    worker = os.path.join(os.path.dirname(ray.origin), "_private", "workers", "default_worker.py")
    # As if Python had been given that file; what lies beside this one is nothing to import.
    sys.argv[0], sys.path[0] = worker, os.path.dirname(worker)
    with put_off(SELDOM_USED), contextlib.suppress(ImportError):
        for user in USERS:
            importlib.import_module(user)
    runpy.run_path(worker, run_name="__main__")


if __name__ == "__main__":
    main()
