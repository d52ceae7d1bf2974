"""`optimizer`: the optimizer that the engine builds."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ConfigDict

from hadal.config.optimizer_params import BUILT_IN, PARAMS
from hadal.config.section import NO_EFFECT, Child, Mark, Section, key
from hadal.config.values import Boolean, Text

_CANONICAL = {name.lower(): name for name in BUILT_IN}


def canonical_type(name: Any) -> Any:
    """Write a built-in optimizer's name as it is spelled; leave torch's class names alone."""
    return _CANONICAL.get(name.lower(), name) if isinstance(name, str) else name


class Optimizer(Section):
    """The optimizer, by name. Not used where the program hands over its own."""

    required: ClassVar[tuple[str, ...]] = ("type",)

    type: Annotated[Text, BeforeValidator(canonical_type)] = key(
        None,
        "Adam, AdamW, Adagrad, Lamb, Lion, Muon, OneBitAdam, ZeroOneAdam, OneBitLamb, MuAdam, "
        "MuAdamW or MuSGD in any case, or the exact name of a class of torch.optim.",
        mark=Mark(auto_is_a_word=True),
    )
    params: dict[str, Any] = key({}, "Arguments of the optimizer; see the tables of each type.")
    legacy_fusion: Boolean = key(
        False, "Choose an older fused kernel. There is one kernel here.", mark=NO_EFFECT
    )

    @classmethod
    def child(cls, name: str, raw: Mapping[str, Any]) -> Child | None:
        """Let the type say which params there are; a torch class takes any."""
        if name != "params":
            return super().child(name, raw)
        kind = canonical_type(raw.get("type"))
        return Child(PARAMS.get(kind, OpenParams) if isinstance(kind, str) else OpenParams, "one")


class OpenParams(Section):
    """Arguments that are handed to a class of torch as they are."""

    model_config = ConfigDict(extra="allow")
