"""Speed and memory of the files behind a curriculum: index, analysis and start of a loader.

    python benchmarks/data_files.py start              # a loader over 100 million samples
    python benchmarks/data_files.py analyze            # 10 million samples measured
    python benchmarks/data_files.py index              # texts to tokens, against the tokenizer

See benchmarks/README.md. Each line is JSON; seconds are processor time of this process, or wall
time if there are worker processes.
"""

from __future__ import annotations

import argparse
import json
import resource
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hadal.config import load_config
from hadal.data.reading import Sharding
from hadal.plugins.data_efficiency.analysis import analyze
from hadal.plugins.data_efficiency.indexed import RowsBuilder
from hadal.plugins.data_efficiency.indexing import (
    ByteTokenizer,
    Indexing,
    PlainTexts,
    index_texts,
    tokenizer_of,
)
from hadal.plugins.data_efficiency.metric_files import Origin, write_single
from hadal.plugins.data_efficiency.ordered import CurriculumOrder


@contextmanager
def timed(found: dict[str, Any], name: str) -> Iterator[None]:
    """Record wall time, and processor time of this process."""
    clock, processor = time.perf_counter(), time.process_time()
    yield
    found[f"{name}_s"] = round(time.perf_counter() - clock, 4)
    found[f"{name}_processor_s"] = round(time.process_time() - processor, 4)


def peak_gb() -> float:
    """Return the peak memory of this process."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2)


def start(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Open a curriculum by percentiles, and draw the first batch."""
    prefix = folder / "m" / "m_index_to_sample_percentile_merged"
    count = options.samples
    metric = {
        "index_to_sample_path": str(prefix),
        "difficulty_type": "percentile",
        "clustering_type": "schedule_based",
        "min_difficulty": options.first,
        "max_difficulty": 100,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 100, "difficulty_step": 1},
    }
    if not prefix.with_suffix(".bin").exists():
        values = np.random.default_rng(0).integers(0, 1000, count).astype(np.uint16)
        write_single(folder, "m", values)
        if not options.folder:
            raise SystemExit("start needs --folder, and two runs: the first one only writes files")
        return {"written": str(prefix), "next": "run it again: memory is measured from its start"}
    curriculum = {"enabled": True, "curriculum_metrics": {"m": metric}}
    sampling = {"curriculum_learning": curriculum}
    config = load_config({"train_batch_size": 32, "data_efficiency": {"data_sampling": sampling}})
    found: dict[str, Any] = {"samples": count, "first_percent": options.first, "base_gb": peak_gb()}
    with timed(found, "start"):
        order = CurriculumOrder(
            config.data_efficiency, Origin(count), Sharding(32, drop_last=True), 1
        )
        next(order.batches(0, 0))
    return {**found, "peak_gb": peak_gb()}


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure length and rarity of random rows of 1 to 127 words."""
    prefix = folder / "rows"
    generator = np.random.default_rng(0)
    with RowsBuilder(prefix, np.uint16) as builder:
        for part in range(0, options.samples, 1 << 20):
            sizes = generator.integers(1, 128, min(1 << 20, options.samples - part))
            words = (65536 * generator.random(int(sizes.sum())) ** 3).astype(np.uint16)
            builder.add_joined(words, sizes.astype(np.int64), np.arange(1, len(sizes) + 1))
    found: dict[str, Any] = {"samples": options.samples, "workers": options.workers}
    for metric in ("length", "rarity"):
        with timed(found, metric):
            analyze(prefix, folder / "analysis", [metric], workers=options.workers)
        found[f"{metric}_samples_per_s"] = round(options.samples / found[f"{metric}_s"])
    return {**found, "peak_gb": peak_gb()}


def corpus(path: Path, nbytes: int) -> None:
    """Write Python's own source text repeatedly, up to a size."""
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [file.read_bytes() for file in sorted(library.glob("*.py"))]
    with open(path, "wb") as file:
        while file.tell() < nbytes:
            for text in texts:
                file.write(text)


def trained(path: Path, folder: Path) -> str:
    """Return a tokenizer of byte pairs with 8,192 tokens, trained on the corpus's beginning."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    with open(path, encoding="utf-8", errors="ignore") as file:
        made.train_from_iterator([file.read(4_000_000)], trainers.BpeTrainer(vocab_size=8192))
    made.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def index(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Index a corpus, and time its tokenizer on the same documents without storing tokens."""
    path = folder / "corpus.txt"
    corpus(path, options.nbytes)
    name = options.tokenizer
    tokenizer = ByteTokenizer() if name == "bytes" else tokenizer_of(name or trained(path, folder))
    source = PlainTexts([path])
    found: dict[str, Any] = {"text_gb": path.stat().st_size / 1e9}

    def alone() -> int:
        tokens = 0
        for span in source.ranges():
            texts = source.documents(span)
            began = time.process_time()
            tokens += len(tokenizer.encode(texts).numbers)
            found["tokenizer_processor_s"] += time.process_time() - began
        return tokens

    def whole() -> int:
        return index_texts(source, Indexing(tokenizer), folder / "tokens", options.workers).tokens

    runs: list[tuple[str, Callable[[], int]]] = [
        ("reading_and_tokenizing", alone),
        ("index", whole),
    ]
    found["tokenizer_processor_s"] = 0.0
    for what, run in runs:
        with timed(found, what):
            found["tokens"] = run()
    share = found["tokenizer_processor_s"] / found["index_processor_s"]
    if options.workers < 2:
        found["share_of_the_tokenizers_speed"] = round(share, 3)
    written = (folder / "tokens.bin").stat().st_size
    return {**found, "written_gb": written / 1e9, "peak_gb": peak_gb()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("start", "analyze", "index"))
    parser.add_argument("--samples", type=lambda text: int(float(text)))
    parser.add_argument("--first", type=int, default=100, help="start: percent admitted at first")
    parser.add_argument("--nbytes", type=lambda text: int(float(text)), default=10**8)
    parser.add_argument("--tokenizer", help="index: bytes, or a name or file (default: trained)")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep the files here")
    options = parser.parse_args()
    options.samples = (
        options.samples or {"start": 10**8, "analyze": 10**7, "index": 0}[options.what]
    )
    run = {"start": start, "analyze": measure, "index": index}[options.what]
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        print(json.dumps(run(options, folder)))


if __name__ == "__main__":
    main()
