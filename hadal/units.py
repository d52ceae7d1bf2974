"""Sizes and counts as people write and read them: "5GB", "7B parameters", "64 MiB"."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(I?)B?", re.IGNORECASE)
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_COUNT = re.compile(r"(\d+(?:\.\d+)?(?:e[+]?\d+)?)([KMBT]?)", re.IGNORECASE)
_COUNT_POWER = {"": 0, "K": 3, "M": 6, "B": 9, "T": 12}
_DECIMAL = ("B", "kB", "MB", "GB", "TB")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


def rounded_up(number: int, step: int) -> int:
    """Round up to a multiple of `step`."""
    return -(-number // step) * step


def nbytes_of(size: str | int) -> int:
    """Return a size in bytes: a number, or text as "5GB" (powers of 1000) or "2GiB" (of 1024).

    Raises:
        ValueError: it is neither.
    """
    found = _SIZE.fullmatch(str(size).strip())
    nbytes = 0
    if found:
        base = 1024 if found[3] else 1000
        nbytes = int(float(found[1]) * base ** _POWER[found[2].upper()])
    if nbytes < 1:
        raise ValueError(f'a size must be a number of bytes, or text as "5GB", found {size!r}')
    return nbytes


def numel_of(text: str) -> int:
    """Return a number of elements: plain ("7e9"), or with K, M, B or T for powers of 1000, as "7B".

    Raises:
        ValueError: it is neither.
    """
    found = _COUNT.fullmatch(text.strip())
    value = round(float(found[1]) * 10 ** _COUNT_POWER[found[2].upper()]) if found else 0
    if value < 1:
        raise ValueError(f'expected a number such as 1300000000 or "7B", got {text!r}')
    return value


def shown_nbytes(nbytes: int) -> str:
    """Format bytes in the power of 1000 that suits them: "1.2 GB"."""
    return _shown(float(nbytes), 1000, _DECIMAL)


def shown_binary(nbytes: int) -> str:
    """Format bytes in the power of 1024 that suits them: "64 MiB"; for blocks and messages."""
    return _shown(float(nbytes), 1024, _BINARY)


def shown_numel(numel: int) -> str:
    """Return a number of elements: "7.0 B", "124.4 M", "512"."""
    for power, letter in ((12, "T"), (9, "B"), (6, "M"), (3, "K")):
        if round(numel / 10**power, 1) >= 1:
            return f"{numel / 10**power:.1f} {letter}"
    return str(numel)


def _shown(value: float, base: int, units: tuple[str, ...]) -> str:
    unit = 0
    while value >= base and unit < len(units) - 1:
        value, unit = value / base, unit + 1
    is_whole = unit == 0 or (base == 1024 and value == int(value))
    return f"{value:.0f} {units[unit]}" if is_whole else f"{value:.1f} {units[unit]}"
