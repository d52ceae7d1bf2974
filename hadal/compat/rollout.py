"""Rollouts: generation with the weights that an engine trains, as prompts and responses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hadal.compat.surface import unbuilt
from hadal.errors import ChoiceError, UsageError
from hadal.zero import GatheredParameters


@dataclass
class RolloutConfig:
    """The engine of rollouts; there is one."""

    engine: str = "hybrid_engine"
    use_graph_capture: bool = False


@dataclass
class SamplingConfig:
    """Options for choosing tokens. Temperature 0 takes the likeliest; `top_k` below 1 all."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n_samples_per_prompt: int = 1
    continuous_batch_size: int | None = None


@dataclass
class RolloutRequest:
    """Prompts, padded on the left, with their mask."""

    prompt_ids: Tensor
    prompt_attention_mask: Tensor

    def __post_init__(self) -> None:
        _expect_rows(self.prompt_ids, self.prompt_attention_mask, "prompt_ids")


@dataclass
class RolloutBatch:
    """Prompts with their responses, the mask of real tokens, and where responses start."""

    input_ids: Tensor
    attention_mask: Tensor
    response_start_idx: Tensor

    def __post_init__(self) -> None:
        _expect_rows(self.input_ids, self.attention_mask, "input_ids")
        if self.response_start_idx.shape != self.input_ids.shape[:1]:
            raise UsageError(
                f"response_start_idx has the shape {tuple(self.response_start_idx.shape)}; expected"
                f" a number for each of {len(self.input_ids)} rows"
            )

    batch_size = property(lambda self: int(self.input_ids.shape[0]))
    """The number of rows."""
    seq_len = property(lambda self: int(self.input_ids.shape[1]))
    """The number of tokens of a row, padding included."""


def _expect_rows(ids: Tensor, mask: Tensor, name: str) -> None:
    if ids.dim() != 2 or mask.shape != ids.shape:
        raise UsageError(
            f"{name} has the shape {tuple(ids.shape)}, and its mask {tuple(mask.shape)}; expected"
            " rows of tokens, and a mask of the same shape"
        )


class RolloutEngine(ABC):
    """The base of programs' own rollout engines."""

    name: str = "base"

    @abstractmethod
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Return the prompts with responses."""

    @abstractmethod
    def sync_weights(self, step: int) -> None:
        """Bring new weights to the engine."""

    def shutdown(self) -> None:  # noqa: B027 - as DeepSpeed's
        """Do nothing: there is nothing to free."""


class HybridEngineRollout(RolloutEngine):
    """Generates with a training engine's own weights, gathered once for all tokens.

    Args:
        engine: the engine; its module has transformers' `generate`.
        tokenizer: gives the ids of padding and of the end.
        cfg: a `RolloutConfig`.

    Raises:
        NotBuiltYetError: `cfg` asks for graph capture.
    """

    name = "hybrid_engine"

    def __init__(self, engine: Any, tokenizer: Any, cfg: Any = None) -> None:
        if getattr(cfg, "use_graph_capture", False):
            raise unbuilt(
                "RolloutConfig.use_graph_capture", "Leave it False; the module's generate runs"
            )
        self.engine, self.tokenizer = engine, tokenizer

    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Return each prompt `n_samples_per_prompt` times with a response; all ranks call it."""
        count, start = sampling.n_samples_per_prompt, request.prompt_ids.shape[1]
        ids = request.prompt_ids.repeat_interleave(count, dim=0)
        mask = request.prompt_attention_mask.repeat_interleave(count, dim=0)
        samples = sampling.temperature > 0
        options: dict[str, Any] = {"max_new_tokens": sampling.max_new_tokens, "do_sample": samples}
        if samples:
            options |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
            options["top_k"] = max(sampling.top_k, 0)
        end, padding = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        padding = end if padding is None else padding
        module = self.engine.module
        with torch.no_grad(), GatheredParameters(module.parameters()):
            found: Tensor = module.generate(
                ids, attention_mask=mask, eos_token_id=end, pad_token_id=padding, **options
            )
        ends = (found[:, start:] == end).long() if end is not None else found[:, start:] * 0
        is_real = (ends.cumsum(1) - ends == 0).long()  # up to the first end, inclusive
        whole = torch.cat([mask.to(is_real.dtype), is_real], dim=1)
        starts = torch.full((len(found),), start, dtype=torch.long, device=found.device)
        return RolloutBatch(found, whole, starts)

    def sync_weights(self, step: int) -> None:
        """Do nothing: the weights are the training engine's own."""


def validate_cuda_graph_support(config: Any, zero_stage: int) -> str:
    """Return why generation uses no graphs of the device: they are not built."""
    return str(unbuilt("capturing graphs of generation", "Use the module's own generate"))


def decode_steps_from_generate_kwargs(kwargs: Mapping[str, Any]) -> int | None:
    """Return how many forwards follow that of the prompt; None if that is not fixed."""
    most, least = kwargs.get("max_new_tokens"), kwargs.get("min_new_tokens")
    return None if most is None or most != least else int(most) - 1


def build_rollout(
    rollout_cfg: Any, student_engine: Any = None, tokenizer: Any = None, **kwargs: Any
) -> HybridEngineRollout:
    """Return the rollout engine of a configuration.

    Raises:
        ChoiceError: it names another kind.
        UsageError: the engine or the tokenizer is missing.
    """
    if rollout_cfg.engine != "hybrid_engine":
        raise ChoiceError(f"rollout engine {rollout_cfg.engine!r}: expected 'hybrid_engine'")
    if student_engine is None or tokenizer is None:
        raise UsageError("a hybrid_engine rollout needs both student_engine and tokenizer")
    return HybridEngineRollout(student_engine, tokenizer, rollout_cfg)
