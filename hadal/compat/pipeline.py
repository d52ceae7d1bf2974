"""The engine of a model in stages, as programs see it."""

from __future__ import annotations

from hadal.compat.engine import DeepSpeedEngine
from hadal.compat.log import logger
from hadal.engine.pipeline import PipelineEngine as _PipelineEngine


class PipelineEngine(_PipelineEngine, DeepSpeedEngine):
    """An engine of stages with the name and the methods of DeepSpeed's."""

    @property
    def pipeline_parallelism(self) -> bool:
        """True: layers are distributed over ranks."""
        return True

    @property
    def is_pipe_parallel(self) -> bool:
        """True if there are several stages."""
        return self.num_stages > 1

    @property
    def is_data_parallel(self) -> bool:
        """True if several ranks have the same layers."""
        return self.grid.data_parallel_size > 1

    @property
    def is_model_parallel(self) -> bool:
        """True if several ranks have slices of the same layers."""
        return self.grid.slice_parallel_size > 1

    def log_for_device(self, *msg: object) -> None:
        """Log a message with this stage's place, if debug messages are shown."""
        logger.debug(
            "RANK=%d PIPE-ID=%d DATA-ID=%d: %s",
            self.global_rank,
            self.stage_id,
            self.grid.data_parallel_id,
            " ".join(map(str, msg)),
        )

    def tput_log(self, *msg: object) -> None:
        """Log a message on rank 0, in updates that have a progress line."""
        if self.global_rank == 0 and self.global_steps % self.steps_per_print() == 0:
            logger.info("%s", " ".join(map(str, msg)))
