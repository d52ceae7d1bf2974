"""Freed parameters say who reads them; whole ones have their own class, and views are not lost."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import pickle
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine.toys import ROWS, TINY, ByNorm, assert_close, assert_equal, engine_of, model_of, train
from ranks import RankPools, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

import hadal
from hadal import comm
from hadal.compat.engine import initialize
from hadal.device import unwatched
from hadal.errors import CheckpointError, MismatchError, ModelError, ShardedAccessError
from hadal.zero import GatheredParameters
from hadal.zero.bucket import Bucket, Weights
from hadal.zero.parameters import Attached, ReadListener, is_foreign, kind_of, watched_kind_of

WIDTH = 6
_buckets = logging.getLogger("hadal.zero.bucket")


class Records(logging.Handler):
    """Collect the log."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def watch(parameter: nn.Parameter) -> None:
    parameter.__class__ = watched_kind_of(parameter)


def unwatch(parameter: nn.Parameter) -> None:
    parameter.__class__ = kind_of(parameter)


class Named(nn.Parameter):
    """A program's own."""


def announced(parameter: nn.Parameter, act: Callable[[], object]) -> int:
    """Count the announced reads of a watched parameter that gets its values back at the first."""
    heard: list[nn.Parameter] = []

    def hear(one: nn.Parameter) -> None:
        heard.append(one)
        unwatch(one)

    listener = ReadListener(hear)
    watch(parameter)
    listener.start()
    try:
        act()
    finally:
        listener.stop()
        unwatch(parameter)
    assert all(one is parameter for one in heard)
    return len(heard)


def test_each_read_is_announced_and_no_question_is() -> None:
    one = nn.Parameter(torch.ones(2, 2))
    reads: list[Callable[[], object]] = [
        lambda: F.linear(torch.ones(1, 2), one),
        lambda: F.linear(input=torch.ones(1, 2), weight=one),
        lambda: torch.stack([torch.ones(2, 2), one]),
        lambda: torch.zeros(2, 2) + one,
        lambda: F.layer_norm(torch.ones(1, 2), (2,), weight=one[0]),
        lambda: one.data,
        lambda: one.t(),
        lambda: torch._foreach_add([one], 1.0),
    ]
    assert [announced(one, read) for read in reads] == [1] * len(reads)

    def ask() -> None:
        assert (one.shape, one.dtype, one.device.type) == ((2, 2), torch.float32, "cpu")
        assert (one.ndim, one.dim(), one.size(0), one.numel()) == (2, 2, 2, 4)
        assert one.requires_grad
        one.grad = None
        assert one.grad is None

    assert announced(one, ask) == 0
    assert type(one) is nn.Parameter


def test_a_watched_parameter_passes_for_what_it_is() -> None:
    for kind in (nn.Parameter, Named):
        one = kind(torch.ones(2))
        watch(one)
        assert isinstance(one, kind)
        assert repr(type(one)) == repr(kind)
        assert kind_of(one) is kind
        assert type(type(one)(torch.ones(1), requires_grad=False)) is kind
        module = nn.Module()
        module.one = one
        assert [*module.parameters()] == [one]
        torch.optim.SGD([one], lr=0.1)
        # Nobody listens: operations take it as it is.
        assert torch.equal(one + 1, torch.full((2,), 2.0))
        unwatch(one)
        assert type(one) is kind


def test_other_threads_are_not_listened_to() -> None:
    one = nn.Parameter(torch.ones(2))

    def act() -> None:
        thread = threading.Thread(target=lambda: one + 1)
        thread.start()
        thread.join()

    assert announced(one, act) == 0


# ---- in an engine -------------------------------------------------------------------------------


class First(nn.Linear):
    def forward(self, inputs: Tensor, gives: bool) -> tuple[Tensor, Tensor | None]:  # type: ignore
        return super().forward(inputs), self.weight.t() if gives else None


