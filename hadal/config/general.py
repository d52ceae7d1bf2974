"""The top-level keys that are not sections; three of them are the batch triangle."""

from typing import Annotated, Literal, NamedTuple

from annotated_types import Gt
from pydantic import BeforeValidator

from hadal.config.section import NO_EFFECT, TUNABLE, Section, key
from hadal.config.values import Boolean, Dtype, Integer, Number, lowered, whole_or_never
from hadal.errors import Fault

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class General(Section):
    """The top-level keys that are not sections."""

    communication_data_type: Dtype | None = key(
        None,
        "Dtype of gradients on the wire: fp16, bf16 or fp32. null uses the dtype they are "
        "accumulated in, which follows the model; on an accelerator 16-bit gradients are then "
        "sent in fp32, because its backend sums in the dtype on the wire and rounds after each "
        "rank, while CPUs sum in fp32. Each parameter then takes 4 bytes of a message in place of "
        "2, and up to two buckets (`reduce_bucket_size`) are in flight as temporary copies in "
        "fp32; bf16 or fp16 halves the messages, and sums are rounded.",
    )
    seq_parallel_communication_data_type: Dtype | None = key(
        "fp32", "Replaces communication_data_type when sequence_parallel_size is greater than 1."
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(lowered)] = key(
        "mean", "Average the ranks' gradients, or sum them (stages 0 to 2)."
    )
    prescale_gradients: Boolean = key(
        False,
        "Divide gradients by the number of ranks before they are rounded for the wire and "
        "summed, not after. Stages 2 and 3 require reduce_scatter false.",
    )
    gradient_predivide_factor: Number = key(
        1.0,
        "Divide gradients by this factor before they are rounded for the wire, and divide the sum "
        "by (number of ranks / factor). Stages 2 and 3 require reduce_scatter false.",
        gt=0,
    )
    sparse_gradients: Boolean = key(
        False,
        "Send only the nonzero rows of the gradients of nn.Embedding and nn.EmbeddingBag when "
        "that takes fewer bytes. Applies to embeddings that are trainable from the start.",
    )
    disable_allgather: Boolean = key(
        False, "An old switch, which DeepSpeed does not read either.", mark=NO_EFFECT
    )
    train_batch_size: Integer = key(
        None,
        "Samples in one update over all ranks: micro-batch x accumulation steps x data-parallel "
        "ranks. Any one of the three sizes follows from the other two.",
        gt=0,
    )
    train_micro_batch_size_per_gpu: Integer = key(
        None,
        "Samples in one rank's forward and backward pass. Every rank's loss has the same "
        "weight, however many samples the rank has.",
        gt=0,
        mark=TUNABLE,
    )
    gradient_accumulation_steps: Integer = key(
        None, "Micro-batches in one update; `engine.backward` divides the loss by it.", gt=0
    )
    managed_gradient_accumulation: Boolean = key(
        True,
        "The engine counts micro-batches, and `engine.step` updates the weights at the last "
        "one. If false, every `engine.step` is an update with all gradients since the previous "
        "one, after as many backward passes as the caller likes. The loss is divided by "
        "gradient_accumulation_steps either way; `engine.backward(loss, scale_wrt_gas=False)` "
        "does not divide it.",
    )
    sequence_parallel_size: Integer = key(
        1,
        "Number of consecutive ranks that share each sequence; it must divide the number of "
        "ranks. These ranks receive the same samples and count as one in the batch. In training, a "
        "model of transformers gets this rank's slice of each batch, its attention exchanges heads "
        "(Ulysses; with fewer heads than ranks, keys and values travel around a ring), and its "
        "loss is that of whole sequences. Any other model gets the program's inputs, and each "
        "rank passes its part of the loss to `engine.backward`; the parts must add up to the loss "
        'of the whole sequence. For the autotuner a list, or "all" divisors of the ranks.',
        ge=1,
        mark=TUNABLE,
    )
    data_parallel_size: Integer | None = key(
        None,
        "Number of ranks that see different samples. Only checked: together with "
        "sequence_parallel_size it must multiply to the number of ranks. Alone it has no "
        "effect.",
        ge=1,
    )
    gradient_clipping: Number = key(
        1.0, "Maximum norm of the whole gradient; 0 does not clip.", ge=0
    )
    zero_allow_untested_optimizer: Boolean = key(
        False,
        "Allow ZeRO with an optimizer that was not tested with it. No permission is needed: "
        "elementwise optimizers update shards, and every other optimizer receives whole "
        "parameters, so each is exact at every stage.",
        mark=NO_EFFECT,
    )
    zero_force_ds_cpu_optimizer: Boolean = key(
        True,
        "Require DeepSpeed's own optimizer when state is offloaded. Hadal never requires it: "
        "any optimizer works with offloading.",
        mark=NO_EFFECT,
    )
    max_skipped_updates: Integer = key(
        20,
        "Consecutive skipped updates that end training with an error listing their reasons; 0 "
        "allows any number. Overflows that lower the loss scale do not count. Hadal's own key.",
        ge=0,
    )
    steps_per_print: Annotated[
        Annotated[Integer, Gt(0)] | None, BeforeValidator(whole_or_never)
    ] = key(
        None,
        "Updates between two progress lines on rank 0: epoch, mean loss, learning rate, gradient "
        "norm, samples or tokens per second, MFU, time of an update, memory, skipped updates, time "
        "left, as far as they are known. null or infinity prints none.",
    )
    wall_clock_breakdown: Boolean = key(
        False,
        "Time forward, backward, the wait for reductions in backward, and the update: "
        "milliseconds per update, averaged between two progress lines (logged for each update "
        "if there are none). On an accelerator the times come from events in its own queue, for "
        "the updates it has finished, so nothing waits for it.",
    )
    memory_breakdown: Boolean = key(
        False,
        "Log host and device memory before and after forward, backward and update, and the "
        "device's peak, for the last micro-step before each progress line. On an accelerator, one "
        "line after the second update tells where these differ from `hadal.plan` by more than 5 %; "
        "that runs a copy of the model once more, without values.",
    )
    dump_state: Boolean = key(
        False, "Log the configuration, the batch and a table of all buckets at the start."
    )
    log_level: (
        Annotated[
            Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(lowered)
        ]
        | None
    ) = key(
        None,
        "Level of the logger `hadal`; null leaves it unchanged, or sets it to info if a key "
        "enables lines of that level. Ranks other than 0 log errors only.",
    )
    dataloader_drop_last: Boolean = key(
        False,
        "Drop an incomplete last batch on all ranks. Otherwise it is kept and filled up with "
        "the first samples of that epoch's order, so that every rank receives the same number.",
    )
    dataloader_shard_iterable: Boolean | None = key(
        None,
        "Who shards an `IterableDataset` over ranks. true: all ranks read the same stream, and "
        "each takes every n-th sample. false: the data set gives each rank its own "
        "samples, as after `datasets.distributed.split_dataset_by_node`. null: it is refused if "
        "several ranks train.",
    )
    vocabulary_size: Integer | None = key(
        None, "Vocabulary size of the model; logs a note if it is not a multiple of 8.", gt=0
    )
    graph_harvesting: Boolean = key(
        False,
        "A leftover: older releases recorded device graphs of one optimizer. The results are "
        "the same.",
        mark=NO_EFFECT,
    )
    disable_python_gc: Boolean = key(
        False, "Disable Python's cycle collector until the engine's `destroy`."
    )
    use_data_before_expert_parallelism: Boolean = key(
        False,
        "Consecutive ranks hold copies of the same experts; false: they share one copy of all "
        "experts.",
    )


