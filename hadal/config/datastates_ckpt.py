"""`datastates_ckpt`: asynchronous checkpoints."""

from hadal.config.section import NO_EFFECT, Section, key
from hadal.config.values import Integer


class DatastatesCkpt(Section):
    """Asynchronous checkpoints; the presence of the section enables them."""

    host_cache_size: Integer | None = key(
        None,
        "Gigabytes of host memory for copies. They take as much as a rank's state does.",
        gt=0,
        mark=NO_EFFECT,
    )
