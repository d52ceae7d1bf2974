"""What `hadal plan` says before a run, against the run: the device's memory at its peak.

Each case is planned on the meta device and then trained for some updates, on the accelerator that
there is, or on the test device of `tests/npu`, whose allocator counts as an accelerator's does. The
peak is that of the allocator in one update, without what was there before `initialize`. Stages of a
pipeline wait for each other forever on the test device, which receives in order: without an
accelerator they train on CPUs, where the bytes of all live tensors are counted.

See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise, repeat
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
_MIB = 1 << 20
_UPDATES = 4
_MOST_OVER, _MOST_UNDER = 0.05, 0.03
_LIBRARIES = ("communicators", "context", "fragments")
Batch = dict[str, Tensor]


# ---- models --------------------------------------------------------------------------------------


def llama(
    rows: int = 2, length: int = 128, words: int = 4000, **keys: Any
) -> tuple[nn.Module, Batch]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": words}
    keys = {"attn_implementation": "eager", **keys}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **keys))
    return model, tokens(rows, length, words)


def staged_llama() -> tuple[nn.Module, Batch]:
    """The same with more activations than logits, so that stages are alike."""
    return llama(rows=8, words=500)


def exchanging_llama() -> tuple[nn.Module, Batch]:
    """The same with an attention whose heads ranks of one sequence exchange."""
    from transformers import AttentionInterface

    AttentionInterface.register("scores", scores)
    return llama(rows=1, length=512, attn_implementation="scores")


def scores(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any
) -> tuple[Tensor, None]:
    """Attention that keeps its scores on any device, as fused kernels do not."""
    shares = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(shares, dim=1) for one in (key, value))
    found = (query @ key.mT) * query.shape[-1] ** -0.5
    later = torch.ones(found.shape[-2:], dtype=torch.bool, device=found.device).triu(1)
    found = found.masked_fill(later, float("-inf")).softmax(-1)
    return (found @ value).transpose(1, 2), None


def mixtral(rows: int = 2, length: int = 128) -> tuple[nn.Module, Batch]:
    """Experts that ranks share, each of which gets as many tokens on average."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4000}
    config = MixtralConfig(**sizes, num_local_experts=8, attn_implementation="eager")
    return MixtralForCausalLM(config), tokens(rows, length, 4000)


def gpt2(rows: int = 4, length: int = 128) -> tuple[nn.Module, Batch]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=256, n_layer=6, n_head=4, vocab_size=4000, n_positions=256)
    config._attn_implementation = "eager"
    return GPT2LMHeadModel(config), tokens(rows, length, 4000)


def qwen2(rows: int = 2, length: int = 192) -> tuple[nn.Module, Batch]:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 8000}
    config = Qwen2Config(**sizes, tie_word_embeddings=True, attn_implementation="eager")
    return Qwen2ForCausalLM(config), tokens(rows, length, 8000)


def lora() -> tuple[nn.Module, Batch]:
    """Adapters beside frozen weights."""
    model, batch = llama(rows=4)
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.endswith(("q_proj", "v_proj")):
            model.set_submodule(name, Adapted(module))
    return model, batch


