"""Layers that are cut over ranks, and experts that are distributed over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from hadal.checkpoint.live import plain_name
from hadal.comm import Ranks
from hadal.comm.ranks import expert_groups, expert_tables, make_expert_groups, size_in_name
from hadal.config import Config
from hadal.engine.checks import is_in_stages
from hadal.engine.topology import RequestedRanks, Topology, with_slices
from hadal.errors import Fault, NotBuiltYetError, raise_faults
from hadal.zero.boxes import ATTRIBUTE, Box
from hadal.zero.sharded_init import sharing_at_init
from hadal.zero.sharing import holders_of

if TYPE_CHECKING:
    from hadal.plugins.pipeline import PipelineModule


import hashlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from hadal.comm.collectives import gather_objects
from hadal.comm.faults import is_same_everywhere, raised_on_all
from hadal.comm.mpu import tensor_group_of
from hadal.config.parallelism import TensorParallel
from hadal.device import has_values
from hadal.errors import MismatchError, ModelError, UsageError, few
from hadal.optim.muon import Muon
from hadal.plugins.pipeline.decoder import DecoderModule
from hadal.plugins.sequence.cross_entropy import vocab_parallel_cross_entropy
from hadal.plugins.tensor_parallel.apply import Sliced, cut_model, share_values
from hadal.plugins.tensor_parallel.plan import CutPlan, plan_cuts
from hadal.zero import sharded_init
from hadal.zero.boxes import Placement
from hadal.zero.sharing import is_model_part

_PATH = "tensor_parallel"
_DTYPES = {
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), torch.float32),
}


class AskedSlices(NamedTuple):
    """The arguments of `tp_model_init`."""

    size: int
    dtype: torch.dtype
    group_size: int | None
    """The ranks of the group that the program gave; None: none was given."""


_asked: WeakIdKeyDictionary = WeakIdKeyDictionary()


def tp_model_init(
    model: nn.Module,
    tp_size: int,
    dtype: torch.dtype,
    config: Any = None,
    tp_group: dist.ProcessGroup | None = None,
) -> nn.Module:
    """Record that `initialize` splits this model over `tp_size` ranks; return it unchanged.

    Args:
        model: the model to pass to `initialize`.
        tp_size: the number of ranks that share a layer, as `tensor_parallel.autotp_size`.
        dtype: the dtype in which the model will compute.
        config: the configuration; it is read by `initialize`.
        tp_group: the ranks that share a layer; consecutive ones.

    Raises:
        ModelError: an earlier call recorded other arguments for this model.
    """
    del config
    wanted = AskedSlices(
        tp_size, dtype, None if tp_group is None else dist.get_world_size(tp_group)
    )
    if wanted.group_size not in (None, tp_size):
        raise ModelError(
            f"tp_model_init(tp_size={tp_size}) got a tp_group of {wanted.group_size} ranks; give a"
            " group of that many"
        )
    known = _asked.setdefault(model, wanted)
    if known != wanted:
        raise ModelError(
            f"tp_model_init was called for this model with {known}, and now with {wanted}; call it"
            " once"
        )
    return model


def size_asked_for(model: nn.Module) -> int | None:
    """Return the ranks that `tp_model_init` requested; None if it was not called."""
    asked = _asked.get(model)
    return None if asked is None else asked.size


def plan_before_stages(model: nn.Module, section: TensorParallel) -> CutPlan:
    """Return the plan by which `cut_over_ranks` will split the stages of a still whole model.

    Raises:
        ModelError: the rules, the model and the ranks do not fit each other.
        NotBuiltYetError: keys that need a whole model.
    """
    if section.sequence_parallel:
        raise NotBuiltYetError(
            f"{_PATH}.sequence_parallel: cutting sequences between the slices of layers is not"
            " built yet for a model in stages; leave the key out"
        )
    return plan_cuts(model, section, section.autotp_size)


def cut_over_ranks(
    model: nn.Module,
    optimizer: Optimizer | None,
    plan: CutPlan,
    config: Config,
    topology: Topology,
    world: Ranks,
) -> None:
    """Split a model over its tensor-parallel ranks. All ranks must call it.

    Raises:
        NotBuiltYetError: the optimizer needs whole matrices.
    """
    section, ranks = config.tensor_parallel, topology.tensor_parallel
    assert ranks is not None
    with raised_on_all(world, "initialize"):
        _check_optimizer(optimizer)
    stage = model if isinstance(model, DecoderModule) else None
    whole = model if stage is None else stage.whole_model
    share_values(model, ranks)
    loss = vocab_parallel_cross_entropy
    names = {parameter: plain_name(name) for name, parameter in model.named_parameters()}
    if stage is not None:
        names |= stage.renamed
    for one in cut_model(whole, plan, section, ranks, loss, is_stage=stage is not None):
        one.parameter.hadal_slice = one  # type: ignore[attr-defined]
        setattr(one.parameter, ATTRIBUTE, _placement(one, names[one.parameter]))
        _cut_state(optimizer, one)
    _compare_first_inputs(model, ranks)


def _placement(one: Sliced, name: str) -> Placement:
    """Return this rank's slice of a whole parameter: one box for each part fused in it."""
    dim, boxes = one.cut.dim, []
    for first, length in one.cut.spans(one.ranks.rank):
        offsets, sizes = [0] * len(one.shape), [*one.shape]
        offsets[dim], sizes[dim] = first, length
        boxes.append(Box(name, one.shape, tuple(offsets), tuple(sizes)))
    return Placement(tuple(boxes), dim)


