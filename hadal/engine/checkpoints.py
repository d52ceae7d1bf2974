"""Methods of an engine that save checkpoints and weights, and load them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hadal.checkpoint.files import location_of
from hadal.checkpoint.rules import MAX_SHARD, NAME
from hadal.checkpoint.storage import Location
from hadal.checkpoint.together import common_folder, compare_tags
from hadal.comm.faults import raised_on_all
from hadal.comm.works import in_step
from hadal.engine.collector import collector_at_rest
from hadal.engine.state import State
from hadal.engine.training import expect_training
from hadal.errors import CheckpointError
from hadal.optim.norm import ScaleState
from hadal.units import nbytes_of

_log = logging.getLogger(__name__)
# More restarts than this, and the checkpoints of the first ones stay.
_REMEMBERED_JOBS = 64
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Checkpoints:
    """Methods of an engine for checkpoints and weights. All ranks must call each of them."""

    _state: State

    @property
    def resumed(self) -> tuple[str | None, dict[str, Any] | None]:
        """The directory and `client_state` loaded by `checkpoint.resume`; else (None, None)."""
        return self._state.resumed

    def resume(self, load_dir: str) -> None:
        """Load the latest checkpoint in `load_dir`, if there is one, and log it.

        `initialize` calls this for `checkpoint.resume`. All ranks must call it.
        """
        state, parts = self._state, self._state.parts
        state.resumed = self.load_checkpoint(load_dir)
        if self.resumed[0] is not None and parts.world.rank == 0:
            _log.warning(
                "resumed from %s at update %d (checkpoint.resume)",
                self.resumed[0],
                state.global_steps,
            )

    @in_step
    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] = _NOTHING,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the whole training state under `save_dir`/`tag`. All ranks must call it.

        This includes the position in the training loader: how much of its epoch was consumed.
        Gradients are not saved: if some wait for an update, rank 0 warns, and a load restarts it.

        Args:
            save_dir: the directory; created if it does not exist. If ranks pass different ones,
                rank 0's is used, and it warns (see also `checkpoint.use_node_local_storage`).
            tag: the checkpoint's name; `global_step<N>` by default.
            client_state: the caller's own values: numbers, text, bytes, paths, dates, dtypes,
                devices, Enums, lists, tuples, sets, dicts, namespaces, dataclasses, tensors and
                numpy arrays. Those of rank 0 are saved.
            save_latest: whether `load_checkpoint` should find this one without a tag.
            exclude_frozen_parameters: leave out parameters that are not trained; the checkpoint
                then loads with `load_module_strict=False`, into a model that has their values.

        A save that fails, or is killed, leaves the previous files: the checkpoint of this tag, if
        there was one, and `latest`. See `checkpoint.keep_last` for how old ones are removed, and
        `checkpoint.async_save` for saves that are written while training continues.

        Raises:
            CheckpointError: the directory cannot be written, or `client_state` cannot be saved; on
                every rank, with the file and the reason.
            MismatchError: another rank continues without saving.
            ShardedAccessError: a sharded weight was written to on this rank (on the others it is a
                `CheckpointError` with the same message).
        """
        from hadal.checkpoint.saving import SaveRequest  # for this alone

        state, parts = self._state, self._state.parts
        began = time.perf_counter()
        state.expect_alive()
        parts.runtime.meet_at_checkpoint()
        self._forget_residuals()
        where = self._folder(save_dir, "engine.save_checkpoint")
        name = str(tag or f"global_step{state.global_steps}")
        compare_tags(name, parts.saving.tag_validation, parts.world)
        if parts.runtime.holds_gradients and parts.world.rank == 0:
            _log.warning(
                "checkpoint %s is saved in the middle of an update: its gradients so far are not"
                " saved, and their samples are not read again; save after an"
                " engine.step() that ended in an update",
                name,
            )
        order = SaveRequest(
            where,
            name,
            client_state or _NOTHING,
            save_latest,
            exclude_frozen_parameters,
            state.jobs,
        )
        what = f"the save of checkpoint {name}"
        with raised_on_all(parts.world, what, CheckpointError):
            parts.runtime.check_freed()
        saved = state.saver.save(order, state.live())
        for listener in state.listeners:
            listener.after_save(saved, time.perf_counter() - began)
        return True

    store_checkpoint = save_checkpoint

    def _folder(self, given: str | Path, what: str) -> Location:
        """Return the folder to use: rank 0's, unless each node has one of its own."""
        parts, folder = self._state.parts, location_of(given)
        if parts.saving.is_node_local and isinstance(folder, Path):
            return folder
        return common_folder(folder, parts.world, what)

    def _forget_residuals(self) -> None:
        """Drop error feedback, which is not saved: this run then continues as a resumed one."""
        state, parts = self._state, self._state.parts
        if parts.runtime.forget_residuals() and not state.has_logged_residuals:
            state.has_logged_residuals = True
            if parts.world.rank == 0:
                _log.warning(
                    "error feedback (zero_optimization.zeropp_loco_param) is reset by each"
                    " checkpoint, so that a resumed run computes the same numbers"
                )

    def wait_for_checkpoint(self) -> None:
        """Wait until the asynchronous save under way has ended. All ranks must call it.

        Raises:
            CheckpointError: it failed; on every rank.
        """
        self._state.saver.wait()

    @in_step
    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Resume from a checkpoint. All ranks must call it.

        It may have been saved by another number of ranks, at another stage, in another dtype or
        other buckets and param groups: parameters are found by their names. The program's random
        generators (Python's, numpy's, torch's) and the training loader resume too.

        Args:
            load_dir: the directory that it was saved in; different ones as in `save_checkpoint`.
            tag: its name; by default the latest.
            load_module_strict: raise if the checkpoint lacks a parameter or buffer of the model,
                or has extra ones; if false, log a warning and keep the model's values.
            load_optimizer_states: load moments, the options of param groups and the loss scale;
                if false, keep the present ones. Masters are loaded with the weights.
            load_lr_scheduler_states: load the learning-rate schedule.
            load_module_only: load weights and buffers, and nothing else.
            custom_load_fn: called as `custom_load_fn(src=state_dict, dst=module)` to load weights
                and buffers into the module; by default they are matched by name.

        Returns:
            The checkpoint's directory and the `client_state` saved with it, its tensors on the
            host; (None, None) if `load_dir` holds none.

        Raises:
            CheckpointError: it is damaged, or was saved by another model. Raised on every rank,
                before anything has changed.
        """
        from hadal.checkpoint.folders import why_none
        from hadal.checkpoint.live import COUNTERS
        from hadal.checkpoint.loading import Wanted, find, load  # for this alone

        state, parts = self._state, self._state.parts
        state.expect_alive()
        parts.runtime.meet_at_checkpoint()
        self._forget_residuals()
        state.saver.wait()
        place = self._folder(load_dir, "engine.load_checkpoint")
        folder = find(
            place,
            None if tag is None else str(tag),
            parts.world,
            prefers_universal=parts.saving.prefers_universal,
        )
        if folder is None:
            if parts.world.rank == 0:
                _log.warning(
                    "engine.load_checkpoint: nothing is loaded, so training starts from scratch:"
                    " %s",
                    why_none(place.absolute() if isinstance(place, Path) else place),
                )
            return None, None
        wanted = Wanted(
            strict=load_module_strict,
            optimizer=load_optimizer_states,
            schedule=load_lr_scheduler_states,
            module_only=load_module_only,
            custom=custom_load_fn,
        )
        # Training continues with the loaded tensors, so inference mode of the caller is left.
        with torch.inference_mode(False), torch.no_grad(), collector_at_rest():
            if parts.runtime.gradients:
                expect_training(state)
            loaded = load(folder, state.live(), wanted)
            if state.training is not None:
                state.training.stepper.bring_values()
        state.optimizer_trains = False  # it may have been saved after `eval`
        if str(folder.parent) == str(place):
            state.jobs = (*loaded.jobs[-_REMEMBERED_JOBS:], state.jobs[-1])
        if loaded.scalars is not None:
            state.resume_counters(loaded.scalars[COUNTERS])
            numbers = loaded.scalars["scale"][: len(ScaleState._fields)]
            scale = state.scale._replace(**dict(zip(ScaleState._fields, numbers, strict=False)))
            # A scale that has never moved is no information: the saved run may have had none.
            if load_optimizer_states and parts.scale_rule.dynamic and scale.iteration:
                state.scale = scale
        state.forget_backwards()
        if state.is_inside_accumulation:
            # Gradients are not saved, and the accumulation may have changed.
            state.begin_accumulation()
        return str(folder), loaded.client_state

    # ---- torch.distributed.checkpoint --------------------------------------------------------

    def sharded_state_dict(self) -> dict[str, Tensor]:
        """Return copies of this rank's shards of the weights, and the buffers. No rank sends any.

        `torch.distributed.checkpoint` (2.14 and later) saves them as whole weights, each rank its
        own part: they have the attributes of its `CheckpointableTensor`. Weights are the fp32
        masters where there are masters. The optimizer's state is not among them. A folder that is
        written so is loaded by `load_checkpoint(folder, load_module_only=True)`, on any number of
        ranks, and by stock torch.

        Raises:
            CheckpointError: torch is older, or tensor, pipeline or expert parallelism divides the
                model.
        """
        from hadal.checkpoint.consolidated import shards_of  # for this alone

        self._state.expect_alive()
        return shards_of(self._state.live())

    def load_sharded_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load shards, as `sharded_state_dict` returns them, into weights and masters.

        All ranks must call it, each with its own shards, after `torch.distributed.checkpoint.load`
        has filled them.

        Raises:
            CheckpointError: shards are missing, or are another rank's; on every rank, and nothing
                has changed.
        """
        from hadal.checkpoint.consolidated import ShardSource
        from hadal.checkpoint.loading import Wanted, load_from  # for this alone

        state, parts = self._state, self._state.parts
        state.expect_alive()
        parts.runtime.meet_at_checkpoint()
        parts.runtime.reshard_all()
        live, what = state.live(), "the sharded state_dict was not loaded"
        load_from(ShardSource(state_dict, live), live, Wanted(module_only=True), what)

    # ---- whole weights ---------------------------------------------------------------------------
    #
    # Rank 0 gets them one bucket at a time; the other ranks need memory for one bucket. If a
    # program's own model is in model-parallel parts, the first rank of those that hold a part gets
    # that part; slices of layers that `tensor_parallel.autotp_size` cut are joined, and experts
    # come from all ranks that share them.

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return the key `zero_optimization.stage3_gather_16bit_weights_on_model_save`."""
        return self._state.live().rules.gathers_weights

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
        from hadal.checkpoint.consolidated import write_consolidated  # for this alone

        self._state.expect_alive()
        live = self._state.live()
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
        state = self._state.whole_state(prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name in self._state.live().frozen_names():
                state.pop(prefix + name, None)
        if destination is None:
            return state
        destination.update(state)
        return destination

    def _consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor] | None:
        """Return the whole model in rank 0's host memory, else None; tied names share a tensor."""
        from hadal.checkpoint.consolidated import consolidated  # for this alone

        self._state.expect_alive()
        live = self._state.live()
        live.runtime.meet_at_checkpoint()
        return consolidated(live, exclude_frozen=exclude_frozen_parameters)

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict
