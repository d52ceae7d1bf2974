"""Units and buckets: who is unsharded together with whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from engine.toys import alone, assert_close, engine_of, train
from hypothesis import given, strategies as st
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from hadal.errors import UsageError
from hadal.zero import (
    GatheredParameters,
    register_external_parameter,
    unregister_external_parameter,
)
from hadal.zero.grouping import (
    BucketPlan,
    LeafModules,
    ParameterPolicy,
    Unit,
    external_parameters,
    find_units,
    plan_buckets,
    repeated_blocks,
)
from hadal.zero.policy import STAGES, Limits, Partition, Precision

NO_LEAVES = LeafModules()


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.ff = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))


class Tower(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(4, 7)


def units_of(model: nn.Module, leaves: LeafModules = NO_LEAVES) -> dict[str, list[str]]:
    """The members' names of each unit."""
    units = find_units(model, dict.fromkeys(model.parameters(), 0), leaves)
    return {unit.name: [member.name for member in unit.members] for unit in units}


def alike(partition: Partition) -> Callable[[nn.Parameter], ParameterPolicy]:
    """One policy for all parameters."""
    return lambda _: ParameterPolicy(partition)


# ---- units --------------------------------------------------------------------------------------


def test_blocks_take_all_below_them_and_others_what_they_own():
    assert units_of(Tower(2)) == {
        "(root)": ["scale"],
        "embedding": ["embedding.weight"],
        **{
            f"blocks.{index}": [
                f"blocks.{index}.{name}"
                for name in (
                    "norm.weight",
                    "norm.bias",
                    "ff.0.weight",
                    "ff.0.bias",
                    "ff.2.weight",
                    "ff.2.bias",
                )
            ]
            for index in range(2)
        },
        "head": ["head.weight", "head.bias"],
    }


def test_the_elements_of_an_outermost_sequential_are_units():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert list(units_of(model)) == ["0", "2"]


def test_blocks_of_nested_lists_are_the_innermost_ones():
    stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
    model = nn.ModuleDict({"stages": stages})
    expected = [f"stages.{outer}.{inner}" for outer in range(2) for inner in range(2)]
    assert list(units_of(model)) == expected


def test_a_block_in_several_places_has_the_name_of_the_first():
    tower = Tower(2)
    tower.blocks.extend([tower.blocks[0], tower.blocks[0]])
    assert [*units_of(tower)] == ["(root)", "embedding", "blocks.1", "head"]  # the root calls it
    assert repeated_blocks(tower) == ["blocks.0", "blocks.1"]


