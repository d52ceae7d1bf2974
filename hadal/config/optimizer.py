"""`optimizer`: the optimizer that the engine builds."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ConfigDict

from hadal.config.optimizer_params import BUILT_IN, MUON_RATES, PARAMS
from hadal.config.section import NO_EFFECT, Child, Mark, Section, key
from hadal.config.values import Boolean, Text

_CANONICAL = {name.lower(): name for name in BUILT_IN}


def canonical_type(name: Any) -> Any:
    """Return a built-in optimizer's canonical spelling; other names are unchanged."""
    return _CANONICAL.get(name.lower(), name) if isinstance(name, str) else name


class Optimizer(Section):
    """The optimizer and its arguments. Not used if the program passes its own optimizer."""

    required: ClassVar[tuple[str, ...]] = ("type",)

    type: Annotated[Text, BeforeValidator(canonical_type)] = key(
        None,
        "Adam, AdamW, Adagrad, Lamb, Lion, Muon, OneBitAdam, ZeroOneAdam, OneBitLamb, MuAdam, "
        "MuAdamW or MuSGD in any case, or the exact name of a class in torch.optim.",
        mark=Mark(auto_is_a_word=True),
    )
    params: dict[str, Any] = key({}, "Arguments of the optimizer; see the table for its type.")
    legacy_fusion: Boolean = key(
        False, "Use an older fused kernel. There is only one kernel.", mark=NO_EFFECT
    )

    @classmethod
    def child(cls, name: str, raw: Mapping[str, Any]) -> Child | None:
        """Return the params section for the type; a torch class accepts any."""
        if name != "params":
            return super().child(name, raw)
        kind = canonical_type(raw.get("type"))
        return Child(PARAMS.get(kind, OpenParams) if isinstance(kind, str) else OpenParams, "one")

    @property
    def rates(self) -> list[float]:
        """Return the learning rates of this section: Muon's two, or the one that is given."""
        params = self.params
        if self.type == "Muon":
            return [params.get(key, params.get("lr", rate)) for key, rate in MUON_RATES.items()]
        return [rate for rate in (params.get("lr"),) if isinstance(rate, (int, float))]


class OpenParams(Section):
    """Arguments passed to a torch class unchanged."""

    model_config = ConfigDict(extra="allow")
