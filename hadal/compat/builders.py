"""The builders of `deepspeed.ops.op_builder`: nothing is built when a program runs.

They report whether their functionality is available. It is found under the names of its classes
(`DeepSpeedCPUAdam`), not in a module that `load` returns.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar

import torch

from hadal.compat.surface import unbuilt

TORCH_MAJOR, TORCH_MINOR = (int(part) for part in torch.__version__.split(".")[:2])
HAS_TRITON = find_spec("triton") is not None
DEFAULT_COMPUTE_CAPABILITIES = "6.0;6.1;7.0"

# class name -> (name of the operator, whether its functionality is available)
_KNOWN: dict[str, tuple[str, bool]] = {
    "AsyncIOBuilder": ("async_io", False),
    "CPUAdagradBuilder": ("cpu_adagrad", True),
    "CPUAdamBuilder": ("cpu_adam", True),
    "CPULionBuilder": ("cpu_lion", True),
    "EvoformerAttnBuilder": ("evoformer_attn", False),
    "FPQuantizerBuilder": ("fp_quantizer", False),
    "FusedAdamBuilder": ("fused_adam", True),
    "FusedLambBuilder": ("fused_lamb", True),
    "FusedLionBuilder": ("fused_lion", True),
    "GDSBuilder": ("gds", False),
    "InferenceBuilder": ("transformer_inference", False),
    "PinMemoryBuilder": ("pin_memory", True),
    "QuantizerBuilder": ("quantizer", False),
    "RaggedUtilsBuilder": ("ragged_device_ops", False),
    "SparseAttnBuilder": ("sparse_attn", True),
    "SpatialInferenceBuilder": ("spatial_inference", False),
    "TransformerBuilder": ("transformer", True),
    "UtilsBuilder": ("utils", True),
}


class MissingCUDAException(Exception):
    """This torch was not built for CUDA."""


def installed_cuda_version(name: str = "") -> tuple[int, int]:
    """Return the CUDA version of this torch: nothing is compiled, so no toolkit is needed.

    Raises:
        MissingCUDAException: this torch was not built for CUDA.
    """
    if torch.version.cuda is None:
        raise MissingCUDAException(f"torch {torch.__version__} was not built for CUDA")
    return _major_minor(torch.version.cuda)


def assert_no_cuda_mismatch(name: str = "") -> bool:
    """Return True: torch's CUDA is the only one in use.

    Raises:
        MissingCUDAException: this torch was not built for CUDA.
    """
    installed_cuda_version(name)
    return True


def get_default_compute_capabilities() -> str:
    """Return DeepSpeed's list of capabilities to compile for; nothing is compiled here."""
    return DEFAULT_COMPUTE_CAPABILITIES


def _major_minor(version: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


class OpBuilder:
    """The methods of every builder."""

    NAME: ClassVar[str] = ""
    is_there: ClassVar[bool] = False

    def __init__(self, name: str | None = None) -> None:
        self.name = self.NAME if name is None else name
        self.error_log: str | None = None

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Return whether this torch was built for ROCm."""
        return torch.version.hip is not None

    @staticmethod
    def installed_rocm_version() -> tuple[int, int]:
        """Return the ROCm version of this torch; (0, 0) if it was not built for ROCm."""
        return (0, 0) if torch.version.hip is None else _major_minor(torch.version.hip)

    @staticmethod
    def is_sycl_enabled() -> bool:
        """Return False: no kernel is converted to SYCL."""
        return False

    @staticmethod
    def is_sycl_supported() -> bool:
        """Return False, as `is_sycl_enabled`."""
        return False

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether the functionality is available."""
        return self.is_there

    def load(self, verbose: bool = True) -> Any:
        """Raise, because there is no module to return.

        Raises:
            NotBuiltYetError: always.
        """
        raise unbuilt(f"deepspeed.ops.op_builder.{type(self).__name__}().load()")


_BUILDERS = {
    name: type(name, (OpBuilder,), {"NAME": operator, "is_there": is_there, "__doc__": operator})
    for name, (operator, is_there) in _KNOWN.items()
}
COMPATIBLE_OPS: dict[str, bool] = dict(_KNOWN.values())
"""Name of an operator -> whether Hadal has a replacement for it."""


def builder_of(class_name: str) -> type[OpBuilder] | None:
    """Return a builder's class by its name."""
    return _BUILDERS.get(class_name)


def __getattr__(name: str) -> Any:
    if name == "TORCH_INFO":
        return _torch_info()
    if name not in _BUILDERS:
        raise AttributeError(f"module 'hadal.compat.builders' has no attribute {name!r}")
    return _BUILDERS[name]


@cache
def _torch_info() -> dict[str, Any]:
    """Return the versions that DeepSpeed's build writes down: torch's, and its libraries'."""
    cuda, hip = torch.version.cuda, torch.version.hip
    has_nccl = torch.cuda.is_available() and hip is None
    nccl = ".".join(map(str, torch.cuda.nccl.version()[:2])) if has_nccl else "0.0"
    return {
        "version": f"{TORCH_MAJOR}.{TORCH_MINOR}",
        "bf16_support": torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        "cuda_version": cuda or "0.0",
        "nccl_version": nccl,
        "hip_version": hip or "0.0",
    }
