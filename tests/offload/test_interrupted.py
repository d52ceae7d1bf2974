"""Interrupted updates, and folders that cannot be written."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools, on_ranks
from torch import Tensor, nn

import hadal
from hadal import comm, utils
from hadal.errors import HadalError, OffloadError
from hadal.offload.file import DiskFile
from hadal.offload.requests import Region
from hadal.offload.store import DiskStore
from hadal.offload.tensors import DiskTensor
from hadal.optim.step import FlatStepper
from hadal.optim.workspace import Workspace
from hadal.zero.offload import Stored

from .test_tiers import WIDTH, config_of, model_of, small_blocks, state_of, train, trained


def interrupt(path: str, stage: int, kind: type[BaseException], updates: int) -> None:
    """Interrupt an update after some of its parts: nothing has changed."""
    weights = "nvme" if stage == 3 else None
    with small_blocks():
        config = config_of(stage, "bf16", "nvme", weights, path)
        engine, *_ = hadal.initialize(model=model_of(), config=config)
        train(engine, updates)
        before = [one.clone() for one in engine.state_dict().values()]
        plain, calls = Workspace.apply, [0]

        def apply(*given: object) -> None:
            plain(*given)  # type: ignore[arg-type]
            calls[0] += 1
            if calls[0] == 3:
                raise kind("now")

        Workspace.apply = apply  # type: ignore[assignment, method-assign]
        try:
            with pytest.raises(kind, match="now"):
                train(engine, 1, updates)
        finally:
            Workspace.apply = plain  # type: ignore[method-assign]
        for mine, theirs in zip(engine.state_dict().values(), before, strict=True):
            assert torch.equal(mine, theirs)
        train(engine, 4 - updates, updates)
        found = state_of(engine)
        engine.destroy()
        _, wanted = trained(config_of(stage, "bf16", None, None, path), 4)
        for mine, theirs in zip(found, wanted, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.fast_cells("RuntimeError")
@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_update_changes_nothing(
    kind: type[BaseException], ranks: RankPools, tmp_path: Path
) -> None:
    for stage, updates in ((2, 2), (3, 0)):
        ranks(1).run(interrupt, str(tmp_path), stage, kind, updates)


def initialize_where_none_can(path: str) -> str:
    """Give rank 1 a path that is not a folder."""
    place = Path(path) / f"of rank {comm.get_rank()}"
    if comm.get_rank() == 1:
        place.write_text("a file")
    with pytest.raises(HadalError) as found:
        hadal.initialize(model=model_of(), config=config_of(2, "bf16", "nvme", None, str(place)))
    assert isinstance(found.value, OffloadError)
    return str(found.value)


def test_all_ranks_raise_for_an_impossible_folder(ranks: RankPools, tmp_path: Path) -> None:
    others, own = ranks(2).run(initialize_where_none_can, str(tmp_path))
    assert "of rank 1" in own and "nvme_path" in own
    assert "initialize stopped on rank 1" in others and own in others


@contextmanager
def room_for(allocations: int) -> Iterator[None]:
    """Limit rank 1's disk to so many regions."""
    plain, left = DiskStore.allocate, [allocations]

    def allocate(store: DiskStore, name: str, nbytes: int) -> Region:
        left[0] -= 1
        if left[0] < 0:
            raise OffloadError(f"no room for {name}")
        return plain(store, name, nbytes)

    if comm.get_rank() == 1:
        DiskStore.allocate = allocate  # type: ignore[method-assign]
    try:
        yield
    finally:
        DiskStore.allocate = plain  # type: ignore[method-assign]


def begin_without_room(path: str, stage: int, way: str, allocations: int) -> str:
    """All ranks raise, and all can start over where there is room."""
    weights = "nvme" if stage == 3 else None
    config = config_of(stage, "bf16", "nvme", weights, path)

    def begin() -> Any:
        with hadal.zero.Init(config_dict_or_path=config) if way == "born" else nullcontext():
            model = model_of()
        return hadal.initialize(model=model, config=config)[0]

    with room_for(allocations), pytest.raises(OffloadError) as found:
        begin()
    engine = begin()
    train(engine, 1)
    engine.destroy()
    return str(found.value)


@pytest.mark.slow_cells("3-given-5", "3-born-3")
@pytest.mark.parametrize(
    ("stage", "way", "allocations"),
    [(1, "given", 0), (2, "given", 3), (3, "given", 5), (3, "born", 3), (3, "born", 9)],
)
def test_all_ranks_raise_for_a_full_disk(
    stage: int, way: str, allocations: int, ranks: RankPools, tmp_path: Path
) -> None:
    told = ranks(2).run(begin_without_room, str(tmp_path), stage, way, allocations)
    assert told[1].startswith("no room for the ")
    assert "stopped on rank 1, and so on every rank: OffloadError: no room for the " in told[0]


