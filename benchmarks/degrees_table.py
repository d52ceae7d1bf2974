"""The table and the plot of `scale.py --degrees`. See ``benchmarks/README.md``."""

from __future__ import annotations

from pathlib import Path

from degrees import DENSE, WAYS, Cost, Job, Layout, Shape, Way, Wire, best_of

_GB = 1e9
_WORLDS = (8, 64, 512, 4096)
_DEGREES = ("ZeRO", "tensor", "sequence", "experts", "pipeline")
_HEADER = (
    "ranks | way                       | replicas x tensor x stages x sequence, experts, batches |"
    " weights  grads  optim  activ gathered | all GB fits | sent GB in the node / between |"
    " idle % | step s"
)

Found = dict[tuple[Shape, Way, int], tuple[Layout, Cost] | str]


def compute(job: Job) -> Found:
    """Find the best layout of every model, way and number of ranks."""
    return {
        (shape, way, world): best_of(shape, way, world, job)
        for shape, ways in WAYS.items()
        for world in _WORLDS
        for way in ways
    }


def lines(found: Found, job: Job) -> list[str]:
    """Return the table."""
    told: list[str] = []
    for (shape, way, world), one in found.items():
        if way is WAYS[shape][0]:
            if world == _WORLDS[0]:
                told += ["", f"{shape.name}: {shape.parameters / 1e9:.1f} B parameters", _HEADER]
            told.append("")
        told.append(f"{world:5} | {way.name:25} | {_cells(one, job)}")
    return told[1:]


def _cells(one: tuple[Layout, Cost] | str, job: Job) -> str:
    if isinstance(one, str):
        return f"none: {one}"
    layout, cost = one
    held = cost.held
    degrees = f"{layout.data} x {layout.tensor} x {layout.pipeline} x {layout.sequence}"
    batches = f"{layout.micro_batches(job)} of {layout.micro_batch}"
    kinds = (held.weights, held.gradients, held.optimizer, held.activations)
    numbers = " ".join(f"{kind / _GB:6.1f}" for kind in kinds)
    numbers += f" {held.gathered / _GB:8.1f}"
    fits = "yes" if held.total <= job.memory else "NO"
    return (
        f"{degrees:21} {layout.experts:3} {batches:>10}{'':19} | {numbers}"
        f"  | {held.total / _GB:6.1f} {fits:4} | {_sent(cost)} |"
        f" {100 * cost.idle:6.1f} | {cost.seconds:6.1f}"
    )


def _sent(cost: Cost) -> str:
    def shown(wire: Wire) -> str:
        return f"{wire.inside / _GB:,.0f}/{wire.between / _GB:,.0f}"

    return ", ".join(f"{name} {shown(cost.sent[name])}" for name in _DEGREES if name in cost.sent)


def draw(found: Found, job: Job, path: Path) -> None:
    """Draw bytes held, bytes sent to other nodes, and the step's time over the ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    rows = figure.subplots(len(WAYS), 3)
    titles = ("GB held by a rank", "GB a rank sends to other nodes", "step, times the shortest")
    for axes, (shape, ways) in zip(rows, WAYS.items(), strict=True):
        shortest = {
            world: min(
                one[1].seconds
                for (model, _, ranks), one in found.items()
                if (model, ranks) == (shape, world) and not isinstance(one, str)
            )
            for world in _WORLDS
        }
        for way in ways:
            points = [
                (world, one[1])
                for world in _WORLDS
                if not isinstance(one := found[shape, way, world], str)
            ]
            worlds = [world for world, _ in points]
            style = {"marker": "o", "markersize": 4, "label": way.name}
            axes[0].plot(worlds, [cost.held.total / _GB for _, cost in points], **style)
            # A layout that does not fit does not train, so its traffic is not shown.
            fits = [(w, cost) for w, cost in points if cost.held.total <= job.memory]
            between = [(w, cost.wire.between / _GB) for w, cost in fits if cost.wire.between]
            axes[1].plot(*zip(*between, strict=True) if between else ([], []), **style)
            times = [(w, cost.seconds / shortest[w]) for w, cost in fits]
            axes[2].plot(*zip(*times, strict=True) if times else ([], []), **style)
        axes[0].axhline(job.memory / _GB, color="black", linestyle=":", linewidth=1)
        axes[0].set_ylabel(shape.name)
        for number, (one, title) in enumerate(zip(axes, titles, strict=True)):
            one.set(xscale="log", title=title if shape is DENSE else "", xlabel="ranks")
            one.set_yscale("linear" if number == 2 else "log")
            one.set_xticks(_WORLDS, [f"{world:,}" for world in _WORLDS])
            one.set_xlim(6, 5500)
            one.minorticks_off()
            one.grid(alpha=0.3)
        axes[0].legend(frameon=False, fontsize=7)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