class Borrows(nn.Module):
    """The first layer gives a view of its weight away, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first = First(WIDTH, WIDTH)
        self.second, self.third = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor, gives: bool) -> Tensor:
        values, view = self.first(inputs, gives)
        values = torch.tanh(self.second(values))
        outputs: Tensor = self.third(values if view is None else values @ view)
        return outputs


def borrow(rows: list[bool]) -> list[bool]:
    """In which forwards every operation was watched."""
    plain, model = Borrows(), Borrows()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine = engine_of(3, model, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    gathering = engine._parts.runtime.gathering
    inputs = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
    found = []
    for gives in rows:
        optimizer.zero_grad()
        plain(inputs, gives).square().mean().backward()
        optimizer.step()
        loss = engine(inputs, gives).square().mean()
        found.append(gathering.kept_views.are_watched)
        engine.backward(loss)
        engine.step()
        assert not [b for b in gathering._buckets if b.state is not Weights.SHARDED]
    assert_close(engine.state_dict(), dict(plain.state_dict()))
    engine.destroy()
    return found


def test_views_of_freed_weights_are_found_whenever_they_come(ranks: RankPools) -> None:
    rows = [False] * 2 + [True] * 2 + [False] * 5
    for found in ranks(2).run(borrow, rows):
        # The first one keeps its weight whole; behind it reads are watched, for a while.
        assert found == [False] * 3 + [True] * 4 + [False] * 2


def kept(stage: int) -> list[list[float]]:
    """The sums of views that a hook keeps of three layers' weights, read at any later moment."""
    torch.manual_seed(7)
    engine = engine_of(stage, model_of(), zero_optimization={"stage": stage, **TINY})
    layers = [layer for layer in engine.module if isinstance(layer, nn.Linear)]
    views: dict[nn.Module, Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda layer, *_: views.update({layer: layer.weight[1:]}))
        for layer in layers
    ]
    inputs = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
    found = []

    def look() -> None:
        found.append([view.sum().item() for view in views.values()])

    for trains in (True, True, False, True):
        with torch.set_grad_enabled(trains):
            engine.train(trains)
            outputs = engine(inputs)
        look()
        if trains:
            engine.backward(outputs.square().mean() + sum(v.square().sum() for v in views.values()))
            look()
            engine.step()
    for hook in hooks:
        hook.remove()
    views.clear()
    engine.backward(engine(inputs).square().mean())
    if stage == 3:
        for bucket in engine._parts.runtime.gathering._buckets:
            assert bucket.full.untyped_storage().nbytes() == 0, bucket.name
    engine.destroy()
    return found


def test_views_that_are_kept_can_be_read_after_their_forward(ranks: RankPools) -> None:
    wanted, found = (ranks(2).run(kept, stage) for stage in (0, 3))
    assert found == wanted


def held_for_a_moment() -> list[int]:
    """The bytes of freed weights after a backward; each had a view when it was freed first."""
    engine = engine_of(3, model_of(), zero_optimization={"stage": 3, **TINY})
    loss = engine(torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)).square().mean()
    plain, seen = Bucket.free_unviewed, set[Bucket]()

    def later(bucket: Bucket) -> bool:
        is_new = bucket not in seen
        seen.add(bucket)
        return not is_new and plain(bucket)

    with patch.object(Bucket, "free_unviewed", later):
        engine.backward(loss)
    buckets = engine._parts.runtime.gathering._buckets
    assert seen == set(buckets)
    found = [bucket.full.untyped_storage().nbytes() for bucket in buckets]
    engine.destroy()
    return found


def test_memory_that_could_not_be_freed_is_freed_at_the_end_of_the_pass(ranks: RankPools) -> None:
    for found in ranks(2).run(held_for_a_moment):
        assert not any(found)


def write_past_torch(keeps: bool) -> str:
    """As a collective does, to a freed parameter, at once or by way of what was kept of it."""
    engine: Any = engine_of(3, zero_optimization={"stage": 3, **TINY})
    inputs = torch.ones(ROWS, WIDTH, device=engine.device)
    weight = engine.module[3].weight
    kept = weight.data
    if keeps:
        engine(inputs)
    with unwatched():
        kept.fill_(1.0)
    with pytest.raises(ShardedAccessError) as caught:
        engine(inputs)
    return str(caught.value)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_write_that_is_not_seen_is_told_by_the_next_forward(
    keeps: bool, ranks: RankPools
) -> None:
    for rank, told in enumerate(ranks(2).run(write_past_torch, keeps)):
        assert f"rank {rank}: parameter 3.weight was written to while its values were" in told


