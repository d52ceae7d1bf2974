"""The planned time of an update beside the real one, over configurations of several models.

The machine is measured first (`hadal bench cluster`), once for each number of ranks. Then each
configuration trains for some updates, and its median is compared. See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peers.model import Gpt
from peers.settings import Workload
from torch import Tensor, nn

GOAL_MEDIAN, GOAL_WORST = 0.10, 0.20
_WARMUPS, _UPDATES = 3, 5


@dataclass(frozen=True)
class Case:
    """One configuration: a model by name, the ranks, and what its ds_config.json has."""

    model: str
    ranks: int = 2
    stage: int = 0
    dtype: str = "fp32"
    accumulation: int = 1
    recomputes: bool = False
    zero: Mapping[str, Any] = field(default_factory=dict)
    parts: str = ""
    """What its ranks share, by `PARTS`."""

    @property
    def label(self) -> str:
        words = [self.model, f"{self.ranks} ranks", f"stage {self.stage}", self.dtype]
        words += [f"{self.accumulation} micro-steps"] * (self.accumulation > 1)
        words += ["recomputed"] * self.recomputes
        words += [self.parts] * bool(self.parts)
        return ", ".join([*words, *(f"{key} {value:,}" for key, value in self.zero.items())])

    @property
    def config(self) -> dict[str, Any]:
        raw: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.accumulation,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": self.stage, **self.zero},
            "gradient_clipping": 1.0,
        }
        raw |= {self.dtype: {"enabled": True}} if self.dtype != "fp32" else {}
        raw |= {"activation_checkpointing": {"modules": "units"}} if self.recomputes else {}
        return raw | PARTS.get(self.parts, {})


PARTS: Mapping[str, dict[str, Any]] = {
    "slices": {"tensor_parallel": {"autotp_size": 2}},
    "sequences": {"sequence_parallel_size": 2},
    "experts": {"expert_parallel": {"enabled": True, "autoep_size": 2}},
    "stages": {"pipeline": {"auto": True, "stages": 2}},
}

CASES = (
    Case("gpt", 1, 0, "bf16"),
    Case("gpt", 2, 1, "bf16"),
    Case("gpt", 2, 2, "fp32", 2),
    Case("gpt", 2, 3, "bf16"),
    Case("gpt2", 1, 0, "fp32", 2, recomputes=True),
    Case("gpt2", 2, 1, "fp32", zero={"reduce_bucket_size": 1_000_000}),
    Case("gpt2", 2, 2, "bf16", 2),
    Case("llama", 1, 0, "fp32"),
    Case("llama", 2, 0, "fp32"),
    Case("llama", 2, 3, "bf16", recomputes=True),
    Case("cnn", 1, 0, "fp32"),
    Case("cnn", 2, 2, "fp32"),
    Case("llama", 2, 1, "fp32", parts="slices"),
    Case("llama", 2, 1, "fp32", parts="sequences"),
    Case("mixtral", 2, 1, "fp32", parts="experts"),
    Case("llama", 2, 1, "fp32", 4, parts="stages"),
)


# ---- models and batches --------------------------------------------------------------------------


class Cnn(nn.Module):
    """Convolutions of growing width; it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128, 256)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(before, width, 3, stride=2, padding=1),
                    nn.GroupNorm(8, width),
                    nn.ReLU(),
                    nn.Conv2d(width, width, 3, padding=1),
                    nn.ReLU(),
                )
                for before, width in pairwise(widths)
            )
        )
        self.head = nn.Linear(widths[-1], 100)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(images).mean(dim=(2, 3))).logsumexp(dim=1).mean()


def _cnn() -> tuple[nn.Module, Any]:
    return Cnn(), (torch.zeros(8, 3, 96, 96),)


def _gpt() -> tuple[nn.Module, Any]:
    """The model of 91 M parameters that `step.py` measures."""
    workload = Workload()
    tokens = torch.zeros(1, workload.sequence + 1, dtype=torch.long)
    return Gpt(workload), (tokens,)


def _gpt2() -> tuple[nn.Module, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=8192, n_positions=128, n_embd=384, n_layer=6, n_head=6, use_cache=False
    )
    return GPT2LMHeadModel(config), _tokens(2, 128)


def _llama() -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config), _tokens(2, 128)


def _mixtral() -> tuple[nn.Module, Any]:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4000}
    return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=8)), _tokens(2, 128)


def _tokens(samples: int, length: int) -> dict[str, Tensor]:
    # Different ones, which are sent to different experts.
    tokens = torch.arange(samples * length).view(samples, length) * 31 % 4000
    return {"input_ids": tokens, "labels": tokens}


MODELS: Mapping[str, Callable[[], tuple[nn.Module, Any]]] = {
    "gpt": _gpt,
    "gpt2": _gpt2,
    "llama": _llama,
    "cnn": _cnn,
    "mixtral": _mixtral,
}


