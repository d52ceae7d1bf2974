"""`optimizer`: the optimizer that the engine builds."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

from hadal.config.optimizer_kinds import KINDS, built_in
from hadal.config.section import NO_EFFECT, Params, Typed, key
from hadal.config.values import Boolean, Text


def canonical_type(name: Any) -> Any:
    """Return a built-in optimizer's canonical spelling; other names are unchanged."""
    if not isinstance(name, str):
        return name
    return next((known for known in built_in() if known.lower() == name.lower()), name)


class Optimizer(Typed):
    """The optimizer and its arguments. Not used if the program passes its own optimizer."""

    types = built_in()
    torch_types = tuple(KINDS)
    home = "torch.optim"

    type: Annotated[Text, BeforeValidator(canonical_type)] = key(
        None,
        f"One of {', '.join(built_in())} in any case, or the exact name of a class in torch.optim.",
    )
    params: dict[str, Any] = key({}, "Arguments of the optimizer; see the table for its type.")
    legacy_fusion: Boolean = key(
        False, "Use an older fused kernel. There is only one kernel.", mark=NO_EFFECT
    )

    @classmethod
    def params_of(cls, raw: Mapping[str, Any]) -> Params:
        """Return the section of params for the type, spelled in any case."""
        return super().params_of({"type": canonical_type(raw.get("type"))})

    @property
    def rates(self) -> list[float]:
        """Return the learning rates of this section: one for each param group, or the given one."""
        params = self.params
        kind = KINDS.get(self.type)
        if kind is not None and kind.rates:
            return [params.get(key, params.get("lr", rate)) for key, rate in kind.rates.items()]
        return [rate for rate in (params.get("lr"),) if isinstance(rate, (int, float))]