def save_what_was_written(folder: str) -> str:
    engine: Any = engine_of(3, zero_optimization={"stage": 3, **TINY})
    assert engine.module[3].weight.data.shape == (4, 9)  # a look is no write
    engine.save_checkpoint(folder)
    if comm.get_rank() == 1:
        values = engine.module[3].weight.data
        with unwatched():
            values.fill_(1.0)
        del values
    mine = ShardedAccessError if comm.get_rank() == 1 else CheckpointError
    with pytest.raises(mine) as caught:
        engine.save_checkpoint(folder)
    return str(caught.value)


def test_a_write_to_a_freed_parameter_is_told_by_the_next_save(
    ranks: RankPools, tmp_path: Path
) -> None:
    for told in ranks(2).run(save_what_was_written, str(tmp_path)):
        assert "rank 1: parameter 3.weight was written to while its values were sharded" in told


def _without_gradients(write: Callable[[], object]) -> Callable[[], object]:
    return torch.no_grad()(write)


def refuse_writes_and_reads() -> tuple[list[str], list[str]]:
    engine: Any = engine_of(3, zero_optimization={"stage": 3, **TINY})
    weight = engine.module[3].weight
    alike = torch.ones(4, 9, device=engine.device)
    average = torch.zeros(4, 9, device=engine.device)
    view = weight.data

    def set_a_row() -> None:
        view[0] = 1.0

    def scale() -> None:
        view.__imul__(2.0)

    writes: list[Callable[[], object]] = [
        lambda: weight.data.zero_(),
        lambda: weight.data.copy_(alike),
        lambda: weight.detach().fill_(1.0),
        lambda: weight.data.t()[0].add_(1.0),
        lambda: torch.add(alike, alike, out=weight.data),
        lambda: torch._foreach_mul_([weight.data], 2.0),
        _without_gradients(lambda: weight.copy_(alike)),
        _without_gradients(lambda: weight.add_(alike)),
        lambda: nn.init.normal_(weight),
        lambda: nn.init.xavier_uniform_(weight),
        lambda: nn.init.zeros_(weight),
        engine.module[3].reset_parameters,
        set_a_row,
        scale,
    ]
    reads: list[Callable[[], object]] = [
        lambda: weight.sum(),
        lambda: weight.data.norm(),
        lambda: weight[0, 0].item(),
        lambda: weight.tolist(),
        lambda: weight.detach().cpu().numpy(),
        lambda: bool(weight.isnan().any()),
        lambda: torch.equal(weight, alike),
        lambda: F.linear(alike, weight),
        lambda: average.lerp_(weight.data, 0.1),
        lambda: torch.cat([weight.flatten(), weight.flatten()]),
        lambda: nn.utils.parameters_to_vector([weight]),
        lambda: weight.double(),
    ]

    def told(act: Callable[[], object]) -> str:
        with pytest.raises(ShardedAccessError) as caught:
            act()
        return str(caught.value)

    found = [told(write) for write in writes], [told(read) for read in reads]
    assert not average.any()  # nothing has reached it
    # Questions, and what a view alone answers.
    assert weight.data_ptr() and weight.data.numel() == weight.t().numel() == 36
    assert torch.zeros_like(weight).sum() == 0
    assert weight.to(weight.device) is weight
    assert "sharded over the ranks" in repr(weight.data)
    engine.destroy()
    return found


def test_operations_on_a_freed_weight_name_it_and_the_remedy(ranks: RankPools) -> None:
    for rank, (writes, reads) in enumerate(ranks(2).run(refuse_writes_and_reads)):
        for told in writes:
            assert f"rank {rank}: parameter 3.weight was written to while" in told
            assert "hadal.zero.GatheredParameters([parameter], modifier_rank=0)" in told
        for told in reads:
            assert f"rank {rank}: parameter 3.weight was read (" in told
            assert "hadal.zero.GatheredParameters([parameter])" in told
        assert "before hadal.initialize" in reads[-1]


