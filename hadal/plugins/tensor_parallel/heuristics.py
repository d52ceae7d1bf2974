"""The row layers of a model without rules: those whose outputs leave a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from hadal.errors import ModelError
from hadal.plugins.tensor_parallel.rules import COLUMN, ROW, SKIP, LayerRule

_ROWS = frozenset(
    {"o_proj", "out_proj", "down_proj", "dense_4h_to_h", "fc2", "fc_out", "wo", "o", "w2"}
)
# A layer of this name is a block's output only in these.
_DENSE, _LEAVES = "dense", frozenset({"attention", "self_attention", "self_attn", "output"})
# A router chooses among experts; every rank computes the whole choice.
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
# Their fused or relative attentions would be cut wrongly.
REFUSED = frozenset(
    {"gpt2", "deberta", "deberta-v2", "flaubert", "fsmt", "led", "longformer", "xlm", "xlnet"}
)


def blocks_of(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost repeated blocks of a model (elements of a ModuleList), with paths."""
    for name, child in model.named_children():
        where = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList):
            yield from ((f"{where}.{number}", block) for number, block in child.named_children())
        else:
            yield from blocks_of(child, where)


def row_layers(model: nn.Module) -> dict[str, list[str]]:
    """Return, for each class of blocks, the names of its row layers: "parent.layer".

    Raises:
        ModelError: this type of model cannot be cut without rules.
    """
    kind = str(getattr(getattr(model, "config", None), "model_type", ""))
    if kind in REFUSED:
        raise ModelError(
            f"tensor_parallel.autotp_size: a model of type {kind!r} cannot be cut without rules;"
            " set tensor_parallel.partition_config with layer_specs for its layers"
        )
    found: dict[str, set[str]] = {}
    for _, block in blocks_of(model):
        names = {
            ".".join(f".{name}".split(".")[-2:])
            for name, layer in block.named_modules()
            if isinstance(layer, nn.Linear) and _is_row(name)
        }
        if names:
            found.setdefault(type(block).__name__, set()).update(names)
    return {kind: sorted(names) for kind, names in found.items()}


def _is_row(name: str) -> bool:
    *above, leaf = name.split(".")
    return leaf in _ROWS or (leaf == _DENSE and bool(above) and above[-1] in _LEAVES)


def guessed_rules(model: nn.Module, rows: Sequence[str] = ()) -> tuple[LayerRule, ...]:
    """Return rules for every linear layer of a model's blocks.

    `rows`: ends of the names of the row layers, if the caller knows them.
    """
    known = tuple(rows)
    if not known:
        known = tuple({name for names in row_layers(model).values() for name in names})
    rules = []
    for path, block in blocks_of(model):
        for name, layer in block.named_modules():
            if not isinstance(layer, nn.Linear):
                continue
            full = f"{path}.{name}"
            way = ROW if _ends(full, known) else COLUMN
            if name.split(".")[-1] in _ROUTERS:
                way = SKIP
            origin = "tensor_parallel.injection_policy_tuple" if rows else "the names of layers"
            rules.append(LayerRule((f"{_escaped(full)}\\.weight$",), way, origin=origin))
    return tuple(rules)


def _ends(name: str, ends: Sequence[str]) -> bool:
    return any(f".{name}".endswith(end if end.startswith(".") else f".{end}") for end in ends)


def _escaped(name: str) -> str:
    return name.replace(".", "\\.")