class Untrue(nn.Module):
    """Must not be asked for its truth: a compiled module has a `__len__` that raises."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))

    def __len__(self) -> int:
        raise TypeError("Untrue does not support len()")


def test_modules_are_not_asked_for_their_truth():
    model = nn.Sequential(nn.ModuleList(), nn.ModuleList(Untrue() for _ in range(2)))
    assert [*units_of(model)] == repeated_blocks(model) == ["1.0", "1.1"]


def test_one_sequential_of_plain_layers_inside_a_module_makes_no_blocks():
    model = nn.ModuleDict({"block": Block()})
    assert list(units_of(model)) == ["block.norm", "block.ff.0", "block.ff.2"]


@pytest.mark.parametrize(
    "leaves",
    [
        LeafModules(classes=("Block",)),
        LeafModules(classes=(f"{Block.__module__}.Block",)),
        LeafModules(names=("block",)),
        LeafModules(name_suffixes=("ock",)),
    ],
    ids=["class", "qualified class", "name", "suffix"],
)
def test_leaf_modules_are_taken_whole(leaves):
    model = nn.ModuleDict({"block": Block(), "other": nn.Linear(2, 2)})
    units = units_of(model, leaves)
    assert list(units) == ["block", "other"]
    assert len(units["block"]) == 6


def test_a_leaf_is_not_divided_by_blocks_or_leaves_inside_it():
    model = nn.ModuleDict({"tower": Tower(3)})
    units = units_of(model, LeafModules(classes=("Block", "Linear"), names=("tower",)))
    assert list(units) == ["tower"]
    assert len(units["tower"]) == 4 + 3 * 6


def test_a_leaf_that_matches_nothing_changes_nothing():
    assert units_of(Tower(), LeafModules(names=("nowhere",))) == units_of(Tower())


def test_a_tied_weight_belongs_to_the_lowest_common_ancestor():
    model = Tower()
    model.head.weight = model.embedding.weight
    units = units_of(model)
    assert units["(root)"] == ["scale", "embedding.weight"]
    assert units["head"] == ["head.bias"]
    assert "embedding" not in units


def test_a_weight_tied_below_a_called_module_stays_below_it():
    outer = nn.ModuleDict({"pair": nn.Bilinear(2, 2, 2), "rest": nn.Linear(2, 2)})
    pair = outer["pair"]
    pair.one, pair.other = nn.Linear(2, 2), nn.Linear(2, 2)
    pair.other.weight = pair.one.weight
    units = units_of(outer)
    assert units["pair"] == ["pair.weight", "pair.bias", "pair.one.weight"]
    assert units["pair.one"] == ["pair.one.bias"]
    assert units["pair.other"] == ["pair.other.bias"]


def test_a_weight_tied_inside_one_block_stays_in_it():
    model = Tower()
    model.blocks[1].ff[2].bias = model.blocks[1].norm.bias
    assert len(units_of(model)["blocks.1"]) == 5


def test_a_module_shared_by_two_blocks_belongs_to_who_calls_both():
    model = Tower()
    model.blocks[2].ff = model.blocks[0].ff
    units = units_of(model)
    shared = [f"blocks.0.ff.{key}" for key in ("0.weight", "0.bias", "2.weight", "2.bias")]
    assert sorted(units["(root)"]) == sorted(["scale", *shared])
    assert units["blocks.2"] == ["blocks.2.norm.weight", "blocks.2.norm.bias"]
    assert len(units["blocks.1"]) == 6


def test_lists_of_parameters_belong_to_the_module_that_holds_them():
    inner = nn.Linear(2, 2)
    inner.extra = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(2)])
    inner.table = nn.ParameterDict({"a": nn.Parameter(torch.ones(3))})
    model = nn.ModuleDict({"inner": inner})
    model.top = nn.ParameterList([nn.Parameter(torch.ones(2))])
    units = units_of(model)
    assert units["(root)"] == ["top.0"]
    assert sorted(units["inner"]) == [
        "inner.bias",
        "inner.extra.0",
        "inner.extra.1",
        "inner.table.a",
        "inner.weight",
    ]


def test_parameters_that_are_not_managed_are_in_no_unit():
    model = Tower()
    managed = {parameter: 3 for parameter in model.head.parameters()}
    (unit,) = find_units(model, managed, NO_LEAVES)
    assert (unit.name, unit.module) == ("head", model.head)
    assert [member.group for member in unit.members] == [3, 3]
    assert find_units(model, {}, NO_LEAVES) == []


# ---- any tree -----------------------------------------------------------------------------------


def grow(draw: st.DrawFn, depth: int) -> nn.Module:
    kind = draw(st.sampled_from(["linear", "own", "list", "sequential", "dict"]))
    if kind == "linear" or depth == 0:
        return nn.Linear(draw(st.integers(1, 3)), 2)
    children = [grow(draw, depth - 1) for _ in range(draw(st.integers(1, 3)))]
    if kind == "list":
        return nn.ModuleList(children)
    if kind == "sequential":
        return nn.Sequential(*children)
    if kind == "dict":
        return nn.ModuleDict({f"k{index}": child for index, child in enumerate(children)})
    module = nn.Module()
    module.own = nn.Parameter(torch.ones(draw(st.integers(1, 5))))
    for index, child in enumerate(children):
        module.add_module(f"c{index}", child)
    return module


@st.composite
def trees(draw: st.DrawFn) -> nn.Module:
    model = nn.Module()
    for index in range(draw(st.integers(1, 3))):
        model.add_module(f"t{index}", grow(draw, 3))
    if draw(st.booleans()):
        model.own = nn.Parameter(torch.ones(2))
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for _ in range(draw(st.integers(0, 3))):  # ties
        if linears:
            draw(st.sampled_from(linears)).bias = draw(st.sampled_from(linears)).bias
    for parameter in model.parameters():
        if draw(st.integers(0, 4)) == 0:
            parameter.requires_grad_(False)
    return model


def groups_of(model: nn.Module) -> dict[nn.Parameter, int]:
    return {
        parameter: (number % 2 if parameter.requires_grad else -1)
        for number, parameter in enumerate(model.parameters())
    }


@given(trees())
def test_every_managed_parameter_is_in_one_unit_that_stands_above_it(model):
    group_of = groups_of(model)
    units = find_units(model, group_of, NO_LEAVES)
    members = [member for unit in units for member in unit.members]
    assert Counter(m.parameter for m in members) == Counter(group_of.keys())
    assert all(member.group == group_of[member.parameter] for member in members)
    paths = dict(model.named_modules(remove_duplicate=False))
    for unit in units:
        assert unit.members
        path = "" if unit.name == "(root)" else unit.name
        assert paths[path] is unit.module
        assert not isinstance(unit.module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList))
        below = {id(parameter) for parameter in unit.module.parameters()}
        for member in unit.members:
            assert model.get_parameter(member.name) is member.parameter
            assert id(member.parameter) in below
    # A parameter with several paths has its unit at or above each of them.
    for path, module in paths.items():
        for parameter in module._parameters.values():
            if parameter in group_of:
                (unit,) = [u for u in units if any(m.parameter is parameter for m in u.members)]
                above = "" if unit.name == "(root)" else unit.name
                assert not above or path == above or path.startswith(f"{above}.")
    order = {path or "(root)": place for place, path in enumerate(paths)}
    places = [order[unit.name] for unit in units]
    assert places == sorted(set(places))


@pytest.mark.slow
@given(trees(), st.sampled_from(STAGES), st.integers(1, 20), st.integers(0, 6), st.integers(0, 20))
def test_every_member_is_in_one_bucket_within_the_targets(model, partition, target, small, total):
    limits = Limits(
        bucket_numel=target,
        shared_numel=0,
        persistence_numel=small,
        persistent_total_numel=total,
    )
    units = find_units(model, groups_of(model), NO_LEAVES)
    plans = plan_buckets(units, alike(partition), limits)
    owner = {member.parameter: unit for unit in units for member in unit.members}
    members = [member.parameter for plan in plans for member in plan.members]
    assert Counter(members) == Counter(owner.keys())
    largest = max(sum(m.parameter.numel() for m in unit.members) for unit in units)
    for plan in plans:
        assert len({m.parameter.dtype for m in plan.members}) == 1
        assert {m.group >= 0 for m in plan.members} == {plan.trainable}
        assert plan.numel == sum(m.parameter.numel() for m in plan.members)
        assert plan.numel <= target or len(plan.members) == 1
        assert plan.numel <= max(largest, target)
        assert len(plan.units) == len(set(plan.units))
        assert {owner[m.parameter] for m in plan.members} == set(plan.units)
        if plan.partition.weights:
            assert len(plan.units) == 1
    whole = [m.parameter for p in plans if not p.partition.weights for m in p.members]
    if partition.weights:
        assert all(p.numel() < max(small, 2) for p in whole)
        assert sum(p.numel() for p in whole if p.numel() > 1) <= total
        assert {p for p in owner if p.numel() <= 1} <= set(whole)
    else:
        assert all(plan.partition == partition for plan in plans)


# ---- buckets ------------------------------------------------------------------------------------


def plans_of(
    model: nn.Module, partition: Partition, limits: Limits, frozen: bool = False
) -> list[BucketPlan]:
    group = -1 if frozen else 0
    units = find_units(model, dict.fromkeys(model.parameters(), group), NO_LEAVES)
    return plan_buckets(units, alike(partition), limits)


def names(plan: BucketPlan) -> list[str]:
    return [member.name for member in plan.members]


def line(*numels: int) -> nn.Sequential:
    """Units of one bias-free layer each."""
    return nn.Sequential(*(nn.Linear(numel, 1, bias=False) for numel in numels))


@pytest.mark.parametrize(
    ("limits", "shared"),
    [
        (Limits(shared_numel=0), ["0", "123", "4", "5"]),  # as many as the largest unit has
        (Limits(shared_numel=14), ["01", "23", "45"]),
        (Limits(shared_numel=15), ["012", "345"]),
        (Limits(), ["012345"]),
        (Limits(bucket_numel=7), ["0", "12", "3", "4", "5"]),
    ],
)
def test_neighbours_share_a_bucket(limits, shared):
    plans = plans_of(line(10, 2, 3, 4, 10, 1), STAGES[2], limits)
    assert ["".join(unit.name for unit in plan.units) for plan in plans] == shared


def test_small_blocks_need_few_messages_and_large_ones_keep_their_own():
    """At stage 3 all parameters of these small blocks stay whole."""
    small, large = line(*[600] * 60), line(*[600_000] * 4, 1_200_000)
    for partition in STAGES:
        assert len(plans_of(small, partition, Limits())) == 1
    sizes = [plan.numel for plan in plans_of(large, STAGES[2], Limits())]
    assert sizes == [1_200_000, 1_200_000, 1_200_000]
    assert len(plans_of(large, STAGES[3], Limits())) == 5


def test_where_weights_are_cut_no_bucket_spans_units():
    plans = plans_of(line(10, 2, 3), STAGES[3], Limits(bucket_numel=1000, persistence_numel=0))
    assert [plan.name for plan in plans] == ["0", "1", "2"]


def test_a_unit_above_the_target_is_cut_between_parameters():
    model = nn.ModuleDict({"b": Block()})
    leaves = LeafModules(names=("b",))
    units = find_units(model, dict.fromkeys(model.parameters(), 0), leaves)
    plans = plan_buckets(units, alike(STAGES[3]), Limits(bucket_numel=40, persistence_numel=0))
    assert [names(plan) for plan in plans] == [
        ["b.norm.weight", "b.norm.bias", "b.ff.0.weight"],
        ["b.ff.0.bias", "b.ff.2.weight"],
        ["b.ff.2.bias"],
    ]
    assert [plan.name for plan in plans][1] == "b[b.ff.0.bias..]"
    plans = plan_buckets(units, alike(STAGES[3]), Limits(bucket_numel=1, persistence_numel=0))
    assert [len(plan.members) for plan in plans] == [1] * 6


def test_dtype_and_trainability_part_buckets():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2))
    frozen = dict.fromkeys(model[2].parameters(), -1)
    group_of = {parameter: 0 for parameter in model.parameters()} | frozen
    plans = plan_buckets(find_units(model, group_of, NO_LEAVES), alike(STAGES[1]), Limits())
    assert [(plan.name, plan.trainable) for plan in plans] == [
        ("0", True),
        ("1", True),
        ("2", False),
    ]


def test_precision_parts_buckets():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.LayerNorm(4))
    units = find_units(model, dict.fromkeys(model.parameters(), 0), NO_LEAVES)
    low, own = Precision(reduce=torch.bfloat16), Precision()
    limits, apart = Limits(bucket_numel=1000), set(model[2].parameters())
    plans = plan_buckets(units, lambda _: ParameterPolicy(STAGES[0], low), limits)
    assert [[unit.name for unit in plan.units] for plan in plans] == [["0", "1", "2"]]
    plans = plan_buckets(
        units, lambda p: ParameterPolicy(STAGES[0], own if p in apart else low), limits
    )
    assert [[unit.name for unit in plan.units] for plan in plans] == [["0", "1"], ["2"]]


def persistent(model: nn.Module, limits: Limits) -> set[str]:
    plans = plans_of(model, STAGES[3], limits)
    assert {plan.partition for plan in plans} <= {STAGES[3], STAGES[2]}
    return {name for plan in plans if not plan.partition.weights for name in names(plan)}


def test_small_parameters_stay_whole():
    model = line(3, 4, 5)
    assert persistent(model, Limits(persistence_numel=5)) == {"0.weight", "1.weight"}
    assert persistent(model, Limits(persistence_numel=0)) == set()
    limits = Limits(persistence_numel=100, persistent_total_numel=8)
    assert persistent(model, limits) == {"0.weight", "1.weight"}


def test_the_small_stay_whole_in_the_models_order_while_there_is_room():
    limits = Limits(persistence_numel=100, persistent_total_numel=7)
    assert persistent(line(5, 4, 2), limits) == {"0.weight", "2.weight"}


def test_one_element_is_never_cut():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(2, 2))
    limits = Limits(persistence_numel=0, persistent_total_numel=0)
    assert persistent(model, limits) == {"0.weight", "0.bias"}


def test_no_units_no_buckets():
    assert plan_buckets([], alike(STAGES[3]), Limits()) == []
    assert plan_buckets([Unit("empty", nn.Identity())], alike(STAGES[0]), Limits()) == []


# Parameters that other modules read: announced, returned, or used far from their owner


class Lender(nn.Module):
    """Gives its weight away: as it is, or as a view."""

    def __init__(self, gives: Callable[[nn.Parameter], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(1)))
        self.gives = gives

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(inputs, self.weight), self.gives(self.weight)


class Borrows(nn.Module):
    def __init__(self, gives: Callable[[nn.Parameter], Tensor]) -> None:
        super().__init__()
        self.lender = Lender(gives)
        self.between = nn.Linear(6, 6)
        self.last = nn.Linear(6, 4)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))

    def forward(self, inputs: Tensor) -> Tensor:
        values, weight = self.lender(inputs)
        values = torch.tanh(self.between(values)) @ weight + weight.sum()
        outputs: Tensor = self.last(values)
        return outputs


class Head(nn.Module):
    """Has no parameter of its own."""

    def __init__(self, embedding: nn.Linear) -> None:
        super().__init__()
        self.read = lambda: embedding.weight
        register_external_parameter(self, embedding.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.read()


class Announced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Linear(6, 4, bias=False)
        self.middle = nn.Linear(4, 4)
        self.head = Head(self.embedding)
        self.out = nn.Linear(6, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.out(self.head(torch.tanh(self.middle(self.embedding(inputs)))))
        return outputs


def itself(weight: nn.Parameter) -> Tensor:
    return weight


def a_view(weight: nn.Parameter) -> Tensor:
    return weight.t()


def detached(weight: nn.Parameter) -> Tensor:
    return weight.detach()


def returns_itself() -> nn.Module:
    return Borrows(itself)


def returns_a_view() -> nn.Module:
    return Borrows(a_view)


def returns_detached() -> nn.Module:
    return Borrows(detached)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "make", [returns_itself, returns_a_view, returns_detached, Announced], ids=lambda m: m.__name__
)
@on_ranks(2)
def test_reads_outside_of_the_owner(make: Callable[[], nn.Module], stage: int) -> None:
    engine = engine_of(stage, make())
    train(engine, range(2))
    assert_close(engine.state_dict(), alone(make(), [[0], [1]]))
    engine.destroy()


@pytest.mark.parametrize("forget", [False, True])
@on_ranks(2)
def test_an_announced_parameter_is_gathered_before_its_reader(forget: bool) -> None:
    """An announced weight is there before the module's own code begins."""
    model = Announced()
    if forget:
        unregister_external_parameter(model.head, model.embedding.weight)
    engine = engine_of(3, model)
    weight = model.embedding.weight
    seen: list[bool] = []

    def look(*_: object) -> None:
        with torch._C.DisableTorchFunction():  # looking must not gather
            seen.append(weight.untyped_storage().nbytes() >= 4 * weight.numel())

    model.head.register_forward_pre_hook(look)  # comes after the engine's
    train(engine, range(1))
    assert seen == [not forget]
    engine.destroy()


