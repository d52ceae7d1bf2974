"""Every block of code in the pages is run by a test, or is marked as a command or as output.

The parts of programs run here, each after what its page takes for granted; whole programs run as
pasted, in the tests that `WHOLE` names.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint.deepspeed_cases import toy, unpack
from ranks import RankPools
from torch import Tensor, nn

import hadal
from hadal.cli.main import main
from hadal.config import load_config

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GENERATED = {DOCS / name for name in ("api", "commands", "configuration", "examples")}
"""Folders that building the site leaves; it makes index.md too."""
PAGES = [
    page
    for page in sorted([*ROOT.glob("*.md"), *DOCS.glob("**/*.md"), *ROOT.glob("*/README.md")])
    if page.parent not in GENERATED and page.name != "index.md"
]
BLOCK = re.compile(r"^( *)```(\S*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
SHOWN = {"sh", "console", "text", "diff"}
"""Commands, commands with what they print, output, and changes."""
DIRECTIVES = {"{toctree}", "{eval-rst}"}
"""What the site makes of these, docs/conf.py tells."""
WHOLE = {
    "CONTRIBUTING.md": "test_contributing.py",
    "README.md": "test_readme.py",
    "docs/from_pytorch.md": "test_getting_started.py",
    "docs/getting_started.md": "test_getting_started.py",
    "docs/listeners.md": "engine/test_listeners.py",
    "docs/scaling.md": "test_getting_started.py",
    "docs/transformers.md": "test_getting_started.py",
    **{
        f"docs/tutorials/{page.name}": "test_getting_started.py"
        for page in DOCS.glob("tutorials/*.md")
        if page.stem != "slurm_container"
    },
}
LATE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 1},
}


def blocks_of(page: Path, *languages: str) -> list[str]:
    return [code for _, language, code in BLOCK.findall(page.read_text()) if language in languages]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_block_says_what_it_is(page: Path) -> None:
    assert page.read_text().count("```") % 2 == 0
    languages = {language for _, language, _ in BLOCK.findall(page.read_text())}
    assert languages <= {"json", "python"} | SHOWN | DIRECTIVES


def test_every_page_with_python_is_run() -> None:
    found = {named(page) for page in PAGES if blocks_of(page, "python")}
    assert found == WHOLE.keys() | {f"docs/{name}.md" for name in PARTS}
    for page, test in WHOLE.items():
        assert page.removeprefix("docs/").removesuffix(".md") in (ROOT / "tests" / test).read_text()


def test_the_reference_has_every_module_that_pages_import() -> None:
    code = "\n".join(part for page in PAGES for part in blocks_of(page, "python"))
    imported = set(re.findall(r"^(?:from|import) (hadal[\w.]*)", code, re.MULTILINE))
    (modules,) = re.findall(r"MODULES = \((.*?)\n\)", (DOCS / "conf.py").read_text(), re.DOTALL)
    assert imported <= set(re.findall(r'"(\S+)"', modules))


@pytest.mark.parametrize(
    ("page", "text"),
    [
        pytest.param(page, text, id=f"{named(page)}-{number}")
        for page in PAGES
        for number, text in enumerate(blocks_of(page, "json"))
    ],
)
def test_a_configuration_is_accepted(page: Path, text: str) -> None:
    """A section alone is accepted with a size of batches."""
    whole = text if text.startswith("{") else f"{{{text}}}"
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "elasticity")
    if not any(f'"{key}":' in whole for key in sizes):
        whole = whole.replace("{", '{"train_micro_batch_size_per_gpu": 1, ', 1)
    load_config(whole, world_size=4 if "parallel" in whole or "stages" in whole else 1)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_are_understood_by_a_shell(page: Path) -> None:
    for code in blocks_of(page, "sh"):
        code = re.sub(r"<[a-z ]+>", "WORD", code)
        done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr + code


# ---- parts of programs, and what their pages take for granted ------------------------------------


def engine_of(model: nn.Module, **changes: Any) -> Any:
    return hadal.initialize(model=model, config=CONFIG | changes)[0]


def train(engine: Any, *batch: Tensor) -> None:
    engine.backward(engine(*batch).float().square().mean())
    engine.step()


def an_engine() -> dict[str, Any]:
    model = nn.Linear(4, 4)
    return {"model": model, "engine": engine_of(model), "epoch": 1, "loss": 0.5}


def a_checkpoint() -> dict[str, Any]:
    """A model, and a checkpoint and an export of one like it."""
    given = an_engine()
    train(given["engine"], torch.randn(2, 4))
    given["engine"].save_checkpoint("checkpoints")
    assert not main(["checkpoint", "export", "checkpoints", "exported", "--format", "dcp"])
    given["engine"].destroy()
    model = nn.Linear(4, 4)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def a_checkpoint_of_deepspeed() -> dict[str, Any]:
    if hadal.comm.get_rank() == 0:  # the ranks share the folder
        unpack("stage2_bf16_world2", Path("their_checkpoints"))
    hadal.comm.barrier()
    model = toy.Toy()
    engine, *_ = hadal.initialize(
        model=model, model_parameters=toy.groups_of(model), config=toy.config_of(2, "bf16")
    )
    return {"engine": engine}


def a_trainer() -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments("out", use_cpu=True, report_to=[])
    return {"trainer": Trainer(nn.Linear(4, 4), arguments)}


def something_to_compress() -> dict[str, Any]:
    linear = {"params": {"start_bits": 8, "target_bits": 8}, "modules": ["*"]}
    quantized = {
        "shared_parameters": {"enabled": True, "schedule_offset": 0, "quantize_groups": 1},
        "different_groups": {"all": linear},
    }
    config = CONFIG | {"compression_training": {"weight_quantization": quantized}}
    return {"model": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), "config": config}


def something_compressed() -> dict[str, Any]:
    from hadal.compression import init_compression, redundancy_clean

    given = something_to_compress()
    model = init_compression(given["model"], given["config"])
    engine, *_ = hadal.initialize(model=model, config=given["config"])
    train(engine, torch.randn(2, 8))
    redundancy_clean(engine, given["config"])
    engine.destroy()
    return {"model": model, "fresh_model": something_to_compress()["model"]}


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.inner(hidden)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.h = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 16)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        hidden = self.words(input_ids)
        for block in self.h:
            hidden = block(hidden)
        logits = self.head(hidden)
        if labels is None:
            return logits
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits.mT, labels))


def blocks() -> dict[str, Any]:
    return {"model": Blocks(), "GPT2Block": Block}


def blocks_that_drop_tokens() -> dict[str, Any]:
    (section,) = [text for text in blocks_of(DOCS / "data.md", "json") if "random_ltd" in text]
    section = section.replace('"total_layer_num": 12', '"total_layer_num": 3')
    section = section.replace('"random_ltd_layer_num": 10', '"random_ltd_layer_num": 1')
    section = section.replace("[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]", "[1]")
    return blocks() | {"engine": engine_of(Blocks(), **json.loads(section))}


def documents() -> dict[str, Any]:
    from hadal.data_efficiency.indexed import RowsBuilder

    rows = [list(range(20)), [1, 2, 3]]
    with RowsBuilder("more", "uint16") as builder:
        builder.add(rows[1])
        builder.end_document()
    return {"documents": rows}


def a_corpus() -> dict[str, Any]:
    from hadal.data_efficiency.indexed import RowsBuilder

    with RowsBuilder("corpus", "uint16") as builder:
        for start in range(8):
            builder.add([(start + step) % 16 for step in range(6)])
            builder.end_document()
    return {"model": Blocks()}


def a_data_set() -> dict[str, Any]:
    return {
        "torch": torch,
        "dataset": [{"input_ids": torch.arange(8) % (n + 2)} for n in range(12)],
    }


def a_loader_with_difficulties() -> dict[str, Any]:
    return {"loader": SimpleNamespace(set_post_process=lambda change: change)}


def sequences() -> dict[str, Any]:
    Path("ds_config.json").write_text(
        '{"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}'
    )
    rows = [{"input_ids": torch.arange(6), "labels": torch.arange(6)}] * 4
    return {"hadal": hadal, "model": Blocks(), "data": rows}


def a_trainer_of_trl() -> dict[str, Any]:
    from trl import SFTTrainer

    return {"SFTTrainer": SFTTrainer}


def a_layer() -> dict[str, Any]:
    layer = nn.Module()
    layer.mlp, layer.lm_head = nn.Linear(8, 8), nn.Linear(8, 16)
    given = {"self": layer, "hidden": torch.randn(2, 16, 8), "targets": torch.ones(2, 16).long()}
    return given | {"cross_entropy": nn.functional.cross_entropy}


def a_transformer() -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained("small")
    return {"AutoModelForCausalLM": AutoModelForCausalLM, "name": "small"}


def vectors() -> dict[str, Any]:
    Path("ds_config.json").write_text(
        '{"train_batch_size": 1, "sparse_attention": {"mode": "fixed", "block": 16}}'
    )
    given = {name: torch.randn(1, 16, 64, 4) for name in ("query", "key", "value")}
    return given | {"mask": torch.zeros(1, 64)}


def pictures() -> dict[str, Any]:
    return {"model": nn.Sequential(nn.Conv2d(3, 4, 3, stride=8), nn.Flatten(), nn.LazyLinear(2))}


def experts() -> dict[str, Any]:
    return {"feed_forward": nn.Linear(8, 8), "hidden": torch.randn(2, 3, 8)}


def stages() -> dict[str, Any]:
    Path("ds_config.json").write_text(
        '{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,'
        ' "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}'
    )

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.mT, targets)

    rows = [(torch.arange(6).expand(2, 6), torch.arange(6).expand(2, 6))] * 4
    return {"hadal": hadal, "nn": nn, "Block": Block, "loss_of": loss_of, "data": iter(rows)}


def a_sharded_model() -> dict[str, Any]:
    model = nn.Linear(4, 4)
    engine_of(model, zero_optimization={"stage": 3})
    return {"hadal": hadal, "model": model}


@dataclass(frozen=True)
class Part:
    """What one block needs before it, on how many ranks, and which sizes in it are changed."""

    given: Callable[[], dict[str, Any]]
    ranks: int = 1
    sizes: tuple[tuple[str, str], ...] = ()
    needs: tuple[str, ...] = ()
    is_slow: bool = False


HUGE = (("50000", "16"), ("1024", "8"), ("range(24)", "range(4)"), ("range(1000)", "range(2)"))
PARTS: dict[str, list[Part]] = {
    "checkpoints": [
        Part(an_engine),
        Part(a_trainer, needs=("transformers",), is_slow=True),
        Part(an_engine, sizes=(("s3://", "memory://"),), needs=("fsspec",)),
        Part(a_checkpoint_of_deepspeed, ranks=2),
        Part(a_checkpoint, is_slow=True),
        Part(an_engine, needs=() if LATE else ("torch 2.14",)),
        Part(a_checkpoint),
    ],
    "compression": [Part(something_to_compress), Part(something_compressed)],
    "data": [
        Part(blocks),
        Part(blocks_that_drop_tokens),
        Part(documents),
        Part(a_corpus, sizes=(("workers=8", "workers=2"),), is_slow=True),
        Part(a_data_set, sizes=(("=8,", "=2,"),), is_slow=True),
        Part(a_loader_with_difficulties),
    ],
    "long_sequences": [
        Part(sequences),
        Part(a_trainer_of_trl, needs=("trl",), is_slow=True),
        Part(a_layer),
        Part(a_transformer, needs=("transformers",), is_slow=True),
        Part(vectors),
    ],
    "metrics": [Part(an_engine), Part(pictures)],
    "parallelism": [
        Part(experts, ranks=4, sizes=HUGE),
        Part(stages, ranks=2, sizes=(*HUGE, ("num_stages=4", "num_stages=2")), is_slow=True),
    ],
    "troubleshooting": [Part(a_sharded_model)],
}


def run_part(page: str, number: int, folder: str) -> None:
    part = PARTS[page][number]
    code = blocks_of(DOCS / f"{page}.md", "python")[number]
    for size, small in part.sizes:
        code = code.replace(size, small)
    before = os.getcwd()
    os.chdir(folder)
    try:
        exec(compile(code, f"docs/{page}.md, Python block {number}", "exec"), part.given())
    finally:
        os.chdir(before)


@pytest.mark.parametrize(
    ("page", "number"),
    [
        pytest.param(page, number, marks=[pytest.mark.slow] * part.is_slow)
        for page, parts in PARTS.items()
        for number, part in enumerate(parts)
    ],
)
def test_a_part_runs(page: str, number: int, ranks: RankPools, tmp_path: Path) -> None:
    assert len(blocks_of(DOCS / f"{page}.md", "python")) == len(PARTS[page])
    part = PARTS[page][number]
    for package in part.needs:
        if importlib.util.find_spec(package.split()[0]) is None or " " in package:
            pytest.skip(f"{package} is not installed")
    ranks(part.ranks).run(run_part, page, number, str(tmp_path))
