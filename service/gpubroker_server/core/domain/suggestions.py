"""Suggestions for misspelled names."""

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the most similar of the known names; empty if none is similar enough."""
    return next(iter(get_close_matches(name, sorted(known), n=1, cutoff=cutoff)), "")


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the question that names the most similar of the known names; without one, `otherwise`."""
    suggestion = nearest(name, known)
    return f'did you mean "{suggestion}"?' if suggestion else otherwise


def meant_field(name: str, known: Collection[str], inner: Mapping[str, Collection[str]]) -> str:
    """Return the question or the list that helps somebody who has sent an unknown field.

    A known field of this name wins, then one of this name in an inner object, then the most similar known
    field. `inner` has the fields of each inner object, by the name of the field that holds the object.
    """
    if name in known:
        return f'did you mean "{name}"?'
    for outer, names in inner.items():
        if name in names:
            return f'did you mean "{outer}.{name}"?'
    if not known:
        return "none is known here"
    return did_you_mean(name, known, otherwise="known are " + ", ".join(known))
