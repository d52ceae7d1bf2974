"""`zero_optimization.leaf_module`: modules that are gathered as a whole."""

from hadal.config.section import Section, key
from hadal.config.values import TextOrTexts

_SPARSE_BLOCKS = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


class LeafModule(Section):
    """Modules that stage 3 gathers as a whole, ignoring the modules inside them."""

    classes: TextOrTexts = key(_SPARSE_BLOCKS, "Class names, with or without their module.")
    names: TextOrTexts = key((), "Full names of modules in the model.")
    name_suffixes: TextOrTexts = key((), "Suffixes of such names.")
