"""DeepSpeed's checkpoints as fewer ranks would have them, for tools that convert them."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from hadal.compat.install import alias
from hadal.errors import CheckpointError, UsageError

NAMES = alias("deepspeed.checkpoint")


@pytest.mark.parametrize(
    ("target", "files"),
    [
        ((1, 1, 1), [[0, 4, 1, 5, 2, 6, 3, 7]]),
        ((1, 2, 1), [[0, 4, 2, 6], [1, 5, 3, 7]]),
        ((2, 1, 1), [[0, 4, 1, 5], [2, 6, 3, 7]]),
        ((1, 2, 2), [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_fewer_ranks_take_the_files_of_several(target: Any, files: list[list[int]]) -> None:
    maps = NAMES.model_3d_desc(2, 2, 2).reshape(NAMES.model_3d_desc(*target))
    assert [
        one.get_data(stage, part)
        for one in maps
        for stage in range(target[0])
        for part in range(target[1])
    ] == files


def test_more_ranks_or_an_uneven_number_are_refused() -> None:
    source = NAMES.model_3d_desc(1, 3, 1)
    for target, message in (((2, 3, 1), "PP: 1 to 2"), ((1, 2, 1), "evenly")):
        for kind in (UsageError, AssertionError):
            with pytest.raises(kind, match=message):
                source.reshape(NAMES.model_3d_desc(*target))


def write(folder: Path, *, degrees: Any = None) -> None:
    """Write what Megatron's GPT leaves: 2 stages, 2 parts, 2 data-parallel ranks, 6 layers."""
    for layer in range(1, 7):
        for part in range(2):
            state = {
                "mlp.dense_4h_to_h.weight": torch.full((2, 1), part + 10.0 * layer),
                "mlp.dense_h_to_4h.weight": torch.full((1, 2), part + 10.0 * layer),
                "mlp.dense_4h_to_h.bias": torch.full((2,), float(layer)),
            }
            torch.save(state, folder / f"layer_{layer:02d}-model_{part:02d}-model_states.pt")
    for rank in range(4):
        info = {"iteration": 7, "args": Namespace(seed=3), "checkpoint_info": {"padded": 8}}
        state = {
            **info,
            "part": torch.tensor([float(rank)]),
            **({} if degrees is None else degrees),
        }
        torch.save(state, folder / f"mp_rank_{rank:02d}_model_states.pt")
        for data in range(2):
            moments = torch.tensor([10.0 * data + rank, 0.5, 0.0])
            optimizer = {
                "base_optimizer_state": {"state": {0: {"exp_avg": moments, "step": 5}}},
                "group_paddings": [data],
                "partition_count": [2],
            }
            name = f"bf16_zero_pp_rank_{data}_mp_rank_{rank:02d}_optim_states.pt"
            torch.save({"optimizer_state_dict": optimizer, "param_shapes": [{}]}, folder / name)


def test_a_checkpoint_of_megatron_is_read_as_one_rank_has_it(tmp_path: Path) -> None:
    write(tmp_path)
    whole = NAMES.DeepSpeedCheckpoint(str(tmp_path), tp_degree=1, pp_degree=1, dp_degree=1)
    assert (whole.original_world_size, whole.world_size, whole.layer_count) == (8, 1, 6)
    assert whole.get_iteration() == 7 and whole.get_args().seed == 3
    assert whole.get_checkpoint_info() == {"padded": 8} and whole.get_checkpoint_info("no") is None
    layers = whole.get_transformer_state(tp_index=0, pp_index=0)
    assert whole.pp_to_transformer_map[0] == [f"layer_{at:02d}" for at in range(2, 6)]
    assert len(layers) == 4
    assert layers[0]["mlp.dense_4h_to_h.weight"].tolist() == [[20, 21], [20, 21]]
    assert layers[0]["mlp.dense_h_to_4h.weight"].tolist() == [[20, 20], [21, 21]]
    assert layers[0]["mlp.dense_4h_to_h.bias"].tolist() == [2, 2]
    assert whole.get_embedding_state(0)["mlp.dense_4h_to_h.weight"].shape == (2, 2)
    assert whole.get_final_norm_state(0)["mlp.dense_4h_to_h.bias"].tolist() == [6, 6]
    assert whole.get_2d_parallel_state(tp_index=0, pp_index=0)["part"].tolist() == [0, 1, 2, 3]
    state = whole.get_zero_checkpoint_state(0, 0, 0)
    optimizer = state["optimizer_state_dict"]
    moments = optimizer["base_optimizer_state"]["state"][0]["exp_avg"]
    assert moments[:5].tolist() == [0, 0.5, 0, 10, 0.5] and moments.numel() == 20
    assert optimizer["group_paddings"] == [0] and optimizer["partition_count"] == [1]
    assert "param_shapes" not in state


def test_a_checkpoint_has_the_ranks_that_wrote_it(tmp_path: Path) -> None:
    write(tmp_path)
    found = NAMES.DeepSpeedCheckpoint(tmp_path)
    assert (found.pp_degree, found.tp_degree, found.dp_degree) == (2, 2, 2)
    assert list(map(len, found.pp_to_transformer_map.values())) == [2, 2]
    second = found.get_transformer_state(1, 1)
    assert second[0]["mlp.dense_4h_to_h.weight"].tolist() == [[41], [41]]
    assert NAMES.ZeROCheckpoint(tmp_path).get_src_dp_degree() == 2
    kept = found.get_zero_checkpoint_state(1, 0, 1, strip_tensor_paddings=False)
    assert kept["optimizer_state_dict"]["group_paddings"] == [1]
    assert len(found.zero_checkpoint.get_files_for_rank(1, 0, 1)) == 1


def test_folders_that_contradict_themselves_are_refused(tmp_path: Path) -> None:
    find = NAMES.get_model_3d_descriptor
    for kind in (AssertionError, RuntimeError, CheckpointError):
        with pytest.raises(kind, match="0 files"):
            find(tmp_path / "nowhere")
    told = {"checkpoint_parallel_dimensions": {"pp_degree": 4, "tp_degree": 1}}
    write(tmp_path, degrees=told)
    assert vars(find(tmp_path)) == {"pp_degree": 4, "tp_degree": 1, "dp_degree": 2}
    torch.save({}, tmp_path / "mp_rank_03_model_states.pt")
    with pytest.raises(RuntimeError, match="missing from model-state files"):
        find(tmp_path)
    (tmp_path / "mp_rank_03_model_states.pt").unlink()
    with pytest.raises(RuntimeError, match="do not fit 4 stages"):
        find(tmp_path)


def test_states_of_different_kinds_do_not_merge() -> None:
    merge = NAMES.merge_state
    merged = merge({"a": [torch.ones(1)], "b": 1}, {"a": [torch.zeros(1)], "c": 2})
    assert merged["a"][0].tolist() == [1, 0] and (merged["b"], merged["c"]) == (1, 2)
    shape = NAMES.SubparamShape(patterns=["qkv"], shape=((4, 2), 8), partition_dim=0)
    assert shape.partition_dim == 0 and shape.patterns == ["qkv"]
    with pytest.raises(ValueError, match="a: <class 'int'> and <class 'str'>"):
        merge({"a": 1}, {"a": "1"})
