"""`datastates_ckpt`: checkpoints written while training goes on."""

from hadal.config.section import NO_EFFECT, Section, key
from hadal.config.values import Integer


class DatastatesCkpt(Section):
    """Checkpoints written behind training; the section's presence switches it on."""

    host_cache_size: Integer | None = key(
        None,
        "Gigabytes of host memory for copies. They take what the state of a rank takes.",
        gt=0,
        mark=NO_EFFECT,
    )
