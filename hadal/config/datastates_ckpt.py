"""`datastates_ckpt`: checkpoints through DataStates."""

from hadal.config.section import Section, key
from hadal.config.values import Integer


class DatastatesCkpt(Section):
    """Checkpoints written behind training; the section's presence switches it on."""

    host_cache_size: Integer | None = key(None, "Gigabytes of host memory for copies.", gt=0)
