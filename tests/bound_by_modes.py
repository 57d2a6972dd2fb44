"""A process that the modes of files bind, also when it runs as root: permission denied, for real."""

import ctypes
import os

_PR_CAPBSET_DROP = 24
_VERSION_3 = 0x20080522
_OVERRIDES = (1, 2)
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: what lets root pass over modes."""


def bound_by_modes() -> None:
    """Give up these rights: neither this process nor what it executes next can ever have them again."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for right in _OVERRIDES:
        _check(libc.prctl(_PR_CAPBSET_DROP, right, 0, 0, 0))
    # Both structures as in capset(2): of 32 rights each, effective, permitted and inheritable ones.
    header, rights = (ctypes.c_uint32 * 2)(_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    _check(libc.capget(header, rights))
    for kind in range(3):
        rights[kind] &= ~sum(1 << right for right in _OVERRIDES)
    _check(libc.capset(header, rights))


def _check(code: int) -> None:
    if code != 0:
        raise OSError(ctypes.get_errno(), "a right of root cannot be given up")
