"""Sequences split over ranks by Accelerate's ParallelismConfig and the Trainer, unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.nn.functional as collectives
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, ParallelismConfig
from accelerate.utils.dataclasses import DeepSpeedSequenceParallelConfig
from sequence.models import llama, tokens
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from hadal.comm import get_world_size
from hadal.compat.trainer import WeighByTargets

_SAMPLES, _ACCUMULATION, _CLIP, _RATE = 8, 2, 0.5, 0.2


def samples() -> list[dict[str, torch.Tensor]]:
    """Always the same; the second half of each sequence is targets."""
    return [
        {name: value[0] for name, value in tokens(seed, rows=1).items()} for seed in range(_SAMPLES)
    ]


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows of one length as a batch."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def plain(optimizer_kind: Any = torch.optim.SGD) -> dict[str, list[float]]:
    """The results of one process on whole sequences."""
    model = llama()
    optimizer = optimizer_kind(model.parameters(), lr=_RATE)
    losses, norms = [], []
    for number, batch in enumerate(DataLoader(samples(), batch_size=1, collate_fn=collate)):
        loss = model(**batch).loss
        (loss / _ACCUMULATION).backward()
        losses.append(loss.item())
        if number % _ACCUMULATION == _ACCUMULATION - 1:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), _CLIP)))
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


def _parallelism(shared: int) -> ParallelismConfig:
    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length=12, sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    return ParallelismConfig(
        sp_backend="deepspeed",
        sp_size=shared,
        sp_handler=handler,
    )


def run(stage: int) -> dict[str, list[float]]:
    """The loop of Accelerate's own script, with accumulation and clipping."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    plugin = DeepSpeedPlugin(
        zero_stage=stage,
        gradient_accumulation_steps=_ACCUMULATION,
        gradient_clipping=_CLIP,
        zero3_init_flag=False,
    )
    accelerator = Accelerator(
        deepspeed_plugin=plugin,
        gradient_accumulation_steps=_ACCUMULATION,
        parallelism_config=_parallelism(get_world_size()),
    )
    inner = llama()
    loader = DataLoader(samples(), batch_size=1, collate_fn=collate)
    optimizer = torch.optim.SGD(inner.parameters(), lr=_RATE)
    model, optimizer, loader = accelerator.prepare(inner, optimizer, loader)
    from deepspeed.utils import groups

    group = groups._get_sequence_parallel_group()
    assert len(loader) == _SAMPLES
    losses, norms = [], []
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            labels = batch["shift_labels"]
            logits = model(**batch).logits
            loss = inner.loss_function(
                logits=logits, labels=None, shift_labels=labels, vocab_size=inner.config.vocab_size
            )
            each = collectives.all_gather(loss, group=group)
            good = collectives.all_gather((labels != -100).sum(), group=group)
            total = sum(each[rank] * good[rank] for rank in range(len(each)) if good[rank] > 0)
            loss = total / max(sum(good), 1)
            accelerator.backward(loss)
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            if number % _ACCUMULATION == _ACCUMULATION - 1:
                norms.append(float(model.get_global_grad_norm()))
    model.destroy()
    return {"losses": losses, "norms": norms}


def weighed(accumulation: int) -> dict[str, list[float]]:
    """The results of one process if each update's loss is the mean over its targets."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    losses, norms = [], []
    batches = list(DataLoader(samples(), batch_size=1, collate_fn=collate))
    for start in range(0, len(batches), accumulation):
        chosen = batches[start : start + accumulation]
        counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in chosen]
        parts = [
            model(**batch).loss * count / sum(counts)
            for batch, count in zip(chosen, counts, strict=True)
        ]
        total = torch.stack(parts).sum()
        total.backward()
        losses.append(total.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), _CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


def train(folder: Path, stage: int) -> dict[str, Any]:
    """The Trainer: its log of losses and norms."""
    arguments = TrainingArguments(**_options(folder, stage, get_world_size(), _ACCUMULATION, None))
    return _trained(
        Trainer(model=llama(), args=arguments, train_dataset=samples(), data_collator=collate)
    )


class _Weighing(WeighByTargets, Trainer):
    pass


def train_weighed(
    folder: Path, shared: int, accumulation: int, power: int | None
) -> dict[str, Any]:
    """The Trainer with micro-batches weighed by their targets."""
    arguments = TrainingArguments(**_options(folder, 2, shared, accumulation, power))
    return _trained(
        _Weighing(model=llama(), args=arguments, train_dataset=samples(), data_collator=collate)
    )


def train_with_trl(
    folder: Path, shared: int, accumulation: int, power: int | None, weighs: bool = True
) -> dict[str, Any]:
    """trl's SFTTrainer, whose model computes its loss from hidden states."""
    from adapter_runs import _tokenizer
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    class Weighing(WeighByTargets, SFTTrainer):
        pass

    arguments = SFTConfig(
        **_options(folder, 2, shared, accumulation, power),
        bf16=False,
        gradient_checkpointing=False,
        remove_unused_columns=False,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    rows = [{name: row[name].tolist() for name in ("input_ids", "labels")} for row in samples()]
    kind = Weighing if weighs else SFTTrainer
    return _trained(
        kind(
            model=llama(),
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=_tokenizer(),
        )
    )


def _options(
    folder: Path, stage: int, shared: int, accumulation: int, power: int | None
) -> dict[str, Any]:
    AcceleratorState._reset_state(reset_partial_state=True)
    found: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": accumulation,
        "max_steps": _SAMPLES // accumulation,
        "max_grad_norm": _CLIP,
        "learning_rate": _RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "fp16": power is not None,
        "deepspeed": {
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
            **({"fp16": {"enabled": True, "initial_scale_power": power}} if power else {}),
        },
    }
    if shared > 1:
        found["parallelism_config"] = _parallelism(shared)
    return found


def _trained(trainer: Trainer) -> dict[str, Any]:
    trainer.train()
    logs = [one for one in trainer.state.log_history if "loss" in one]
    return {
        "losses": [float(one["loss"]) for one in logs],
        "norms": [float(one["grad_norm"]) for one in logs],
    }