def keep_views() -> None:
    engine: Any = engine_of(3, zero_optimization={"stage": 3, **TINY})
    inputs, weight = torch.ones(ROWS, WIDTH), engine.module[3].weight
    kept = []
    for _ in range(2):
        engine.backward(engine(inputs).sum())
        engine.step()
        with hadal.zero.GatheredParameters([weight]):
            kept += [(weight.detach().cpu(), weight.t(), weight.data, weight.detach().clone())]
    assert not kept[0][-1].equal(kept[1][-1])
    for one, turned, data, values in kept:
        assert one.equal(values) and turned.t().equal(values) and data.equal(values)
    engine.destroy()


def test_views_of_gathered_weights_keep_their_values(ranks: RankPools) -> None:
    ranks(2).run(keep_views)


def share_with_numpy() -> list[str]:
    engine: Any = engine_of(3, zero_optimization={"stage": 3, **TINY})
    inputs, weight = torch.ones(ROWS, WIDTH), engine.module[3].weight
    records, arrays = Records(), []
    _buckets.addHandler(records)
    engine.module[3].register_forward_hook(
        lambda module, _, __: arrays.append(module.weight.detach().numpy())
    )
    for _ in range(2):
        engine.backward(engine(inputs).sum())
        engine.step()
    _buckets.removeHandler(records)
    with hadal.zero.GatheredParameters([weight]):
        assert bool((engine.state_dict()["3.weight"] == weight).all())
    engine.destroy()
    return records.told


def test_weights_that_numpy_shares_stay_in_memory(ranks: RankPools) -> None:
    (line,), others = ranks(2).run(share_with_numpy)
    assert "3.weight" in line and ".clone().numpy()" in line
    assert not others  # rank 0 warns for all


def print_freed_weights() -> tuple[str, str]:
    engine: Any = engine_of(3, zero_optimization={"stage": 3, **TINY})
    weight = engine.module[3].weight
    with hadal.zero.GatheredParameters([weight]):
        whole = repr(weight)
    freed = repr(weight)
    engine.destroy()
    return whole, freed


def test_a_freed_weight_is_printed_without_values(ranks: RankPools) -> None:
    for whole, freed in ranks(2).run(print_freed_weights):
        assert whole.startswith("Parameter containing:\ntensor([[")
        assert freed.startswith("Parameter(shape=(")
        assert "sharded over the ranks" in freed
        assert "hadal.zero.GatheredParameters([parameter])" in freed
        assert "nan" not in freed


# Engines and models that nothing refers to are freed without `destroy`


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16": {"fp16": {"enabled": True}},
    "bf16": {"bf16": {"enabled": True}},
}


def drop(stage: int, born: bool, way: str, folder: str) -> None:
    wishes: dict[str, Any] = {}
    changes = dict(WAYS.get(way, {}))
    if way == "whole":
        wishes["optimizer"] = lambda parameters: ByNorm(parameters, 0.01)
        changes["optimizer"] = None
    if way == "disk":
        tier = {"device": "nvme", "nvme_path": folder}
        zero = {"stage": stage, **TINY, "offload_optimizer": tier, "offload_param": tier}
        changes["zero_optimization"] = zero
    with hadal.zero.Init() if born else nullcontext():
        model = model_of()
    engine = engine_of(stage, model, wishes, **changes)
    train(engine, range(2))
    runtime = engine._parts.runtime
    held = [engine, model, runtime, *runtime.buckets, *model.parameters(), *engine.optimizer.state]
    gone = [weakref.ref(one) for one in held]
    held.clear()
    del engine, model, runtime
    gc.collect()
    assert [type(one()) for one in gone if one() is not None] == []


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("born", [False, True], ids=["given", "created sharded"])
def test_an_engine_that_is_dropped_is_freed(
    stage: int, born: bool, ranks: RankPools, tmp_path: Any
) -> None:
    ranks(2).run(drop, stage, born, "plain", str(tmp_path))


