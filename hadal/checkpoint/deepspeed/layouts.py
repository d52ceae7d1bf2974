"""The layouts of DeepSpeed's files: arithmetic that finds the values of each parameter.

Four layouts. Stages 1 and 2: all parameters of a param group end to end, in even slices per rank.
Stage 3: each parameter in even slices per rank. Stage 0: whole, without names. Universal: a
folder of files for each parameter.
"""

from __future__ import annotations

import re
from collections import ChainMap, Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

Shapes = Sequence[Mapping[str, Sequence[int]]]
"""Name and shape of the trained parameters, for each flat group: a param group, or a sub-group."""


@dataclass(frozen=True, slots=True)
class TrainedValues:
    """The optimizer's values in a checkpoint, by parameter name.

    A value is a list of slices: flat tensors whose concatenation starts with the value's elements.
    """

    options: list[dict[str, Any]] = field(default_factory=list)
    """The options of each param group."""
    names: list[list[str]] = field(default_factory=list)
    """The names of each param group's parameters."""
    masters: dict[str, list[Tensor]] = field(default_factory=dict)
    state: dict[tuple[str, str], list[Tensor]] = field(default_factory=dict)
    """Per-element state, by parameter and key."""
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    """All other state, by parameter and key."""

    def add(self, name: str, flat: Tensor, start: int, numel: int, state: Any) -> None:
        """Add a slice of a parameter: part of a flat master, and the same slice of its state.

        State may be longer than the master, with padding at its end.
        """
        self.masters.setdefault(name, []).append(flat[start : start + numel])
        for key, value in dict(state).items():
            if has_elements(value) and value.numel() >= flat.numel():
                piece = value.reshape(-1)[start : start + numel]
                self.state.setdefault((name, key), []).append(piece)
            else:
                self.scalars.setdefault(name, {})[key] = value


def cut_evenly(
    optimizers: Sequence[Any], shapes: Shapes, *, data_first: bool = False
) -> TrainedValues:
    """Parse stages 1 and 2: a group's parameters end to end, in even slices per rank.

    Padding may follow a parameter. (The slice table in the files is not used: with
    `round_robin_gradients` it gives another order.) A group of experts is sharded over the ranks
    with the same experts: every n-th of n sets, or with `data_first` neighbours.
    """
    first = _base(optimizers[0])
    found = TrainedValues(options_of(first))
    gaps = optimizers[0].get("param_alignment_paddings") or [[0] * len(named) for named in shapes]
    for number, named in enumerate(shapes):
        sets, names = _sets_of_experts(first["param_groups"][number]), list[str]()
        each = len(optimizers) // sets
        for place in range(sets):
            start = place * each
            held = optimizers[start : start + each] if data_first else optimizers[place::sets]
            own = _global_names(named, place, shapes) if sets > 1 else named
            names += own
            _add_group(found, number, held, list(_end_to_end(own, gaps[number])))
        found.names.append(names)
    return found


def join_stages(stages: Sequence[TrainedValues]) -> TrainedValues:
    """Return the values of all stages of a pipeline, tied parameters once."""
    groups = zip(*(one.names for one in stages), strict=True)
    return TrainedValues(
        stages[0].options,
        [list(dict.fromkeys(chain.from_iterable(rows))) for rows in groups],
        dict(ChainMap(*(one.masters for one in stages))),
        dict(ChainMap(*(one.state for one in stages))),
        dict(ChainMap(*(one.scalars for one in stages))),
    )


def _add_group(
    found: TrainedValues,
    number: int,
    optimizers: Sequence[Any],
    places: Sequence[tuple[str, int, int]],
) -> None:
    base = 0
    for optimizer in optimizers:
        flat, inner = optimizer["single_partition_of_fp32_groups"][number], _base(optimizer)
        (index,) = inner["param_groups"][number]["params"]
        stop = base + flat.numel()
        for name, begin, end in places:
            start, numel = max(begin, base), max(min(end, stop) - max(begin, base), 0)
            if numel or (begin == end and name not in found.masters):
                found.add(name, flat, start - base, numel, inner["state"].get(index, {}))
        base = stop
    _expect(not places or base >= places[-1][2], f"elements of group {number}: {base}")


EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d+)")
"""The name of a parameter of an expert begins with this: the layer's, and the expert's number."""


def _sets_of_experts(group: Mapping[str, Any]) -> int:
    """Return over how many ranks all experts of a param group are spread; 1 if it has none."""
    return int(group["name"].rpartition("_")[2]) if group.get("moe") else 1


def _global_names(
    named: Mapping[str, Sequence[int]], place: int, shapes: Shapes
) -> dict[str, Sequence[int]]:
    """Return the names in the whole model of one rank's experts, which it counts from 0."""
    found = {found.groups()[:2] for row in shapes for found in map(EXPERT.match, row) if found}
    counts = Counter(prefix for prefix, _ in found)

    def in_whole(found: re.Match[str]) -> str:
        return f"{found[1]}{place * counts[found[1]] + int(found[2])}"

    return {EXPERT.sub(in_whole, name): shape for name, shape in named.items()}


def _end_to_end(
    named: Mapping[str, Sequence[int]], gaps: Sequence[int]
) -> Iterator[tuple[str, int, int]]:
    """Yield (name, start, stop) of each parameter."""
    start = 0
    for (name, shape), gap in zip(named.items(), gaps, strict=True):
        yield name, start, start + prod(shape)
        start += prod(shape) + gap


def _base(optimizer: Any) -> Any:
    base = optimizer["base_optimizer_state"]
    _expect(isinstance(base, dict), "optimizer state, which is stored per group only")
    return base


