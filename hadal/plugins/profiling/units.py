"""Formats of numbers with units, as DeepSpeed's profiler writes them."""

from __future__ import annotations

_SCALES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Format `1083328` as `1.08 M`. The default unit is the largest that leaves at least 1."""
    if units is None:
        size = abs(num)
        fitting = (unit for unit, scale in _SCALES.items() if size >= scale)
        units = next(fitting, "u") if size else ""
    scale = _SCALES.get(units, 1.0)
    return f"{round(num / scale, precision):g} {units}"


def flops_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Format `1083328` as `1.08 MFLOPS`."""
    return f"{number_to_string(num, units, precision)}FLOPS"


def macs_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Format `499136` as `499.14 KMACs`."""
    return f"{number_to_string(num, units, precision)}MACs"


def bytes_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Format `7.25e9` as `7.25 GB`; a unit has 1,000 of the next."""
    return f"{number_to_string(num, units, precision)}B"


def duration_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Format `0.0123` seconds as `12.3 ms`."""
    return f"{number_to_string(num, units, precision)}s"


def params_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Format `7.25e9` as `7.25 B`."""
    given = "G" if units == "B" else units
    return number_to_string(num, given, precision).replace("G", "B").strip()
