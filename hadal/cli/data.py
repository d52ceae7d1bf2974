"""`hadal data`: from texts to indexed data sets, and to the files of a curriculum."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hadal.cli.parser import add_actions, add_command, add_flag, add_json, integer, positive
from hadal.cli.terminal import (
    COLOURS,
    FAINT,
    INK,
    CommandError,
    aligned,
    key,
    note,
    progress,
    show,
    show_json,
    table,
)
from hadal.errors import HadalError, needed
from hadal.units import shown_nbytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hadal.plugins.data_efficiency.metric_files import Distribution

_FORMATS = ("text", "jsonl", "parquet", "dataset")
_BARS = 100
_LONG = 10
"""A distribution whose maximum is as many times its 95th percentile is drawn logarithmically."""
_DOCUMENTS = ("line", "paragraph", "file")


def add_to(group: Any) -> None:
    """Add the subcommand and its own."""
    own = add_actions(
        group,
        "data",
        help="Index texts as tokens, and measure samples for a curriculum",
        description="Make an indexed data set (.bin and .idx) of texts, and measure its samples for"
        " a curriculum.",
        examples=(
            "hadal data index corpus.jsonl --tokenizer gpt2 --output corpus",
            "hadal data analyze corpus --output analysis",
        ),
    )
    _add_index(own)
    _add_analyze(own)


def _add_index(own: Any) -> None:
    parser = add_command(
        own,
        "index",
        help="Write the tokens of texts as an indexed data set",
        description="Write the tokens of text, JSONL or Parquet files, or of a data set of Hugging"
        " Face, as OUTPUT.bin and OUTPUT.idx, which DeepSpeed and Megatron read, too. The order of"
        " the documents stays; empty ones are left out.",
        examples=(
            "hadal data index corpus.jsonl --tokenizer gpt2 --end --output corpus",
            "hadal data index book.txt --document paragraph --length 128 --output book",
            "hadal data index roneneldan/TinyStories --format dataset --output stories",
        ),
    )
    add_flag(parser, "input INPUT", "Files of one format, or the name of a data set", nargs="+")
    add_flag(
        parser,
        "-o --output PREFIX",
        "The path of the two files, without .bin and .idx",
        Path,
        required=True,
    )
    add_flag(
        parser,
        "--tokenizer NAME",
        "A model of the hub, a folder, a tokenizer.json, or bytes, which needs nothing",
        default="bytes",
    )
    add_flag(parser, "--format", "The format (default: by the files' suffixes)", choices=_FORMATS)
    add_flag(
        parser,
        "--field NAME",
        "The field or column with the text; not for text files",
        default="text",
    )
    add_flag(parser, "--split NAME", "The split of a data set", default="train")
    add_flag(
        parser,
        "--document",
        "The part of a text file that is a document",
        default="line",
        choices=_DOCUMENTS,
    )
    add_flag(
        parser,
        "--length N",
        "Split documents into rows of at most N tokens (default: a document is a row)",
        positive,
    )
    add_flag(parser, "--end", "Append the token for the end to each document")
    _add_workers(parser)
    add_json(parser)
    parser.set_defaults(run=run_index)


def _add_analyze(own: Any) -> None:
    parser = add_command(
        own,
        "analyze",
        help="Measure the samples of an indexed data set for a curriculum",
        description="Measure every row of an indexed data set, and write the files that"
        " data_efficiency.data_sampling.curriculum_learning reads, with a plot of each metric's"
        " distribution. An analysis that was stopped resumes when it is run again.",
        examples=(
            "hadal data analyze corpus --output analysis",
            "hadal data analyze corpus -o analysis --metrics loss --model gpt2",
        ),
    )
    add_flag(parser, "dataset PREFIX", "The data set, without .bin and .idx", Path)
    add_flag(
        parser,
        "-o --output DIR",
        "The directory of the files; each metric has its own in it",
        Path,
        required=True,
    )
    add_flag(
        parser,
        "--metrics NAMES",
        "Metrics, separated by commas: length (tokens), rarity (the sum of -log of the"
        " words' frequencies), loss (1000 times a model's mean loss) (default: length,rarity)",
        _names,
        ("length", "rarity"),
    )
    add_flag(
        parser,
        "--model NAME",
        "The model of the loss: one of transformers for causal language modelling, on the"
        " hub or in a folder",
    )
    add_flag(parser, "--no-picture", "Do not draw the distributions")
    _add_workers(parser)
    add_json(parser)
    parser.set_defaults(run=run_analyze)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _add_workers(parser: argparse.ArgumentParser) -> None:
    add_flag(
        parser,
        "--workers N",
        "Processes (default: one for each CPU of this process)",
        integer(ge=0),
    )


def _workers(asked: int | None) -> int:
    return len(os.sched_getaffinity(0)) if asked is None else asked


def run_index(parsed: argparse.Namespace) -> int:
    """Write an indexed data set.

    Raises:
        HadalError: a file cannot be read or written, or a package is missing.
    """
    # The processes are the parallelism; threads of each would only get in each other's way.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from hadal.plugins.data_efficiency.indexed import bin_path
    from hadal.plugins.data_efficiency.indexing import Indexing, index_texts, tokenizer_of

    source = _source(parsed)
    indexing = Indexing(tokenizer_of(parsed.tokenizer), parsed.end, parsed.length)
    ranges = source.ranges()
    total = sum(span.size for span in ranges)
    began = time.perf_counter()
    with progress(total, "indexing", is_bytes=parsed.format != "dataset") as advance:
        found = index_texts(source, indexing, parsed.output, _workers(parsed.workers), advance)
    seconds = time.perf_counter() - began
    nbytes = bin_path(parsed.output).stat().st_size
    facts: dict[str, Any] = {
        "files": str(parsed.output),
        "documents": found.documents,
        "rows": found.rows,
        "tokens": found.tokens,
        "dtype": str(indexing.dtype),
        "nbytes": nbytes,
        "seconds": round(seconds, 3),
    }
    if parsed.json:
        show_json(facts)
        return 0
    shown = {
        "files": f"{parsed.output}.bin, {parsed.output}.idx",
        "documents": f"{found.documents:,}",
        "rows": f"{found.rows:,}",
        "tokens": f"{found.tokens:,} of {indexing.dtype} ({shown_nbytes(nbytes)})",
        "seconds": f"{seconds:.1f} ({found.tokens / seconds:,.0f} tokens/s)",
    }
    show(aligned([(key(name), text) for name, text in shown.items()]))
    return 0


def _source(parsed: argparse.Namespace) -> Any:
    from hadal.plugins.data_efficiency.indexing import DatasetTexts, source_of

    if parsed.format != "dataset":
        return source_of(parsed.input, parsed.format, parsed.field, parsed.document)
    if len(parsed.input) > 1:
        raise CommandError(
            f"{len(parsed.input)} data sets were given; index one at a time, and merge them with"
            " RowsBuilder.merge"
        )
    return DatasetTexts.load(parsed.input[0], parsed.split, parsed.field)


def run_analyze(parsed: argparse.Namespace) -> int:
    """Measure the samples of an indexed data set.

    Raises:
        HadalError: the data set cannot be read, a metric is unknown, or a package is missing.
    """
    from hadal.plugins.data_efficiency.analysis import analyze, passes
    from hadal.plugins.data_efficiency.indexed import IndexedRows
    from hadal.plugins.data_efficiency.metric_files import prefix_of

    rows = len(IndexedRows(parsed.dataset))
    model = _model(parsed.model) if "loss" in parsed.metrics and parsed.model else None
    with progress(rows * passes(parsed.metrics), "measuring") as advance:
        found = analyze(
            parsed.dataset,
            parsed.output,
            parsed.metrics,
            model=model,
            workers=_workers(parsed.workers),
            progress=advance,
        )
    facts = {name: _summary(*distribution) for name, distribution in found.items()}
    for name in facts:
        facts[name]["files"] = str(prefix_of(parsed.output, name, ""))
    pictures = [] if parsed.no_picture else _draw(parsed.output, found)
    if parsed.json:
        show_json({"samples": rows, "metrics": facts, "pictures": [str(path) for path in pictures]})
        return 0
    columns = ("metric", "distinct", "min", "5 %", "median", "95 %", "max")
    made = table(*columns, right=columns[1:])
    for name, each in facts.items():
        numbers = (each[key] for key in ("distinct", "min", "p5", "median", "p95", "max"))
        made.add_row(name, *(f"{number:,}" for number in numbers))
    show(f"{rows:,} samples", made)
    where = [each["files"] + "index_to_..." for each in facts.values()]
    show(aligned([(key("files"), "\n".join([*where, *map(str, pictures)]))]))
    return 0


def _model(name: str) -> Any:
    from hadal.device import current_device

    transformers = needed("transformers", "a model of the loss")
    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(name)
        return model.to(current_device())
    except Exception as error:
        raise CommandError(f"model {name} cannot be loaded: {error}") from error


def _summary(values: Any, counts: Any) -> dict[str, Any]:
    """Summarize the distribution of the values."""
    import numpy as np

    ranks = np.cumsum(counts)

    def quantile(share: float) -> int:
        place = int(np.searchsorted(ranks, share * ranks[-1]))
        return int(values[place])

    return {
        "distinct": len(values),
        "min": int(values[0]),
        "p5": quantile(0.05),
        "median": quantile(0.5),
        "p95": quantile(0.95),
        "max": int(values[-1]),
    }


def _draw(folder: Path, found: Mapping[str, Distribution]) -> list[Path]:
    """Draw each metric's distribution; without matplotlib, say so."""
    from hadal.cli.terminal import picture_path, save_picture

    paths = []
    for name, distribution in found.items():
        try:
            path = picture_path(folder / name / f"{name}_distribution.png")
        except HadalError as error:
            note(f"no picture: {error}")
            return []
        save_picture(figure_of(name, *distribution), path)
        paths.append(path)
    return paths