def begin_later_without_room(path: str, way: str) -> str:
    """State that is offloaded after `initialize`: in the first backward, or with a later group."""
    config, model = config_of(2, "bf16", "nvme", None, path), model_of()
    if way == "the first backward":
        del config["optimizer"]
    else:
        model[1].requires_grad_(False)
    engine, optimizer, *_ = hadal.initialize(model=model, config=config)
    plain = DiskTensor.write_next

    def write_next(run: DiskTensor, values: Tensor) -> None:
        if comm.get_rank() == 1:
            raise OffloadError("no room for the masters")
        plain(run, values)

    DiskTensor.write_next = write_next  # type: ignore[method-assign]
    # What a bucket lays down is written by another way.
    write = DiskTensor.write
    DiskTensor.write = lambda run, values: plain(run, values) or run.commit()  # type: ignore
    try:
        with pytest.raises(OffloadError) as found:
            if way == "the first backward":
                engine.backward(engine(torch.randn(2, WIDTH).bfloat16()).float().sum())
            else:
                model[1].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[1].parameters())})
    finally:
        DiskTensor.write_next, DiskTensor.write = plain, write  # type: ignore[method-assign]
    engine.destroy()
    return str(found.value)


@pytest.mark.parametrize("way", ["the first backward", "a later group"])
def test_all_ranks_raise_if_later_state_does_not_fit(
    way: str, ranks: RankPools, tmp_path: Path
) -> None:
    others, own = ranks(2).run(begin_later_without_room, str(tmp_path), way)
    assert own == "no room for the masters"
    assert "stopped on rank 1, and so on every rank: OffloadError: no room" in others


