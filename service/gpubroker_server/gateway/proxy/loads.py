"""Whether the body of a load over HTTP brings files. What cannot be read might, and counts as if it did."""

import json

MOST_READ_BYTES = 1024 * 1024
"""Of a body. A configuration that takes the place of a model's own has some thousand."""

_FILE = "file:"


class _Files(Exception):
    """A name that begins like that of a file, anywhere."""


def brings_files(body: bytes) -> bool:
    """Triton reads JSON with a parser of its own, and of names that come twice another one may count: so no
    name at all may be one of a file, and what is read here is read as generously as can be."""
    if not body:
        return False
    try:
        json.loads(body.decode("latin-1"), strict=False, object_pairs_hook=_refuse_files)
    except (ValueError, RecursionError, _Files):
        return True
    return False


def _refuse_files(pairs: list[tuple[str, object]]) -> None:
    if any(name.startswith(_FILE) for name, _ in pairs):
        raise _Files
