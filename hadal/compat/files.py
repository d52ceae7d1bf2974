"""The files of a checkpoint of DeepSpeed's, for programs that open them themselves."""

from __future__ import annotations

from pathlib import Path

from hadal.checkpoint.deepspeed.folder import Files, files_of
from hadal.errors import CheckpointError


def get_model_state_file(checkpoint_dir: str | Path, zero_stage: int) -> str:
    """The file of rank 0's model states.

    Raises:
        CheckpointError: there is none in this folder.
    """
    return str(_files(checkpoint_dir).model[0])


def get_optim_files(checkpoint_dir: str | Path) -> list[str]:
    """The files of the optimizer's states, in the order of the ranks.

    Raises:
        CheckpointError: there is none in this folder.
    """
    found = _files(checkpoint_dir).optimizer
    if not found:
        raise CheckpointError(
            f"{checkpoint_dir} has no files of an optimizer sharded by ZeRO; it is of stage 0, and"
            " its weights are in get_model_state_file(...)"
        )
    return [str(path) for path in found]


def get_model_ckpt_name_for_rank(base_folder: str | Path, mp_rank_str: str) -> str:
    """How the file of whole model states is called."""
    return str(Path(base_folder) / f"mp_rank_{mp_rank_str}_model_states.pt")


def _files(folder: str | Path) -> Files:
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder; give the one of a checkpoint's tag")
    found = files_of(path)
    if not found.model:
        raise CheckpointError(
            f"{path} is no checkpoint of DeepSpeed's: it has no *_model_states.pt. Checkpoints that"
            " Hadal wrote are read by get_fp32_state_dict_from_zero_checkpoint and"
            " convert_zero_checkpoint_to_fp32_state_dict of deepspeed.utils.zero_to_fp32"
        )
    return found