@contextmanager
def unreadable(after: int) -> Iterator[None]:
    """Let the disk fail after so many reads."""
    plain, left = DiskFile.read, [after]

    def read(file: DiskFile, *given: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OffloadError("the disk cannot be read")
        plain(file, *given)

    DiskFile.read = read  # type: ignore[method-assign]
    try:
        yield
    finally:
        DiskFile.read = plain  # type: ignore[method-assign]


@pytest.mark.fast_cells("0-2", "2-0", "2-6")
@pytest.mark.parametrize(("before", "after"), [(0, 0), (0, 2), (2, 0), (2, 1), (2, 3), (2, 6)])
@on_ranks(1)
def test_a_failed_read_raises_once(tmp_path: Path, before: int, after: int) -> None:
    """One error, and nothing else: once the disk is back, training continues."""
    config = config_of(3, "bf16", "nvme", "nvme", tmp_path)
    engine, *_ = hadal.initialize(model=model_of(), config=config)
    train(engine, before)
    with unreadable(after), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(OffloadError, match=r"^the disk cannot be read$") as found:
            train(engine, 1, before)
    assert found.value.__context__ is None
    engine.zero_grad()
    train(engine, 3 - before, before)
    found_state = state_of(engine)
    engine.destroy()
    _, wanted = trained(config_of(3, "bf16", None, None, tmp_path), 3)
    for mine, theirs in zip(found_state, wanted, strict=True):
        assert torch.equal(mine, theirs)


# The reads of a micro-step by a plan, which the second update follows: those of its forward first.


@pytest.mark.fast_cells("the masters")
@pytest.mark.parametrize("fails", ["the body", "the masters"])
@on_ranks(1)
def test_state_is_kept_as_a_whole_or_not_at_all(tmp_path: Path, fails: str) -> None:
    """Writes to state that is in memory for a while take effect as a whole or not at all."""
    config = config_of(2, "bf16", "nvme", None, tmp_path)
    engine, *_ = hadal.initialize(model=model_of(), config=config)
    train(engine, 2)
    before = state_of(engine)
    stepper, optimizer = engine.stepper, engine.optimizer
    bucket = engine._parts.runtime.gradients[0].bucket
    plain, has_run = Stored.present, []

    @contextmanager
    def present(stored: Stored, **given: Any) -> Iterator[Tensor]:
        with plain(stored, **given) as values:
            yield values
            if has_run and fails == "the masters":
                raise OffloadError("now")

    Stored.present = present  # type: ignore[method-assign]
    try:
        with pytest.raises(OffloadError, match=r"^now$"), stepper.present(bucket):
            bucket.master.fill_(3.0)
            for state in optimizer.state.values():
                if state["exp_avg"].stride() != (0,):
                    state["step"] += 5
                    state["exp_avg"].fill_(7.0)
                    has_run.append(True)
            if fails == "the body":
                raise OffloadError("now")
    finally:
        Stored.present = plain  # type: ignore[method-assign]
    assert has_run
    for mine, theirs in zip(state_of(engine), before, strict=True):
        assert torch.equal(mine, theirs)
    train(engine, 1, 2)
    found = state_of(engine)
    engine.destroy()
    _, wanted = trained(config_of(2, "bf16", None, None, tmp_path), 3)
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
@on_ranks(1)
def test_an_interrupt_that_cannot_be_rolled_back_says_so(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    """With masters in memory and weights on disk, only a checkpoint makes them consistent again."""
    engine, *_ = hadal.initialize(
        model=model_of(), config=config_of(3, "bf16", "cpu", "nvme", tmp_path)
    )
    train(engine, 1)
    engine.save_checkpoint(Path(tmp_path, "saved"))
    plain, calls = FlatStepper._step_buckets, [0]

    def step_buckets(*given: Any) -> None:
        plain(*given)
        calls[0] += 1
        if calls[0] == 2:
            raise kind

    FlatStepper._step_buckets = step_buckets  # type: ignore[method-assign]
    try:
        with pytest.raises(OffloadError, match=r"^\w+; masters .* load a checkpoint") as found:
            train(engine, 1, 1)
    finally:
        FlatStepper._step_buckets = plain  # type: ignore[method-assign]
    assert isinstance(found.value.__cause__, kind)
    engine.load_checkpoint(Path(tmp_path, "saved"))
    train(engine, 1, 1)
    found_state = state_of(engine)
    engine.destroy()
    _, wanted = trained(config_of(3, "bf16", None, None, tmp_path), 2)
    for mine, theirs in zip(found_state, wanted, strict=True):
        assert torch.equal(mine, theirs)


class OfNothing(nn.Module):
    """A model whose trained parameters have no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0))
        self.rest = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.rest(inputs) + self.nothing.sum()
        return result


@on_ranks(1)
def test_parameters_without_elements_are_updated(tmp_path: Path) -> None:
    engine, *_ = hadal.initialize(
        model=OfNothing(), config=config_of(2, "bf16", "nvme", None, tmp_path)
    )
    train(engine, 2)
    assert engine.global_steps == 2
    engine.destroy()


def test_a_failed_allocation_keeps_no_space(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    plain, given = store.allocate, []

    def allocate(name: str, nbytes: int) -> Region:
        if given:
            raise OffloadError("no room")
        given.append(plain(name, nbytes))
        return given[0]

    store.allocate = allocate  # type: ignore[method-assign]
    with pytest.raises(OffloadError, match="no room"):
        DiskTensor(store, "moments", 4096, torch.float32)
    assert given and not store.nbytes
    store.close()


def end_without_the_file(path: str) -> None:
    """Weights can no longer be read: the error is raised, and nothing of the engine is left."""
    engine, *_ = hadal.initialize(
        model=model_of(), config=config_of(3, "bf16", "nvme", "nvme", path)
    )
    train(engine, 1)
    own = next(Path(path).glob(f"hadal-*-{os.getpid()}-*"))
    (own / "states").unlink()
    with pytest.raises(OffloadError, match="the file was deleted"):
        engine.destroy()
    assert not own.exists()
    engine.destroy()  # it has ended


def test_an_engine_whose_disk_is_gone_can_be_destroyed(ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(end_without_the_file, str(tmp_path))
    assert not list(tmp_path.iterdir())


class Tied(nn.Module):
    """A model with a tied embedding, a scalar and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 12)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.fixed = nn.Linear(12, 12).requires_grad_(False)
        self.head = nn.Linear(12, 50, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.head(self.scale * self.fixed(self.tokens(batch))).float().square()
        return loss.mean()


class Scalar(nn.Module):
    """A model of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, batch: Tensor) -> Tensor:
        loss: Tensor = (self.scale * batch.float().mean() - 1).float().square()
        return loss


def train_in_every_place(kind: type[nn.Module], path: str) -> None:
    """The smallest possible buffers, and more ranks than some buckets have elements."""
    tight: dict[str, Any] = {"sub_group_size": 1, "stage3_param_persistence_threshold": 0}
    found = []
    for optimizer, weights in ((None, None), ("nvme", "nvme"), ("cpu", "nvme")):
        keys = dict(tight)
        if optimizer:
            keys |= {"offload_optimizer": {"buffer_count": 1 if optimizer == "nvme" else 4}}
            keys |= {"offload_param": {"buffer_count": 1, "max_in_cpu": 0}}
        torch.manual_seed(0)
        engine, *_ = hadal.initialize(
            model=kind(), config=config_of(3, "fp16", optimizer, weights, path, **keys)
        )
        generator = torch.Generator().manual_seed(comm.get_rank())
        for _ in range(6):
            engine.backward(engine(torch.randint(50, (2, 8), generator=generator)))
            engine.step()
        masters = [utils.safe_get_full_fp32_param(p) for p in engine.module.parameters()]
        found.append([*masters, *engine.state_dict().values()])
        engine.destroy()
    for other in found[1:]:
        assert_equal(other, found[0])


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.fast_cells("Tied")
@pytest.mark.parametrize("kind", [Tied, Scalar])
def test_odd_models_fit_through_the_least_buffers(
    kind: type[nn.Module], ranks: RankPools, tmp_path: Path
) -> None:
    for size in (1, 3):
        ranks(size).run(train_in_every_place, kind, str(tmp_path))
    assert not list(tmp_path.iterdir())


def train_two(path: str) -> None:
    """Two engines in one folder do not affect each other."""
    config = config_of(3, "bf16", "nvme", "nvme", path)
    first, second = (hadal.initialize(model=model_of(), config=config)[0] for _ in range(2))
    for number in range(2):
        train(first, 1, number)
        train(second, 1, number)
    assert_equal(state_of(first), state_of(second))
    first.destroy()
    train(second, 1, 2)
    second.destroy()


def test_two_engines_share_a_folder(ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(train_two, str(tmp_path))
    assert not list(tmp_path.iterdir())
