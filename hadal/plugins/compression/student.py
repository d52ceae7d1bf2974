"""Layer reduction: a shallower student takes over some of its teacher's layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hadal.config.compression import LayerReduction
from hadal.errors import ModelError, needed
from hadal.plugins.compression.shrinking import shapes_of, take_shapes

_PATH = "compression_training.layer_reduction"


@torch.no_grad()
def take_over_layers(student: nn.Module, teacher: nn.Module, section: LayerReduction) -> None:
    """Copy the named layers and modules of a teacher into a student, buffers included.

    The student's layer i becomes a copy of the teacher's layer `teacher_layer[i]`. The student's
    dtypes and devices are unchanged.

    Raises:
        ModelError: a module is missing in one of the models, or differs between them, or the
            student has more or fewer layers than `teacher_layer` names. Nothing is copied.
    """
    prefix, chosen = section.module_name_prefix, section.teacher_layer
    assert prefix is not None  # the rules of the configuration check both
    assert chosen is not None
    name, known = f"{_PATH}.module_name_prefix", len(_layers(teacher, prefix, "teacher"))
    mine = len(_layers(student, prefix, "student"))
    if mine != len(chosen):
        raise ModelError(
            f"{_PATH}.teacher_layer names {len(chosen)} layers, but the student's {prefix} has"
            f" {mine}; name one for each, or build the student with {len(chosen)}"
        )
    for index, layer in enumerate(chosen):
        if not 0 <= layer < known:
            raise ModelError(
                f"{_PATH}.teacher_layer[{index}]: the teacher's {prefix} has no layer {layer}, only"
                f" 0 to {known - 1}"
            )
    pairs = [(f"{prefix}.{index}", f"{prefix}.{layer}", name) for index, layer in enumerate(chosen)]
    for index, other in enumerate(section.other_module_name or ()):
        pairs.append((other, other, f"{_PATH}.other_module_name[{index}]"))
    copies: list[tuple[Tensor, Tensor]] = []
    for to, source, where in pairs:
        copies += _copies(
            _part(student, to, "student", where), _part(teacher, source, "teacher", where), to
        )
    for target, value in copies:
        target.copy_(value)


def _layers(model: nn.Module, prefix: str, whose: str) -> nn.ModuleList | nn.Sequential:
    found = _part(model, prefix, whose, f"{_PATH}.module_name_prefix")
    if not isinstance(found, (nn.ModuleList, nn.Sequential)):
        raise ModelError(
            f"{_PATH}.module_name_prefix: the {whose}'s {prefix} is {type(found).__name__};"
            " expected a ModuleList or Sequential"
        )
    return found


def _part(model: nn.Module, name: str, whose: str, where: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        known = ", ".join(name for name, _ in model.named_children())
        raise ModelError(
            f"{where}: the {whose} has no module {name!r}; its top-level modules are {known}"
        ) from None


def _copies(student: nn.Module, teacher: nn.Module, name: str) -> list[tuple[Tensor, Tensor]]:
    targets, values = _tensors(student), _tensors(teacher)
    if targets.keys() != values.keys():
        only = sorted(targets.keys() ^ values.keys())
        raise ModelError(
            f"{_PATH}: student and teacher differ in {name}: only one of them has"
            f" {', '.join(only[:3])}"
        )
    for leaf, target in targets.items():
        if target.shape != values[leaf].shape:
            raise ModelError(
                f"{_PATH}: {name}.{leaf} is {tuple(target.shape)} in the student and"
                f" {tuple(values[leaf].shape)} in the teacher; shapes must be the same"
                " (weights created sharded are empty: take the layers over before)"
            )
    return [(target, values[leaf]) for leaf, target in targets.items()]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


# ---- pruned transformers models ------------------------------------------------------------------

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
        MissingPackageError: transformers is not installed.
    """
    user = "register_with_transformers"
    auto: Any = needed("transformers.quantizers.auto", user)
    base: Any = needed("transformers.quantizers.base", user)
    configs: Any = needed("transformers.utils.quantization_config", user)
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


# ---- distillation --------------------------------------------------------------------------------


def distillation_loss(student: Tensor, teacher: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return the Kullback-Leibler divergence of a student's logits from its teacher's.

    The mean over all positions, times the square of the temperature, so that the size of the
    gradients does not depend on it. No gradient goes to the teacher.

    Args:
        student: logits, (..., classes).
        teacher: logits of the same shape.
        temperature: divides both; above 0.

    Returns:
        0-dim, fp32.

    Raises:
        ModelError: the shapes differ, or the temperature is not above 0.
    """
    _expect_alike(student, teacher, "the logits")
    if not temperature > 0:
        raise ModelError(f"distillation_loss: temperature is {temperature}; expected more than 0")
    classes = student.shape[-1]
    mine = F.log_softmax(student.float().reshape(-1, classes) / temperature, dim=1)
    known = F.log_softmax(teacher.detach().float().reshape(-1, classes) / temperature, dim=1)
    return F.kl_div(mine, known, reduction="batchmean", log_target=True) * temperature**2


def hidden_state_loss(
    student: Sequence[Tensor], teacher: Sequence[Tensor], layers: Sequence[int] | None = None
) -> Tensor:
    """Return the mean squared difference of hidden states, averaged over the student's.

    The student's state i is compared with the teacher's state `layers[i]`. No gradient goes to the
    teacher.

    Args:
        student: hidden states, as models of transformers return them: the embeddings' output, and
            then each layer's.
        teacher: the teacher's, of the same shapes.
        layers: indices into `teacher`, as many as `student` has. None spreads the student's states
            evenly over the teacher's, from the first to the last.

    Returns:
        0-dim, fp32.

    Raises:
        ModelError: numbers, indices or shapes do not fit.
    """
    chosen = _spread(len(student), len(teacher)) if layers is None else list(layers)
    if len(chosen) != len(student) or not student:
        raise ModelError(
            f"hidden_state_loss: the student has {len(student)} hidden states, but layers names"
            f" {len(chosen)}; name one for each, and at least one"
        )
    total = student[0].new_zeros((), dtype=student[0].float().dtype)
    for index, (state, layer) in enumerate(zip(student, chosen, strict=True)):
        if not 0 <= layer < len(teacher):
            raise ModelError(
                f"hidden_state_loss: layers[{index}] is {layer}, but the teacher has the hidden"
                f" states 0 to {len(teacher) - 1}"
            )
        known = teacher[layer].detach()
        _expect_alike(state, known, f"hidden state {index}")
        total = total + F.mse_loss(state.float(), known.float())
    return total / len(chosen)


def _spread(count: int, of: int) -> list[int]:
    return [round(index * (of - 1) / max(count - 1, 1)) for index in range(count)]


def _expect_alike(student: Tensor, teacher: Tensor, what: str) -> None:
    if student.shape != teacher.shape:
        raise ModelError(
            f"distillation: {what} of the student have the shape {tuple(student.shape)}, and"
            f" {tuple(teacher.shape)} in the teacher; expected the same"
        )
