"""The part of an engine that saves checkpoints and resumes from them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hadal.checkpoint.background import Saver
from hadal.checkpoint.files import location_of, new_mark
from hadal.checkpoint.folders import why_none
from hadal.checkpoint.live import COUNTERS
from hadal.checkpoint.loading import Wanted, find, load, load_from
from hadal.checkpoint.saving import SaveRequest
from hadal.checkpoint.storage import Location
from hadal.checkpoint.tensor_shards import ShardSource, shards_of
from hadal.checkpoint.together import common_folder, compare_tags
from hadal.comm.faults import raised_on_all
from hadal.comm.interrupts import in_step
from hadal.engine.collector import collector_at_rest
from hadal.engine.parts import Counters
from hadal.engine.session import Session
from hadal.errors import CheckpointError
from hadal.optim.loss_scale import ScaleState

_log = logging.getLogger(__name__)
# More restarts than this, and the checkpoints of the first ones stay.
_REMEMBERED_JOBS = 64
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Checkpoints:
    """Checkpoints of an engine. All ranks must call each method."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._saver = Saver(session.parts.world)
        # The jobs whose checkpoints this one may remove: itself, and those it has resumed from.
        self._jobs: tuple[str, ...] = (new_mark(),)
        self._has_logged_residuals = False
        self.resumed: tuple[str | None, dict[str, Any] | None] = None, None

    def resume(self, load_dir: str) -> None:
        """Load the latest checkpoint in `load_dir`, if there is one, and log it.

        `initialize` calls this for `checkpoint.resume`. All ranks must call it.
        """
        self.resumed = self.load_checkpoint(load_dir)
        if self.resumed[0] is not None and self._session.parts.world.rank == 0:
            _log.warning(
                "resumed from %s at update %d (checkpoint.resume)",
                self.resumed[0],
                self._session.counters.global_steps,
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
        began = time.perf_counter()
        self._session.expect_alive()
        self._session.parts.runtime.meet_at_checkpoint()
        self._forget_residuals()
        where = self._folder(save_dir, "engine.save_checkpoint")
        name = str(tag or f"global_step{self._session.counters.global_steps}")
        compare_tags(name, self._session.parts.saving.tag_validation, self._session.parts.world)
        if self._session.parts.runtime.holds_gradients and self._session.parts.world.rank == 0:
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
            self._jobs,
        )
        what = f"the save of checkpoint {name}"
        with raised_on_all(self._session.parts.world, what, CheckpointError):
            self._session.parts.runtime.check_freed()
        saved = self._saver.save(order, self._session.live())
        for listener in self._session.listeners:
            listener.after_save(saved, time.perf_counter() - began)
        return True

    def _folder(self, given: str | Path, what: str) -> Location:
        """Return the folder to use: rank 0's, unless each node has one of its own."""
        parts, folder = self._session.parts, location_of(given)
        if parts.saving.is_node_local and isinstance(folder, Path):
            return folder
        return common_folder(folder, parts.world, what)

    def _forget_residuals(self) -> None:
        """Drop error feedback, which is not saved: this run then continues as a resumed one."""
        if self._session.parts.runtime.forget_residuals() and not self._has_logged_residuals:
            self._has_logged_residuals = True
            if self._session.parts.world.rank == 0:
                _log.warning(
                    "error feedback (zero_optimization.zeropp_loco_param) is reset by each"
                    " checkpoint, so that a resumed run computes the same numbers"
                )

    def wait_for_checkpoint(self) -> None:
        """Wait until the asynchronous save under way has ended. All ranks must call it.

        Raises:
            CheckpointError: it failed; on every rank.
        """
        self._saver.wait()

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
        self._session.expect_alive()
        self._session.parts.runtime.meet_at_checkpoint()
        self._forget_residuals()
        self._saver.wait()
        place = self._folder(load_dir, "engine.load_checkpoint")
        folder = find(
            place,
            None if tag is None else str(tag),
            self._session.parts.world,
            prefers_universal=self._session.parts.saving.prefers_universal,
        )
        if folder is None:
            if self._session.parts.world.rank == 0:
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
            if self._session.parts.runtime.gradients:
                self._session.expect_training()
            loaded = load(folder, self._session.live(), wanted)
        self._session.optimizer_trains = False  # it may have been saved after `eval`
        if str(folder.parent) == str(place):
            self._jobs = (*loaded.jobs[-_REMEMBERED_JOBS:], self._jobs[-1])
        if loaded.scalars is not None:
            # Counters that an older version did not save start at their default.
            saved = loaded.scalars[COUNTERS]
            known = {one.name for one in fields(Counters)}
            self._session.counters = Counters(**{k: v for k, v in saved.items() if k in known})
            numbers = loaded.scalars["scale"][: len(ScaleState._fields)]
            scale = self._session.scale._replace(
                **dict(zip(ScaleState._fields, numbers, strict=False))
            )
            # A scale that has never moved is no information: the saved run may have had none.
            if load_optimizer_states and self._session.parts.scale_rule.dynamic and scale.iteration:
                self._session.scale = scale
        self._session.cycle.begin_anew()
        if self._session.is_inside_accumulation:
            # Gradients are not saved, and the accumulation may have changed.
            self._session.begin_accumulation()
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
        self._session.expect_alive()
        return shards_of(self._session.live())

    def load_sharded_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load shards, as `sharded_state_dict` returns them, into weights and masters.

        All ranks must call it, each with its own shards, after `torch.distributed.checkpoint.load`
        has filled them.

        Raises:
            CheckpointError: shards are missing, or are another rank's; on every rank, and nothing
                has changed.
        """
        self._session.expect_alive()
        self._session.parts.runtime.meet_at_checkpoint()
        self._session.parts.runtime.reshard_all()
        live, what = self._session.live(), "the sharded state_dict was not loaded"
        load_from(ShardSource(state_dict, live), live, Wanted(module_only=True), what)
