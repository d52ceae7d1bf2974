"""Sequence parallelism of models that see and read: the numbers of one process."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn

from hadal.compat.install import alias
from hadal.errors import ModelError

NAMES = alias("deepspeed.sequence")


class CLIPAttention(nn.Module):
    """An attention as encoders have it, with a name that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, hidden_states: Tensor, scale: float = 1.0) -> tuple[Tensor, None]:
        return self.inner(*[hidden_states] * 3)[0] * scale, None


class LlamaAttention(nn.Module):
    pass


def seeing() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.encoder, model.decoder = nn.ModuleList([CLIPAttention()]), nn.ModuleList()
    model.decoder.append(LlamaAttention())
    model.mm_projector = nn.Sequential(nn.Linear(4, 4))
    return model


@pytest.mark.parametrize("with_class_token", [True, False])
@on_ranks(2)
def test_an_encoder_s_attention_sees_the_patches_of_all_ranks(with_class_token: bool) -> None:
    rank = torch.distributed.get_rank()
    attention, first = seeing().encoder[0], int(with_class_token)
    tokens = torch.randn(2, first + 5, 4)  # 5 patches: 3 on one rank, 2 on the other
    whole = tokens.clone().requires_grad_()
    expected = attention(whole, scale=2.0)[0]
    expected.square().sum().backward()
    named = {name: one.grad.clone() for name, one in attention.named_parameters()}
    attention.zero_grad()
    wrapped = NAMES.UlyssesSPViTAttention(attention, None, has_cls_token=with_class_token)
    mine = slice(first, first + 3) if rank == 0 else slice(first + 3, None)
    part = torch.cat([tokens[:, :first], tokens[:, mine]], 1).requires_grad_()
    found, nothing = wrapped(part, scale=2.0)
    assert nothing is None
    torch.testing.assert_close(found[:, first:], expected[:, mine])
    torch.testing.assert_close(found[:, :first], expected[:, :first])
    counted = found if rank == 0 else found[:, first:]  # the class token's loss counts once
    counted.square().sum().backward()
    assert part.grad is not None and whole.grad is not None
    torch.testing.assert_close(part.grad[:, first:], whole.grad[:, mine])
    for name, one in attention.named_parameters():
        torch.distributed.all_reduce(one.grad)
        torch.testing.assert_close(one.grad, named[name])


@on_ranks(1)
def test_a_model_s_attentions_are_found_and_wrapped() -> None:
    model = seeing()
    inner, logger = model.encoder[0], alias("deepspeed.utils.logging").logger
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    assert NAMES.auto_wrap_model_for_sp(model, None) is model
    logger.removeHandler(handler)
    assert isinstance(model.encoder[0], NAMES.UlyssesSPViTAttention)
    assert model.encoder[0].attn is inner and model.encoder[0].has_cls_token
    assert "sequence_parallel_size" in told[0] and "mm_projector" in told[1]
    for kind in (ModelError, ValueError):
        with pytest.raises(kind, match="no known attention"):
            NAMES.auto_wrap_model_for_sp(nn.Linear(2, 2), None)


def fused(name: str, ids: list[list[int]], patches: int, **tokens: int) -> tuple[Any, Tensor]:
    """Return each rank's part of the fused embeddings, joined, and the expected gradient's size."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    projection = nn.Linear(1, 2, bias=False)
    nn.init.ones_(projection.weight)
    seen = torch.arange(1.0, 1 + len(ids) * patches).view(len(ids), patches, 1)
    mine = seen.chunk(ranks, 1)[rank].clone().requires_grad_()
    text = -torch.tensor(ids, dtype=torch.float).unsqueeze(-1).expand(-1, -1, 2)
    adapter = getattr(NAMES, name)(projection, None, **tokens)
    part = adapter(mine, text, torch.tensor(ids))
    part.sum().backward()
    parts = [torch.empty_like(part) for _ in range(ranks)]
    torch.distributed.all_gather(parts, part.detach())
    assert mine.grad is not None
    return torch.cat(parts, 1)[..., 0].tolist(), mine.grad.unique()


@on_ranks(2)
def test_patches_take_the_places_of_their_tokens() -> None:
    found, gradient = fused(
        "InternVLFusionAdapter", [[7, 9, 9, 8], [9, 7, 8, 9]], 2, image_token_id=9
    )
    assert found == [[-7, 1, 2, -8], [3, -7, -8, 4]] and gradient.tolist() == [2]
    between = {"vision_start_token_id": 5, "vision_end_token_id": 6}
    found, gradient = fused(
        "Qwen2VLFusionAdapter", [[5, 0, 0, 6, 1], [5, 0, 6, 5, 0]], 2, **between
    )
    assert found == [[-5, 1, 2, -6, -1, 0], [-5, 3, -6, -5, 4, 0]] and gradient.tolist() == [2]
    found, gradient = fused("LlavaFusionAdapter", [[1, -200, 2], [-200, 3, -200], [4, 5, 6]], 4)
    assert found == [[-1, 1, 2, 3, 4, -2], [5, 6, -3, 7, 8, 0], [-4, -5, -6, 0, 0, 0]]
    assert gradient.tolist() == [0, 2]  # the third text has no place for an image
    with pytest.raises(ModelError, match="3 places for patches, but the image 2"):
        fused("InternVLFusionAdapter", [[9, 9, 9, 8]], 2, image_token_id=9)
    with pytest.raises(NotImplementedError, match="LlavaFusionAdapter"):
        fused("ModalityFusionSPAdapter", [[9]], 2)
