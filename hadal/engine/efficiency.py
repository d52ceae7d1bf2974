"""Data efficiency as the engine's users see it: custom schedules, and batches that change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hadal.engine.loader import PostProcess
from hadal.engine.session import Session
from hadal.errors import UsageError

if TYPE_CHECKING:
    from hadal.plugins.data_efficiency.pacing import CustomPace, Pacer


class Efficiency:
    """Access to the schedules of an engine's curricula."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def set_custom_curriculum_learning_schedule(
        self, schedule_func_dict: CustomPace | Mapping[str, CustomPace]
    ) -> None:
        """Set the functions of schedules whose `schedule_type` is "custom". All ranks must call it.

        Functions are not saved: call it after a resume, too.

        Args:
            schedule_func_dict: a function from the update, from 1, to its difficulty, an integer;
                or such functions by metric ("seqlen" for `curriculum_learning`). A difficulty that
                has reached `max_difficulty` stays there.

        Raises:
            UsageError: there is no such curriculum, its schedule is not custom, or a value is no
                function.
        """
        pacers, given = self._pacers(), schedule_func_dict
        named = given if isinstance(given, Mapping) else dict.fromkeys(pacers, given)
        if not isinstance(given, Mapping) and len(pacers) > 1:
            raise UsageError(
                "set_custom_curriculum_learning_schedule got one function for the curricula"
                f" {', '.join(pacers)}; pass a dict with a function for each name"
            )
        if not pacers or not named.keys() <= pacers.keys():
            raise UsageError(
                "set_custom_curriculum_learning_schedule got functions for"
                f" {', '.join(named) or 'a curriculum'}; the configuration has"
                f" {', '.join(pacers) or 'no curriculum; switch on curriculum_learning'}"
            )
        for name, custom in named.items():
            pacers[name].set_custom(custom)

    def set_data_post_process_func(self, post_process_func: PostProcess) -> None:
        """Change each training batch before it is handed out.

        Args:
            post_process_func: a function of the batch and a dict that describes it. With
                `data_sampling.curriculum_learning`, that has `current_difficulties` by metric and
                `curriculum_step`, of this very batch, also if workers read ahead.

        Raises:
            UsageError: the engine has no training loader, or this is no function.
        """
        loader = self._session.loader
        if loader is None:
            raise UsageError(
                "set_data_post_process_func: the engine has no training loader; pass training_data"
                " to initialize, or call engine.deepspeed_io first"
            )
        if not callable(post_process_func):
            raise UsageError(
                "set_data_post_process_func: expected a function of the batch and its state, got"
                f" {type(post_process_func).__name__}"
            )
        loader.post_process = post_process_func

    def _pacers(self) -> dict[str, Pacer]:
        """Return the schedules of difficulties by metric."""
        from hadal.plugins.data_efficiency.sampler import CurriculumOrder  # for this alone
        from hadal.plugins.data_efficiency.seqlen import LengthCurriculum

        loader = self._session.loader
        order = None if loader is None else loader.given_order
        found = dict(order.pacers) if isinstance(order, CurriculumOrder) else {}
        for one in self._session.listeners:
            if isinstance(one, LengthCurriculum):
                found["seqlen"] = one.pacer
        return found
