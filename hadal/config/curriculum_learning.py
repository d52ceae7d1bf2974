"""`curriculum_learning`: difficulty (sequence length) that grows during training."""

from typing import ClassVar, Literal, TypeAlias

from hadal.config.section import Section, key
from hadal.config.values import Boolean, Integer, Integers, Number

Pace: TypeAlias = Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"]


class PaceConfig(Section):
    """Pace at which the difficulty grows; the required keys depend on the schedule type."""

    total_curriculum_step: Integer | None = key(
        None, "fixed_linear, fixed_root: updates until the full difficulty.", gt=0
    )
    difficulty_step: Integer | None = key(
        None, "fixed_linear, fixed_root: the difficulty is a multiple of this.", gt=0
    )
    root_degree: Number | None = key(None, "fixed_root: degree of the root.", gt=0)
    difficulty: Integers | None = key(None, "fixed_discrete: levels, in order.")
    max_step: Integers | None = key(
        None, "fixed_discrete: last update of each level except the last."
    )


class CurriculumLearning(Section):
    """Short sequences first (the older form; see also `data_efficiency`)."""

    switch: ClassVar[str | None] = "enabled"
    required: ClassVar[tuple[str, ...]] = ("enabled",)

    enabled: Boolean = key(False, "Increase the difficulty during training. Required.")
    curriculum_type: Literal["seqlen"] | None = key(
        None, "Measure of difficulty: the sequence length. Required."
    )
    min_difficulty: Integer | None = key(None, "Length at the start, in tokens. Required.", ge=1)
    max_difficulty: Integer | None = key(None, "Length at the end, in tokens. Required.", ge=1)
    schedule_type: Pace | None = key(
        None,
        "Kind of schedule; for custom, pass the function to"
        " engine.set_custom_curriculum_learning_schedule. Required.",
    )
    schedule_config: PaceConfig | None = key(None, "Settings of the schedule.")
    truncate: Boolean | None = key(
        None,
        "true: Hadal truncates the inputs of forward; false: forward is given the length as"
        " curriculum_seqlen; null: the latter if the model takes it, else the former. Hadal's own"
        " key.",
    )
