"""Dynamic batching under DeepSpeed's names, with its golden values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from data_efficiency.test_batching import LENGTHS, Sequences, joined, section_of
from torch import nn

from hadal.compat import batching as named, engine as compat
from hadal.errors import UsageError
from hadal.optim.schedules import WarmupLR

GOLDEN = json.loads((Path(__file__).parents[1] / "data/dynamic_batching.json").read_text())


def schedule_of(kind: str, method: str) -> tuple[Any, named.VariableBatchSizeLR]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    made: Any = {
        "constant": lambda: optimizer,
        "step": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        "warmup": lambda: WarmupLR(optimizer, 0.0, 0.1, 4, "linear"),
    }[kind]()
    made = named.lr_scheduler_for_variable_batch_size(8, [4, 8, 16], None, made, method)
    return optimizer, made


@pytest.mark.filterwarnings("ignore:The epoch parameter", "ignore:Detected call of")
@pytest.mark.parametrize("method", ["linear", "sqrt"])
@pytest.mark.parametrize("kind", ["constant", "step", "warmup"])
def test_rates_are_those_of_deepspeed(kind: str, method: str) -> None:
    expected = GOLDEN[f"lr_{kind}_{method}"]
    optimizer, schedule = schedule_of(kind, method)
    found = [optimizer.param_groups[0]["lr"]]
    for _ in expected["lr"][1:]:
        schedule.step()
        found.append(optimizer.param_groups[0]["lr"])
    assert found == pytest.approx(expected["lr"], rel=1e-12)
    state = schedule.state_dict()
    assert list(state) == expected["state_keys"]
    later, other = schedule_of(kind, method)
    other.load_state_dict(state)
    assert other.get_last_lr() == schedule.get_last_lr()
    for one in (schedule, other):
        one.step()
    assert other.get_lr() == schedule.get_lr() == [later.param_groups[0]["lr"]]
    schedule.step(0)
    assert schedule.get_last_lr()[0] == pytest.approx(expected["after_step0"])


def test_other_objects_are_not_schedules() -> None:
    with pytest.raises(ValueError, match=r"Unknown type for lr_scheduler_or_optimizer: <class 's"):
        named.lr_scheduler_for_variable_batch_size(8, [4], None, "adam")
    assert named.scale_lr(16, 4, 0.1, "sqrt") == pytest.approx(0.05)


def test_packs_are_numbered_by_batch() -> None:
    numbered, sizes, longest = named.batch_by_seqlens([5, 5, 5, 5, 2], 10, effective_batch_size=2)
    assert numbered == [(0, [0, 1]), (0, [2, 3])]
    assert (sizes, longest) == ([4], [5])
    numbered, *_ = named.batch_by_seqlens([9, 3, 30, 3, 3], 10, min_batch_size=3)
    assert numbered == [(0, [1, 3, 4])]
    with pytest.raises(UsageError, match="2 samples make no batch of effective_batch_size 4"):
        named.batch_by_seqlens([4, 4], 10, effective_batch_size=4)
    with pytest.raises(UsageError, match="sequence_picking_order is 'foo'; expected"):
        named.batch_by_seqlens([4, 4], 10, sequence_picking_order="foo")


def test_a_loader_and_a_schedule() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    found = [
        named.get_dataloader_and_lr_scheduler_for_variable_batch_size(
            Sequences(),
            LENGTHS,
            24,
            4,
            dataloader_rank=rank,
            dataloader_num_replicas=2,
            dataloader_collate_fn=joined,
            lr_scheduler_or_optimizer=optimizer,
        )
        for rank in (0, 1)
    ]
    (mine, schedule, told), (theirs, _, _) = found
    assert set(told) == {
        *("dataset", "batch_size", "pin_memory"),
        *("data_sampler", "collate_fn", "num_local_io_workers"),
    }
    batches = [*mine, *theirs]
    seen = torch.cat(batches).flatten().int().unique().tolist()
    assert len(seen) == sum(schedule.batch_sizes)
    assert schedule.base_batch_size == 4
    assert max(map(len, batches)) <= 24
    alike, _ = named.dataloader_for_variable_batch_size(
        Sequences(),
        *named.batch_by_seqlens(LENGTHS, 24)[::2],
        dataloader_num_workers=0,
        required_microbatches_of_same_seqlen=True,
        sample_padding_fn=lambda sample, length: nn.functional.pad(
            sample, (0, length - len(sample))
        ),
    )
    assert next(iter(alike)).dim() == 2
    with pytest.raises(UsageError, match="needs sample_padding_fn"):
        named.dataloader_for_variable_batch_size(
            Sequences(), [], [], required_microbatches_of_same_seqlen=True
        )


def test_the_loader_of_an_engine(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.001}},
        "data_efficiency": section_of(metrics_path=str(tmp_path)),
    }
    make = named.get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed
    engine = compat.initialize(model=nn.Linear(1, 1), config=config)[0]
    asked: list[int] = []

    def measure(samples: list[torch.Tensor]) -> list[int]:
        asked.append(len(samples))
        return [len(sample) for sample in samples]

    loader, schedule, told = make(
        Sequences(), engine, dataloader_collate_fn=joined, batch_seqlens_fn=measure
    )
    assert loader is engine.training_dataloader
    assert len(asked) == 60
    engine.lr_scheduler = schedule
    assert set(told) == {"dataset", "pin_memory", "collate_fn", "num_local_io_workers"}
    assert sum(len(batch.unique()) for batch in loader) == 60
    with pytest.raises(UsageError, match="the engine has a training loader"):
        make(Sequences(), engine)
    engine.destroy()
    engine = compat.initialize(model=nn.Linear(1, 1), config=config)[0]
    loader, *_ = make(
        Sequences(), engine, LENGTHS, dataset_filter_ids=range(9), dataloader_collate_fn=joined
    )
    assert sum(len(batch.unique()) for batch in loader) == 9
    engine.destroy()
    del config["data_efficiency"]
    engine = compat.initialize(model=nn.Linear(1, 1), config=config)[0]
    with pytest.raises(UsageError, match=r"dynamic_batching\.enabled is not true"):
        make(Sequences(), engine)
    engine.destroy()
