"""Sizes and durations as people write them: `18GiB`, `1h30m`. Each function raises ValueError that says what
to write."""

import math
import re

_BYTES = {
    "b": 1, "k": 1024, "kib": 1024, "kb": 1000, "m": 1024**2, "mib": 1024**2, "mb": 10**6,
    "g": 1024**3, "gib": 1024**3, "gb": 10**9, "t": 1024**4, "tib": 1024**4, "tb": 10**12,
}  # fmt: skip
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def size_bytes(text: str, plain: int) -> float:
    """Return `18GiB`, `18g`, `512MiB` or `80GB` in bytes. A number without a unit is multiplied by `plain`
    bytes."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([a-zA-Z]*)\s*", text)
    unit = match[2].lower() if match else ""
    if match is None or (unit and unit not in _BYTES):
        raise ValueError(f"invalid size {text!r}: write 18GiB, 512MiB or {18432 * 2**20 // plain}")
    return float(match[1]) * (_BYTES[unit] if unit else plain)


def is_unit(word: str) -> bool:
    """True if this word is a unit of a size or of a duration."""
    return word.lower() in _BYTES or word in _SECONDS


def size_mb(text: str) -> int:
    """Return `18GiB`, `18g`, `512MiB`, `80GB` or a number of MiB as MiB, rounded up."""
    return math.ceil(size_bytes(text, plain=2**20) / 2**20)


def seconds(text: str) -> float:
    """Return `90`, `90s`, `15m`, `1h30m` or `2d` as seconds."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"invalid duration {text!r}: write 90s, 15m or 1h30m")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)
