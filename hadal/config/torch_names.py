"""The schedules of torch that a `type` may name, known without importing torch."""

import sys

SCHEDULES = (
    *("ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts"),
    *("CyclicLR", "ExponentialLR", "LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR"),
    *("OneCycleLR", "PolynomialLR", "ReduceLROnPlateau", "SequentialLR", "StepLR"),
)


def is_class_of(module: str, name: str) -> bool:
    """Return whether a torch module, if imported, has a class: newer releases have more."""
    return isinstance(getattr(sys.modules.get(module), name, None), type)