@pytest.mark.parametrize(
    ("stage", "way"), [(1, "fp16"), (2, "bf16"), (3, "bf16"), (2, "whole"), (3, "disk")]
)
def test_it_is_freed_with_all_that_it_has(
    stage: int, way: str, ranks: RankPools, tmp_path: Any
) -> None:
    ranks(2).run(drop, stage, False, way, str(tmp_path))
    assert not list(tmp_path.iterdir())


def drop_under_the_other_name(stage: int) -> None:
    config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": stage, **TINY}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
    engine, _, _, _ = initialize(model=model_of(), config=config)
    train(engine, range(2))
    gone = weakref.ref(engine._parts.runtime)
    del engine
    gc.collect()
    assert gone() is None


def test_it_is_freed_under_the_name_of_deepspeed(ranks: RankPools) -> None:
    for stage in (2, 3):
        ranks(2).run(drop_under_the_other_name, stage)


@on_ranks(2)
def test_a_parameter_keeps_what_it_needs() -> None:
    engine = engine_of(3)
    whole = engine.state_dict()
    model = engine.module
    del engine
    gc.collect()
    with hadal.zero.GatheredParameters(list(model.parameters())):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, whole[name])
    parameter = model[0].weight
    del model
    gc.collect()
    with hadal.zero.GatheredParameters(parameter):
        assert torch.equal(parameter, whole["0.weight"])


@on_ranks(2)
def test_a_model_that_was_born_sharded_is_freed() -> None:
    with hadal.zero.Init():
        model = model_of()
    gone = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    assert all(one() is None for one in gone)


def test_attributes_that_are_given_on_are_nobodys() -> None:
    table: Attached[int] = Attached("number")
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    assert one not in table
    table[one] = 3
    vars(other).update(vars(one))
    assert (table[one], table.get(other)) == (3, None)
    with pytest.raises(KeyError):
        table[other]
    assert copy.deepcopy(one) not in table
    table.pop(one)
    table.pop(one)
    assert one not in table


# Parameters of classes of a program's own: trained right, kept as they are, or refused by name


class Labelled(nn.Parameter):
    """Attributes that programs set on some parameters."""

    def __repr__(self) -> str:
        return "Labelled"


class Saved(nn.Parameter):
    """A class to which Python adds attributes of its own."""


class Plain(torch.Tensor):
    pass


