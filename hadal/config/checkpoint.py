"""`checkpoint` and `datastates_ckpt`: saving and loading."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator

from hadal.config.section import NO_EFFECT, Mark, Section, key, rule, section
from hadal.config.values import Boolean, Integer, Nbytes, Number, Text, lowered, titled
from hadal.errors import Fault


class ParallelWrite(Section):
    """Options for ranks that write together."""

    pipeline_stage: Boolean = key(
        False,
        "Split the writing of a state among all ranks that hold it. This is always done, so the "
        "key changes nothing.",
    )


class CheckpointWriter(Section):
    """Options for writing checkpoint files."""

    type: Annotated[Literal["mock", "python", "fast"], BeforeValidator(lowered)] = key(
        "fast",
        'Writer to use: "fast" and "python" are the same here; "mock" would write nothing.',
        mark=Mark(status="not built yet", only=("mock",)),
    )
    io_buffer_size: Integer = key(
        67_108_864, "Bytes copied from a device, checksummed and written at a time.", gt=0
    )
    io_buffer_double: Boolean = key(
        True,
        "Write one such buffer while the next one is filled. If false, and in an asynchronous "
        "save, they alternate.",
    )
    show_statistics: Boolean = key(False, "Log the speed of each save.")
    data_parallel: (
        Annotated[Literal["replica", "socket", "machine"], BeforeValidator(lowered)] | None
    ) = key(
        None,
        "Ranks that share the writing of one state. All ranks that hold it always do.",
        mark=NO_EFFECT,
    )
    decoupled: Boolean = key(
        False,
        "Write in a background thread while training continues, as checkpoint.async_save does.",
    )
    io_multiplier: Integer = key(
        1, "Files per rank. Each rank writes one file.", ge=1, mark=NO_EFFECT
    )


class OnSignal(Section):
    """Saving at a signal, before a node is taken away."""

    signals: tuple[Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP"], ...] = key(
        ("SIGTERM", "SIGUSR1"), "Signals to obey. It is enough if one rank receives one."
    )
    save_dir: str | None = key(
        None,
        "Directory to save into, as for save_checkpoint; null leaves saving and leaving to the "
        "program, when `engine.is_preempted` becomes true.",
    )


class Staging(Section):
    """The place in which an asynchronous save keeps the state until it is written."""

    folder: Text | None = key(
        None,
        "Directory on a local disk: the save returns once the state is written there, and needs no "
        "host memory. null copies the state to host memory.",
    )
    size: Nbytes | None = key(
        None,
        'Bytes that the copy may take in each process: a number, or text such as "4GB". A larger '
        "state is written before the save returns, with a warning. null sets no limit.",
        gt=0,
    )


class Checkpoint(Section):
    """Saving and loading."""

    tag_validation: Annotated[Literal["Ignore", "Warn", "Fail"], BeforeValidator(titled)] = key(
        "Warn", "Action to take when ranks save under different tags."
    )
    load_universal: Boolean = key(
        False,
        "Without a tag, load the checkpoint that latest_universal names rather than the one of "
        "latest, if there is one. Every checkpoint loads with another number of ranks or at "
        "another stage, regardless of this key.",
    )
    use_node_local_storage: Boolean = key(
        False,
        "The checkpoint directory is local to each node and not visible to the others: each "
        "node's directory holds all that its own ranks need to resume.",
    )
    parallel_write: ParallelWrite = section(ParallelWrite, "Options for ranks that write together.")
    checkpoint_serialization: Boolean = key(
        True, "Format that torch.save writes. Checkpoints are safetensors and JSON.", mark=NO_EFFECT
    )
    writer: CheckpointWriter | None = key(
        None, "Options for writing files; null is the writer's defaults."
    )
    async_save: Boolean = key(
        False,
        "Return from a save once the state is copied to host memory, and write it while "
        "training continues. The memory of the copy is kept for the next save. Hadal's own key.",
    )
    staging: Staging = section(
        Staging,
        "Storage of the state of an asynchronous save until it is written. Hadal's own section.",
    )
    on_signal: OnSignal | None = key(
        None,
        "At a signal, save at the end of the next update, on all ranks together, and leave with "
        "exit code 75; null obeys none. Hadal's own key.",
    )
    resume: Text | None = key(
        None,
        "Directory (or URL) of save_checkpoint: `initialize` loads its latest checkpoint if there "
        "is one, so that a restarted job continues. null loads nothing. Hadal's own key.",
    )
    verify_checksums: Boolean = key(
        True,
        "Compare every byte of a checkpoint with its checksum before loading; false compares "
        "only sizes, headers and the index. Hadal's own key.",
    )
    deepspeed_files: Boolean = key(
        False,
        "Also write into the checkpoint's directory the files that tools for DeepSpeed's "
        "checkpoints read, such as its zero_to_fp32: `*_model_states.pt` and, at stages 1 to 3, "
        "`*_optim_states.pt`. A save then takes more than twice the space. DeepSpeed itself "
        "continues from the universal format. Hadal's own key.",
    )
    keep_last: Integer | None = key(
        None,
        "Keep this many of the newest complete checkpoints and delete older ones after each "
        "save; null keeps all. Never deletes the one just saved, the one that `latest` names, "
        "or one saved with save_latest=False. Hadal's own key.",
        ge=1,
    )
    keep_hours: Number | None = key(
        None,
        "After each save, delete complete checkpoints older than this many hours; null sets no "
        "limit. If keep_last is given too, a checkpoint stays when either key keeps it. Hadal's "
        "own key.",
        gt=0,
    )

    @rule("deepspeed_files", "use_node_local_storage")
    def _all_files_in_one_directory(self) -> Iterator[Fault]:
        if self.deepspeed_files and self.use_node_local_storage:
            yield Fault(
                "deepspeed_files",
                "needs one directory for all ranks, and use_node_local_storage gives each node its"
                " own; remove one of the two",
            )


class DatastatesCkpt(Section):
    """Asynchronous checkpoints; the presence of the section enables them."""

    host_cache_size: Integer | None = key(
        None,
        "Gigabytes of host memory for copies. They take as much as a rank's state does.",
        gt=0,
        mark=NO_EFFECT,
    )
