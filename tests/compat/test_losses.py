"""DeepSpeed's cross entropies by their names and arguments: torch's values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from sequence.models import llama, recomputes, tokens
from torch.nn import functional as F

from hadal import comm
from hadal.compat import losses
from hadal.compat.offloading import get_checkpoint_hidden_states_offloading_ctx_manager
from hadal.errors import NotBuiltYetError, SequenceError, UsageError

ROWS, WORDS, WIDTH = 6, 8, 4


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, WIDTH, generator=generator)
    weight = torch.randn(WORDS, WIDTH, generator=generator)
    target = torch.randint(WORDS, (ROWS,), generator=generator)
    target[2] = -100
    return hidden, weight, F.linear(hidden, weight), target


def test_logits_in_pieces() -> None:
    _, _, logits, target = inputs()
    for reduction in ("mean", "sum", "none"):
        mine, other = (logits.clone().requires_grad_() for _ in range(2))
        found = losses.chunked_cross_entropy(mine, target, reduction=reduction)
        expected = F.cross_entropy(other, target, reduction=reduction)
        torch.testing.assert_close(found, expected)
        found.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(mine.grad, other.grad)
    for call in (losses.chunked_cross_entropy, losses.vocab_parallel_cross_entropy):
        for kernels in ("triton", "liger"):
            with pytest.raises(NotBuiltYetError, match=rf"'{kernels}'.* Give .*backend='torch'"):
                call(logits, target, backend=kernels)
        with pytest.raises(UsageError, match="backend='tirton' is unknown; give"):
            call(logits, target, backend="tirton")
    assert losses.triton_backend_available() is False


def test_a_model_of_transformers_computes_its_loss_in_pieces() -> None:
    pytest.importorskip("transformers")
    model, batch = llama(), tokens(0)
    expected = model(**batch).loss, model(**batch, num_items_in_batch=7).loss
    losses.install_chunked_causal_lm_loss(model)
    found = model(**batch).loss, model(**batch, num_items_in_batch=7).loss
    torch.testing.assert_close(found, expected)
    with pytest.raises(UsageError, match="loss_function is transformers' ForCausalLMLoss"):
        losses.install_chunked_causal_lm_loss(model)


@pytest.mark.parametrize("by_words", [True, False])
@on_ranks(2)
def test_over_ranks(by_words: bool) -> None:
    """Each rank has a slice of the vocabulary, or of the rows."""
    rank, size = comm.get_rank(), comm.get_world_size()
    hidden, weight, logits, target = inputs()
    group = dist.group.WORLD
    columns = (slice(5), slice(5, WORDS))[rank]
    rows = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    whole, all_hidden = (one.clone().requires_grad_() for one in (logits, hidden))
    expected = F.cross_entropy(whole, target)
    expected.backward()
    F.cross_entropy(F.linear(all_hidden, weight), target).backward()
    here = (slice(None), columns) if by_words else (rows, slice(None))
    mine = logits[here].clone().requires_grad_()
    groups = {"tp_group" if by_words else "sp_group": group}
    goal = target if by_words else target[rows]
    found = losses.VocabParallelCrossEntropyLoss(**groups)(mine, goal)
    torch.testing.assert_close(found, expected)
    found.backward()
    torch.testing.assert_close(mine.grad, whole.grad[here])
    states = (hidden if by_words else hidden[rows]).clone().requires_grad_()
    some = weight[columns] if by_words else weight
    found = losses.vocab_parallel_linear_cross_entropy(states, some, goal, **groups)
    torch.testing.assert_close(found, expected)
    found.backward()
    wanted = all_hidden.grad if by_words else all_hidden.grad[rows]
    torch.testing.assert_close(states.grad, wanted)
    labels = F.pad(target, (1, 0))[None]
    lm = losses.VocabParallelCausalLMLoss(**({"tp_group": group} if by_words else {}))
    shown = F.pad(logits, (0, 0, 0, 1))[None]
    shown = shown[..., columns] if by_words else shown
    torch.testing.assert_close(lm(shown, labels), expected)
    counted = lm(shown, shift_labels=F.pad(target, (0, 1), value=-100)[None], num_items_in_batch=10)
    torch.testing.assert_close(counted, expected * 5 / 10)
    with pytest.raises(SequenceError, match=r"has \d columns of the vocabulary.* 1 to 3 of None"):
        losses.vocab_parallel_cross_entropy(mine, goal, vocab_start_index=1, vocab_end_index=3)
    for name, choices in (
        ("backend='liger'", {"backend": "liger"}),
        ("gather_sequence_loss", {"gather_sequence_loss": True}),
    ):
        with pytest.raises(NotBuiltYetError, match=name):
            losses.vocab_parallel_cross_entropy(mine, goal, **choices)


def test_a_context_of_offloaded_inputs_leaves_nothing_behind() -> None:
    pytest.importorskip("transformers")
    from transformers.modeling_layers import GradientCheckpointingLayer

    call = GradientCheckpointingLayer.__call__
    context = get_checkpoint_hidden_states_offloading_ctx_manager(min_offload_bytes=0)
    batch = tokens(0)
    model = recomputes(llama())
    model(**batch, use_cache=False).loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with context:
        assert GradientCheckpointingLayer.__call__ is not call
        with pytest.raises(UsageError, match="is open already"), context:
            pass
        loss = model(**batch, use_cache=False).loss
    assert GradientCheckpointingLayer.__call__ is call
    loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
    with pytest.raises(ValueError, match="keep_last_count is -1; expected 0 or more"):
        get_checkpoint_hidden_states_offloading_ctx_manager(keep_last_count=-1)