def _check_optimizer(optimizer: Optimizer | None) -> None:
    if isinstance(optimizer, Muon):
        raise NotBuiltYetError(
            f"{_PATH}.autotp_size: Muon orthogonalises whole matrices, which is not built yet for"
            " slices of them; use another optimizer, or leave the key out"
        )


def _cut_state(optimizer: Optimizer | None, one: Sliced) -> None:
    """Cut state that an optimizer made before its parameter was cut (Adagrad's sums)."""
    state = {} if optimizer is None else optimizer.state.get(one.parameter, {})
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == one.shape:
            state[name] = one.cut.take(value, one.ranks.rank)


def _compare_first_inputs(model: nn.Module, ranks: Ranks) -> None:
    """Compare the first forward's inputs on the ranks of one model: they must read the same
    samples."""

    def compare(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle.remove()
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if not all(map(has_values, tensors)):
            return  # it is planned
        named = {**{f"argument {n}": value for n, value in enumerate(args)}, **kwargs}
        digests = {name: _digest(value) for name, value in named.items()}
        if is_same_everywhere(repr(digests), ranks):
            return
        found = gather_objects(digests, ranks)
        names = list(dict.fromkeys(name for one in found for name in one))
        differing = [n for n in names if len({one.get(n) for one in found}) > 1]
        raise MismatchError(
            f"{_PATH}.autotp_size: ranks {ranks.numbers} share one model and read the same samples,"
            f" but {few(differing)} of the first forward differ between them; give the sampler"
            " engine.topology.data_parallel's rank and size, or use engine.deepspeed_io"
        )

    handle = model.register_forward_pre_hook(compare, prepend=True, with_kwargs=True)


def _digest(value: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    leaf: Any
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            digest.update(repr((leaf.dtype, tuple(leaf.shape))).encode())
            digest.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        elif isinstance(leaf, bool | int | float | str | None):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def check_slices(model: nn.Module, config: Config, topology: Topology) -> None:
    """Check what a plan of slices takes for granted: the groups of ranks, and whole layers.

    Raises:
        ConfigError: the program's group, dtype or other keys contradict the section.
        UsageError: ranks or parameters have been split in another way.
        NotBuiltYetError: the model is split into stages by hand.
    """
    section = config.tensor_parallel
    if not section.is_on:
        return
    ranks, size = topology.tensor_parallel, section.autotp_size
    faults = list(_faults_of_groups(section, ranks))
    asked = _asked.get(model)
    computes = torch.float16 if config.fp16.enabled else None
    computes = torch.bfloat16 if config.bf16.enabled else computes
    given = {"it": _dtype_of(section), "tp_model_init": asked and asked.dtype}
    for where, dtype in given.items():
        if None not in (computes, dtype) and dtype != computes:
            message = f"{where} is {dtype}, but the model computes in {computes}; make them equal"
            faults.append(Fault(f"{_PATH}.dtype", message))
    raise_faults(faults)
    if ranks is None or ranks.size != size:
        raise UsageError(
            f"{_PATH}.autotp_size: {size}, and the mpu that initialize got has"
            f" {ranks.size if ranks else 1} tensor-parallel ranks; make them equal"
        )
    if topology.pipe is not None and not isinstance(model, DecoderModule):
        raise NotBuiltYetError(
            f"{_PATH}.autotp_size: cutting the layers of a PipelineModule is not built yet; leave"
            " the key out and let the layers cut themselves, or let pipeline.auto cut a model of"
            " transformers"
        )
    for name, parameter in model.named_parameters():
        if is_model_part(parameter):
            raise UsageError(
                f"{_PATH}.autotp_size: parameter {name} is a part already (it is marked"
                " tensor_model_parallel or model_parallel); leave the key out, or give the whole"
                " model"
            )
        if sharded_init.sharing_at_init(parameter) is not None:
            raise UsageError(
                f"{_PATH}.autotp_size: parameter {name} was created sharded (in hadal.zero.Init),"
                " and a layer that is cut over ranks is shared by fewer of them; build the model"
                " without zero.Init"
            )


def _faults_of_groups(section: TensorParallel, ranks: Ranks | None) -> Any:
    groups = {"tp_group": section.tp.tp_group}
    if section.tp.mpu is not None:
        groups["mpu"] = tensor_group_of(section.tp.mpu)
    expected = () if ranks is None else ranks.numbers
    for name, group in groups.items():
        if group is None:
            continue
        found = tuple(dist.get_process_group_ranks(group))
        if found != expected:
            yield Fault(
                f"{_PATH}.tp.{name}",
                f"has the ranks {found}; expected {expected}, consecutive ranks as many as"
                " autotp_size",
            )


def _dtype_of(section: TensorParallel) -> torch.dtype | None:
    """Return the section's dtype; None if it sets none."""
    given = section.dtype
    if "dtype" not in section.model_fields_set or isinstance(given, torch.dtype):
        return given if isinstance(given, torch.dtype) else None
    if str(given) not in _DTYPES:
        raise_faults([Fault(f"{_PATH}.dtype", f'{given!r} is not "bf16", "fp16" or "fp32"')])
    return _DTYPES[str(given)]


# ---- experts -------------------------------------------------------------------------------------


def make_groups_of_experts(model: nn.Module, config: Config, topology: Topology) -> None:
    """Make the groups that the model's parameters name. All ranks must call it together.

    Other names are the program's own, which makes them itself. Each expert's parameters say which
    expert of the whole model it is, for checkpoints.

    Raises:
        UsageError: a number of ranks does not divide those with the same dense parameters.
    """
    names = {holders_of(parameter).experts for parameter in model.parameters()}
    found = (size_in_name(name) for name in names if name is not None)
    sizes = sorted(size for size in found if size is not None)
    for size in sizes:
        make_expert_groups(
            size, topology.sharding, data_first=config.use_data_before_expert_parallelism
        )
    if any(size > 1 for size in sizes):
        for parameter, box in _boxes(model):
            setattr(parameter, ATTRIBUTE, box)


def _boxes(model: nn.Module) -> Iterator[tuple[nn.Parameter, Box]]:
    """Yield this rank's expert parameters, and their place in the whole model."""
    from hadal.plugins.moe.blocks import DistributedExperts  # for this alone
    from hadal.plugins.moe.layer import MOELayer

    for path, module in model.named_modules():
        if isinstance(module, MOELayer) and module.ep_size > 1:
            first = expert_groups(module.ep_group_name).parallel.rank * module.num_local_experts
            for number, expert in enumerate(module.experts.deepspeed_experts, first):
                for name, parameter in expert.named_parameters():
                    whole = f"{path}.experts.deepspeed_experts.{number}.{name}"
                    yield parameter, Box.whole(plain_name(whole), tuple(parameter.shape))
        elif isinstance(module, DistributedExperts):
            rank = expert_groups(module.expert_group_name).parallel.rank
            for name, parameter in module.named_parameters():
                shape = (module.total_experts, *parameter.shape[1:])
                offsets = (rank * len(parameter), *(0 for _ in parameter.shape[1:]))
                whole = plain_name(f"{path}.{name}")
                yield parameter, Box(whole, shape, offsets, tuple(parameter.shape))


def rank_among_experts(
    model: nn.Module, config: Config, requested: RequestedRanks, ranks: Ranks
) -> int:
    """Return this rank's number among those that share the model's experts, 0 if none do.

    Raises:
        ConfigError: the ranks cannot share experts evenly.
        NotBuiltYetError: an mpu splits the model over ranks, or it was created sharded.
    """
    section = config.expert_parallel
    if not section.enabled:
        return 0
    grid = None
    if is_in_stages(model):
        grid, model = model.mpu(), _whole_model(model)
    elif requested.cuts_the_model:
        raise NotBuiltYetError(
            "expert_parallel.enabled: with an mpu whose ranks hold parts of the model it is not"
            " built yet; leave the section out, or replace the mpu by tensor_parallel.autotp_size"
        )
    if any(sharing_at_init(parameter) is not None for parameter in model.parameters()):
        raise NotBuiltYetError(
            "expert_parallel.enabled: for models whose parameters were created sharded (zero.Init)"
            " it is not built yet; create the model outside of it"
        )
    size, slices = section.autoep_size, with_slices(requested, config).tensor_parallel_size
    # Consecutive ranks hold slices of the same layers; they all have the same experts.
    copies, number = ranks.size // slices, ranks.rank // slices
    if grid is not None:
        copies, number = grid.sharing.size, grid.sharing.rank
    if copies % size:
        path = "expert_parallel.autoep_size"
        is_part = copies < ranks.size
        alike = f" (of {ranks.size}) that hold the same dense parameters" if is_part else ""
        raise_faults([Fault(path, f"{size} does not divide the {copies} ranks{alike}; lower it")])
    data_first = config.use_data_before_expert_parallelism
    parallel, _ = expert_tables(range(copies), size, data_first=data_first)
    mine = next(group for group in parallel if number in group)
    return mine.index(number)


def _whole_model(module: PipelineModule) -> nn.Module:
    from hadal.plugins.pipeline.decoder import DecoderModule  # for this alone

    if not isinstance(module, DecoderModule):
        raise NotBuiltYetError(
            "expert_parallel.enabled: finding blocks of experts in the layers of a PipelineModule"
            " is not built yet; make them with hadal.moe.MoE(ep_size=) and leave the section out,"
            " or let pipeline.auto cut a model of transformers"
        )
    return module.whole_model
