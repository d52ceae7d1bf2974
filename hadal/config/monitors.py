"""`monitor` and the sections of the monitors: scalars of training, written by rank 0."""

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import StringConstraints

from hadal.config.plain import shown
from hadal.config.section import NULL_IS_DEFAULT, Section, Switched, key, rule
from hadal.config.values import Boolean, Integer, Text
from hadal.errors import Fault


class MonitorScope(Section):
    """Selection of the scalars that the monitors write. Hadal's own section."""

    extra: Boolean = key(
        True,
        "Also write metrics that DeepSpeed does not write: gradient norm, samples and tokens per"
        " second, skipped updates, peak memory.",
    )


class _Files(Switched):
    """Files of a monitor."""

    enabled: Boolean = key(False, "Write scalars.")
    output_path: Text = key(
        "", "Parent directory; empty or null is the working directory.", mark=NULL_IS_DEFAULT
    )
    job_name: Text = key("DeepSpeedJobName", "Directory inside output_path.")

    @rule()
    def _folder(self) -> Iterator[Fault]:
        job = PurePosixPath(self.job_name)
        if self.enabled and (job.is_absolute() or ".." in job.parts):
            yield Fault(
                "job_name",
                f"{shown(self.job_name)} leads out of output_path; set a name without"
                ' ".." or a leading "/", and the directory in output_path',
            )


class TensorBoard(_Files):
    """Scalars of training in an event file for TensorBoard, written by rank 0.

    The step is the number of samples so far. Needs `pip install tensorboard`.
    """


class CsvMonitor(_Files):
    """Scalars of training in CSV files, one per name, written by rank 0.

    Each has a header, then lines with the number of samples so far and the value; later runs
    append.
    """


class Wandb(Switched):
    """Scalars of training in a Weights & Biases run, sent by rank 0.

    The step is the number of samples so far. Needs `pip install wandb`. wandb's own variables set
    everything else (WANDB_MODE, WANDB_DIR, WANDB_RUN_ID); a run that the program has started is
    used.
    """

    enabled: Boolean = key(False, "Send scalars.")
    group: Text | None = key(None, "Group of the run.")
    team: Text | None = key(None, "Owner of the run.")
    project: Text = key("deepspeed", "Project of the run.")


class Comet(Switched):
    """Scalars of training in a Comet experiment, sent by rank 0.

    The step is the number of samples so far. Needs `pip install comet_ml`.
    """

    enabled: Boolean = key(False, "Send scalars.")
    workspace: Text | None = key(None, "Workspace of the experiment.")
    project: Text | None = key(None, "Project of the experiment.")
    samples_log_interval: Integer = key(
        100, "Samples between two values of one name that are sent.", ge=1
    )
    experiment_name: Text | None = key(None, "Name given to the experiment.")
    api_key: Text | None = key(
        None, "API key, hidden wherever the configuration is logged; prefer COMET_API_KEY."
    )
    experiment_key: Annotated[Text, StringConstraints(pattern=r"^[A-Za-z0-9]{32,50}$")] | None = (
        key(None, "Existing experiment to continue: 32 to 50 letters and digits.")
    )
    online: Boolean | None = key(
        None,
        "true sends immediately, false writes to the disk for a later `comet upload`; null lets"
        " Comet decide.",
    )
    mode: Literal["get", "create", "get_or_create"] | None = key(
        None, "Whether the experiment must exist (get), must not (create), or may (get_or_create)."
    )


class JsonlMonitor(_Files):
    """Everything about a run in `events.jsonl`, one JSON object per line, written by rank 0.

    The first line describes the run (configuration, model, machine); each update adds a line with
    its scalars. A section of Hadal's own.
    """

    enabled: Boolean = key(False, "Write the file.")
    report: Boolean = key(
        False,
        "Also record warnings, checkpoints, memory, profile and communication, and write "
        "report.html next to the file when the program ends. `hadal report FOLDER` builds "
        "that page from any such file.",
    )
