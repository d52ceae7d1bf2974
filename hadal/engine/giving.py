"""Export of whole weights from an engine: to a file, or as a state dict on one rank."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hadal.checkpoint.consolidated import consolidated, write_consolidated
from hadal.checkpoint.huggingface import MAX_SHARD, NAME
from hadal.checkpoint.together import common_folder
from hadal.engine.session import Session
from hadal.units import nbytes_of

_log = logging.getLogger(__name__)


class WeightsOut:
    """Export of an engine's weights. All ranks must call each method.

    Rank 0 gets them one bucket at a time; the other ranks need memory for one bucket. If a
    program's own model is in model-parallel parts, the first rank of those that hold a part gets
    that part; slices of layers that `tensor_parallel.autotp_size` cut are joined, and experts come
    from all ranks that share them.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return the key `zero_optimization.stage3_gather_16bit_weights_on_model_save`."""
        return self._session.live().rules.gathers_weights

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = NAME,
        exclude_frozen_parameters: bool = False,
        max_shard_size: str | int = MAX_SHARD,
    ) -> bool:
        """Write the model, in the dtypes that it computes in, in Hugging Face layout.

        Args:
            save_dir: the directory, created if it does not exist, or a URL. A program's own
                model-parallel parts go into `mp_rank_00`, `mp_rank_01` and so on below it.
            save_filename: the file, or the base name of several files. If it does not end in
                `.safetensors`, `torch.save` writes it, and rank 0 holds a whole file in memory.
            exclude_frozen_parameters: leave out parameters that are not trained.
            max_shard_size: the size limit of one file, as "5GB" or in bytes.

        Returns:
            True if it was written. At stage 3 weights are gathered for this only if
            `stage3_gather_16bit_weights_on_model_save` is true; else rank 0 warns.

        Raises:
            CheckpointError: it cannot be written; on every rank.
            ValueError: `max_shard_size` is not a size.
        """
        self._session.expect_alive()
        live = self._session.live()
        nbytes = nbytes_of(max_shard_size)
        if live.rules.cuts_weights and not live.rules.gathers_weights:
            if live.world.rank == 0:
                _log.warning(
                    "save_16bit_model did not save anything: the weights are partitioned, and"
                    " zero_optimization.stage3_gather_16bit_weights_on_model_save is false. Set it"
                    " to true, or save a checkpoint and run `hadal checkpoint export`"
                )
            return False
        live.runtime.meet_at_checkpoint()
        write_consolidated(
            live,
            common_folder(save_dir, live.world, "engine.save_16bit_model"),
            save_filename,
            nbytes,
            exclude_frozen=exclude_frozen_parameters,
        )
        return True

    def save_fp16_model(self, save_dir: str | Path, save_filename: str = NAME) -> bool:
        """Call `save_16bit_model`."""
        return self.save_16bit_model(save_dir, save_filename)

    @torch.no_grad()
    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return `state_dict()`, whole on every rank; without frozen parameters if wanted."""
        state = self._session.whole_state(prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name in self._session.live().frozen_names():
                state.pop(prefix + name, None)
        if destination is None:
            return state
        destination.update(state)
        return destination

    def consolidated_16bit(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor] | None:
        """Return the whole model in rank 0's host memory, else None; tied names share a tensor."""
        self._session.expect_alive()
        live = self._session.live()
        live.runtime.meet_at_checkpoint()
        return consolidated(live, exclude_frozen=exclude_frozen_parameters)
