"""Grouping of parameters into units, which are unsharded together, and into buckets."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hadal.errors import UsageError
from hadal.zero.layout import Layout
from hadal.zero.policy import Limits, Partition, Precision
from hadal.zero.sharing import HolderGroups

_LISTS = (nn.ModuleList, nn.Sequential)
# Containers of other modules that are never called themselves.
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def is_leaf(module: nn.Module) -> bool:
    """Return True if a program has marked a module as a leaf module (see `leaves.py`)."""
    return bool(getattr(module, "_z3_leaf", False))


class LeafModules(NamedTuple):
    """The modules that the user wants unsharded as a whole (`zero_optimization.leaf_module`)."""

    classes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()
    granularity_numel: int = 0
    """A module is also a leaf if it has fewer elements than this per module in it."""

    def match(self, name: str, module: nn.Module) -> bool:
        """Return True if the module of this full name is a leaf by these settings or by a mark."""
        return is_leaf(module) or self.selects(name, module)

    def selects(self, name: str, module: nn.Module) -> bool:
        """Return True if the module of this full name is a leaf by these settings."""
        kind = type(module)
        return (
            kind.__name__ in self.classes
            or f"{kind.__module__}.{kind.__qualname__}" in self.classes
            or name in self.names
            or any(name.endswith(suffix) for suffix in self.name_suffixes)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One parameter with its full name and the number of its param group (-1: not optimized)."""

    name: str
    parameter: nn.Parameter
    group: int


@dataclass(slots=True, eq=False)
class Unit:
    """A module whose parameters are unsharded together."""

    name: str
    module: nn.Module
    members: list[Member] = field(default_factory=list)
    is_external: bool = False
    """True: the module reads these parameters, but other modules own them."""


_FP32, _DENSE = Precision(), HolderGroups()


class ParameterPolicy(NamedTuple):
    """Sharding and dtypes of a parameter; the parameters of a bucket have the same."""

    partition: Partition
    """The states that are sharded."""
    precision: Precision = _FP32
    holders: HolderGroups = _DENSE
    """The ranks that hold it, of which `partition` shards its states."""


Fetch = Callable[[Sequence[nn.Parameter], Layout, bool], Tensor]
"""Returns the values of parameters, 1-D in a layout; if True is passed, only my shard."""


@dataclass(frozen=True, slots=True, eq=False)
class BucketPlan:
    """The parameters that will share one flat buffer."""

    name: str
    partition: Partition
    members: list[Member]
    units: list[Unit]
    row_numel: int = 0
    """Elements of a row, if only the non-zero rows of gradients are sent; otherwise 0."""
    precision: Precision = _FP32
    holders: HolderGroups = _DENSE
    fetch: Fetch | None = None
    """Gets the values from shards that the ranks hold already; None: rank 0's parameters have the
    values."""

    @property
    def trainable(self) -> bool:
        """Return True if these parameters get gradients and are stepped."""
        return self.members[0].group >= 0

    @property
    def numel(self) -> int:
        """Elements of all members, without padding."""
        return sum(member.parameter.numel() for member in self.members)


def find_units(
    model: nn.Module, group_of: Mapping[nn.Parameter, int], leaves: LeafModules
) -> list[Unit]:
    """Divide the model's managed parameters (the keys of `group_of`) into units.

    A repeated block or leaf module takes all parameters below it, any other module its own ones. A
    parameter that is reachable by several paths belongs to their lowest common ancestor. Units are
    returned in the order of the model's modules.
    """
    paths = dict(model.named_modules(remove_duplicate=False))
    whole = _whole_units(paths, leaves)
    owners: dict[nn.Parameter, str] = {}
    names: dict[nn.Parameter, str] = {}
    for path, module in paths.items():
        for key, parameter in module._parameters.items():
            if parameter is None or parameter not in group_of:
                continue
            names.setdefault(parameter, f"{path}.{key}" if path else key)
            owner = _unit_above(path, paths, whole)
            known = owners.get(parameter)
            owners[parameter] = (
                owner
                if known is None or known == owner
                else _unit_above(_common_ancestor(known, owner), paths, whole)
            )
    units: dict[str, Unit] = {}
    for parameter, owner in owners.items():
        unit = units.setdefault(owner, Unit(owner or "(root)", paths[owner]))
        unit.members.append(Member(names[parameter], parameter, group_of[parameter]))
    order = {path: position for position, path in enumerate(paths)}
    return [units[path] for path in sorted(units, key=lambda path: order[path])]


def repeated_blocks(model: nn.Module) -> list[str]:
    """Return the full names of the outermost blocks of the model's stacks, in model order."""
    paths = dict(model.named_modules())
    whole = _whole_units(paths, LeafModules())
    return _outermost([path for path in paths if path in whole and [*paths[path].children()]])


