"""`comet`: scalars in Comet."""

from typing import Annotated, ClassVar, Literal

from pydantic import StringConstraints

from hadal.config.section import Section, key
from hadal.config.values import Boolean, Integer, Text


class Comet(Section):
    """Scalars of training in a Comet experiment, sent by rank 0.

    The step is the number of samples so far. Needs `pip install comet_ml`.
    """

    switch: ClassVar[str | None] = "enabled"

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