def cut_by_parameter(optimizers: Sequence[Any], shapes: Shapes) -> TrainedValues:
    """Parse stage 3: each rank's even slice of every parameter, end to end in sub-groups."""
    first = optimizers[0]["optimizer_state_dict"]
    found = TrainedValues(options_of(first), names_of(first, shapes))
    for optimizer in optimizers:
        states, flats = optimizer["optimizer_state_dict"]["state"], optimizer["fp32_flat_groups"]
        _expect(len(flats) == len(shapes), "sub-groups")
        for number, (flat, named) in enumerate(zip(flats, shapes, strict=True)):
            for name, start, numel in _walk(flat, named, len(optimizers)):
                found.add(name, flat, start, numel, states.get(number, {}))
    return found


def _walk(
    flat: Tensor, named: Mapping[str, Sequence[int]], ranks: int
) -> Iterator[tuple[str, int, int]]:
    """Yield (name, start, numel) of each parameter's slice."""
    start = 0
    for name, shape in named.items():
        numel = -(-prod(shape) // ranks)
        _expect(start + numel <= flat.numel(), f"elements of {name}")
        yield name, start, numel
        start += numel


class RankSlice(NamedTuple):
    """A rank's elements of a parameter, and the padding after them."""

    name: str
    start: int
    numel: int
    padding: int


def slices_of_rank(
    named: Mapping[str, Sequence[int]], rank: int, ranks: int, *, by_parameter: bool
) -> Iterator[RankSlice]:
    """Yield what a rank has of a group: as `cut_by_parameter` reads it, or as `cut_evenly` does."""
    numel = sum(map(prod, named.values()))
    share = 2 * -(-numel // (2 * ranks))  # an even number, as there
    for name, begin, stop in _end_to_end(named, [0] * len(named)):
        if by_parameter:
            begin, stop = 0, stop - begin
            share = -(-stop // ranks)
        first, last = (min(max(edge, begin), stop) for edge in (rank * share, (rank + 1) * share))
        padding = share - (last - first) if by_parameter else 0
        yield RankSlice(name, first - begin, last - first, padding)


def whole(
    optimizer: Any, names: Sequence[Sequence[str]], module: Mapping[str, Tensor]
) -> TrainedValues:
    """Parse stage 0: nothing is sharded, and only the weights have names.

    `names` lists the parameters of each param group of the run that continues; they are assumed to
    be in the model's order. 16-bit training verifies that assumption for the saved run: the rounded
    masters must equal the weights.
    """
    inner = optimizer.get("optimizer_state_dict", optimizer)
    rows = [[name for name in module if name in set(group)] for group in names]
    _expect(
        len(inner["param_groups"]) == len(rows) and all(map(_same, rows, names)),
        f"param groups: {len(inner['param_groups'])}, here {[len(row) for row in names]}",
    )
    found = TrainedValues(options_of(inner), rows)
    for number, (group, row) in enumerate(zip(inner["param_groups"], rows, strict=True)):
        if "fp32_groups_flat" in optimizer:
            flat = optimizer["fp32_groups_flat"][number]
            (index,) = group["params"]
            shapes = {name: module[name].shape for name in row}
            for name, start, numel in _walk(flat, shapes, 1):
                found.add(name, flat, start, numel, inner["state"].get(index, {}))
        else:
            _expect(len(group["params"]) == len(row), f"parameters in group {number}")
            masters = optimizer.get("fp32_groups", {number: [module[name] for name in row]})
            for index, name, master in zip(group["params"], row, masters[number], strict=True):
                state, shape = inner["state"].get(index, {}), module[name].shape
                if not shape:  # one number, which has state for its element all the same
                    state = {key: v if key == "step" else _in_a_row(v) for key, v in state.items()}
                    master, shape = _in_a_row(master), torch.Size([1])
                alike = {v.shape for v in [master, *state.values()] if has_elements(v)}
                _expect(alike == {shape}, f"shape of the state of {name}")
                found.add(name, master.reshape(-1), 0, master.numel(), state)
        _count_together([found.scalars[name] for name in row if name in found.scalars])
    for name, pieces in found.masters.items():
        weight = module[name].reshape(-1)
        _expect(torch.equal(pieces[0].to(weight.dtype), weight), f"master of {name}")
    return found


def _in_a_row(value: Any) -> Any:
    return value.reshape(-1) if isinstance(value, Tensor) else value


def _same(row: Sequence[str], names: Sequence[str]) -> bool:
    return sorted(row) == sorted(names)


def has_elements(value: Any) -> bool:
    """Return whether a value is a tensor that is not a single number."""
    return isinstance(value, Tensor) and value.dim() > 0


def names_of(optimizer: Any, shapes: Shapes) -> list[list[str]]:
    """Return the parameters of each param group; the file lists its flat groups instead."""
    return [
        [name for number in group["params"] for name in shapes[number]]
        for group in optimizer["param_groups"]
    ]


def _count_together(states: Sequence[dict[str, Any]]) -> None:
    """Give a group's parameters one step count: DeepSpeed's fused Adam counts only at the last."""
    counts = [state["step"] for state in states if isinstance(state.get("step"), int)]
    for state in states:
        if isinstance(state.get("step"), int):
            state["step"] = max(counts)


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the options of each param group, without those of the optimizer's implementation."""
    own = {"params", "step", "bias_correction", "foreach", "fused", "capturable", "differentiable"}
    if any(group.get("moe") for group in optimizer["param_groups"]):
        own |= {"moe", "name"}  # the ranks that had the experts
    return [
        {key: value for key, value in group.items() if key not in own}
        for group in optimizer["param_groups"]
    ]


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"unexpected {what}")
