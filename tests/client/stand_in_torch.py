"""A module named torch that notes how its memory is limited."""

from pathlib import Path

_TORCH = """
class cuda:
    calls = []
    _started = []

    @classmethod
    def set_per_process_memory_fraction(cls, fraction, device):
        assert 0 <= fraction <= 1
        cls.calls.append([fraction, device])

    @staticmethod
    def is_available():
        return True
"""
_LAZY = """
    @classmethod
    def _lazy_call(cls, call):
        cls._started.append(call)

    @classmethod
    def init(cls):
        for call in cls._started:
            call()
"""


def stand_in_for_torch(folder: Path, *, lazy: bool = False) -> None:
    """`lazy`: CUDA begins with `torch.cuda.init()`, as in PyTorch, and with the import otherwise."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(_TORCH + _LAZY * lazy)
