"""Few cases run always, and they meet each level; all of them run where slow tests do."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from cases import diagonal, is_in_part, mark_slow_cells, often, pairs, rarely

FACTORS = {"stage": range(4), "precision": ["fp32", "bf16", "fp16"], "model": ["tied", "frozen"]}


def both(mark: pytest.MarkDecorator) -> tuple[set[tuple[object, ...]], set[tuple[object, ...]]]:
    """All combinations, and those that are not slow."""
    names, cases = mark.args
    assert names == tuple(FACTORS)
    usual = {case.values for case in cases if not case.marks}
    assert all(case.marks == (pytest.mark.slow,) for case in cases if case.marks)
    return {case.values for case in cases}, usual


def test_each_test_is_in_one_of_three_similar_parts() -> None:
    names = [f"tests/zero/test_bucket.py::test_name[{n}]" for n in range(900)]
    parts = [{name for name in names if is_in_part(name, f"{n}/3")} for n in (1, 2, 3)]
    assert set.union(*parts) == set(names)
    assert sum(map(len, parts)) == len(names)
    assert all(250 < len(part) < 350 for part in parts)
    with pytest.raises(ValueError, match=r"--part 4/3: expected a number from 1 to 3"):
        is_in_part("name", "4/3")


def test_a_diagonal_has_each_level() -> None:
    every, usual = both(diagonal(**FACTORS))
    assert every == set(product(*FACTORS.values()))
    assert len(usual) == 4
    for at, levels in enumerate(FACTORS.values()):
        assert {case[at] for case in usual} == set(levels)


def test_pairs_have_each_two_levels() -> None:
    every, usual = both(pairs(**FACTORS))
    assert every == set(product(*FACTORS.values()))
    assert 12 <= len(usual) < 24
    for one, other in combinations(range(3), 2):
        levels = list(FACTORS.values())
        assert {(case[one], case[other]) for case in usual} == set(
            product(levels[one], levels[other])
        )


def test_chosen_cells_run_often() -> None:
    assert often(["a", "b"], "b") == [rarely("a"), "b"]
    assert often([(1, "a"), (2, "b")], (2, "b")) == [rarely(1, "a"), (2, "b")]
    with pytest.raises(AssertionError, match="c"):
        often(["a", "b"], "c")


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
