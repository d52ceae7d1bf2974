"""Factors, and a small set of cells in which every pair of levels meets.

The rule is fixed, so the same factors always give the same cover: take the first pair that no cell
has yet, give every other factor the level that covers most uncovered pairs with what is chosen so
far (the one used least, then the first, among equals), and go on until no pair is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product

Levels = Mapping[str, Sequence[str]]
Cell = dict[str, str]
# (factor, level) of one factor with (factor, level) of a later one
Pair = tuple[tuple[str, str], tuple[str, str]]


def every_cell(levels: Levels) -> Iterator[Cell]:
    """The full product, the last factor moving fastest."""
    for chosen in product(*levels.values()):
        yield dict(zip(levels, chosen, strict=True))


def every_pair(levels: Levels) -> list[Pair]:
    """Each two levels of two different factors, in the factors' order."""
    return [
        ((one, left), (other, right))
        for one, other in combinations(levels, 2)
        for left, right in product(levels[one], levels[other])
    ]


def pairs_of(cell: Cell) -> Iterator[Pair]:
    """The pairs that meet in a cell."""
    return combinations(cell.items(), 2)


def pairwise_cover(levels: Levels) -> list[Cell]:
    """Cells in which every pair of levels meets at least once."""
    uncovered = dict.fromkeys(every_pair(levels))
    used: Counter[tuple[str, str]] = Counter()
    cells: list[Cell] = []
    while uncovered:
        chosen = dict(next(iter(uncovered)))
        for factor in levels:
            if factor not in chosen:
                chosen[factor] = _best_level(factor, levels, chosen, uncovered, used)
        cell = {factor: chosen[factor] for factor in levels}
        cells.append(cell)
        used.update(cell.items())
        for pair in pairs_of(cell):
            uncovered.pop(pair, None)
    return cells


def _best_level(
    factor: str,
    levels: Levels,
    chosen: Cell,
    uncovered: Mapping[Pair, None],
    used: Counter[tuple[str, str]],
) -> str:
    order = {name: index for index, name in enumerate(levels)}

    def gain(level: str) -> int:
        own = (factor, level)
        return sum(
            ((own, item) if order[factor] < order[item[0]] else (item, own)) in uncovered
            for item in chosen.items()
        )

    return max(levels[factor], key=lambda level: (gain(level), -used[factor, level]))
