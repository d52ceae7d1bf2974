"""The table of checks, and the lines that they yield."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER, DRY = "GPU_CHECK_FOLDER", "GPU_CHECK_DRY"


@dataclass(frozen=True)
class Line:
    """One line of the report; `is_ok` is None for a reading."""

    name: str
    value: str
    expected: str = ""
    is_ok: bool | None = None


Lines = Iterator[Line]


@dataclass(frozen=True)
class Job:
    """The processes that run a check: how many share the device, with which variables.

    Checks of the same job run one after another in the same processes. `ranks` is 0 for a check
    that starts programs itself.
    """

    ranks: int = 1
    variables: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Check:
    """A function that yields lines, the seconds that it may take, and its processes."""

    part: str
    limit_s: float
    job: Job
    act: Callable[[], Lines]
    skips_dry: bool


@dataclass(frozen=True)
class Part:
    """The seconds that a part may take, and how many of its jobs run at the same time."""

    limit_s: float
    lanes: int = 1


CHECKS: dict[str, Check] = {}
PARTS = {"right": Part(240, 2), "fast": Part(270), "offload": Part(300)}


def check(
    part: str, limit_s: float, ranks: int = 1, skips_dry: bool = False, **variables: str
) -> Callable[[Callable[[], Lines]], Callable[[], Lines]]:
    """Add a check to a part; one that `skips_dry` can only run on a GPU."""

    def add(act: Callable[[], Lines]) -> Callable[[], Lines]:
        job = Job(ranks, tuple(variables.items()))
        CHECKS[act.__name__] = Check(part, limit_s, job, act, skips_dry)
        return act

    return add


def is_dry() -> bool:
    """Return True if everything runs tiny on CPUs."""
    return os.environ.get(DRY) == "1"


def keep(name: str, value: Any) -> None:
    """Keep a JSON value for checks in other processes."""
    Path(os.environ[FOLDER], f"{name}.json").write_text(json.dumps(value))


def kept(name: str) -> Any:
    """Return a value that an earlier check kept; None if that check did not run."""
    path = Path(os.environ[FOLDER], f"{name}.json")
    return json.loads(path.read_text()) if path.exists() else None


# ---- verdicts ------------------------------------------------------------------------------------


def expect(name: str, value: object, expected: str, is_ok: bool) -> Line:
    """Return a line with a verdict."""
    return Line(name, str(value), expected, bool(is_ok))


def measured(
    name: str, value: float, least: float | None = None, most: float | None = None, unit: str = ""
) -> Line:
    """Return a line with a figure and its limits; a reading on CPUs, whose speed shows nothing."""
    limits = {">=": least, "<=": most}
    expected = ", ".join(f"{sign} {limit:g}" for sign, limit in limits.items() if limit is not None)
    is_in = (least is None or value >= least) and (most is None or value <= most)
    return Line(
        name, f"{value:.4g} {unit}".strip(), expected, is_in if limits_apply(expected) else None
    )


def limits_apply(expected: str) -> bool:
    """Return True if a figure is judged."""
    return bool(expected) and not is_dry()


def close(name: str, far: float, limit: float) -> Line:
    """Return a line about a relative distance; a limit of 0 asks for equal bits."""
    expected = f"<= {limit:g} relative" if limit else "equal to the bit"
    return expect(name, f"{far:.1e}", expected, far <= limit)


def distance(one: Any, other: Any) -> float:
    """Return the largest relative distance of two lists of numbers; infinite if one is NaN."""
    far = [abs(a - b) / max(abs(b), 1e-9) for a, b in zip(one, other, strict=True)]
    return max(each if each == each else float("inf") for each in far)