class Adapted(nn.Module):
    """A frozen layer and a product of two narrow ones."""

    def __init__(self, layer: nn.Linear, width: int = 8) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, width, bias=False)
        self.up = nn.Linear(width, layer.out_features, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        found: Tensor = self.layer(values) + self.up(self.down(values))
        return found


class Convolution(nn.Module):
    """A convolution of 3 x 3 by products of shifted images, for devices without its kernel."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, outputs, inputs))

    def forward(self, images: Tensor) -> Tensor:
        rows, columns = images.shape[2:]
        wider = nn.functional.pad(images, (1, 1, 1, 1))
        parts = [
            weight @ wider[:, :, at // 3 :, at % 3 :][:, :, :rows, :columns].flatten(2)
            for at, weight in enumerate(self.weight)
        ]
        return torch.stack(parts).sum(0).unflatten(-1, (rows, columns))


class Convolutions(nn.Module):
    """A network of convolutions, with norms over the batch."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128, 128)
        self.blocks = nn.ModuleList(
            nn.Sequential(Convolution(a, b), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in pairwise(widths)
        )
        self.head = nn.Linear(128, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            images = nn.functional.max_pool2d(block(images), 2)
        return nn.functional.cross_entropy(self.head(images.mean((2, 3))), labels)


def convolutions() -> tuple[nn.Module, Batch]:
    images = torch.ones(16, 3, 32, 32)
    return Convolutions(), {"images": images, "labels": torch.zeros(16, dtype=torch.long)}


class Experts(nn.Module):
    """Blocks whose feed-forward is a mixture of experts; each token goes to its best one."""

    def __init__(self, width: int = 192, experts: int = 4, blocks: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(2000, width)
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(blocks))
        self.experts = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                for _ in range(experts)
            )
            for _ in range(blocks)
        )

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        values = self.table(input_ids)
        for gate, experts in zip(self.gates, self.experts, strict=True):
            shares = gate(values).softmax(-1)
            parts = [
                share * each(values)
                for share, each in zip(shares.split(1, -1), experts, strict=True)
            ]
            values = values + torch.stack(parts).sum(0)
        return nn.functional.cross_entropy(
            (values @ self.table.weight.T).flatten(0, 1), labels.flatten()
        )


def experts() -> tuple[nn.Module, Batch]:
    return Experts(), tokens(2, 128, 2000)


def tokens(rows: int, length: int, vocabulary: int) -> Batch:
    ids = torch.arange(rows * length).reshape(rows, length) % vocabulary
    return {"input_ids": ids, "labels": ids}


# ---- cases ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model and a configuration on some ranks."""

    build: Callable[..., tuple[nn.Module, Batch]]
    ranks: int = 2
    stage: int = 2
    dtype: str = "bf16"
    accumulation: int = 1
    zero: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """The ds_config."""
        found: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.accumulation,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": self.stage, **_BUCKETS, **self.zero},
            **self.keys,
        }
        return found | ({self.dtype: {"enabled": True}} if self.dtype != "fp32" else {})

    @property
    def is_on_host(self) -> bool:
        """True if it trains on CPUs."""
        return "pipeline" in self.keys and not torch.accelerator.is_available()


_BUCKETS = {
    "reduce_bucket_size": 1_000_000,
    "allgather_bucket_size": 1_000_000,
    "stage3_param_persistence_threshold": 1000,
    "stage3_max_live_parameters": 2_000_000,
    "stage3_max_reuse_distance": 2_000_000,
    "stage3_prefetch_bucket_size": 1_000_000,
}
_WHOLE = {"reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000}
_UNITS = {"activation_checkpointing": {"modules": "units"}}
_HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
_BOTH = {**_HOST, "offload_param": {"device": "cpu", "pin_memory": True}}

_TENSOR = {"tensor_parallel": {"autotp_size": 2}}
_SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
    "zero_bubble": {"schedule": "zero_bubble"},
}
_EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}

CASES = {
    **{f"llama, stage {s}, 2 ranks": Case(llama, stage=s) for s in range(4)},
    **{f"llama, stage {s}, 4 ranks": Case(llama, 4, s) for s in (0, 2, 3)},
    **{f"llama, stage {s}, 3 ranks": Case(llama, 3, s) for s in (1, 3)},
    "llama, 1 rank": Case(llama, 1, 0),
    **{f"llama, stage {s}, fp32": Case(llama, stage=s, dtype="fp32") for s in (0, 1, 3)},
    **{f"llama, stage {s}, fp16": Case(llama, stage=s, dtype="fp16") for s in (2, 3)},
    **{
        f"llama, stage {s}, accumulation 4": Case(llama, stage=s, accumulation=4) for s in (0, 2, 3)
    },
    **{f"llama, stage {s}, recomputed": Case(llama, stage=s, keys=_UNITS) for s in (1, 3)},
    "llama, stage 2, whole buckets": Case(llama, stage=2, zero=_WHOLE),
    **{
        f"llama, stage {s}, optimizer on the host": Case(llama, stage=s, zero=_HOST) for s in (2, 3)
    },
    "llama, stage 3, all on the host": Case(llama, stage=3, zero=_BOTH),
    **{f"gpt2, stage {s}": Case(gpt2, stage=s) for s in (1, 3)},
    **{f"qwen2 with tied weights, stage {s}": Case(qwen2, stage=s) for s in (2, 3)},
    **{f"adapters, stage {s}": Case(lora, stage=s) for s in (2, 3)},
    **{f"experts, stage {s}": Case(experts, stage=s) for s in (1, 3)},
    "llama, 2 tensor ranks": Case(llama, stage=1, keys=_TENSOR),
    "llama, 2 x 2 tensor ranks, stage 3": Case(llama, 4, 3, keys=_TENSOR),
    "llama, 2 tensor ranks, sequences cut": Case(
        llama, stage=0, keys={"tensor_parallel": {"autotp_size": 2, "sequence_parallel": True}}
    ),
    **{f"mixtral, 2 expert ranks, stage {s}": Case(mixtral, 2, s, keys=_EXPERTS) for s in (1, 3)},
    **{
        f"llama, 2 sequence ranks, stage {s}": Case(
            exchanging_llama, stage=s, keys={"sequence_parallel_size": 2}
        )
        for s in (1, 3)
    },
    **{
        f"llama, 2 stages, {name}": Case(
            staged_llama,
            stage=1,
            accumulation=4,
            keys={"pipeline": {"auto": True, "stages": 2} | keys},
        )
        for name, keys in _SCHEDULES.items()
    },
    **{f"convolutions, stage {s}, fp32": Case(convolutions, stage=s, dtype="fp32") for s in (0, 2)},
}


