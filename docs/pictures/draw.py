"""Draws the pictures of docs/: `python docs/pictures/draw.py` writes them again.

They are narrow enough for a phone, and have a background and colours for light and dark pages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path

WIDTH, RANKS, LEFT, STEP, BAR = 520, 4, 24, 120, 104
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600 } .faint { fill: #59636e } .small { font-size: 11.5px }
.back { fill: #ffffff; stroke: #d1d9e0 }
.box { fill: #f3f5f7; stroke: #818b98 }
.empty { fill: none; stroke: #818b98; stroke-dasharray: 3 3 }
.line { stroke: #59636e; fill: none; stroke-width: 1.5 } .tip { fill: #59636e }
.c0 { fill: #8ec5ff } .c1 { fill: #8fdcb0 } .c2 { fill: #ffcf70 } .c3 { fill: #f4a3b5 }
.mean { fill: #c7b3f5 } .edge { stroke: #59636e; stroke-width: .75 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e8eb } .faint { fill: #a6b0ba }
  .back { fill: #15191f; stroke: #3d444d } .box { fill: #232a33; stroke: #7d8792 }
  .empty { stroke: #7d8792 } .line { stroke: #a6b0ba } .tip { fill: #a6b0ba }
  .c0 { fill: #1f5f9e } .c1 { fill: #1d7446 } .c2 { fill: #8a6410 } .c3 { fill: #97405a }
  .mean { fill: #5d48a0 } .edge { stroke: #a6b0ba }
}
"""


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float, kind: str = "box") -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" class="{kind}"/>'
    )


def _labelled(
    x: float, y: float, width: float, height: float, *lines: str, kind: str = "box"
) -> str:
    top = y + height / 2 + 4.5 - 8 * (len(lines) - 1)
    texts = (_text(x + width / 2, top + 16 * n, line, "small") for n, line in enumerate(lines))
    return _box(x, y, width, height, kind) + "".join(texts)


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """Draw a straight arrow, down or to the right."""
    if to_x == x:
        tip = f"M{to_x - 5:g} {to_y - 8:g}h10l-5 8z"
    else:
        tip = f"M{to_x - 8:g} {to_y - 5:g}v10l8 -5z"
    return f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" class="line"/><path d="{tip}" class="tip"/>'


def _places() -> Iterator[tuple[int, float]]:
    """Yield each rank, and where its column begins."""
    return ((rank, LEFT + rank * STEP) for rank in range(RANKS))


def _ranks(y: float) -> str:
    return "".join(_text(x + BAR / 2, y, f"rank {rank}", "faint") for rank, x in _places())


def _bars(y: float, kind: Callable[[int, int], str]) -> str:
    """Draw a buffer for each rank in four slices; `kind(rank, slice)` names each one's colour."""
    wide = BAR / RANKS
    return "".join(
        _box(x + slice * wide, y, wide, 26, f"{kind(rank, slice)} edge")
        for rank, x in _places()
        for slice in range(RANKS)
    )


def _own(rank: int, slice: int) -> str:
    return f"c{slice}" if slice == rank else "empty"


def _mean(rank: int, slice: int) -> str:
    return "mean" if slice == rank else "empty"


def _note(x: float, y: float, words: str) -> str:
    return _text(x, y, words, "small faint", "start")


def _between(y: float, words: str, below: str = "") -> str:
    """Draw an arrow in every column, and what happens there."""
    arrows = "".join(_arrow(x + BAR / 2, y, x + BAR / 2, y + 22) for _, x in _places())
    return (
        arrows
        + _text(WIDTH / 2, y + 42, words, "title")
        + (_text(WIDTH / 2, y + 60, below, "small faint") if below else "")
    )


def stages() -> tuple[int, str]:
    """What one of four ranks holds between steps, at each ZeRO stage, with Adam in bf16."""
    kinds = (("weights", 2, "c0"), ("gradients", 2, "c1"), ("optimizer state", 12, "c2"))
    scale, parts = 22, list[str]()
    for number, (name, nbytes, kind) in enumerate(kinds):
        x = LEFT + 84 + number * 122
        parts += [_box(x, 20, 14, 14, f"{kind} edge"), _note(x + 20, 31, f"{name}, {nbytes} B")]
    for stage in range(4):
        y, x, held = 50 + stage * 44, float(LEFT + 84), 0.0
        parts.append(_text(LEFT, y + 19, f"stage {stage}", "", "start"))
        for number, (_, nbytes, kind) in enumerate(kinds):
            kept = nbytes / RANKS if stage >= len(kinds) - number else nbytes
            parts.append(_box(x, y, kept * scale, 30, f"{kind} edge"))
            x, held = x + kept * scale, held + kept
        parts.append(_note(x + 8, y + 19, f"{held:g} B"))
    parts.append(_note(LEFT, 240, "bytes of each parameter of the model, on one of four ranks"))
    return 256, "".join(parts)


