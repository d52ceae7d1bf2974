"""`pipeline`: options of pipeline parallelism."""

from typing import Any, Literal

from hadal.config.section import NO_EFFECT, Mark, Section, key
from hadal.config.values import Boolean, Integer, Text


def _of_module(argument: str, **more: Any) -> Mark:
    return Mark(status="not built yet", why=f"pass PipelineModule {argument} instead", **more)


class Pipeline(Section):
    """Options of a model that is split into pipeline stages."""

    auto: Boolean = key(
        False,
        "Split an unmodified causal language model of transformers into `stages`, between blocks.",
    )
    stages: Literal["auto"] | Integer = key(
        "auto",
        "The number of stages, with `auto`. A PipelineModule has its own number: `auto` or the same"
        " here.",
        mark=Mark(auto_is_a_word=True),
    )
    chunks: Integer = key(
        1,
        "Parts of the model on each stage, with `auto`, for the schedule `interleaved`. A"
        " PipelineModule has its own `chunks`.",
        ge=1,
    )
    partition: Text = key(
        "best",
        "How layers are split into stages, with `auto`: `parameters` (or `best`: equally many"
        " elements), `uniform` (equally many layers) or `type:` and a regular expression of"
        " classes. A PipelineModule has its `partition_method`.",
    )
    seed_layers: Boolean = key(
        False,
        "Seed each layer; it is an argument of the pipeline module.",
        mark=_of_module("seed_layers="),
    )
    activation_checkpoint_interval: Integer = key(
        0,
        "Layers that are recomputed together in backward, by the pipeline module's function or else"
        " with the options of `activation_checkpointing`; 0 leaves it to the module.",
        ge=0,
    )
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = key(
        "1f1b",
        "The order of forwards and backwards. `1f1b`: they alternate. `gpipe`: all forwards come"
        " first, which needs the memory of all micro-batches. `interleaved`: each stage has several"
        " parts of the model (`PipelineModule(chunks=)`), so stages wait for each other as many"
        " times less. `zero_bubble`: linear layers compute their weights' gradients while their"
        " stage would wait (ZB-H1), for a third of the waiting; every stage needs the memory of"
        " the first one. Losses and weights are the same.",
    )
    pipe_partitioned: Boolean = key(
        True,
        "Send the first tensor between stages in slices, one for each rank of the topology's axis"
        " `model`; these must all have the same activations.",
    )
    grad_partitioned: Boolean = key(True, "Send the gradient of that tensor in the same way.")
    use_reentrant: Boolean = key(
        True,
        "Recompute by a second backward inside the first. Recomputation here never does, and its"
        " results are the same.",
        mark=NO_EFFECT,
    )