def figure_of(name: str, values: Any, counts: Any) -> Figure:
    """Draw the distribution of a metric, and below it the share of samples up to each value."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=[2, 1])
    # Whole numbers: an edge is between two of them.
    low, high = int(values[0]), int(values[-1])
    summary = _summary(values, counts)
    edges: Any
    is_long = low >= 0 and high > _LONG * max(1, summary["p95"])
    if is_long:
        whole = np.geomspace(max(1, low), high + 1, _BARS)
        edges = np.unique([low, *np.rint(whole)]) - 0.5
        upper.set_xscale("symlog", linthresh=1)
    else:
        width = max(1, -(-(high - low + 1) // _BARS))
        edges = np.arange(low, high + width + 1, width) - 0.5
    heights, _ = np.histogram(values, edges, weights=counts)
    upper.bar(edges[:-1], heights, np.diff(edges), align="edge", color=COLOURS[0], linewidth=0)
    per = "per bar" if is_long else "" if width == 1 else f"per {width:,} values"
    upper.set_ylabel(f"samples {per}".strip())
    shares = np.cumsum(counts) / counts.sum()
    lower.step([low - 0.5, *values], [0, *shares], where="post", color=COLOURS[0], linewidth=2)
    lower.set_ylabel("share up to here")
    lower.set_ylim(0, 1.02)
    lower.set_xlabel(f"{name} (logarithmic)" if is_long else name)
    for axis in (upper, lower):
        for label in ("p5", "median", "p95"):
            axis.axvline(summary[label], color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        axis.grid(color=FAINT, linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.xaxis.set_major_formatter("{x:,.0f}")
    figure.suptitle(f"{name} of {int(counts.sum()):,} samples", fontsize=13, weight="bold")
    facts = (
        f"5 %: {summary['p5']:,}",
        f"median: {summary['median']:,}",
        f"95 %: {summary['p95']:,}",
    )
    upper.set_title("dashed lines: " + " · ".join(facts), fontsize=8.5, color=INK)
    return figure