# ---- a rank --------------------------------------------------------------------------------------


def planned(case: Case) -> dict[str, Any]:
    """Return the bytes of each kind on the device at the peak, without values."""
    import hadal
    from hadal.engine.clusters import cluster_here

    with torch.device("meta"):
        model, batch = case.build()
    cluster: Any = f"h100x{case.ranks}"
    if case.is_on_host:
        cluster = cluster_here(torch.device("cpu"), case.ranks)
    found = hadal.plan(model, case.config, batch, cluster=cluster)
    assert found.peak is not None
    return {need.kind: need.held.device for need in found.kinds} | {
        "moment": f"{found.peak.phase} {found.peak.unit}"
    }


def measured(case: Case) -> int:
    """Return the most bytes in use in one update."""
    import hadal

    model, batch = case.build()
    gc.collect()
    if case.is_on_host:
        return measured_on_host(case, model, batch)
    before = torch.accelerator.memory_allocated()
    engine, *_ = hadal.initialize(model=model, config=case.config)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[case.dtype]
    peak = 0
    for _ in range(_UPDATES):
        torch.accelerator.reset_peak_memory_stats()
        if hasattr(engine, "train_batch"):
            engine.train_batch(repeat(batch))
        else:
            _train(engine, batch, case, dtype)
        peak = torch.accelerator.max_memory_allocated() - before
    engine.destroy()
    return peak


def measured_on_host(case: Case, model: nn.Module, batch: Batch) -> int:
    """Return the most bytes of live tensors in one update of a pipeline."""
    import hadal
    from hadal.engine.activations import _Recorder

    recorder = _Recorder([], {}, {})
    for tensor in (*model.parameters(), *model.buffers(), *batch.values()):
        recorder._known[tensor.untyped_storage()] = True
    with recorder:
        engine, *_ = hadal.initialize(model=model, config=case.config)
        for _ in range(_UPDATES):
            recorder.segments[-1].peaks[-1] = recorder.now
            engine.train_batch(repeat(batch))
    peak = recorder.segments[-1].peak.total
    engine.destroy()
    return peak


def _train(engine: Any, batch: Batch, case: Case, dtype: torch.dtype) -> None:
    for _ in range(case.accumulation):
        here = {k: _there(v, engine.device, dtype) for k, v in batch.items()}
        output = engine(**here)
        loss = output if isinstance(output, Tensor) else output.loss
        del output
        engine.backward(loss)
        engine.step()
        del loss, here


