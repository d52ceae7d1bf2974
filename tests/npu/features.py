"""An engine for each feature that works on tensors during an update, with one update of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compression import (
    test_curvature as blocks,
    test_eigenvalues,
    test_momentum,
    test_quantize_training,
    test_training,
    toys,
)
from data_efficiency import test_batching, test_layer_drop, test_seqlen, test_token_drop
from engine import test_generating, test_pipeline
from engine.toys import engine_of
from sequence.models import llama, tokens
from torch import Tensor, nn
from torch.nn import functional as F

import npu
from hadal.comm import Ranks, get_rank
from hadal.plugins import sequence
from hadal.plugins.data_efficiency.layer_drop import drop_layers
from hadal.plugins.data_efficiency.token_drop import convert_to_random_ltd

from . import runs

Update = Callable[[], Tensor]
_folder: list[Path] = []  # of the test


def updates(engine: Any, *batch: Tensor, loss_of: Callable[..., Tensor] | None = None) -> Update:
    """Return an update with the same batch, on the device, in each micro-step.

    It returns the loss of the last one.
    """
    there = [one.to(engine.device) for one in batch]

    def update() -> Tensor:
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(*there) if loss_of is None else loss_of(engine, *there)
            engine.backward(loss)
            engine.step()
        return loss.detach()

    return update


def squares(engine: Any, *given: Tensor) -> Tensor:
    return engine(*given).float().square().mean()


# ---- the model of runs.py, with any keys ---------------------------------------------------------


def words(engine: Any, given: Tensor) -> Tensor:
    return F.cross_entropy(engine(given[:, :-1]).float().flatten(0, 1), given[:, 1:].flatten())


def keys(stage: int = 2, precision: str = "bf16", **changes: Any) -> tuple[Any, Update]:
    model = {name: changes.pop(name) for name in ("model", "freezes") if name in changes}
    engine = runs.built(
        runs.config(stage, precision, changes.pop("zero", None), **changes), **model
    )
    return engine, updates(engine, runs.batches(get_rank(), 1)[0], loss_of=words)


def optimizer(name: str, stage: int = 2, **params: Any) -> tuple[Any, Update]:
    return keys(stage, optimizer={"type": name, "params": {"lr": 0.01, **params}})


def signs(name: str, **params: Any) -> tuple[Any, Update]:
    made = {"type": name, "params": {"lr": 0.01, **params}}
    return keys(0, "fp32", optimizer=made, gradient_clipping=0.0)


# ---- data efficiency and compression -------------------------------------------------------------


def tokens_dropped(stage: int) -> tuple[Any, Update]:
    class Middle(test_token_drop.Layer):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + torch.tanh(self.l(hidden))

    net = nn.Sequential()
    net.h = nn.ModuleList(Middle() for _ in range(4))
    engine = test_token_drop.engine_with(
        Layers(net.h), test_token_drop.section(first=8), stage=stage
    )
    convert_to_random_ltd(engine, Middle)
    return engine, updates(engine, torch.randn(2, 16, 8))


class Layers(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.h = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = layer(x)
        return x.square().mean()


def layers_dropped(stage: int) -> tuple[Any, Update]:
    torch.manual_seed(7)
    model = drop_layers(test_layer_drop.Blocks(), test_layer_drop.Block)
    engine = test_layer_drop.engine_with(model, test_layer_drop.ALWAYS, stage=stage)
    return engine, updates(engine, torch.randn(2, 4))


def short_sequences(truncates: bool) -> tuple[Any, Update]:
    kind = test_seqlen.Untold if truncates else test_seqlen.Told
    engine = test_seqlen.engine_with(kind(), {**test_seqlen.SECTION})
    return engine, updates(engine, test_seqlen.ids())


def batches_by_tokens() -> tuple[Any, Update]:
    engine = test_batching.engine_with(pin_memory=True)

    def update() -> Tensor:
        for _ in range(engine.gradient_accumulation_steps()):
            batch = next(test_batching.batches_of(engine)).to(engine.device, non_blocking=True)
            loss = engine(batch / 60).square().mean()
            engine.backward(loss)
            engine.step()
        return loss.detach()

    return engine, update


def compressed(*sections: dict[str, Any], stage: int = 2, **changes: Any) -> tuple[Any, Update]:
    engine = test_training.engine_with(*sections, stage=stage, **changes)
    return engine, updates(engine, toys.TOKENS, loss_of=squares)


def technique(name: str, shared: dict[str, Any], **params: Any) -> tuple[Any, Update]:
    return compressed(toys.section(name, {"schedule_offset": 0, **shared}, params))


def eigenvalues(**changes: Any) -> tuple[Any, Update]:
    engine = test_eigenvalues.engine_of(blocks.configured(**changes), stage=3)
    return engine, updates(engine, blocks.inputs())


def moq() -> tuple[Any, Update]:
    engine = engine_of(1, toys.Bert(), quantize_training=test_quantize_training.OLD)
    return engine, updates(engine, toys.TOKENS, loss_of=squares)


# ---- models in parts -----------------------------------------------------------------------------


def experts(**options: Any) -> tuple[Any, Update]:
    from moe.models import EXPERTS, WIDTH, an_expert

    from hadal.plugins.moe import MoE

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = MoE(WIDTH, an_expert(), num_experts=EXPERTS, **options)

        def forward(self, x: Tensor) -> Tensor:
            found, balance, _ = self.layer(x)
            return found.float().square().mean() + balance

    engine = engine_of(2, Mixed())
    return engine, updates(engine, torch.randn(7, WIDTH))


def experts_of_transformers() -> tuple[Any, Update]:
    from moe.test_blocks import model_of

    model = model_of("qwen3_moe")
    section = {"enabled": True, "autoep_size": 2}
    engine = engine_of(2, model, expert_parallel=section, bf16={"enabled": True})
    return engine, updates(engine, torch.randint(1, 32, (2, 8)), loss_of=next_tokens)


def next_tokens(engine: Any, given: Tensor) -> Tensor:
    return engine(input_ids=given, labels=given, use_cache=False).loss


def of_transformers(heads: int = 4, **changes: Any) -> tuple[Any, Update]:
    engine = engine_of(changes.pop("stage", 2), llama(heads, heads), **changes)
    return engine, updates(engine, tokens(0)["input_ids"], loss_of=next_tokens)


def in_stages(schedule: str, chunks: int) -> tuple[Any, Update]:
    section = {"pipeline": {"schedule": schedule}, "zero_optimization": {"stage": 1}}
    engine = test_pipeline.engine_of(2, section, test_pipeline.module_of(2, chunks=chunks))
    batch = [one.to(engine.device) for one in test_pipeline.batch(0)]

    def data() -> Iterator[Any]:
        while True:
            yield tuple(batch)

    given = data()
    return engine, lambda: engine.train_batch(given)


class Ring(nn.Module):
    """Attention in a ring, and the cross entropy of a vocabulary and a sequence in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        group = Ranks.world().group
        x = self.first(x).unflatten(-1, (2, -1)).transpose(1, 2)
        x = sequence.ring_attention(x, x, x, group).transpose(1, 2).flatten(2)
        loss = sequence.linear_cross_entropy(x, self.head.weight, y, self.head.bias)
        return loss + sequence.sequence_loss(self.head(x), y, group)