# ---- the batch triangle: train batch = micro-batch x accumulation x ranks ------------------------


class Given(NamedTuple):
    """The three sizes in the JSON; None for a size that it does not set."""

    train: int | None = None
    micro: int | None = None
    accumulation: int | None = None


class Sizes(NamedTuple):
    """The three sizes, consistent with each other."""

    train: int
    micro: int
    accumulation: int


def complete(given: Given, ranks: int) -> Sizes | Fault:
    """Infer the missing sizes; return a fault if they cannot agree."""
    if given.train is not None:
        return _split(given.train, given, ranks)
    if given.micro is None:
        return Fault(
            "train_batch_size",
            "neither this nor train_micro_batch_size_per_gpu is set; set one of the two",
        )
    accumulation = given.accumulation or 1
    return Sizes(given.micro * accumulation * ranks, given.micro, accumulation)


def _split(train: int, given: Given, ranks: int) -> Sizes | Fault:
    micro, accumulation = given.micro, given.accumulation
    if micro is not None and accumulation is not None:
        product = micro * accumulation * ranks
        if product != train:
            return Fault(
                "train_batch_size",
                f"{train}, but {micro} (micro-batch) x {accumulation} (accumulation)"
                f" x {_counted(ranks)} = {product}; remove one of the three",
            )
        return Sizes(train, micro, accumulation)
    known = (micro or accumulation or 1) * ranks
    if train % known:
        return Fault("train_batch_size", _uneven(train, given, ranks, known))
    rest = train // known
    if micro is not None:
        return Sizes(train, micro, rest)
    return Sizes(train, rest, accumulation or 1)


def _uneven(train: int, given: Given, ranks: int, known: int) -> str:
    if known == ranks:
        return f"{train} is not divisible by {_counted(ranks)}; use a multiple of {known}"
    size = given.micro, "micro-batch"
    if given.micro is None:
        size = given.accumulation, "accumulation"
    parts = f"{size[0]} ({size[1]}) x {_counted(ranks)} = {known}"
    return f"{train} is not divisible by {parts}; use a multiple of {known}"


def _counted(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"