def gather() -> tuple[int, str]:
    """A unit's weights at stage 3: from shards to whole values, and back."""
    rank0 = LEFT + BAR / 2
    parts = [
        _ranks(34),
        _note(LEFT, 58, "between uses: each rank has its shard; the parameter reads as NaN"),
        _bars(66, _own),
        _between(
            98,
            "unshard: all-gather",
            "started some units ahead, as the plan of earlier passes says",
        ),
        _bars(172, lambda rank, slice: f"c{slice}"),
        f'<path d="M{LEFT} 204v6h66v-6M{LEFT + 70} 204v6h34v-6" class="line"/>',
        _text(LEFT + 33, 224, "weight", "small"),
        _text(LEFT + 88, 224, "bias", "small"),
        _note(rank0 + BAR / 2 + 20, 224, "parameters are views of the full buffer: no copies"),
        _between(236, "reshard: free", "after the unit's forward, and again after its backward"),
        _bars(310, _own),
    ]
    return 356, "".join(parts)


def reduction() -> tuple[int, str]:
    """A bucket's gradients at stages 2 and 3: from each rank's whole ones to shards of the mean."""
    parts = [
        _ranks(34),
        _note(LEFT, 58, "backward: each rank has the whole gradient of its own samples"),
        _bars(66, lambda rank, slice: f"c{rank}"),
        _between(
            98,
            "reduce-scatter",
            "as soon as the bucket's last gradient is there, in one order on all ranks",
        ),
        _bars(172, _mean),
        _note(LEFT, 218, "each rank has a shard of the mean over ranks ..."),
        _between(228, "add", ""),
        _bars(282, _mean),
        _note(LEFT, 328, "... which is added to those of earlier micro-steps, until the update"),
    ]
    return 350, "".join(parts)


def update() -> tuple[int, str]:
    """One rank's part of an update: from its shard of the gradient to new weights."""
    parts = [
        _labelled(LEFT, 24, 150, 44, "shard of the", "mean gradient", kind="mean edge"),
        _arrow(174, 46, 200, 46),
        _labelled(200, 24, 140, 44, "norm of this shard,", "is it finite?"),
        _arrow(340, 46, 366, 46),
        _labelled(366, 24, 130, 44, "one all-reduce:", "norm of all shards"),
        _arrow(431, 68, 431, 96),
        _labelled(366, 96, 130, 44, "factor: clipping", "and loss scale"),
        _text(346, 114, "not finite: the update is skipped,", "small faint", "end"),
        _text(346, 130, "and the loss scale falls", "small faint", "end"),
        _arrow(431, 140, 431, 186),
        _box(LEFT - 8, 186, WIDTH - 2 * LEFT + 16, 116, "empty"),
        _note(LEFT + 4, 206, "block after block of the shard, each while it is in the cache"),
        _labelled(LEFT + 4, 218, 132, 70, "cast the gradient", "to fp32, times", "the factor"),
        _arrow(160, 253, 186, 253),
        _labelled(186, 218, 148, 70, "optimizer's step:", "fp32 master,", "its moments"),
        _arrow(334, 253, 360, 253),
        _labelled(
            360, 218, 132, 70, "cast the master", "to bf16: the new", "weight", kind="c0 edge"
        ),
        _arrow(260, 302, 260, 330),
        _text(260, 350, "refresh", "title"),
        _text(
            260, 370, "stages 1 and 2: gather the new weights before their next use", "small faint"
        ),
        _text(260, 388, "stage 3: nothing, the next use gathers them", "small faint"),
    ]
    return 406, "".join(parts)


