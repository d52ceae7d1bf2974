"""`checkpoint`: saving and loading."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from hadal.config.section import NO_EFFECT, Mark, Section, key, section
from hadal.config.values import Boolean, Integer, Number, lowered, titled


class ParallelWrite(Section):
    """Ranks that write together."""

    pipeline_stage: Boolean = key(
        False,
        "All ranks that hold the same state share the writing of it. They always do: it asks for"
        " what is there.",
    )


class Writer(Section):
    """How checkpoint files are written."""

    type: Annotated[Literal["mock", "python", "fast"], BeforeValidator(lowered)] = key(
        "fast",
        'Which writer: "fast" and "python" are one and the same here; "mock" would write nothing.',
        mark=Mark(status="not built yet", only=("mock",)),
    )
    io_buffer_size: Integer = key(
        67_108_864,
        "Bytes that are copied from a device, summed and written at a time.",
        gt=0,
    )
    io_buffer_double: Boolean = key(
        True,
        "Write one such buffer while the next one is filled; false, and in an asynchronous save:"
        " one after the other.",
    )
    show_statistics: Boolean = key(False, "Log how fast a checkpoint was written.")
    data_parallel: (
        Annotated[Literal["replica", "socket", "machine"], BeforeValidator(lowered)] | None
    ) = key(
        None,
        "Ranks that share the writing of one state. All ranks that hold it always do.",
        mark=NO_EFFECT,
    )
    decoupled: Boolean = key(
        False, "Write while training goes on, as checkpoint.async_save does (in a thread)."
    )
    io_multiplier: Integer = key(1, "Files per rank. A rank writes one file.", ge=1, mark=NO_EFFECT)


class Checkpoint(Section):
    """Saving and loading."""

    tag_validation: Annotated[Literal["Ignore", "Warn", "Fail"], BeforeValidator(titled)] = key(
        "Warn", "What to do where ranks save under different tags."
    )
    load_universal: Boolean = key(
        False, "Load at another number of ranks or stage. Every checkpoint can, whatever is given."
    )
    use_node_local_storage: Boolean = key(
        False,
        "The folder is another one on each node, which the others do not see: each node's folder"
        " holds all that its own ranks need to go on.",
    )
    parallel_write: ParallelWrite = section(ParallelWrite, "Ranks that write together.")
    checkpoint_serialization: Boolean = key(
        True,
        "Which format of torch.save is written. Checkpoints are safetensors and JSON.",
        mark=NO_EFFECT,
    )
    writer: Writer | None = key(None, "How files are written; null is the writer's defaults.")
    async_save: Boolean = key(
        False,
        "Saves return when the state is copied to host memory, and are written while training goes"
        " on. The copy's memory is kept for the next one. A key of Hadal's own.",
    )
    verify_checksums: Boolean = key(
        True,
        "Compare every byte of a checkpoint with its checksum before it is loaded; false compares"
        " sizes, headers and the index only. A key of Hadal's own.",
    )
    keep_last: Integer | None = key(
        None,
        "After a save, remove complete checkpoints beyond so many of the newest; null keeps all."
        " Never the one just saved, the one that `latest` names, or one saved with"
        " save_latest=False. A key of Hadal's own.",
        ge=1,
    )
    keep_hours: Number | None = key(
        None,
        "After a save, remove complete checkpoints older than so many hours; null sets no limit."
        " With keep_last, one stays that either key keeps. A key of Hadal's own.",
        gt=0,
    )
