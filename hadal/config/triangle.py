"""The batch triangle: train batch = micro-batch x accumulation x ranks."""

from __future__ import annotations

from typing import NamedTuple

from hadal.errors import Fault


class Given(NamedTuple):
    """The three sizes in the JSON; None for a size that it does not set."""

    train: int | None = None
    micro: int | None = None
    accumulation: int | None = None


class Sizes(NamedTuple):
    """The three sizes, consistent with each other."""

    train: int
    micro: int
    accumulation: int


def complete(given: Given, ranks: int) -> Sizes | Fault:
    """Infer the missing sizes; return a fault if they cannot agree."""
    if given.train is not None:
        return _split(given.train, given, ranks)
    if given.micro is None:
        return Fault(
            "train_batch_size",
            "neither this nor train_micro_batch_size_per_gpu is set; set one of the two",
        )
    accumulation = given.accumulation or 1
    return Sizes(given.micro * accumulation * ranks, given.micro, accumulation)


def _split(train: int, given: Given, ranks: int) -> Sizes | Fault:
    micro, accumulation = given.micro, given.accumulation
    if micro is not None and accumulation is not None:
        product = micro * accumulation * ranks
        if product != train:
            return Fault(
                "train_batch_size",
                f"{train}, but {micro} (micro-batch) x {accumulation} (accumulation)"
                f" x {_counted(ranks)} = {product}; remove one of the three",
            )
        return Sizes(train, micro, accumulation)
    known = (micro or accumulation or 1) * ranks
    if train % known:
        return Fault("train_batch_size", _uneven(train, given, ranks, known))
    rest = train // known
    if micro is not None:
        return Sizes(train, micro, rest)
    return Sizes(train, rest, accumulation or 1)


def _uneven(train: int, given: Given, ranks: int, known: int) -> str:
    if known == ranks:
        return f"{train} is not divisible by {_counted(ranks)}; use a multiple of {known}"
    size = given.micro, "micro-batch"
    if given.micro is None:
        size = given.accumulation, "accumulation"
    parts = f"{size[0]} ({size[1]}) x {_counted(ranks)} = {known}"
    return f"{train} is not divisible by {parts}; use a multiple of {known}"


def _counted(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"