def save() -> tuple[int, str]:
    """A checkpoint: every rank writes its own shards, and the index is written last."""
    middle = WIDTH / 2
    parts = [
        _ranks(34),
        _bars(46, _own),
        "".join(_arrow(x + BAR / 2, 76, x + BAR / 2, 104) for _, x in _places()),
        _box(LEFT - 8, 104, WIDTH - 2 * LEFT + 16, 84, "empty"),
        _note(LEFT, 124, "checkpoints/global_step100/<mark>/"),
        "".join(
            _labelled(x, 134, BAR, 40, f"rank_0000{rank}", ".safetensors", kind=f"c{rank} edge")
            for rank, x in _places()
        ),
        _arrow(middle, 188, middle, 216),
        _text(middle, 234, "all ranks have written, and say so", "title"),
        _arrow(middle, 242, middle, 270),
        _labelled(
            110,
            270,
            300,
            44,
            "rank 0 writes index.json: what is where,",
            "every file's checksum, the mark",
        ),
        _text(
            middle,
            332,
            "this commits the save: before it, the old checkpoint is valid",
            "small faint",
        ),
        _arrow(middle, 340, middle, 368),
        _labelled(110, 368, 300, 30, "latest: global_step100"),
    ]
    return 416, "".join(parts)


LAYERS = (
    ("8", "__init__.py", "the public API"),
    ("7", "cli/, utils.py, compat/", "commands, and names that programs import"),
    ("6", "engine/", "initialize, the engine, reports"),
    ("5", "checkpoint/", "save and load"),
    ("4", "optim/, plugins/", "updates, schedules; features of their own"),
    ("3", "zero/, data/, listener.py", "the mechanism; loaders"),
    ("2", "comm/, offload/, order.py", "collectives, codecs, tiers, orders"),
    ("1", "config/, device/, launcher/", "the JSON, devices, hosts, processes"),
    ("0", "errors.py, units.py, lazy.py", "what everything uses"),
)


def layers() -> tuple[int, str]:
    """The layers of the library; imports go down only."""
    parts = []
    for row, (number, files, what) in enumerate(LAYERS):
        y = 18 + row * 38
        parts.append(_box(LEFT - 8, y, WIDTH - 2 * LEFT + 16, 32))
        parts.append(_text(LEFT + 4, y + 21, number, "faint", "start"))
        parts.append(_text(LEFT + 22, y + 21, files, "title small", "start"))
        parts.append(_text(WIDTH - LEFT - 4, y + 21, what, "small faint", "end"))
    parts.append(_text(WIDTH / 2, 376, "imports go down only", "small faint"))
    return 392, "".join(parts)


def both_ways() -> tuple[int, str]:
    """Losses of a run of DeepSpeed, Hadal and DeepSpeed again, and of DeepSpeed alone."""
    losses = json.loads((Path(__file__).parent / "both_ways.json").read_text())
    whole, legs = losses["deepspeed"], losses["there and back"]
    left, top, height, each = LEFT + 16, 44, 170, (WIDTH - 2 * LEFT - 16) / len(whole)
    most = max(whole)

    def places(row: list[float]) -> list[tuple[float, float]]:
        return [
            (left + each * (n + 0.5), top + height * (1 - loss / most))
            for n, loss in enumerate(row)
        ]

    parts = []
    for number, name in enumerate(("DeepSpeed", "Hadal", "DeepSpeed")):
        width = each * len(whole) / 3
        kind = f"c{number % 2} edge"
        parts.append(_labelled(left + number * width, top - 30, width, 22, name, kind=kind))
    line = "L".join(f"{x:.1f} {y:.1f}" for x, y in places(whole))
    parts.append(f'<path d="M{line}" class="line"/>')
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" class="tip"/>' for x, y in places(legs)]
    parts.append(f'<path d="M{left} {top}v{height}h{WIDTH - LEFT - left}" class="line"/>')
    parts += [
        _text(left - 6, top + height * (1 - loss / most) + 4, str(loss), "small faint", "end")
        for loss in range(0, int(most) + 1, 2)
    ]
    parts.append(_note(left, top + height + 18, "loss over 60 updates; line: DeepSpeed alone"))
    return top + height + 32, "".join(parts)


PICTURES = (stages, gather, reduction, update, save, layers, both_ways)


def drawn() -> dict[str, str]:
    """Return the text of each picture by its file name."""
    found = {}
    for picture in PICTURES:
        height, content = picture()
        back = (
            f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8" class="back"/>'
        )
        found[f"{picture.__name__}.svg"] = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
            f' width="{WIDTH}" height="{height}" role="img">'
            f"<title>{escape((picture.__doc__ or '').strip())}</title>"
            f"<style>{STYLE}</style>{back}{content}</svg>\n"
        ).replace("><", ">\n<")
    return found


if __name__ == "__main__":
    for name, content in drawn().items():
        (Path(__file__).parent / name).write_text(content, encoding="utf-8")
