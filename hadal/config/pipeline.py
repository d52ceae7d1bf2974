"""`pipeline`: options of pipeline parallelism.

Tests: tests/config/test_every_key.py
"""

from typing import Literal

from hadal.config.section import UNBUILT, Mark, Section, key
from hadal.config.values import Boolean, Integer, Text

_MODULE_SAYS = "Also an argument of the pipeline module."


class Pipeline(Section):
    """Options of a model that is split into pipeline stages."""

    stages: Literal["auto"] | Integer = key(
        "auto",
        _MODULE_SAYS,
        mark=Mark(status="not built yet", auto_is_a_word=True),
    )
    partition: Text = key("best", _MODULE_SAYS, mark=UNBUILT)
    seed_layers: Boolean = key(False, _MODULE_SAYS, mark=UNBUILT)
    activation_checkpoint_interval: Integer = key(
        0, "Layers between stored activations; 0 leaves it to the module.", ge=0, mark=UNBUILT
    )
    pipe_partitioned: Boolean = key(
        True, "Shard activations between stages over tensor-parallel ranks.", mark=UNBUILT
    )
    grad_partitioned: Boolean = key(
        True, "Shard gradients between stages in the same way.", mark=UNBUILT
    )
    use_reentrant: Boolean = key(True, "Use reentrant recomputation.", mark=UNBUILT)
