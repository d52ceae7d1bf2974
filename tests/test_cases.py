"""Few cases run always, and they meet each level; all of them run where slow tests do."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from cases import RARE_TESTS, diagonal, is_in_part, often, pairs, rare_tests, rarely

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


def test_rare_tests_are_those_of_files_in_order() -> None:
    lines = RARE_TESTS.read_text().splitlines()
    listed = [line for line in lines if line in rare_tests()]
    assert listed == sorted(set(listed))
    for name in listed:
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in (RARE_TESTS.parent / file).read_text(), name


def test_a_rare_test_is_slow(request: pytest.FixtureRequest) -> None:
    """None of the listed tests of this run has run without the mark."""
    for item in request.session.items:
        name = item.nodeid.removeprefix("tests/")
        if {name, name.partition("[")[0]} & rare_tests():
            assert item.get_closest_marker("slow") is not None, name