class Seen(nn.Parameter):
    """A class with arithmetic of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Elsewhere(nn.Parameter):
    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self


@pytest.mark.parametrize(
    ("tensor", "foreign"),
    [
        (nn.Parameter(torch.ones(2)), False),
        (nn.Parameter(torch.ones(())), False),
        (nn.Parameter(torch.ones(0, dtype=torch.bfloat16)), False),
        (torch.ones(2), False),
        (Labelled(torch.ones(2)), False),
        (nn.Parameter(Plain(torch.ones(2))), False),
        (nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False), True),
        (nn.Parameter(torch.ones(2, dtype=torch.bool), requires_grad=False), True),
        (nn.Parameter(torch.ones(2, dtype=torch.complex64)), True),
        (nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn)), True),
        (nn.Parameter(torch.eye(2).to_sparse()), True),
        (nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2))), True),
        (Seen(torch.ones(2)), True),
        (Elsewhere(torch.ones(2)), True),
    ],
)
def test_what_cannot_lie_in_a_flat_buffer(tensor: torch.Tensor, foreign: bool) -> None:
    assert is_foreign(tensor) is foreign


def test_attributes_that_python_adds_to_a_class_do_not_count() -> None:
    saved = nn.Parameter(torch.ones(2)), Saved(torch.ones(2)), torch.ones(2)
    for one in saved:
        pickle.loads(pickle.dumps(one))
        assert type(one).__annotations__ is not None
    assert {"__slotnames__", "__annotations__"} <= set(vars(Saved))
    assert not is_foreign(saved[1])


class Shadowing(nn.Parameter):
    grad = None


def test_a_value_in_place_of_a_property_counts() -> None:
    assert is_foreign(Shadowing(torch.ones(2)))


def marked() -> nn.Sequential:
    """A model whose parameters are the plain one's, in classes of the program's own."""
    model = model_of()
    model[0].weight = Labelled(model[0].weight.data)
    model[0].bias = Labelled(model[0].bias.data, requires_grad=False)
    model[3].weight = nn.Parameter(Plain(model[3].weight.data))
    return model


def plain() -> nn.Sequential:
    model = model_of()
    model[0].bias.requires_grad_(False)
    return model


def train_both(stage: int, born: bool) -> None:
    states, losses = [], []
    for make in (marked, plain):
        with hadal.zero.Init() if born else contextlib.nullcontext():
            model = make()
        engine = engine_of(stage, model)
        losses.append(torch.stack(train(engine, range(3))))
        states.append(engine.state_dict())
        if make is marked:
            assert isinstance(model[0].weight, Labelled)
            assert isinstance(model[0].bias, Labelled)
            assert isinstance(model[3].weight, Plain)
            with GatheredParameters(model.parameters()):
                alone = copy.deepcopy(model[0].weight)
            assert type(alone) is Labelled
            assert torch.equal(alone, states[0]["0.weight"])
        engine.destroy()
    assert torch.equal(*losses)
    assert_equal(*states)
    assert not torch.equal(states[0]["0.weight"], model_of()[0].weight)
    assert not torch.equal(states[0]["3.weight"], model_of()[3].weight)


@pytest.mark.slow_cells("2-created sharded", "3-given")
@pytest.mark.parametrize("born", [False, True], ids=["given", "created sharded"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_class_of_its_own_trains_as_a_plain_one(stage: int, born: bool, ranks: RankPools) -> None:
    ranks(2).run(train_both, stage, born)


MAKERS = {
    "own functions": Seen,
    "own methods": Elsewhere,
    "complex": lambda values: nn.Parameter(values.to(torch.complex64)),
    "float8": lambda values: nn.Parameter(values.to(torch.float8_e5m2)),
    "sparse": lambda values: nn.Parameter(values.to_sparse()),
    "wrapped": lambda values: nn.Parameter(TwoTensor(values, values.clone())),
}


@pytest.mark.parametrize("kind", MAKERS)
@on_ranks(2)
def test_other_trainables_are_refused_by_name(kind: str) -> None:
    """One rank is enough for all to raise, before anything of the model is sent."""
    model, rank = model_of(), comm.get_rank()
    if rank == 1:
        model[3].bias = MAKERS[kind](model[3].bias.data)
    error = ModelError if rank == 1 else MismatchError
    with pytest.raises(error, match=r"rank 1: parameter 3\.bias is a .*Freeze it \(requires"):
        engine_of(0, model)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_tensors_over_a_mesh_are_refused_by_name(stage: int) -> None:
    model = model_of()
    parallelize_module(model[0], init_device_mesh("cpu", (2,)), ColwiseParallel())
    for trains in (True, False):
        model.requires_grad_(trains)
        model[3].requires_grad_(True)
        with pytest.raises(ModelError, match=r"parameter 0\.weight is a DTensor .* over .*mpu="):
            engine_of(stage, model)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(3)
def test_frozen_ones_stay_whole_with_rank_0s_values(stage: int) -> None:
    model, rank = model_of(), comm.get_rank()
    values = torch.full((4,), float(rank))
    model[3].bias = nn.Parameter(TwoTensor(values, values + 2), requires_grad=False)
    model.eighths = nn.Parameter(values.to(torch.float8_e4m3fn), requires_grad=False)
    engine = engine_of(stage, model)
    wrapped = model[3].bias
    assert isinstance(wrapped.data, TwoTensor)
    assert (wrapped.a.sum().item(), wrapped.b.sum().item()) == (0.0, 8.0)
    assert model.eighths.dtype == torch.float8_e4m3fn
    assert model.eighths.float().tolist() == [0.0] * 4
    engine.destroy()
