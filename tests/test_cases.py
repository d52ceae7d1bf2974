"""Few cases run always, and they meet each level; all of them run where slow tests do."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
from cases import diagonal, is_in_part, mark_slow_cells, pairs

FACTORS = {"stage": range(4), "precision": ["fp32", "bf16", "fp16"], "model": ["tied", "frozen"]}


def test_each_test_is_in_one_of_three_similar_parts() -> None:
    names = [f"tests/zero/test_bucket.py::test_name[{n}]" for n in range(900)]
    parts = [{name for name in names if is_in_part(name, f"{n}/3")} for n in (1, 2, 3)]
    assert set.union(*parts) == set(names)
    assert sum(map(len, parts)) == len(names)
    assert all(250 < len(part) < 350 for part in parts)
    with pytest.raises(ValueError, match=r"--part 4/3: expected a number from 1 to 3"):
        is_in_part("name", "4/3")


@pytest.mark.parametrize(
    ("cases", "most", "met"), [(diagonal, 4, 1), (pairs, 23, 2)], ids=["diagonal", "pairs"]
)
def test_few_cases_meet_all_levels(cases: Any, most: int, met: int) -> None:
    """Each level, or each two levels, in cases that are not slow."""
    names, cells = cases(**FACTORS).args
    usual = [cell.values for cell in cells if not cell.marks]
    assert names == tuple(FACTORS) and len(usual) <= most
    assert {cell.values for cell in cells} == set(product(*FACTORS.values()))
    assert all(cell.marks == (pytest.mark.slow,) for cell in cells if cell.marks)
    for places in combinations(range(3), met):
        wanted = product(*(list(FACTORS.values())[place] for place in places))
        assert {tuple(cell[place] for place in places) for cell in usual} == set(wanted)


class Cell:
    """What `mark_slow_cells` asks of an item."""

    def __init__(self, cell: str, mark: pytest.Mark) -> None:
        self.nodeid, self.marks, self._mark = f"test_it[{cell}]", [], mark

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self._mark if self._mark.name == name else None

    def add_marker(self, name: str) -> None:
        self.marks.append(name)


@pytest.mark.parametrize(("mark", "slow"), [("slow_cells", ["b", "c"]), ("fast_cells", ["a"])])
def test_cells_are_slow_by_their_ids(mark: str, slow: list[str]) -> None:
    cells = [Cell(one, getattr(pytest.mark, mark)("b", "c").mark) for one in "abc"]
    mark_slow_cells(cells, are_all_there=True)
    assert [one.nodeid[-2] for one in cells if one.marks == ["slow"]] == slow
    mark_slow_cells(cells[:1], are_all_there=False)
    with pytest.raises(pytest.UsageError, match=r"do not exist: {'test_it': \['c'\]}"):
        mark_slow_cells(cells[:2], are_all_there=True)