def _whole_units(paths: Mapping[str, nn.Module], leaves: LeafModules) -> set[str]:
    """Return the paths of modules that take everything below them but other such modules."""
    whole: set[str] = set()
    asked = {path for path, module in paths.items() if leaves.match(path, module)}
    asked |= _fine_grained(paths, leaves.granularity_numel)
    # A module that is never called has no forward in which to gather everything below it.
    leaf_paths = {path for path in asked if not isinstance(paths[path], _NEVER_CALLED)}
    for path, module in paths.items():
        if path in leaf_paths or any(_is_below(path, leaf) for leaf in leaf_paths):
            continue
        if isinstance(module, _LISTS) and (_has_repeated_blocks(module) or not path):
            # A module in two places has the path of the first.
            whole.update(paths.keys() & {_join(path, key) for key in module._modules})
    blocks = {path for path in whole if not isinstance(paths[path], _NEVER_CALLED + _LISTS)}
    return blocks.union(_outermost(leaf_paths))


def _fine_grained(paths: Mapping[str, nn.Module], threshold: int) -> set[str]:
    """Return the paths of modules with fewer than `threshold` elements per module in them.

    A module that contains a stack of blocks is not among them, but its blocks may be.
    """
    if not threshold:
        return set()
    lists = (path for path, module in paths.items() if isinstance(module, _LISTS))
    stacks = _outermost([path for path in lists if _has_repeated_blocks(paths[path])])
    return {
        path
        for path, module in paths.items()
        if not any(path == stack or _is_below(stack, path) for stack in stacks)
        and sum(p.numel() for p in module.parameters()) < threshold * len(list(module.modules()))
    }


def _has_repeated_blocks(module: nn.Module) -> bool:
    """Return True for a stack of blocks: a list with two or more composite modules of one class.

    A list of plain layers (such as a feed-forward network written as a Sequential) gets no units of
    its own inside a block.
    """
    blocks = [block for block in module._modules.values() if block is not None]
    composite = [type(block) for block in blocks if block._modules]
    return len(composite) > len(set(composite))


def _unit_above(path: str, paths: Mapping[str, nn.Module], whole: set[str]) -> str:
    """Return the unit that takes this path: the nearest whole unit at or above it, or itself.

    A container that is never called cannot gather for its children, so the module above it does.
    """
    above = path
    while True:
        if above in whole:
            return above
        if not above:
            break
        above = above.rpartition(".")[0]
    while path and isinstance(paths[path], _NEVER_CALLED):
        path = path.rpartition(".")[0]
    return path


