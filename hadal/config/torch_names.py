"""The torch classes that a `type` may name, known without importing torch."""

import sys
from collections.abc import Mapping

OPTIMIZERS = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
)
SCHEDULES = (
    *("ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts"),
    *("CyclicLR", "ExponentialLR", "LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR"),
    *("OneCycleLR", "PolynomialLR", "ReduceLROnPlateau", "SequentialLR", "StepLR"),
)
REFUSED: Mapping[str, str] = {
    "LBFGS": "it calls the loss several times in one step, which an engine's step cannot",
    "SparseAdam": "it updates only the rows of sparse gradients, and gradients here are dense",
}
"""Torch classes that an engine cannot step, with the reason."""


def is_class_of(module: str, name: str) -> bool:
    """Return whether a torch module, if imported, has a class: newer releases have more."""
    return isinstance(getattr(sys.modules.get(module), name, None), type)