def _there(values: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return values.to(device, dtype if values.is_floating_point() else None)


def work(names: list[str], output: Path) -> None:
    """Train the cases on this rank, and write the figures on the first."""
    if not torch.accelerator.is_available() and not CASES[names[0]].is_on_host:
        sys.path.insert(0, str(ROOT / "tests"))
        import npu

        npu.join()
    import hadal

    hadal.init_distributed()
    rank = int(os.environ["RANK"])
    for name in names:
        case = CASES[name]
        found = measured(case)
        with (output / f"{rank}.jsonl").open("a") as file:
            file.write(json.dumps([name, found]) + "\n")
    hadal.comm.destroy_process_group()


# ---- the table -----------------------------------------------------------------------------------


def launch(ranks: int, names: list[str], output: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = [sys.executable, __file__, "--work", str(output), *names]
    started = [
        subprocess.Popen(words, env={**os.environ, **shared, "RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(ranks)
    ]
    codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit(f"{ranks} ranks ended with {codes}")


def measure(names: list[str]) -> dict[str, int]:
    """Return the bytes at the peak of the fullest rank by case."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = sorted({(CASES[name].ranks, CASES[name].is_on_host) for name in names})
        for job in jobs:
            own = [n for n in names if (CASES[n].ranks, CASES[n].is_on_host) == job]
            launch(job[0], own, Path(folder))
        lines = [line for file in Path(folder).iterdir() for line in file.read_text().splitlines()]
    found: dict[str, int] = {}
    for name, nbytes in map(json.loads, lines):
        found[name] = max(nbytes, found.get(name, 0))
    return found


def page(memory: list[str], known: Path | None) -> str:
    """Return both tables as a page."""
    from foresight_time import times

    rows = json.loads(known.read_text()) if known else times()
    lines = [
        f"| {row['case']} | {1e3 * row['real']['seconds']:.0f}"
        f" | {1e3 * row['planned']['seconds']:.0f} | {row['error']:+.1%} |"
        for row in rows
    ]
    errors = [abs(row["error"]) for row in rows]
    device = torch.accelerator.current_accelerator() or "the test device, whose allocator counts"
    said = f"{date.today()}, torch {torch.__version__}, {os.cpu_count()} cores"
    return "\n".join(
        [
            "# Plans and real runs",
            "",
            "`make foresight` compares what [`hadal plan`](will_it_fit.md) says with what happens"
            f" then, and writes this page. {said}; memory on {device}.",
            "",
            "## Memory",
            "",
            "The most MiB that the allocator had given out in an update, beside libraries.",
            "",
            "| case | measured | planned | error | planned peak |",
            "|---|---|---|---|---|",
            *memory,
            "",
            "## Time",
            "",
            "Milliseconds of an update on CPUs, after `hadal bench cluster` on the same ranks:"
            f" median of the error {median(errors):.1%}, worst {max(errors):.1%}.",
            "",
            "| case | measured | planned | error |",
            "|---|---|---|---|",
            *lines,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="some cases (default: all)")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write what was measured to a file")
    parser.add_argument("--measured", type=Path, help="such a file, instead of measuring")
    parser.add_argument("--page", type=Path, help="compare times too, and write both tables")
    parser.add_argument("--times", type=Path, help="a file of foresight_time.py, instead of timing")
    parsed = parser.parse_args()
    if parsed.work:
        work(parsed.names, parsed.work)
        return
    sys.path.insert(0, str(ROOT / "benchmarks"))
    chosen = parsed.names or list(CASES)
    found = json.loads(parsed.measured.read_text()) if parsed.measured else measure(chosen)
    errors, rows = [], []
    print(f"{'case':44} {'measured':>9} {'planned':>9} {'error':>7}  at the peak, MiB")
    for name in chosen:
        kinds = planned(CASES[name])
        moment = kinds.pop("moment")
        said = sum(nbytes for kind, nbytes in kinds.items() if kind not in _LIBRARIES)
        errors.append(said / found[name] - 1)
        parts = ", ".join(
            f"{kind} {nbytes / _MIB:.1f}"
            for kind, nbytes in kinds.items()
            if nbytes and kind not in _LIBRARIES
        )
        print(
            f"{name:44} {found[name] / _MIB:9.1f} {said / _MIB:9.1f} {errors[-1]:+7.1%}"
            f"  {moment}: {parts}"
        )
        sizes = f"{found[name] / _MIB:.1f} | {said / _MIB:.1f} | {errors[-1]:+.1%}"
        rows.append(f"| {name} | {sizes} | {moment.strip()} |")
    print(
        f"{len(errors)} cases: {min(errors):+.1%} to {max(errors):+.1%}, median of the error"
        f" {median(map(abs, errors)):.1%}"
    )
    if parsed.page:
        parsed.page.write_text(page(rows, parsed.times))
    if parsed.json:
        parsed.json.write_text(json.dumps(found, indent=1) + "\n")
    if min(errors) < -_MOST_UNDER or max(errors) > _MOST_OVER:
        raise SystemExit(f"goal: at most {_MOST_OVER:.0%} over and {_MOST_UNDER:.0%} under")


if __name__ == "__main__":
    main()
