"""No test is lost: each is in one part of the slow ones, and no mark names a cell that is not."""

from __future__ import annotations

import pytest
from cases import is_in_part, mark_slow_cells


def test_each_test_is_in_one_of_three_similar_parts() -> None:
    names = [f"tests/zero/test_bucket.py::test_name[{n}]" for n in range(900)]
    parts = [{name for name in names if is_in_part(name, f"{n}/3")} for n in (1, 2, 3)]
    assert set.union(*parts) == set(names)
    assert sum(map(len, parts)) == len(names)
    assert all(250 < len(part) < 350 for part in parts)
    with pytest.raises(ValueError, match=r"--part 4/3: expected a number from 1 to 3"):
        is_in_part("name", "4/3")


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