def _common_ancestor(one: str, other: str) -> str:
    pairs = zip(one.split("."), other.split("."), strict=False)
    return ".".join(left for left, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _is_below(path: str, ancestor: str) -> bool:
    return path != ancestor and (not ancestor or path.startswith(f"{ancestor}."))


def _outermost(paths: Collection[str]) -> list[str]:
    """Return the paths that are not below another of them."""
    return [path for path in paths if not any(_is_below(path, other) for other in paths)]


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


class _BucketKind(NamedTuple):
    """The properties that all parameters of a bucket share."""

    dtype: torch.dtype
    trainable: bool
    policy: ParameterPolicy
    row_numel: int


def find_tables(model: nn.Module) -> frozenset[nn.Parameter]:
    """Return the weights of embeddings, whose gradients have few non-zero rows per batch."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    found = (module.weight for module in model.modules() if isinstance(module, kinds))
    # A parametrized weight is computed in each forward; its parameter is in another module.
    return frozenset(weight for weight in found if isinstance(weight, nn.Parameter))


def plan_buckets(
    units: Sequence[Unit],
    policy_of: Callable[[nn.Parameter], ParameterPolicy],
    limits: Limits,
    tables: Set[nn.Parameter] = frozenset(),
) -> list[BucketPlan]:
    """Divide the units' parameters into buckets.

    The parameters of a bucket share their dtype, trainability and policy. Each of `tables`, whose
    gradients are sent in rows, gets its own bucket.
    Neighbouring units share a bucket as long as it exceeds neither the bucket target nor the larger
    of `limits.shared_numel` and the largest unit: that saves collectives, and needs little more
    memory in flight than the largest unit does.
    If weights are sharded, a bucket never spans units, because a use of one would gather the other.
    A unit above the target is split between parameters; a parameter above it gets its own bucket.
    """
    persistent = _persistent_parameters(units, policy_of, limits)
    largest = max((sum(m.parameter.numel() for m in unit.members) for unit in units), default=0)
    plans: list[BucketPlan] = []
    open_plans: dict[_BucketKind, BucketPlan] = {}
    for unit in units:
        for kind, members in _kinds(unit, policy_of, persistent, tables).items():
            target = _target(kind, largest, limits)
            for piece in _pieces(members, min(target, limits.bucket_numel)):
                plan = open_plans.get(kind)
                room = target - (plan.numel if plan else 0)
                fits = sum(member.parameter.numel() for member in piece) <= room
                if plan and fits and not kind.policy.partition.weights:
                    plan.members.extend(piece)
                    if plan.units[-1] is not unit:
                        plan.units.append(unit)
                    continue
                is_all = len(piece) == len(unit.members)
                name = unit.name if is_all else f"{unit.name}[{piece[0].name}..]"
                partition, precision, holders = kind.policy
                open_plans[kind] = BucketPlan(
                    name, partition, piece, [unit], kind.row_numel, precision, holders
                )
                plans.append(open_plans[kind])
    return plans


def _kinds(
    unit: Unit,
    policy_of: Callable[[nn.Parameter], ParameterPolicy],
    persistent: Set[nn.Parameter],
    tables: Set[nn.Parameter],
) -> dict[_BucketKind, list[Member]]:
    """Return the members of a unit that may share a bucket."""
    found: dict[_BucketKind, list[Member]] = defaultdict(list)
    for member in unit.members:
        parameter, trains = member.parameter, member.group >= 0
        policy = policy_of(parameter)
        if parameter in persistent:
            policy = policy._replace(partition=policy.partition._replace(weights=False))
        row_numel = parameter.shape[-1] if trains and parameter in tables else 0
        found[_BucketKind(parameter.dtype, trains, policy, row_numel)].append(member)
    return found


def _target(kind: _BucketKind, largest: int, limits: Limits) -> int:
    if kind.row_numel:
        return 0  # each table alone
    if kind.policy.holders.tied is not None:
        return limits.bucket_numel  # the same on all stages, which differ in their other units
    if kind.policy.partition.weights:
        return limits.bucket_numel
    return min(max(largest, limits.shared_numel), limits.bucket_numel)


def _pieces(members: Iterable[Member], target: int) -> list[list[Member]]:
    """Split members into lists of at most `target` elements, or of a single parameter."""
    pieces: list[list[Member]] = [[]]
    filled = 0
    for member in members:
        numel = member.parameter.numel()
        if pieces[-1] and filled + numel > target:
            pieces.append([])
            filled = 0
        pieces[-1].append(member)
        filled += numel
    return pieces


def _persistent_parameters(
    units: Sequence[Unit],
    policy_of: Callable[[nn.Parameter], ParameterPolicy],
    limits: Limits,
) -> set[nn.Parameter]:
    """Return the small parameters that stay whole although weights are sharded.

    A parameter of one element always does, because its placeholder would look like a value.
    """
    chosen: set[nn.Parameter] = set()
    room = limits.persistent_total_numel
    for unit in units:
        for member in unit.members:
            if not policy_of(member.parameter).partition.weights:
                continue
            numel = member.parameter.numel()
            if numel <= 1:
                chosen.add(member.parameter)
            elif numel < limits.persistence_numel and numel <= room:
                chosen.add(member.parameter)
                room -= numel
    return chosen


# ---- parameters that a module reads without owning them ------------------------------------------

# Registered parameters, by the module that reads them.
_external: WeakIdKeyDictionary = WeakIdKeyDictionary()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Register that `module` reads `parameter` in its forward, though another module owns it.

    Called before `hadal.initialize`, it makes stage 3 gather the parameter together with `module`'s
    own in forward and backward. This is needed only if a compiled module hides the read; all other
    reads are noticed when they happen. After `initialize` it has no effect.

    Raises:
        UsageError: the arguments are not a module and a parameter.
    """
    _check("register_external_parameter", module, parameter)
    known = _external.setdefault(module, [])
    if all(reference() is not parameter for reference in known):
        known.append(weakref.ref(parameter))


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter`.

    Raises:
        UsageError: the arguments are not a module and a parameter that was registered for it.
    """
    _check("unregister_external_parameter", module, parameter)
    if all(parameter is not known for known in external_parameters(module)):
        raise UsageError(
            f"unregister_external_parameter: this parameter of shape {tuple(parameter.shape)} was"
            f" not registered for this {type(module).__name__}"
        )
    _external[module] = [ref for ref in _external[module] if ref() is not parameter]


def external_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that were registered for a module."""
    found = (reference() for reference in _external.get(module, ()))
    return [parameter for parameter in found if parameter is not None]


def announced_uses(model: nn.Module, units: Iterable[Unit]) -> list[Unit]:
    """Return an additional unit for each module that reads parameters of other modules."""
    members: Mapping[nn.Parameter, Member] = {
        member.parameter: member for unit in units for member in unit.members
    }
    uses = []
    for path, module in model.named_modules():
        read = [members[p] for p in external_parameters(module) if p in members]
        if read:
            uses.append(Unit(f"{path or '(root)'} (external)", module, read, is_external=True))
    return uses


def _check(name: str, module: object, parameter: object) -> None:
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise UsageError(
            f"{name}(module, parameter) takes a torch.nn.Module and a torch.nn.Parameter, got"
            f" {type(module).__name__} and {type(parameter).__name__}"
        )
