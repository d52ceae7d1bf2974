"""`deepspeed.sequence.autosp_*`: sequence parallelism of models that see and read.

The ranks of a group each have some patches of an image; the encoder's attention sees all of them.
A fusion adapter puts the projected patches among the text's embeddings, and returns each rank its
part of the whole. Unlike DeepSpeed's, the gathers have gradients.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from hadal.comm import Ranks, all_gather_object
from hadal.comm.adjoint import across, gathered, own, sum_scattered
from hadal.compat.log import logger
from hadal.errors import ModelError, NotBuiltYetError

_SEES = {
    "ViTAttention": True,
    "CLIPAttention": True,
    "SiglipAttention": False,
    "InternVisionAttention": False,
    "Qwen2VLVisionAttention": False,
    "Idefics2VisionAttention": False,
    "PaliGemmaVisionAttention": False,
}
"""Classes of encoders' attentions, and whether a class token comes before the patches."""
_READS = re.compile("(Llama|Mistral|Qwen2|InternLM2|Gemma|Phi3|GPTNeoX|Falcon|Mpt)Attention")
"""Classes of decoders' attentions."""
_BETWEEN = re.compile(
    "visual_projection|mm_projector|vision_proj|multi_modal_projector|img_projection"
)


def auto_wrap_model_for_sp(model: nn.Module, process_group: Any) -> nn.Module:
    """Wrap the attentions of a model's image encoder; return the model.

    Raises:
        ModelError: none of its modules is a known attention.
    """
    named = list(model.named_modules())
    reads = [name for name, each in named if _READS.fullmatch(type(each).__name__)]
    sees = [(name, each) for name, each in named if type(each).__name__ in _SEES]
    if not sees and not reads:
        raise ModelError(
            f"auto_wrap_model_for_sp: {type(model).__name__} has no known attention; wrap its own"
            " in UlyssesSPViTAttention"
        )
    for name, attention in sees:
        has_cls = _SEES[type(attention).__name__]
        model.set_submodule(name, UlyssesSPViTAttention(attention, process_group, has_cls))
    if reads:
        logger.warning(
            f"auto_wrap_model_for_sp leaves {len(reads)} attentions of the decoder as they are; the"
            " key sequence_parallel_size splits their sequences"
        )
    between = next((name for name, _ in named if _BETWEEN.search(name)), None)
    if between is not None:
        logger.warning(f"auto_wrap_model_for_sp: wrap {between} in a fusion adapter of this model")
    return model


def _whole(mine: Tensor, ranks: Ranks, label: str) -> tuple[Tensor, list[int]]:
    """Return the tokens [batch, tokens, width] of all ranks, and how many each has."""
    sizes: list[int] = [0] * ranks.size
    all_gather_object(sizes, mine.shape[1], group=ranks.group)
    return (
        across(
            mine,
            lambda x: gathered(x, 1, sizes, ranks, label),
            lambda gradient: sum_scattered(gradient, 1, sizes, ranks, label),
        ),
        sizes,
    )


class UlyssesSPViTAttention(nn.Module):
    """An attention that sees the patches of all ranks, and returns this rank's.

    Args:
        attn: called with hidden states; returns them, or a tuple that begins with them.
        process_group: the ranks.
        has_cls_token: whether the first token is no patch, and the same on all ranks.
    """

    def __init__(self, attn: nn.Module, process_group: Any, has_cls_token: bool = True) -> None:
        super().__init__()
        self.attn, self.process_group, self.has_cls_token = attn, process_group, has_cls_token
        self._ranks = Ranks.world() if process_group is None else Ranks.of(process_group)
        self.world_size = self._ranks.size

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        """Return the attention's result for this rank's tokens; see the class."""
        first = int(self.has_cls_token)
        patches, sizes = _whole(hidden_states[:, first:], self._ranks, "the patches of an image")
        result = self.attn(torch.cat([hidden_states[:, :first], patches], 1), **kwargs)
        seen, *others = result if isinstance(result, (tuple, list)) else (result,)
        mine = own(seen[:, first:], 1, sizes, self._ranks)
        mine = torch.cat([seen[:, :first], mine], 1)
        return (mine, *others) if others else mine


