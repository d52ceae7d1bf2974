"""`monitor`: selection of the scalars that the monitors write."""

from hadal.config.section import Section, key
from hadal.config.values import Boolean


class MonitorScope(Section):
    """Selection of the scalars that the monitors write. Hadal's own section."""

    extra: Boolean = key(
        True,
        "Also write metrics that DeepSpeed does not write: gradient norm, samples and tokens per"
        " second, skipped updates, peak memory.",
    )
