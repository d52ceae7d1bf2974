"""Pruned transformers models: their configuration, and the shapes that it cannot express."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hadal.errors import UsageError
from hadal.plugins.compression.shrinking import shapes_of, take_shapes

METHOD = "hadal"
_HEADS = ("num_attention_heads", "num_key_value_heads", "n_head", "num_heads")
_ROWS = ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner")
Sizes = set[tuple[int, int]]
"""Numbers of heads or rows, before and after."""


def describe(model: nn.Module, heads: Sizes, rows: Sizes) -> None:
    """Set the configuration of a transformers model to its new sizes.

    If no configuration produces these shapes, those that differ are recorded in it as
    `quantization_config`; after `register_with_transformers`, `from_pretrained` reads them.

    Args:
        model: after pruning.
        heads: numbers of heads before and after, of all attention modules that were cut.
        rows: the same for matrices that lost rows.
    """
    config: Any = getattr(model, "config", None)
    if not shapes_of(model) or not hasattr(config, "save_pretrained"):
        return
    best: tuple[list[str], Any] | None = None
    for made in _candidates(config, heads, rows):
        wrong = _misshapen(model, made)
        if wrong is not None and (best is None or len(wrong) < len(best[0])):
            best = wrong, made
    wrong, made = best or (list(shapes_of(model)["modules"]), config)
    for name in (*_HEADS, *_ROWS):
        if hasattr(config, name) and getattr(made, name) != getattr(config, name):
            setattr(config, name, getattr(made, name))
    if wrong:
        shapes = shapes_of(model)
        modules = {name: shape for name, shape in shapes["modules"].items() if name in wrong}
        config.quantization_config = {"quant_method": METHOD, **shapes, "modules": modules}


def _candidates(config: Any, heads: Sizes, rows: Sizes) -> Iterator[Any]:
    """Yield configurations with all new sizes, with some, and with none."""
    for changes in ([(_HEADS, heads), (_ROWS, rows)], [(_ROWS, rows)], [(_HEADS, heads)], []):
        made = copy.deepcopy(config)
        for names, sizes in changes:
            for before, after in sizes if len(sizes) == 1 else ():
                for name in names:
                    if getattr(made, name, None) == before:
                        setattr(made, name, after)
        yield made


def _misshapen(model: nn.Module, config: Any) -> list[str] | None:
    """Return the modules whose shapes this configuration gets wrong; None if it cannot be used.

    It cannot be used if any module would be too small, or if modules differ in other numbers, such
    as the head size.
    """
    kind: Any = type(model)
    try:
        with torch.device("meta"):
            made = kind(config)
    except Exception:  # the class refuses the configuration, or requires more
        return None
    wrong = []
    expected = dict(model.named_parameters())
    for name, value in made.named_parameters():
        theirs = expected.get(name)
        if theirs is None or theirs.shape == value.shape:
            continue
        if any(new > old for new, old in zip(theirs.shape, value.shape, strict=False)):
            return None
        wrong.append(name.rpartition(".")[0])
    noted = shapes_of(model)["attributes"]
    for name, module in made.named_modules():
        # The recorded shapes are set after the configuration.
        found = {**_numbers(module), **noted.get(name, {})}
        if name not in wrong and found != _numbers(model.get_submodule(name)):
            return None
    return list(dict.fromkeys(wrong))


def _numbers(module: nn.Module) -> dict[str, int | float]:
    """Return the numbers among a module's own attributes."""
    return {name: value for name, value in vars(module).items() if type(value) in (int, float)}


def register_with_transformers() -> None:
    """Let `from_pretrained` of transformers load models whose heads `redundancy_clean` removed.

    Call it once in a program, before `from_pretrained`. Models whose configuration has all
    sizes load without it.

    Raises:
        UsageError: transformers is not installed.
    """
    try:
        auto: Any = importlib.import_module("transformers.quantizers.auto")
        base: Any = importlib.import_module("transformers.quantizers.base")
        configs: Any = importlib.import_module("transformers.utils.quantization_config")
    except ImportError as error:
        raise UsageError(
            f"register_with_transformers: transformers cannot be imported ({error}); pip install"
            " transformers"
        ) from error
    if METHOD in auto.AUTO_QUANTIZER_MAPPING:
        return

    class Shapes(configs.QuantizationConfigMixin):  # type: ignore[misc]
        """The shapes in a configuration."""

        def __init__(self, modules: Any = None, attributes: Any = None, **rest: Any) -> None:
            del rest
            self.quant_method = METHOD
            self.modules, self.attributes = modules or {}, attributes or {}

    class Shrinker(base.HfQuantizer):  # type: ignore[misc]
        """Shrinks a model's modules before its weights are loaded."""

        def _process_model_before_weight_loading(self, model: Any, **rest: Any) -> Any:
            del rest
            found = self.quantization_config
            take_shapes(model, {"modules": found.modules, "attributes": found.attributes})
            return model

        def _process_model_after_weight_loading(self, model: Any, **rest: Any) -> Any:
            del rest
            model.is_quantized = False  # no weight is quantized: it saves and trains like any model
            del model.hf_quantizer, model.quantization_method
            return model

        def is_serializable(self) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return True

    auto.register_quantization_config(METHOD)(Shapes)
    auto.register_quantizer(METHOD)(Shrinker)
