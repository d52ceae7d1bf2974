"""`eigenvalue`: curvature of a model's blocks during training."""

from typing import ClassVar

from hadal.config.section import Section, key
from hadal.config.values import Boolean, Integer, Number, Text


class Eigenvalue(Section):
    """The dominant eigenvalue of each block's Hessian, by power iteration."""

    switch: ClassVar[str | None] = "enabled"

    enabled: Boolean = key(False, "Compute eigenvalues. Requires layer_num.")
    verbose: Boolean = key(False, "Log each one.")
    max_iter: Integer = key(100, "Most iterations for each block.", ge=1)
    tol: Number = key(1e-2, "Relative change at which to stop.", ge=0)
    stability: Number = key(1e-6, "Added to norms.", ge=0)
    gas_boundary_resolution: Integer = key(1, "Updates from one computation to the next.", ge=1)
    layer_name: Text = key("bert.encoder.layer", "Full name of the list of blocks.")
    layer_num: Integer = key(0, "Number of blocks, from the first.", ge=0)
