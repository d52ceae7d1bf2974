"""`checkpoint`: saving and loading."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from hadal.config.section import UNBUILT, Section, key, section
from hadal.config.values import Boolean, Integer, Number, lowered, titled


class ParallelWrite(Section):
    """Ranks that write together."""

    pipeline_stage: Boolean = key(
        False, "All copies of a pipeline stage share the writing.", mark=UNBUILT
    )


class Writer(Section):
    """A faster writer of checkpoint files."""

    type: Annotated[Literal["mock", "python", "fast"], BeforeValidator(lowered)] = key(
        "fast", "Which writer."
    )
    io_buffer_size: Integer = key(67_108_864, "Bytes of the staging buffer.", gt=0)
    io_buffer_double: Boolean = key(True, "Use two such buffers in turn.")
    show_statistics: Boolean = key(False, "Print speeds.")
    data_parallel: (
        Annotated[Literal["replica", "socket", "machine"], BeforeValidator(lowered)] | None
    ) = key(None, "Ranks that share one state; null is one writer.")
    decoupled: Boolean = key(False, "Write from a helper process.")
    io_multiplier: Integer = key(1, "Files per rank.", ge=1)


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
    checkpoint_serialization: Boolean = key(True, "Write torch's zip format.", mark=UNBUILT)
    writer: Writer | None = key(None, "A faster writer.", mark=UNBUILT)
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
