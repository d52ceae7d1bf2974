"""Models of transformers on slices: logits and gradients of whole sequences, packed ones too."""

from __future__ import annotations

import warnings
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools, on_ranks
from torch import Tensor, nn

from hadal import comm
from hadal.errors import SequenceError
from hadal.plugins.sequence import SequenceGroups, UlyssesSPAttentionHF
from hadal.plugins.sequence.huggingface import detach, documents_in
from sequence.models import llama, tokens

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)

register = UlyssesSPAttentionHF.register_with_transformers


def test_documents_begin_where_positions_do() -> None:
    assert documents_in(torch.arange(5).expand(2, -1)) is None
    rows = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 0], [1, 1, 0, 1, 2, 3]])
    assert documents_in(rows) == ((6,), (2, 3, 1), (1, 1, 4))


def packed() -> Tensor:
    """Two rows of packed documents, some of which cross from one rank's slice to the next."""
    rows = [[5, 2, 2, 3], [1, 8, 1, 1, 1]]
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])


def mistral(**changes: Any) -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=4,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return MistralForCausalLM(config)


def gpt2() -> Any:
    """A model that does not hand positions to its attention."""
    from transformers import GPT2Config, GPT2LMHeadModel

    names = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 32}
    torch.manual_seed(0)
    pdrop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**names, **pdrop, attn_implementation="sdpa"))


MODELS = {
    "grouped": lambda: llama(4, 2),
    "one key": lambda: llama(4, 1),
    "uneven": lambda: llama(5, 5),
    "uneven groups": lambda: llama(6, 2),
    "window": mistral,
    "no positions": gpt2,
}


@pytest.mark.fast_cells(
    "grouped-plain-2", "uneven-plain-2", "window-plain-2", "no positions-numbered-2"
)
@pytest.mark.parametrize(
    ("name", "kind", "world"),
    [
        ("grouped", "plain", 2),
        ("grouped", "packed", 4),
        ("one key", "packed", 2),
        ("one key", "checkpointed", 4),
        ("uneven", "plain", 2),
        ("uneven groups", "plain", 4),
        ("window", "plain", 2),
        ("window", "packed", 2),
        ("no positions", "numbered", 2),
        ("no positions", "packed", 2),
    ],
)
@on_ranks("world")
def test_slices_compute_the_same_as_whole_sequences(name: str, kind: str) -> None:
    size, rank = comm.get_world_size(), comm.get_rank()
    given = tokens(0)["input_ids"]
    positions = packed() if kind == "packed" else torch.arange(12).expand(2, -1).contiguous()
    whole = MODELS[name]()
    expected = whole(input_ids=given, position_ids=positions, use_cache=False).logits
    if kind == "packed":  # one document at a time
        lengths = documents_in(positions)
        assert lengths is not None
        rows = [
            torch.cat([whole(part[None]).logits for part in row.split(cut)], dim=1)
            for row, cut in zip(given, lengths, strict=True)
        ]
        expected = torch.cat(rows)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (expected * weights).sum().backward()

    model = MODELS[name]()
    if kind == "checkpointed":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # renamed between releases
            model.gradient_checkpointing_enable({"use_reentrant": False})
    groups = register(model, "sdpa", size, 1)
    assert groups is not None and groups.get_sequence_parallel_world_size() == size
    here = slice(rank * 12 // size, (rank + 1) * 12 // size)
    named = {"position_ids": positions[:, here].contiguous()}
    if kind == "numbered":
        named = {}
    model.train()
    found = model(input_ids=given[:, here].contiguous(), **named).logits
    torch.testing.assert_close(found, expected[:, here], rtol=1e-4, atol=1e-5)
    (found * weights[:, here]).sum().backward()
    for (where, one), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        comm.all_reduce(one.grad)
        message = f"{where}: {{}}".format
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=2e-4, msg=message)
    groups_of = [getattr(m, "num_key_value_groups", None) for m in model.modules()]
    assert groups_of == [getattr(m, "num_key_value_groups", None) for m in whole.modules()]
    detach(model)
    torch.testing.assert_close(model(given).logits, whole(given).logits)