# ---- what is planned, and what is measured -------------------------------------------------------


def planned(case: Case, cluster_file: Path) -> dict[str, Any]:
    """The planned seconds of an update, and its parts that take time."""
    import hadal

    with torch.device("meta"):
        model, batch = MODELS[case.model]()
    found = hadal.plan(model, case.config, batch, cluster=str(cluster_file)).time
    assert found is not None  # a batch is given
    parts = {name: part.exposed for name, part in found.parts.items() if part.exposed}
    return {"seconds": found.seconds, "parts": parts}


def measured(case: Case, seconds: float) -> dict[str, float]:
    """The real seconds of each update on this rank, and of their parts."""
    import torch.distributed as dist

    import hadal

    torch.manual_seed(0)
    model, batch = MODELS[case.model]()
    engine = hadal.initialize(model=model, config=case.config)[0]
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
    if case.dtype != "fp32":
        args = tuple(one.to(torch.bfloat16) if one.is_floating_point() else one for one in args)
    spent: list[list[float]] = []
    begun, over = time.perf_counter(), torch.zeros(1)
    while not over:
        dist.barrier()
        forward = backward = step = 0.0
        if case.parts == "stages":
            start = time.perf_counter()
            engine.train_batch(repeat(batch))
            forward = time.perf_counter() - start
        for _ in range(case.accumulation * (case.parts != "stages")):
            start = time.perf_counter()
            output = engine(*args, **kwargs)
            loss = output if isinstance(output, Tensor) else output.loss
            between = time.perf_counter()
            engine.backward(loss)
            before = time.perf_counter()
            engine.step()
            forward += between - start
            backward += before - between
            step += time.perf_counter() - before
        spent.append([forward, backward, step])
        enough = len(spent) >= _WARMUPS + _UPDATES
        over.fill_(enough and time.perf_counter() - begun > seconds)
        dist.broadcast(over, 0)
    engine.destroy()
    parts = [median(each) for each in zip(*spent[_WARMUPS:], strict=True)]
    whole = median(sum(each) for each in spent[_WARMUPS:])
    return dict(zip(("seconds", "forward", "backward", "step"), [whole, *parts], strict=True))


def _take_part(folder: Path, seconds: float, only: str) -> None:
    """Measure, as one of some ranks, the cases of that many ranks."""
    import hadal

    hadal.init_distributed()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for number, case in enumerate(CASES):
        if case.ranks == ranks and only in case.label:
            found = measured(case, seconds)
            (folder / f"{number}.{rank}").write_text(json.dumps(found))


# ---- the comparison ------------------------------------------------------------------------------


def _hadal(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "hadal", *words], check=True, stdout=subprocess.DEVNULL)


def times(seconds: float = 4.0, only: str = "") -> list[dict[str, Any]]:
    """Compare plans and reality; return and print a row for each case."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sorted({case.ranks for case in CASES if only in case.label}):
            cluster = Path(folder, f"cluster{ranks}.json")
            _hadal("bench", "cluster", "--ranks", str(ranks), "--output", str(cluster))
            started = ("run", "--quiet", "--num_accelerators", str(ranks))
            words = ("--seconds", str(seconds), "--only", only)
            _hadal(*started, __file__, "--worker", folder, *words)
            for number, case in enumerate(CASES):
                if case.ranks == ranks and only in case.label:
                    found = [
                        json.loads(Path(folder, f"{number}.{rank}").read_text())
                        for rank in range(ranks)
                    ]
                    real = {name: max(one[name] for one in found) for name in found[0]}
                    rows.append(_row(case, planned(case, cluster), real))
    errors = [abs(row["error"]) for row in rows]
    print(f"median {median(errors):.1%} (goal {GOAL_MEDIAN:.0%}), worst {max(errors):.1%}", end="")
    print(f" (goal {GOAL_WORST:.0%})")
    return rows


def _row(case: Case, plan: dict[str, Any], real: dict[str, Any]) -> dict[str, Any]:
    error = plan["seconds"] / real["seconds"] - 1
    parts = ", ".join(f"{name} {part * 1e3:.0f}" for name, part in plan["parts"].items())
    print(
        f"{case.label:<62} planned {plan['seconds'] * 1e3:7.1f} ms, real"
        f" {real['seconds'] * 1e3:7.1f} ms, {error:+6.1%}  ({parts}; real forward"
        f" {real['forward'] * 1e3:.0f}, backward {real['backward'] * 1e3:.0f}, step"
        f" {real['step'] * 1e3:.0f})",
        flush=True,
    )
    return {"case": case.label, "planned": plan, "real": real, "error": error}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each case")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        _take_part(options.worker, options.seconds, options.only)
        return 0
    rows = times(options.seconds, options.only)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
