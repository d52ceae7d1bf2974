"""Suggestions for misspelled names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_ALIKE = 0.75
_ALIKE_SHORT = 0.6
_SHORT = 5
# Other libraries' names of the same thing, which are not spelled alike.
_ELSEWHERE = {"learning_rate": "lr", "epsilon": "eps", "decay": "weight_decay"}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most similar to a misspelled one, or None."""
    plain = {word.lower(): word for word in known}
    cut = _ALIKE_SHORT if len(name) <= _SHORT else _ALIKE
    written = name.strip().lower().replace("-", "_").replace(" ", "_")
    if _ELSEWHERE.get(written) in plain:
        return _ELSEWHERE[written]
    found = get_close_matches(written, plain, n=1, cutoff=cut)
    return plain[found[0]] if found else None