@on_ranks(2)
def test_evaluation_may_be_whole() -> None:
    model, given = llama().eval(), tokens(0)["input_ids"]
    expected = model(given).logits
    register(model, None, 2, 1, disable_in_eval=True)
    torch.testing.assert_close(model(given).logits, expected)
    register(model, None, 2, 1, disable_in_eval=False)
    here = slice(6 * comm.get_rank(), 6 * comm.get_rank() + 6)
    torch.testing.assert_close(model(given[:, here]).logits, expected[:, here])
    assert register(model, "sdpa", 1, 1) is None


def _register_a_kernel_of_the_hub(path: str) -> None:
    from transformers import modeling_flash_attention_utils as lazily
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name, core = "some/kernel", partial(print)
    with pytest.MonkeyPatch.context() as patches:
        load = partial(ALL_ATTENTION_FUNCTIONS.register, value=core)
        patches.setattr(lazily, "lazy_import_flash_attention", load)
        register(path, name, 2, 1)
    assert ALL_ATTENTION_FUNCTIONS[name].hadal_core is core


def test_a_kernel_of_the_hub_is_loaded_before_its_model(tmp_path: Path, ranks: RankPools) -> None:
    llama().config.save_pretrained(tmp_path)
    ranks(2).run(_register_a_kernel_of_the_hub, str(tmp_path))


def _refused(kind: str) -> None:
    model, given = llama(), tokens(0)["input_ids"][:, :6]
    if kind == "plain model":
        register(nn.Linear(2, 2), "sdpa", 2, 1)
    elif kind == "other attention":
        register(model, "flash_attention_2", 2, 1)
    elif kind == "unknown":
        model.config._attn_implementation_internal = "sdpaa"
        register(model, "sdpaa", 2, 1)
    elif kind == "length":
        register(model, "sdpa", 2, 1, seq_length=7, seq_length_is_variable=False)
    elif kind == "other length":
        register(model, "sdpa", 2, 1, seq_length=10, seq_length_is_variable=False)
        model(given)
    elif kind == "ranks":
        SequenceGroups(4)
    elif kind == "chunks":
        model.config.attention_chunk_size = 4
        register(model, "sdpa", 2, 1)
    else:
        register(model, "sdpa", 2, 1)
        attention, cache = model.model.layers[0].self_attn, torch.zeros(1, 4, 6, 8)
        call = model.model.layers[0].self_attn.config._attn_implementation
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        function = ALL_ATTENTION_FUNCTIONS[call]
        if kind == "cache":
            function(attention, cache, cache[:, :, 1:], cache[:, :, 1:], None)
        elif kind == "bias":
            function(attention, cache, cache, cache, None, position_bias=cache)
        else:
            function(attention, cache, cache, cache, None)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("plain model", "Linear has no config._attn_implementation.*DistributedAttention"),
        ("other attention", "uses the attention 'sdpa', but 'flash_attention_2' was requested"),
        ("unknown", "'sdpaa' is not an attention of transformers; expected one of .*sdpa"),
        ("length", r"seq_length is 7; sequences of a fixed length need one that .* \(2\) divides"),
        ("other length", "got 6 positions on this rank, .* implies 5"),
        ("ranks", "size is 4, but there are 2 ranks"),
        ("chunks", "layers of chunked_attention are not built"),
        ("cache", "attends from 6 positions to 5"),
        ("bias", "adds a bias between positions"),
        ("positions", "got no position_ids"),
    ],
)
def test_unsupported_attention_is_an_error(kind: str, message: str, ranks: RankPools) -> None:
    for error in ranks(2).raises(_refused, kind):
        assert isinstance(error, SequenceError), error
        with pytest.raises(SequenceError, match=message):
            raise error
