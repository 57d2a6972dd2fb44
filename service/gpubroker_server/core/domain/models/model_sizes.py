"""How much memory a model is taken to need before anybody has seen it loaded."""

from math import ceil

from gpubroker_server.core.domain.units import Mib

FILE_FACTOR = 1.25
"""Of the size of its files: weights are laid out anew, and work needs room beside them."""

MIB_BYTES = 2**20


def first_guess_mb(file_bytes: int | None, least_mb: Mib) -> Mib:
    """By its files, where they can be seen; at least what a small one takes with all that comes with it."""
    if file_bytes is None:
        return least_mb
    return max(least_mb, Mib(ceil(FILE_FACTOR * file_bytes / MIB_BYTES)))
