"""Models of transformers, and BERT's own tools."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

import hadal
from hadal.config import load_config
from hadal.errors import ModelError, UsageError
from hadal.plugins.sparse_attention import (
    BertSparseSelfAttention,
    BigBirdSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    SparseAttentionUtils,
    SparseSelfAttention,
    plan_pattern,
    use_sparse_attention,
)
from hadal.plugins.sparse_attention.huggingface import _made

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
WINDOW = {"mode": "bslongformer", "block": 8}


def llama(**changes):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **changes)
    return transformers.LlamaForCausalLM(config)


def bert(kind=transformers.BertForMaskedLM, positions=64):
    torch.manual_seed(0)
    config = kind.config_class(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=positions,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return kind(config)


def t5_config(**changes):
    return transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        **changes,
    )


def tokens(length, batch=2):
    return torch.randint(2, 64, (batch, length), generator=torch.Generator().manual_seed(1))


def padding(length, *kept, left=False):
    mask = torch.stack([(torch.arange(length) < each).long() for each in kept])
    return mask.flip(1) if left else mask


# ---- the attention function ----------------------------------------------------------------------


@pytest.mark.parametrize("make", [llama, bert])
@pytest.mark.parametrize("padded", [False, True])
def test_a_dense_pattern_is_the_models_own_attention(make, padded):
    model, ids = make(), tokens(37)
    mask = {"attention_mask": padding(37, 37, 20)} if padded else {}
    seen = mask.get("attention_mask", torch.ones(2, 37)).bool()
    expected = model(ids, **mask).logits
    found = use_sparse_attention(model, {"mode": "dense"})(ids, **mask).logits
    torch.testing.assert_close(found[seen], expected[seen], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [llama, bert])
def test_the_pattern_decides_which_tokens_are_seen(make):
    model, ids = use_sparse_attention(make(), WINDOW), tokens(64, batch=1)
    changed = ids.clone()
    changed[0, 20] = 63 - ids[0, 20]  # block 2, which is in the windows of 1, 2 and 3
    differs = (model(ids).logits != model(changed).logits).any(-1)[0]
    # Each of two layers reaches one block further; a global block sees all after the first.
    alone = use_sparse_attention(make(), {"mode": "local_sliding_window", "block": 8})
    near = (alone(ids).logits != alone(changed).logits).any(-1)[0]
    causal = make is llama
    assert near[20:40].all()
    assert not near[40:].any()
    assert near[:20].any() != causal
    assert differs[40:].any() != causal  # causal rows do not see what the global block learns


def test_each_layer_has_its_own_random_blocks_and_each_rank_the_same():
    source = '{"mode": "bigbird", "block": 8, "num_random_blocks": 2}'
    first, second = (_made(source, 4, 128, layer) for layer in (0, 1))
    assert not first.layout.equal(second.layout)
    _made.cache_clear()
    assert _made(source, 4, 128, 1).layout.equal(second.layout)
    fixed = '{"mode": "fixed"}'
    assert _made(fixed, 4, 120, 1) is _made(fixed, 4, 128, 0)


def test_the_pattern_is_saved_with_the_model(tmp_path):
    model = use_sparse_attention(llama(), WINDOW)
    model.save_pretrained(tmp_path)
    ids = tokens(64)
    again = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, attn_implementation="hadal_sparse"
    )
    assert again.config.sparse_attention["mode"] == "bslongformer"
    assert again(ids).logits.equal(model(ids).logits)


@pytest.mark.claims("sparse_attention", "sparse_attention.mode")
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("make", [llama, bert])
def test_initialize_sets_the_pattern_of_the_json(make, stage):
    section = {"mode": "fixed", "block": 8, "num_local_blocks": 2}
    config = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "sparse_attention": section,
    }
    expected = use_sparse_attention(make(), section)
    model = make()
    model.set_attn_implementation("hadal_sparse")
    engine, *_ = hadal.initialize(model=model, config=config)
    ids = tokens(64)
    losses = []
    for _ in range(3):
        loss = engine(ids, labels=ids).loss
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    assert losses[0] == float(expected(ids, labels=ids).loss.detach())
    assert losses[2] < losses[0]


def test_generation_matches_one_forward():
    model = use_sparse_attention(llama(), WINDOW).eval()
    ids, mask = tokens(41), padding(41, 41, 30, left=True)
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    assert out.sequences.shape == (2, 47)
    # A sample without padding sees, token by token, what one forward over all of it shows.
    last = model(out.sequences[:1, :-1]).logits[:, -1]
    torch.testing.assert_close(out.logits[-1][:1], last, rtol=1e-4, atol=1e-5)


def test_a_short_prompt_has_fewer_blocks_than_a_window():
    model = use_sparse_attention(llama(), {"mode": "bigbird", "num_random_blocks": 1})
    assert model.generate(tokens(3), max_new_tokens=2, pad_token_id=0).shape == (2, 5)
    found = model(tokens(20)).logits
    torch.testing.assert_close(found, llama()(tokens(20)).logits, rtol=1e-4, atol=1e-5)


def test_a_section_that_nothing_reads_is_reported(caplog):
    model = nn.Linear(2, 2)
    with caplog.at_level("INFO", logger="hadal"):
        plan_pattern(
            model, load_config({"train_batch_size": 1, "sparse_attention": {}}).sparse_attention
        )
    assert "no part of Linear uses it" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO", logger="hadal"):
        plan_pattern(
            nn.Sequential(SparseSelfAttention()),
            load_config({"train_batch_size": 1, "sparse_attention": {}}).sparse_attention,
        )
    assert caplog.text == ""


def test_packed_sequences_stay_apart():
    model = use_sparse_attention(llama(), {"mode": "dense"})
    ids = tokens(40, batch=1)
    positions = torch.cat([torch.arange(16), torch.arange(24)])[None]
    found = model(ids, position_ids=positions, use_cache=False).logits
    alone = model(ids[:, 16:], use_cache=False).logits
    torch.testing.assert_close(found[:, 16:], alone, rtol=1e-4, atol=1e-5)


def test_impossible_requests_are_reported():
    with pytest.raises(
        ModelError, match=r"Linear has no choice of attention functions.*SparseSelf"
    ):
        use_sparse_attention(nn.Linear(2, 2))
    with pytest.raises(UsageError, match='no section "sparse_attention"'):
        use_sparse_attention(llama(), {"train_batch_size": 1})
    with pytest.raises(
        UsageError, match=r"LlamaAttention uses hadal_sparse, but its config has no"
    ):
        use_sparse_attention(llama())(tokens(16))
    dropping = use_sparse_attention(llama(attention_dropout=0.1), WINDOW).train()
    with pytest.raises(UsageError, match=r"no dropout, but LlamaAttention requests 0\.1; set"):
        dropping(tokens(16))


def gemma2(**changes):
    config = transformers.Gemma2Config(
        **SIZES, num_key_value_heads=2, head_dim=8, attn_logit_softcapping=1.5, **changes
    )
    return transformers.Gemma2ForCausalLM(config)


def gpt_oss():
    config = transformers.GptOssConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = transformers.GptOssForCausalLM(config)
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.sinks)
    return model


def bart():
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0}
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(**sizes, **heads, encoder_ffn_dim=32, decoder_ffn_dim=32)
    )


def t5():
    return transformers.T5ForConditionalGeneration(t5_config(num_decoder_layers=1))


# Scores with a cap, sinks, and attention to another sequence.
@pytest.mark.parametrize("make", [gemma2, gpt_oss, bart, t5])
def test_scores_and_sequences_of_many_models(make, monkeypatch, caplog):
    torch.manual_seed(0)
    model, ids = make(), tokens(37)
    model.set_attn_implementation("eager")
    given = {"input_ids": ids, "labels": ids, "attention_mask": padding(37, 37, 30)}

    def computed():
        model.zero_grad()
        loss = model(**given, use_cache=False).loss
        loss.backward()
        return loss, [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = computed()
    with caplog.at_level("INFO", logger="hadal"):
        use_sparse_attention(model, {"mode": "dense", "block": 8})
        for shortest in (0, 1024):
            monkeypatch.setattr("hadal.plugins.sparse_attention.attention._SHORT", shortest)
            torch.testing.assert_close(computed(), expected, rtol=1e-4, atol=1e-5)
    told = f"{make.__name__.title()}Attention attends to another sequence"
    assert (told.lower() in caplog.text.lower()) == (make in (bart, t5))


def mistral():
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=12)
    return transformers.MistralForCausalLM(config)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("make", [llama, mistral, gpt_oss])
def test_generation_with_every_cache(make, kind):
    torch.manual_seed(0)
    # A window of the pattern alone does not hide what a cache drops; global blocks show it.
    model, ids = use_sparse_attention(make(), {**WINDOW, "block": 4}).eval(), tokens(21)
    mask = padding(21, 21, 13, left=True)
    choices = {
        "attention_mask": mask,
        "max_new_tokens": 9,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    expected = model.generate(ids, use_cache=False, **choices)
    static = {"cache_implementation": "static", "disable_compile": True}
    found = model.generate(ids, **(static if kind == "static" else {}), **choices)
    assert found.sequences.equal(expected.sequences)
    for one, other in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_many_tokens_after_a_cache_has_dropped_keys():
    model, ids = use_sparse_attention(mistral(), {**WINDOW, "block": 4}).eval(), tokens(40)
    expected = model(ids, use_cache=False).logits
    cache = transformers.DynamicCache(config=model.config)
    found = [model(part, past_key_values=cache).logits for part in ids.split([17, 14, 1, 8], 1)]
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-4, atol=1e-5)


def test_a_bias_of_positions_is_added_and_trained():
    torch.manual_seed(0)
    model, ids = transformers.T5EncoderModel(t5_config()), tokens(37)
    mask = padding(37, 37, 20)
    expected = model(ids, attention_mask=mask)[0][mask.bool()]
    expected.square().sum().backward()
    parameters = dict(model.named_parameters())
    wanted = {name: one.grad.clone() for name, one in parameters.items()}
    model.zero_grad()
    found = use_sparse_attention(model, {"mode": "dense"})(ids, attention_mask=mask)[0][mask.bool()]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    found.square().sum().backward()
    for name, one in parameters.items():
        torch.testing.assert_close(one.grad, wanted[name], rtol=1e-3, atol=1e-4)
    assert any("relative_attention_bias" in name for name in wanted)


# ---- BERT and RoBERTa ----------------------------------------------------------------------------

KINDS = [transformers.BertForMaskedLM, transformers.RobertaForMaskedLM]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("longer", [128, 100])
def test_position_embeddings_are_repeated_to_the_exact_length(kind, longer):
    special = 2 if kind is transformers.RobertaForMaskedLM else 0
    model = bert(kind, positions=64 + special)
    embeddings = model.base_model.embeddings
    before, parameter = copy.deepcopy(embeddings), embeddings.position_embeddings.weight
    assert SparseAttentionUtils.extend_position_embedding(model, longer) is model
    table = embeddings.position_embeddings
    assert table.weight is parameter
    assert table.num_embeddings == len(table.weight) == longer + special
    assert model.config.max_position_embeddings == longer + special
    old = before.position_embeddings.weight
    assert table.weight[: 64 + special].equal(old)
    assert table.weight[64 + special :].equal(old[special : special + longer - 64])
    assert embeddings.position_ids.shape == (1, longer + special)
    assert model(tokens(longer)).logits.shape == (2, longer, 64)
    with pytest.raises(ModelError, match=rf"max_position is 64, but the model has {longer} pos"):
        SparseAttentionUtils.extend_position_embedding(model, 64)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replaced_attention_with_a_dense_pattern_is_the_original(kind):
    model, ids, mask = bert(kind, positions=66), tokens(48), padding(48, 48, 30)
    expected = model(ids, attention_mask=mask).logits
    weights = [layer.attention.self.query for layer in model.base_model.encoder.layer]
    replaced = SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
        model, 64, DenseSparsityConfig(4)
    )
    assert replaced is model
    for layer, query in zip(model.base_model.encoder.layer, weights, strict=True):
        assert isinstance(layer.attention.self, BertSparseSelfAttention)
        assert layer.attention.self.query is query
    found = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_longer_sparse_model_trains_on_padded_inputs(kind):
    model = bert(kind, positions=66)
    SparseAttentionUtils.extend_position_embedding(model, 1000)
    pattern = BigBirdSparsityConfig(4, block=16)
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
        model, 1000, pattern
    )
    ids = tokens(133)
    more, ids, mask, *_ = SparseAttentionUtils.pad_to_block_size(
        16, ids, torch.ones_like(ids), None, None, None, 1, model.base_model.embeddings
    )
    assert (more, ids.shape) == (11, (2, 144))
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(3):
        logits = SparseAttentionUtils.unpad_sequence_output(
            more, model(ids, attention_mask=mask)[0]
        )
        assert logits.shape == (2, 133, 64)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, :133].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[2] < losses[0]
    # What is padded is not seen.
    other = ids.clone()
    other[:, 133:] = 5
    assert model(other, attention_mask=mask)[0][:, :133].equal(
        model(ids, attention_mask=mask)[0][:, :133]
    )


def test_inputs_are_padded_to_the_block():
    pad = SparseAttentionUtils.pad_to_block_size
    ids = torch.tensor([[5, 6, 7]])
    found = pad(4, ids, torch.ones_like(ids), 0 * ids, torch.arange(3)[None], None, 9, None)
    assert found[0] == 1
    assert [each.tolist() for each in found[1:5]] == [
        [[5, 6, 7, 9]],
        [[1, 1, 1, 0]],
        [[0, 0, 0, 0]],
        [[0, 1, 2, 9]],
    ]
    assert found[5] is None
    assert pad(4, ids, torch.zeros(1, 1, 1, 3), None, None, None, 9, None)[2].shape == (1, 1, 1, 4)
    table = nn.Embedding(10, 2)
    _, none, mask, *_, embeds = pad(4, None, None, None, None, table(ids), 9, table)
    assert none is None
    assert mask.tolist() == [[1, 1, 1, 0]]
    assert embeds[0, 3].equal(table.weight[9])
    assert pad(3, ids, None, None, None, None, 9, None)[:3] == (0, ids, None)
    assert SparseAttentionUtils.unpad_sequence_output(0, ids) is ids
    with pytest.raises(ModelError, match="needs input_ids or inputs_embeds"):
        pad(4)
    with pytest.raises(ModelError, match="needs model_embeddings"):
        pad(4, None, None, None, None, table(ids), 9, None)


def test_a_tokenizer_makes_longer_sequences():
    tokenizer = SimpleNamespace(model_max_length=4, init_kwargs={})
    assert SparseAttentionUtils.update_tokenizer_model_max_length(tokenizer, 8) is tokenizer
    assert (tokenizer.model_max_length, tokenizer.init_kwargs) == (8, {"model_max_length": 8})


def test_berts_attention_alone():
    config = SimpleNamespace(hidden_size=32, num_attention_heads=4)
    attention = BertSparseSelfAttention(config, FixedSparsityConfig(4))
    shapes = {name: tuple(value.shape) for name, value in attention.state_dict().items()}
    assert shapes["sparse_self_attention.master_layout"] == (4, 128, 128)
    assert shapes["query.weight"] == (32, 32)
    hidden = torch.randn(2, 48, 32)
    extended = torch.zeros(2, 1, 1, 48)
    extended[:, :, :, 40:] = -10000.0
    found = attention(hidden, extended)
    assert found.shape == (2, 48, 32)
    torch.testing.assert_close(found, attention(hidden, extended > -1))
    with pytest.raises(
        ModelError, match="hidden_size 30 is not a multiple of num_attention_heads 4"
    ):
        BertSparseSelfAttention(SimpleNamespace(hidden_size=30, num_attention_heads=4))
    with pytest.raises(ModelError, match=r"neither `bert` nor `roberta`.*use_sparse_attention"):
        SparseAttentionUtils.extend_position_embedding(nn.Linear(2, 2), 8)
    with pytest.raises(NotImplementedError, match="with past_key_values is not built yet"):
        attention(hidden, past_key_values=object())
