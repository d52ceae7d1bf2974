"""Where DeepSpeed's files hold the values of each parameter: arithmetic over what was read.

Four layouts. Stages 1 and 2: all parameters of a param group end to end, cut evenly over the ranks.
Stage 3: each parameter cut evenly over the ranks. Stage 0: whole, without names. Universal: a
folder of files for each parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

Shapes = Sequence[Mapping[str, Sequence[int]]]
"""Name and shape of the trained parameters, for each flat group: a param group, or a sub-group."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What the optimizer of a checkpoint holds, by the names of the parameters.

    Values are pieces: flat tensors whose elements, end to end, begin with the value's.
    """

    options: list[dict[str, Any]] = field(default_factory=list)
    """Of each param group."""
    names: list[list[str]] = field(default_factory=list)
    """Of each param group's parameters."""
    masters: dict[str, list[Tensor]] = field(default_factory=dict)
    state: dict[tuple[str, str], list[Tensor]] = field(default_factory=dict)
    """By parameter and key: what has an element for each of the parameter's."""
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By parameter and key: all other state."""

    def add(self, name: str, flat: Tensor, start: int, numel: int, state: Any) -> None:
        """Add a piece of a parameter: a cut of a flat master, and the same cut of its state.

        State may be longer than the master: it is filled up at its end where that is not.
        """
        self.masters.setdefault(name, []).append(flat[start : start + numel])
        for key, value in dict(state).items():
            if _has_elements(value) and value.numel() >= flat.numel():
                piece = value.reshape(-1)[start : start + numel]
                self.state.setdefault((name, key), []).append(piece)
            else:
                self.scalars.setdefault(name, {})[key] = value


def cut_evenly(optimizers: Sequence[Any], shapes: Shapes) -> Trained:
    """Stages 1 and 2: the parameters of a group end to end, cut evenly over the ranks.

    Behind a parameter there may be elements that are nobody's. (The table of cuts that lies in the
    files, too, is not asked: with `round_robin_gradients` it tells of another order.)
    """
    first = _base(optimizers[0])
    found = Trained(options_of(first), names_of(first, shapes))
    gaps = optimizers[0].get("param_alignment_paddings") or [[0] * len(named) for named in shapes]
    for number, named in enumerate(shapes):
        base, places = 0, list(_end_to_end(named, gaps[number]))
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
    return found


def _end_to_end(
    named: Mapping[str, Sequence[int]], gaps: Sequence[int]
) -> Iterator[tuple[str, int, int]]:
    """Name, first element and the first one behind it."""
    start = 0
    for (name, shape), gap in zip(named.items(), gaps, strict=True):
        yield name, start, start + prod(shape)
        start += prod(shape) + gap


def _base(optimizer: Any) -> Any:
    base = optimizer["base_optimizer_state"]
    _expect(isinstance(base, dict), "state of the optimizer, which was saved for each group alone")
    return base


def cut_by_parameter(optimizers: Sequence[Any], shapes: Shapes) -> Trained:
    """Stage 3: each rank's even cut of every parameter, end to end in sub-groups."""
    first = optimizers[0]["optimizer_state_dict"]
    found = Trained(options_of(first), names_of(first, shapes))
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
    """Name, first element and number of elements of each parameter's cut."""
    start = 0
    for name, shape in named.items():
        numel = -(-prod(shape) // ranks)
        _expect(start + numel <= flat.numel(), f"elements of {name}")
        yield name, start, numel
        start += numel


def whole(optimizer: Any, names: Sequence[Sequence[str]], module: Mapping[str, Tensor]) -> Trained:
    """Stage 0: nothing is cut, and nothing is named but the weights.

    `names` tells the parameters of each param group that is to go on; their order is taken to be
    the model's. That it was so when they were saved shows in 16-bit training: rounded, the masters
    are the weights.
    """
    inner = optimizer.get("optimizer_state_dict", optimizer)
    rows = [[name for name in module if name in set(group)] for group in names]
    _expect(
        len(inner["param_groups"]) == len(rows) and all(map(_same, rows, names)),
        f"param groups: {len(inner['param_groups'])}, here are {[len(row) for row in names]}",
    )
    found = Trained(options_of(inner), rows)
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
                state = inner["state"].get(index, {})
                alike = {v.shape for v in [master, *state.values()] if _has_elements(v)}
                _expect(alike == {module[name].shape}, f"shape of the state of {name}")
                found.add(name, master.reshape(-1), 0, master.numel(), state)
        _count_together([found.scalars[name] for name in row if name in found.scalars])
    for name, pieces in found.masters.items():
        weight = module[name].reshape(-1)
        _expect(torch.equal(pieces[0].to(weight.dtype), weight), f"master of {name}")
    return found


def _same(row: Sequence[str], names: Sequence[str]) -> bool:
    return sorted(row) == sorted(names)


def _has_elements(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def names_of(optimizer: Any, shapes: Shapes) -> list[list[str]]:
    """The parameters of each param group; what stands for them there are the flat groups."""
    return [
        [name for number in group["params"] for name in shapes[number]]
        for group in optimizer["param_groups"]
    ]


def _count_together(states: Sequence[dict[str, Any]]) -> None:
    """DeepSpeed's fused Adam counts a group's updates at its last parameter alone."""
    counts = [state["step"] for state in states if isinstance(state.get("step"), int)]
    for state in states:
        if isinstance(state.get("step"), int):
            state["step"] = max(counts)


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    """What param groups say of training; how an implementation works is its own business."""
    own = {"params", "step", "bias_correction", "foreach", "fused", "capturable", "differentiable"}
    return [
        {key: value for key, value in group.items() if key not in own}
        for group in optimizer["param_groups"]
    ]


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"unexpected {what}")