class ModalityFusionSPAdapter(nn.Module):
    """A projection of image features, which are put among the text's embeddings.

    Subclasses say where, in `_splice_visual_into_text`.

    Args:
        projection: the layer from the encoder's width to the decoder's.
        process_group: the ranks that share the sequence.
        image_token_id: the token that stands for an image, or for each of its patches.
    """

    def __init__(
        self, projection: nn.Module, process_group: Any, image_token_id: int = -200
    ) -> None:
        super().__init__()
        self.projection, self.process_group = projection, process_group
        self.image_token_id = image_token_id
        self._ranks = Ranks.world() if process_group is None else Ranks.of(process_group)
        self.world_size = self._ranks.size

    def forward(self, visual_features: Tensor, text_embeds: Tensor, input_ids: Tensor) -> Tensor:
        """Return this rank's part of the embeddings; zeros fill them to a multiple of the ranks."""
        seen, _ = _whole(self.projection(visual_features), self._ranks, "the features of an image")
        fused = self._splice_visual_into_text(text_embeds, seen, input_ids)
        lacking = -fused.shape[1] % self.world_size
        fused = nn.functional.pad(fused, (0, 0, 0, lacking))
        share = [fused.shape[1] // self.world_size] * self.world_size
        return own(fused, 1, share, self._ranks).contiguous()

    def _splice_visual_into_text(
        self, text_embeds: Tensor, visual_embeds: Tensor, input_ids: Tensor
    ) -> Tensor:
        raise NotBuiltYetError(
            f"{type(self).__name__}._splice_visual_into_text is not built: override it for your"
            " model, or use LlavaFusionAdapter, InternVLFusionAdapter or Qwen2VLFusionAdapter"
        )


class LlavaFusionAdapter(ModalityFusionSPAdapter):
    """An adapter for models in which one token stands for each image."""

    def _splice_visual_into_text(
        self, text_embeds: Tensor, visual_embeds: Tensor, input_ids: Tensor
    ) -> Tensor:
        rows = [
            self._fused(*row) for row in zip(text_embeds, visual_embeds, input_ids, strict=True)
        ]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def _fused(self, text: Tensor, image: Tensor, ids: Tensor) -> Tensor:
        places = (ids == self.image_token_id).nonzero().flatten().tolist()
        if not places:
            return text
        images = image.chunk(len(places))
        begins = [0, *(place + 1 for place in places)]
        texts = [text[a:b] for a, b in zip(begins, [*places, len(text)], strict=True)]
        return torch.cat(
            [texts[0], *(each for pair in zip(images, texts[1:], strict=True) for each in pair)]
        )


class InternVLFusionAdapter(ModalityFusionSPAdapter):
    """An adapter for models in which a token stands for each patch."""

    def _splice_visual_into_text(
        self, text_embeds: Tensor, visual_embeds: Tensor, input_ids: Tensor
    ) -> Tensor:
        return _replaced(text_embeds, visual_embeds, input_ids == self.image_token_id)


class Qwen2VLFusionAdapter(ModalityFusionSPAdapter):
    """An adapter for models in which patches stand between two tokens."""

    def __init__(
        self,
        projection: nn.Module,
        process_group: Any,
        vision_start_token_id: int,
        vision_end_token_id: int,
    ) -> None:
        super().__init__(projection, process_group)
        self.vision_start_token_id = vision_start_token_id
        self.vision_end_token_id = vision_end_token_id

    def _splice_visual_into_text(
        self, text_embeds: Tensor, visual_embeds: Tensor, input_ids: Tensor
    ) -> Tensor:
        starts, ends = (
            input_ids == self.vision_start_token_id,
            input_ids == self.vision_end_token_id,
        )
        inside = (starts.cumsum(1) > ends.cumsum(1)) & ~starts
        return _replaced(text_embeds, visual_embeds, inside)


def _replaced(text: Tensor, image: Tensor, where: Tensor) -> Tensor:
    """Return the text's embeddings with each row's patches in the chosen places, in order."""
    counts = where.sum(1).tolist()
    if max(counts) > image.shape[1]:
        raise ModelError(
            f"the text has {max(counts)} places for patches, but the image {image.shape[1]};"
            " give each rank its own part of the image"
        )
    patches = torch.cat([row[:count] for row, count in zip(image, counts, strict=True)])
    return text.masked_scatter(where[..., None], patches.to(text.dtype))
