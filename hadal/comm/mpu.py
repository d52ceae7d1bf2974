"""Reading a program's own model-parallel object: the methods of Megatron, and their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from hadal.errors import NotBuiltYetError, UsageError

# Names that tensor-parallel programs use for the ranks of one model, the most common first.
_MODEL_NAMES = ("model_parallel", "tensor_model_parallel", "slice_parallel")
_PIPE_NAMES = ("pipe_parallel", "pipeline_model_parallel")
_ASKED = ("group", "world_size", "rank")
# Other kinds of ranks whose sizes Megatron-Core and others report: gradients, norms and weights of
# each follow different rules.
_OTHER_KINDS = ("context_parallel", "expert_model_parallel")


def cuts_the_model(mpu: Any) -> bool:
    """Return True if the program's own groups say which ranks see different samples."""
    return mpu is not None and hasattr(mpu, "get_data_parallel_world_size")


def shared_size_of(mpu: Any) -> int:
    """Return how many ranks share each sequence; 1 if the program does not say."""
    if not hasattr(mpu, "get_sequence_parallel_world_size"):
        return 1
    expect_methods(mpu, ["get_sequence_parallel_group", "get_sequence_parallel_rank"])
    return int(mpu.get_sequence_parallel_world_size())


def sharing_group_of(mpu: Any) -> Any:
    """Return the process group that holds the same parameters; None: all ranks do."""
    if shared_size_of(mpu) > 1:
        found = getattr(mpu, "get_sequence_data_parallel_group", None)
    else:
        found = getattr(mpu, "get_data_parallel_group", None)
    return None if found is None else found()


def model_group_of(mpu: Any) -> Any:
    """Return the process group whose ranks hold the parts of one model."""
    return getattr(mpu, f"get_{_model_name(mpu)}_group")()


def tensor_group_of(mpu: Any) -> Any:
    """Return the process group whose ranks hold slices of the same layers; None if there is none.

    A pipeline's `model_parallel` ranks include its stages, so that name comes last.
    """
    for name in (*_MODEL_NAMES[1:], _MODEL_NAMES[0]):
        if hasattr(mpu, f"get_{name}_group"):
            return getattr(mpu, f"get_{name}_group")()
    return None


def pipe_group_of(mpu: Any) -> Any:
    """Return the process group whose ranks hold the stages of one model; None if there is one."""
    for name in _PIPE_NAMES:
        if hasattr(mpu, f"get_{name}_world_size") and _size_of(mpu, name) > 1:
            expect_methods(mpu, [f"get_{name}_{what}" for what in _ASKED])
            return getattr(mpu, f"get_{name}_group")()
    return None


def sizes_of(mpu: Any, world_size: int) -> tuple[int, int]:
    """Return how many ranks see different samples, and how many hold parts of one model.

    In a pipeline the `model_parallel` ranks are all of those: stages times slices of layers.

    Raises:
        UsageError: a method is missing, or their answers do not fit the ranks or the groups.
        NotBuiltYetError: the model is split in further ways.
    """
    name, shared = _model_name(mpu), shared_size_of(mpu)
    if pipe_group_of(mpu) is not None:
        name = _MODEL_NAMES[0]
    wanted = [f"get_data_parallel_{what}" for what in _ASKED]
    wanted += [f"get_{name}_{what}" for what in _ASKED]
    if shared > 1:
        wanted.append("get_sequence_data_parallel_group")
    expect_methods(mpu, wanted)
    _refuse_other_kinds(mpu)
    data, model = (_size_of(mpu, kind) for kind in ("data_parallel", name))
    if data * shared * model != world_size:
        raise UsageError(
            f"initialize(mpu=...): {data} data-parallel x {shared} sequence-parallel x {model}"
            f" model-parallel ranks are {data * shared * model}, and there are {world_size}"
        )
    for kind in ("data_parallel", name):
        _check_group(mpu, kind)
    return data, model


def expect_data_methods(mpu: Any) -> None:
    """Raise `UsageError` if an object cannot say which ranks see different samples."""
    expect_methods(mpu, [f"get_data_parallel_{what}" for what in _ASKED])


def expect_methods(mpu: Any, methods: Sequence[str]) -> None:
    """Raise `UsageError` if an object lacks one of these methods."""
    missing = [name for name in methods if not callable(getattr(mpu, name, None))]
    if missing:
        raise UsageError(
            f"initialize(mpu=...) got a {type(mpu).__name__} without {', '.join(missing)}; pass an"
            " object that has them (Megatron's parallel_state module does)"
        )


def _model_name(mpu: Any) -> str:
    found = (name for name in _MODEL_NAMES if hasattr(mpu, f"get_{name}_world_size"))
    return next(found, _MODEL_NAMES[0])


def _size_of(mpu: Any, kind: str) -> int:
    return int(getattr(mpu, f"get_{kind}_world_size")())


def _refuse_other_kinds(mpu: Any) -> None:
    for kind in _OTHER_KINDS:
        if hasattr(mpu, f"get_{kind}_world_size") and (size := _size_of(mpu, kind)) > 1:
            raise NotBuiltYetError(
                f"initialize(mpu=...): get_{kind}_world_size() is {size}; ranks of that kind are"
                " not built yet: start the program with 1 of them"
            )


def _check_group(mpu: Any, kind: str) -> None:
    """Check a group against its reported rank and size: it may have been made for other ranks."""
    group = getattr(mpu, f"get_{kind}_group")()
    found = (dist.get_rank(group), dist.get_world_size(group))
    reported = (int(getattr(mpu, f"get_{kind}_rank")()), _size_of(mpu, kind))
    if found != reported:
        raise UsageError(
            f"initialize(mpu=...): this process is rank {found[0]} of {found[1]} in"
            f" get_{kind}_group(), but get_{kind}_rank() and _world_size() report rank"
            f" {reported[0]} of {reported[1]}; create the mpu after torch.distributed has started,"
            " in the same way on every rank"
        )
