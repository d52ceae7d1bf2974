"""Sizes and counts, read and written."""

from __future__ import annotations

import pytest

from hadal.units import nbytes_of, numel_of, shown_binary, shown_nbytes, shown_numel


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("5GB", 5 * 10**9), ("2GiB", 2**31), ("1.5kB", 1500), (17, 17), ("300", 300), ("1 MB", 10**6)],
)
def test_sizes_are_read_as_the_hub_does(text: str | int, nbytes: int) -> None:
    assert nbytes_of(text) == nbytes


@pytest.mark.parametrize("text", ["64X", "", "GB", "-1GB", "0", "1e3"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a size must be"):
        nbytes_of(text)


def test_counts_are_read_in_powers_of_1000() -> None:
    assert [numel_of(text) for text in ("7B", "1.5b", "300k", "12")] == [7e9, 1.5e9, 3e5, 12]
    assert [numel_of(text) for text in ("7e9", "1.3E+9", "1e3K")] == [7e9, 1.3e9, 1e6]
    for text in ("many", "0", "-7B", "7 BB"):
        with pytest.raises(ValueError, match="expected a number"):
            numel_of(text)


def test_bytes_and_counts_are_shown_in_the_unit_that_suits_them() -> None:
    assert [shown_nbytes(n) for n in (0, 999, 1500, 5 * 10**9)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "5.0 GB",
    ]
    assert [shown_binary(n) for n in (0, 1536, 3 << 30)] == ["0 B", "1.5 KiB", "3 GiB"]
    counts = (512, 124_439_808, 7_000_000_000, 999_999_999)
    assert [shown_numel(n) for n in counts] == ["512", "124.4 M", "7.0 B", "1.0 B"]
