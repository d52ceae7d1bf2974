"""`optimizer`: the optimizer that the engine builds."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ConfigDict

from hadal.config.optimizer_kinds import KINDS, built_in
from hadal.config.section import NO_EFFECT, Child, Mark, Section, key
from hadal.config.values import Boolean, Text


def canonical_type(name: Any) -> Any:
    """Return a built-in optimizer's canonical spelling; other names are unchanged."""
    if not isinstance(name, str):
        return name
    return next((known for known in built_in() if known.lower() == name.lower()), name)


class Optimizer(Section):
    """The optimizer and its arguments. Not used if the program passes its own optimizer."""

    required: ClassVar[tuple[str, ...]] = ("type",)

    type: Annotated[Text, BeforeValidator(canonical_type)] = key(
        None,
        f"One of {', '.join(built_in())} in any case, or the exact name of a class in torch.optim.",
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
        return Child(
            built_in().get(kind, OpenParams) if isinstance(kind, str) else OpenParams, "one"
        )

    @property
    def rates(self) -> list[float]:
        """Return the learning rates of this section: one for each param group, or the given one."""
        params = self.params
        kind = KINDS.get(self.type)
        if kind is not None and kind.rates:
            return [params.get(key, params.get("lr", rate)) for key, rate in kind.rates.items()]
        return [rate for rate in (params.get("lr"),) if isinstance(rate, (int, float))]


class OpenParams(Section):
    """Arguments passed to a torch class unchanged."""

    model_config = ConfigDict(extra="allow")