def ring() -> tuple[Any, Update]:
    engine = engine_of(2, Ring())
    return engine, updates(engine, torch.randn(2, 6, 8), torch.randint(6, (2, 6)))


class Heads(nn.Module):
    """Six heads on two ranks, which share three heads of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 48)
        self.attention = sequence.DistributedAttention(self.local, Ranks.world().group)

    @staticmethod
    def local(*given: Tensor) -> Tensor:
        moved = [one.transpose(1, 2) for one in given]
        return F.scaled_dot_product_attention(*moved, enable_gqa=True).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        given = [one.unflatten(-1, (-1, 4)) for one in self.first(x).split((24, 12, 12), dim=-1)]
        return self.attention(*given, 0).square().mean()


def heads() -> tuple[Any, Update]:
    engine = engine_of(2, Heads())
    return engine, updates(engine, torch.randn(2, 6, 8))


def tiled() -> tuple[Any, Update]:
    from sequence.test_tiles import WIDTH, WORDS, Head

    engine = engine_of(2, Head())
    x, y = torch.randn(2, 8, WIDTH), torch.randint(WORDS, (2, 8))
    return engine, updates(engine, x, y, loss_of=lambda engine, x, y: engine(x, y, tiles=2))


def generating(stage: int) -> tuple[Any, Update]:
    """Each update generates with its weights first, as in training by rewards."""
    engine = test_generating.hybrid(stage, test_generating.Writer())
    given = torch.ones(2, 6, device=engine.device)
    train = updates(engine, given, loss_of=squares)

    def update() -> Tensor:
        engine.generate(given, 4)
        return train()

    return engine, update


def sparse_attention(length: int) -> tuple[Any, Update]:
    from hadal.plugins.sparse_attention import FixedSparsityConfig, SparseSelfAttention

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.attention = SparseSelfAttention(FixedSparsityConfig(2), max_seq_length=2048)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).unflatten(-1, (2, -1)).transpose(1, 2)
            return self.attention(x, x, x).square().mean()

    engine = engine_of(2, Attending())
    return engine, updates(engine, torch.randn(1, length, 8))


def monitored(name: str) -> tuple[Any, Update]:
    return keys(**{name: {"enabled": True, "output_path": str(_folder[0])}})


def on_disk() -> tuple[Any, Update]:
    disk = {"device": "nvme", "nvme_path": str(_folder[0])}
    return keys(3, zero={"offload_optimizer": disk, "offload_param": disk})


# ---- the table -----------------------------------------------------------------------------------


class Feature(NamedTuple):
    build: Callable[[], tuple[Any, Update]]
    waits: Collection[int] = (0,)
    """How often the host may wait in an update; a copy that it waits for may be over already."""
    where: str = ""
    """The module that waits; docs/gpus.md gives the reason."""
    is_rare: bool = False
    """Another feature here runs most of the same code: this one is a slow test."""


def rare(build: Callable[[], tuple[Any, Update]], *waits: int, where: str = "") -> Feature:
    return Feature(build, waits or (0,), where, is_rare=True)


HOST = {"device": "cpu"}
ALL_ON_HOST = {"offload_optimizer": HOST, "offload_param": HOST}
CODED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
FEATURES: dict[str, Feature] = {
    "fp32": Feature(partial(keys, 1, "fp32")),
    "fp16": rare(partial(keys, 3, "fp16"), 1, where="engine/update.py"),
    "fp16 with a constant scale": rare(
        partial(keys, bf16={"enabled": False}, fp16={"enabled": True, "loss_scale": 8})
    ),
    "torch_autocast": Feature(
        partial(keys, 2, "fp32", torch_autocast={"enabled": True, "dtype": "bfloat16"})
    ),
    "amp": rare(
        partial(keys, 0, "fp32", amp={"enabled": True, "opt_level": "O2"}),
        *(0, 1),
        where="engine/update.py",
    ),
    "communication_data_type": rare(partial(keys, communication_data_type="bf16")),
    "data_types": rare(partial(keys, data_types={"grad_accum_dtype": "fp32"})),
    "gradient_clipping 0": rare(partial(keys, gradient_clipping=0.0)),
    "max_skipped_updates": rare(partial(keys, max_skipped_updates=3)),
    "sparse_gradients": Feature(partial(keys, 1, sparse_gradients=True), {3}, "comm/rows.py"),
    "zero_hpz_partition_size": rare(partial(keys, 3, zero={"zero_hpz_partition_size": 2})),
    "mics_shard_size": rare(partial(keys, 3, zero={"mics_shard_size": 2})),
    "ZeRO++": Feature(partial(keys, 3, zero=CODED)),
    "divergent_ranks": rare(partial(keys, 3, zero={"divergent_ranks": True})),
    "enable_sanity_checks": rare(
        partial(keys, 3, zero={"enable_sanity_checks": True}),
        *range(1, 100),
        where="zero/sanity.py",
    ),
    "offload_optimizer": Feature(
        partial(keys, 2, zero={"offload_optimizer": HOST}), range(7), "zero/gradients.py"
    ),
    "offload_param": rare(partial(keys, 3, zero=ALL_ON_HOST), *range(7), where="zero/gradients.py"),
    "offload to a disk": rare(
        on_disk,
        *range(200),
        where="zero/gradients.py zero/offload.py offload/crossing.py",
    ),
    "zero_quantized_nontrainable_weights": rare(
        partial(keys, 3, zero={"zero_quantized_nontrainable_weights": True}, freezes=True)
    ),
    # ---- optimizers
    "AdamW and a scheduler": rare(partial(keys, scheduler=runs.SCHEDULER)),
    **{name: rare(partial(optimizer, name)) for name in ("Adam", "Adagrad", "SGD")},
    "Lion": Feature(partial(optimizer, "Lion")),
    # These read no flag on the device: the host decides whether gradients are finite.
    **{
        name: Feature(partial(optimizer, name), {1}, "engine/update.py", name == "NAdam")
        for name in ("Lamb", "Muon", "NAdam")
    },
    "OneBitAdam": Feature(partial(signs, "OneBitAdam", freeze_step=1)),
    "OneBitAdam, before": rare(partial(signs, "OneBitAdam", freeze_step=100)),
    "OneBitLamb": rare(partial(signs, "OneBitLamb", freeze_step=1)),
    "OneBitLamb, before": rare(partial(signs, "OneBitLamb", freeze_step=100)),
    "ZeroOneAdam": Feature(partial(signs, "ZeroOneAdam", var_freeze_step=1)),
    "ZeroOneAdam, before": rare(partial(signs, "ZeroOneAdam", var_freeze_step=100)),
    # ---- activations
    "activation_checkpointing": rare(partial(keys, activation_checkpointing={"modules": "units"})),
    "cpu_checkpointing": Feature(
        partial(keys, activation_checkpointing={"modules": "units", "cpu_checkpointing": True})
    ),
    "memory_budget": rare(partial(keys, activation_checkpointing={"memory_budget": 0.5})),
    "contiguous_memory_optimization": rare(
        partial(
            keys,
            activation_checkpointing={
                "modules": "units",
                "contiguous_memory_optimization": True,
                "partition_activations": True,
                "number_checkpoints": 3,
            },
        )
    ),
    "synchronize_checkpoint_boundary": rare(
        partial(
            keys,
            activation_checkpointing={"modules": "units", "synchronize_checkpoint_boundary": True},
        ),
        24,
        where="activation_checkpointing/function.py",
    ),
    # ---- data efficiency and compression
    "random_ltd": Feature(partial(tokens_dropped, 3)),
    "progressive_layer_drop": Feature(partial(layers_dropped, 3)),
    "curriculum_learning": rare(partial(short_sequences, False)),
    "curriculum_learning, truncated": Feature(partial(short_sequences, True)),
    "dynamic_batching": Feature(batches_by_tokens),
    "eigenvalue": Feature(eigenvalues, range(1, 60), "compression/training.py zero/offload.py"),
    "eigenvalue in another update": rare(partial(eigenvalues, gas_boundary_resolution=100)),
    "quantize_training": Feature(moq),
    "weight_quantization": rare(
        partial(
            technique,
            "weight_quantization",
            {},
            start_bits=8,
            target_bits=4,
            quantization_period=50,
        )
    ),
    **{
        f"activation_quantization, {kind}": Feature(
            partial(technique, "activation_quantization", {"range_calibration": kind}, bits=8),
            is_rare=kind == "static",
        )
        for kind in ("dynamic", "static")
    },
    # Counting how many blocks of each layer are pruned, as often as layers reach their limit.
    "pruning of blocks": Feature(
        partial(compressed, test_momentum.GROWING), range(1, 4), "compression/masks.py"
    ),
    "pruning by size": rare(partial(compressed, test_momentum.FIXED)),
    "pruning by trained scores": Feature(partial(compressed, test_momentum.LEARNED)),
    "rows and heads": rare(partial(compressed, test_momentum.SMALLER)),
    # ---- models in parts, long sequences
    "MoE": Feature(partial(experts, ep_size=2, k=2), range(2), "moe/experts.py"),
    "MoE of one rank": rare(partial(experts, ep_size=1, k=1), 0, 1, where="moe/experts.py"),
    "RSample": rare(
        partial(experts, ep_size=2, k=1, noisy_gate_policy="RSample"),
        *range(2),
        where="moe/experts.py",
    ),
    "Jitter": rare(
        partial(experts, ep_size=2, k=4, noisy_gate_policy="Jitter"),
        *range(2),
        where="moe/experts.py",
    ),
    # Models of transformers look for packed documents when they make their mask. torch's grouped
    # product reads the ends of its groups, except on CUDA.
    "expert_parallel": Feature(
        experts_of_transformers, range(1, 16), "moe/experts.py engine/precision.py"
    ),
    "tensor_parallel": Feature(
        partial(of_transformers, tensor_parallel={"autotp_size": 2}, stage=1),
        range(2),
        "engine/precision.py",
    ),
    "sequence_parallel_size": Feature(
        partial(of_transformers, sequence_parallel_size=2),
        range(1, 3),
        "engine/precision.py sequence/huggingface.py",
    ),
    "DistributedAttention": Feature(heads),
    "ring_attention and losses": Feature(ring),
    "tiles": Feature(tiled),
    "hybrid_engine": rare(partial(generating, 3), 4, where="zero/offload.py"),
    "sparse_attention": rare(partial(sparse_attention, 2048)),
    "sparse_attention, computed whole": Feature(partial(sparse_attention, 256)),
    **{
        f"pipeline, {schedule}": Feature(
            partial(in_stages, schedule, chunks), is_rare=schedule != "interleaved"
        )
        for schedule, chunks in test_pipeline.SCHEDULES
    },
    # ---- logs
    "steps_per_print": rare(
        partial(keys, steps_per_print=1), *(0, 2), where="engine/clocks.py engine/report.py"
    ),
    **{
        name: rare(partial(monitored, name))
        for name in ("jsonl_monitor", "csv_monitor", "tensorboard")
    },
    "comms_logger": rare(partial(keys, comms_logger={"enabled": True})),
    "flops_profiler in another update": rare(
        partial(keys, flops_profiler={"enabled": True, "profile_step": 100})
    ),
    "breakdowns": Feature(partial(keys, memory_breakdown=True, wall_clock_breakdown=True)),
}


def waits_of(name: str, folder: Path) -> list[npu.Wait]:
    """Return the waits of the host in the fourth update; files go into a folder."""
    _folder[:] = [folder]
    with npu.asynchronous(), npu.with_float64():
        engine, update = FEATURES[name].build()
        for _ in range(3):
            update()
        with npu.waits() as found:
            update()
        engine.destroy()
    return found
