"""A list of layers becomes one stage on each rank, under the names of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools
from torch import Tensor, nn

from hadal import comm
from hadal.errors import ChoiceError, UsageError
from hadal.plugins.pipeline.grid import PipelineParallelGrid
from hadal.plugins.pipeline.module import PipelineModule
from hadal.plugins.pipeline.partition import cut
from hadal.plugins.pipeline.specs import LayerSpec, TiedLayerSpec
from hadal.plugins.pipeline.topology import PipeModelDataParallelTopology

built: list[int] = []


class Counted(nn.Linear):
    """Notes each of its layers that is built with memory."""

    def __init__(self, number: int) -> None:
        super().__init__(4, 4)
        if self.weight.device.type != "meta":
            built.append(number)


def head(embedding: nn.Module, value: Tensor) -> Tensor:
    return value @ embedding.weight.T


def tied(recomputed: int = 0, **options: Any) -> PipelineModule:
    layers = [
        TiedLayerSpec("emb", nn.Embedding, 5, 4),
        LayerSpec(Counted, 1),
        torch.tanh,
        LayerSpec(Counted, 3),
        TiedLayerSpec("emb", nn.Embedding, 5, 4, forward_fn=head),
    ]
    return PipelineModule(layers, seed_layers=True, **options)


def names(stages: int) -> tuple[list[str], list[int], list[int]]:
    built.clear()
    module = tied(num_stages=stages, partition_method="uniform")
    weight = module.tied_modules["emb"].weight if "emb" in module.tied_modules else None
    if weight is not None and stages > 1:
        assert weight.hadal_tied_copy is (module.stage_id > 0)
        ((found, _),) = module.get_tied_weights_and_groups()
        assert found is weight and module.tied_comms["emb"]["ranks"] == [0, 1]
        weight.grad = torch.ones_like(weight)
        module.allreduce_tied_weight_gradients()
        assert weight.grad.unique().tolist() == [2.0]
    owners = [module.stage_owner(n) for n in range(5)]
    assert owners == sorted(owners)
    return [name for name, _ in module.named_parameters()], list(built), module.parts


def test_names_and_builds(ranks: RankPools) -> None:
    ((whole, made, parts),) = ranks(1).run(names, 1)
    assert made == [1, 3] and parts == [0, 5]
    assert sorted(whole) == sorted(
        ["tied_modules.emb.weight", "1.weight", "1.bias", "3.weight", "3.bias"]
    )
    (first, made_first, parts), (second, made_second, _) = ranks(2).run(names, 2)
    assert parts == [0, 3, 5] and made_first == [1] and made_second == [3]
    assert set(first) | set(second) == set(whole)
    assert set(first) & set(second) == {"tied_modules.emb.weight"}


def files(folder: Path) -> list[str]:
    module = tied(num_stages=comm.get_world_size(), partition_method="uniform")
    module.save_state_dict(folder, None)
    comm.barrier()
    other = tied(num_stages=comm.get_world_size(), partition_method="parameters", base_seed=7)
    other.load_state_dir(folder, None)
    assert module.ckpt_prefix(folder, "t").startswith(str(folder / "t" / "module"))
    whole = {n: p for n, p in module.named_parameters() if not n.startswith("tied")}
    for name, parameter in other.named_parameters():
        if name in whole:
            assert torch.equal(parameter, whole[name])
    return sorted(file.name for file in folder.iterdir())


def test_files_of_layers(ranks: RankPools, tmp_path: Path) -> None:
    told = [f"layer_{number:02d}-model_states.pt" for number in (0, 1, 3)]
    assert ranks(2).run(files, tmp_path) == [told, told]


def outputs(interval: int) -> list[Tensor]:
    module = tied(num_stages=1)
    module.set_checkpoint_interval(interval)
    loss = module(torch.arange(5)).square().sum()
    loss.backward()
    return [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("interval", [1, 2])
def test_recomputed_layers_have_equal_gradients(interval: int, ranks: RankPools) -> None:
    (plain,), (again,) = ranks(1).run(outputs, 0), ranks(1).run(outputs, interval)
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


def groups() -> tuple[Any, ...]:
    grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1))
    assert grid.stage_to_global(1) == 2 + grid.get_slice_parallel_rank()
    return (
        grid.get_pipeline_model_parallel_rank(),
        grid.get_tensor_model_parallel_rank(),
        grid.get_model_parallel_world_size(),
        grid.pp_group,
        grid.dp_group,
        grid.slice_group,
    )


def test_groups_of_a_grid(ranks: RankPools) -> None:
    assert ranks(4).run(groups) == [
        (0, 0, 4, [0, 2], [0], [0, 1]),
        (0, 1, 4, [1, 3], [1], [0, 1]),
        (1, 0, 4, [0, 2], [2], [2, 3]),
        (1, 1, 4, [1, 3], [3], [2, 3]),
    ]


def default_grid() -> tuple[int, int]:
    grid = PipelineParallelGrid()
    return grid.pipe_parallel_size, grid.data_parallel_size


def test_a_grid_without_a_topology(ranks: RankPools) -> None:
    assert ranks(4).run(default_grid) == [(2, 2)] * 4


def test_layers_are_cut_by_the_partition_method() -> None:
    layers = [LayerSpec(nn.Linear, 4, 4), torch.tanh, LayerSpec(nn.LayerNorm, 4), torch.relu]
    assert cut(layers, 2, "Uniform") == [0, 2, 4]
    assert cut(layers, 2, "parameters") == [0, 2, 4]
    assert cut(layers, 2, r"type:(\D)inear") == [0, 3, 4]
    with pytest.raises(UsageError, match="matches no layer; the layers are Linear, tanh"):
        cut(layers, 2, "type:foo")
    with pytest.raises(ChoiceError, match="best"):
        cut(layers, 2, "best")
    with pytest.raises(UsageError, match="stage 4 would have none"):
        cut(layers, 5, "uniform")


def test_descriptions() -> None:
    assert repr(LayerSpec(nn.Linear, 4, 4, bias=False)) == "Linear((4, 4), {'bias': False})"
    with pytest.raises(UsageError, match=r"subclass of torch\.nn\.Module"):
        LayerSpec(dict)
    spec = TiedLayerSpec("a", nn.Linear, 1, 1, tied_weight_attr="weight")
    assert spec.tied_weight_attr == ["weight"]


def refused(options: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as caught:
        tied(**options)
    return str(caught.value)


def test_impossible_arguments_are_refused(ranks: RankPools) -> None:
    assert "num_stages= or topology=" in ranks(1).run(refused, {})[0]
    assert "must divide" in ranks(1).run(refused, {"num_stages": 2})[0]