@on_ranks(2)
def test_fwd_module_registers() -> None:
    model = Announced()
    unregister_external_parameter(model.head, model.embedding.weight)
    engine = engine_of(3, model)
    with GatheredParameters(model.embedding.weight, fwd_module=model.head):
        pass
    assert external_parameters(model.head) == [model.embedding.weight]
    train(engine, range(1))
    engine.destroy()


def test_registering() -> None:
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    for _ in range(2):
        register_external_parameter(module, other.weight)
    register_external_parameter(module, other.bias)
    assert [p is q for p, q in zip(external_parameters(module), other.parameters(), strict=True)]
    unregister_external_parameter(module, other.weight)
    assert len(external_parameters(module)) == 1
    with pytest.raises(UsageError, match=r"this parameter of shape \(2, 2\) was not registered"):
        unregister_external_parameter(module, other.weight)
    with pytest.raises(UsageError, match=r"takes a torch\.nn\.Module and a torch\.nn\.Parameter"):
        register_external_parameter(module, torch.ones(2))  # type: ignore[arg-type]
    del other
    assert external_parameters(module) == []


class Functional(nn.Module):
    """A head that is called with other values, or with those after a step of its own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.body, self.head, self.way = nn.Linear(6, 5), nn.Linear(5, 4), way

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(inputs))
        if self.way == "functional_call":
            doubled = {name: 2 * value for name, value in self.head.named_parameters()}
            outputs: Tensor = torch.func.functional_call(self.head, doubled, (hidden,))
            return outputs
        inner = self.head(hidden).square().mean()
        (gradient,) = torch.autograd.grad(inner, [self.head.weight], create_graph=True)
        return hidden @ (self.head.weight - 0.1 * gradient).t() + self.head.bias


@pytest.mark.parametrize("way", ["functional_call", "autograd.grad"])
@on_ranks(2)
def test_weights_may_be_used_by_functions(way: str) -> None:
    """Return a forward's results with other modules' weights, second derivatives included."""
    engine = engine_of(3, Functional(way))
    expected = alone(Functional(way), [[step] for step in range(3)])
    train(engine, range(3))
    assert_close(engine.state_dict(), expected)
    engine.destroy()
