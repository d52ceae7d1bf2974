"""`zero_optimization.zenflow`: important gradients update at once, others later on the CPU."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeAlias

from annotated_types import Ge

from hadal.config.section import AUTO_IS_A_WORD, Section, key
from hadal.config.values import Boolean, Integer, Number

_Period: TypeAlias = Literal["auto"] | Annotated[Integer, Ge(1)]


class ZenFlow(Section):
    """Selective updates on the device alongside an offloaded optimizer."""

    leftovers: ClassVar[Mapping[str, str]] = {
        "steps_per_epoch": "ignored: it is filled in while training"
    }

    topk_ratio: Number = key(0.1, "Fraction of columns updated at each step.", gt=0, lt=1)
    select_strategy: Literal["auto", "step", "epoch"] = key(
        "auto", "Unit of the selection interval.", mark=AUTO_IS_A_WORD
    )
    select_interval: _Period = key("auto", "Interval between selections.", mark=AUTO_IS_A_WORD)
    update_interval: _Period = key(
        "auto", "Steps between updates of the columns that were not selected.", mark=AUTO_IS_A_WORD
    )
    overlap_step: Boolean = key(False, "Run the CPU's update in parallel with the next steps.")
    offload: Boolean = key(False, "Keep the selected columns' state on the CPU too.")
    auto_ratio: Number = key(
        0.99, "Fraction of the gradients' mass that decides an automatic interval.", ge=0, le=1
    )
    full_warm_up_rounds: Integer = key(0, "Steps at the start that update everything.", ge=0)
    pt_reserved_cores_perc: Number = key(
        0.5, "Fraction of the cores reserved for torch.", ge=0, le=1
    )
