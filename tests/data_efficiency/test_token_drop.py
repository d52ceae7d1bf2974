"""Random token dropping: schedules, subsets, gradients, masks, recomputation and checkpoints."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.toys import engine_of
from ranks import RankPools
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hadal import comm
from hadal.config import load_config
from hadal.errors import ConfigError, UsageError
from hadal.plugins.data_efficiency.token_drop import (
    KeptRule,
    Subset,
    convert_to_random_ltd,
    draw,
    kept_at,
    layer_number,
    layer_tokens_at,
    put_back,
    take,
)

KEYS = "data_efficiency.data_routing.random_ltd"


def section(**changes: Any) -> dict[str, Any]:
    schedule = {
        "min_value": changes.pop("first", 4),
        "max_value": changes.pop("last", 16),
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": changes.pop("steps", 4), "seq_per_step": 4},
    }
    return {
        "enabled": True,
        "total_layer_num": 4,
        "random_ltd_layer_num": 2,
        "random_ltd_layer_id": [1, 2],
        "model_mask_name": None,
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": schedule,
        **changes,
    }


def around(ltd: dict[str, Any]) -> dict[str, Any]:
    return {"enabled": True, "data_routing": {"enabled": True, "random_ltd": ltd}}


class Layer(nn.Module):
    """Mixes tokens causally, with a residual connection; keeps what it is given."""

    def __init__(self, pairs: bool = False) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)
        self.pairs = pairs
        self.shapes: list[Any] = []

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Any:
        self.shapes.append((tuple(hidden.shape), None if mask is None else tuple(mask.shape)))
        steps = torch.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype)[:, None]
        found = hidden + torch.tanh(self.l(hidden.cumsum(1) / steps))
        return (found, None) if self.pairs else found


class Net(nn.Module):
    def __init__(self, pairs: bool = False, recomputes: bool = False, masks: bool = False) -> None:
        super().__init__()
        self.h = nn.ModuleList(Layer(pairs) for _ in range(4))
        self.recomputes = recomputes
        self.mask = torch.ones(2, 1, 16, 16).tril() if masks else None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            if self.recomputes:
                x = checkpoint(layer, x, self.mask, use_reentrant=False)
            elif self.mask is None:
                x = layer(x)
            else:
                x = layer(x, mask=self.mask)
            x = x[0] if isinstance(x, tuple) else x
        return x.square().mean()

    @property
    def lengths(self) -> list[list[int]]:
        return [[shape[1] for shape, _ in layer.shapes] for layer in self.h]


def engine_with(model: nn.Module, ltd: dict[str, Any] | None = None, **changes: Any) -> Any:
    torch.manual_seed(7)
    ltd = section() if ltd is None else ltd
    stage = changes.pop("stage", 0)
    return engine_of(stage, model, data_efficiency=around(ltd), **changes)


def train(engine: Any, updates: int) -> list[float]:
    losses = []
    for step in range(updates * engine.gradient_accumulation_steps()):
        generator = torch.Generator().manual_seed(step)
        loss = engine(torch.randn(2, 16, 8, generator=generator))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# ---- arithmetic ----------------------------------------------------------------------------------


@pytest.mark.claims(
    f"{KEYS}.random_ltd_schedule.schedule_config.require_steps",
    f"{KEYS}.random_ltd_schedule.schedule_config.seq_per_step",
    f"{KEYS}.total_layer_num",
    f"{KEYS}.random_ltd_layer_num",
)
def test_values_are_those_of_deepspeed():
    rule = KeptRule(128, 2048, steps=200, multiple=16, dropping=22, layers=24)
    expected = {0: 128, 1: 128, 10: 224, 50: 608, 100: 1088, 150: 1568, 200: 2048, 201: 2048}
    assert {step: kept_at(rule, step) for step in expected} == expected
    tokens = {0: 27648, 1: 55296, 10: 344960, 50: 2459008, 201: 22621696}
    for updates, total in tokens.items():
        assert 4 * sum(layer_tokens_at(rule, step) for step in range(updates + 1)) == total
    rule = KeptRule(100, 1000, steps=100, multiple=16, dropping=1, layers=1)
    expected = {0: 96, 3: 112, 50: 544, 99: 976, 100: 992, 120: 1000}
    assert {step: kept_at(rule, step) for step in expected} == expected
    # Never none, although 4 is rounded down to a multiple of 16.
    assert kept_at(KeptRule(4, 64, steps=10, multiple=16, dropping=1, layers=1), 0) == 16


def test_layers_are_known_by_the_last_number_of_their_names():
    names = {"model.layers.11": 11, "block2.0": 0, "h.3.inner": 3, "layer12": 12, "encoder": None}
    assert {name: layer_number(name) for name in names} == names


def test_draws_are_ascending_and_uniform_and_differ_between_ranks():
    torch.manual_seed(0)
    index = draw(4000, 6, 3, 0, torch.device("cpu"))
    assert (index[:, 1:] > index[:, :-1]).all()
    counts = torch.bincount(index.flatten(), minlength=6) / 4000
    assert torch.allclose(counts, torch.full((6,), 0.5), atol=0.05)
    torch.manual_seed(0)
    other = draw(4000, 6, 3, 1, torch.device("cpu"))
    assert (index == other).all(1).float().mean() < 0.1


@pytest.mark.parametrize("order", ["batch_seq_dim", "seq_batch_dim"])
def test_gradients_are_those_of_plain_indexing(order):
    torch.manual_seed(0)
    hidden = torch.randn(3, 10, 4, dtype=torch.float64, requires_grad=True)
    index = draw(3, 10, 6, 0, torch.device("cpu"))
    given = hidden if order == "batch_seq_dim" else hidden.transpose(0, 1)
    part = take(given, index, order)
    found = put_back(given, part.sin() * 3, index, order)
    found = found if order == "batch_seq_dim" else found.transpose(0, 1)
    weights = torch.randn_like(found)
    (gradient,) = torch.autograd.grad((found * weights).sum(), hidden)

    rows = torch.arange(3)[:, None]
    expected = hidden.clone()
    expected[rows, index] = hidden[rows, index].sin() * 3
    assert torch.equal(found, expected)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), hidden)
    assert torch.equal(gradient, wanted)
    dropped = torch.ones(3, 10, dtype=torch.bool).index_put((rows, index), torch.tensor(False))
    assert torch.equal(gradient[dropped], weights[dropped])


def subset(index: Tensor, length: int, **changes: Any) -> Subset:
    values = {"order": "batch_seq_dim", "mask_name": None, "is_causal": True}
    return Subset(index, length, **{**values, **changes}, layer="h.1", number=1)


def test_arguments_are_taken_at_the_same_tokens():
    index = torch.tensor([[0, 2, 5], [1, 3, 4]])
    rows, kept = torch.arange(2)[:, None], subset(index, 6)
    mask = torch.randn(2, 1, 6, 6)
    found = kept.of("attention_mask", mask)
    for row in range(2):
        assert torch.equal(found[row, 0], mask[row, 0][index[row]][:, index[row]])
    wide = torch.randn(2, 1, 1, 6)
    assert torch.equal(kept.of("mask", wide)[:, 0, 0], wide[rows, 0, 0, index])
    causal = torch.ones(1, 1, 6, 6).tril()
    assert torch.equal(kept.of("mask", causal), torch.ones(2, 1, 3, 3).tril())
    assert torch.equal(kept.of("src_mask", torch.ones(6, 6).tril()), torch.ones(3, 3).tril())
    padding = torch.randint(2, (2, 6))
    assert torch.equal(kept.of("attention_mask", padding), padding[rows, index])
    ids = torch.arange(6)[None]
    assert torch.equal(kept.of("position_ids", ids), index)
    cos, sin = kept.of("position_embeddings", (torch.randn(1, 6, 4), torch.randn(2, 6, 4)))
    assert cos.shape == sin.shape == (2, 3, 4)
    assert kept.of("rotary", torch.randn(1, 1, 6, 4)).shape == (2, 1, 3, 4)
    assert kept.of("cache_position", torch.arange(6)).tolist() == [0, 1, 2]
    assert kept.of("encoder_attention_mask", mask) is mask
    assert kept.of("use_cache", True) is True
    by_token = subset(index, 6, order="seq_batch_dim")
    table = torch.randn(6, 1, 1, 4)
    assert torch.equal(by_token.of("rotary", table)[:, 1, 0], table[index[1], 0, 0])


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("freqs", torch.ones(6, 4), "give it a batch dimension"),
        ("alibi", torch.ones(8, 1, 6), "give it a batch dimension"),
        ("cu_seqlens", torch.ones(3), "pad sequences to one length"),
        ("past_key_values", ((1, 2),), r"train without a cache \(use_cache=False\)"),
        ("attention_mask", object(), "pass the mask as a tensor"),
    ],
)
def test_irreducible_arguments_are_refused(name, value, remedy):
    with pytest.raises(UsageError, match=rf"layer h.1 .* argument {name} .*{remedy}"):
        subset(torch.tensor([[0, 2, 5], [1, 3, 4]]), 6).of(name, value)


def test_an_encoder_needs_a_mask_for_each_sequence():
    kept = subset(torch.tensor([[0, 2]]), 6, is_causal=False)
    with pytest.raises(UsageError, match=r"mask\[None, None\]"):
        kept.of("mask", torch.ones(6, 6))


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("first", [False, True], ids=["after", "before initialize"])
@pytest.mark.claims(
    "data_efficiency",
    "data_efficiency.data_routing",
    KEYS,
    f"{KEYS}.enabled",
    f"{KEYS}.random_ltd_layer_id",
    f"{KEYS}.model_mask_name",
    f"{KEYS}.model_type",
    f"{KEYS}.hidden_state_order",
    f"{KEYS}.random_ltd_schedule",
    f"{KEYS}.random_ltd_schedule.min_value",
    f"{KEYS}.random_ltd_schedule.max_value",
    f"{KEYS}.random_ltd_schedule.schedule_type",
    f"{KEYS}.random_ltd_schedule.schedule_config",
)
def test_layers_see_fewer_tokens(pairs, first):
    model = Net(pairs, masks=True)
    names = list(model.state_dict())
    if first:
        assert convert_to_random_ltd(model, Layer) is model
    engine = engine_with(model, section(model_mask_name="mask"), train_micro_batch_size_per_gpu=2)
    if not first:
        assert convert_to_random_ltd(engine, Layer) is engine
    train(engine, 6)
    assert engine.module.lengths == [[16] * 6, *[[4, 4, 8, 12, 16, 16]] * 2, [16] * 6]
    assert engine.module.h[1].shapes[2] == ((2, 8, 8), (2, 1, 8, 8))
    assert engine.token_drop.layer_tokens == 624
    assert engine.token_drop.kept == 16
    assert list(engine.module.state_dict()) == names
    engine.eval()
    engine(torch.randn(2, 16, 8))
    assert [length[-1] for length in engine.module.lengths] == [16] * 4
    engine.destroy()


def test_a_length_stays_for_all_micro_steps():
    model = convert_to_random_ltd(Net(), Layer)
    engine = engine_with(model, gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=2)
    train(engine, 4)
    assert engine.module.lengths[1] == [4, 4, 4, 4, 8, 8, 12, 12]
    assert engine.token_drop.layer_tokens == 736
    engine.destroy()


def test_all_tokens_are_the_plain_model():
    torch.manual_seed(3)
    model = Net()
    plain = copy.deepcopy(model)
    engine = engine_with(convert_to_random_ltd(model, Layer), section(first=16))
    other = engine_of(0, plain)
    assert train(engine, 3) == train(other, 3)
    engine.destroy()
    other.destroy()


def test_recomputation_sees_the_same_tokens():
    torch.manual_seed(3)
    model = Net()
    again = copy.deepcopy(model)
    again.recomputes = True
    engines = [engine_with(convert_to_random_ltd(each, Layer)) for each in (model, again)]
    losses = []
    for engine in engines:
        torch.manual_seed(5)
        losses.append(train(engine, 3))
    assert losses[0] == losses[1]
    for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for engine in engines:
        engine.destroy()


@pytest.mark.parametrize("converts_first", [True, False])
def test_checkpoints_load_before_and_after_conversion(tmp_path: Path, converts_first):
    torch.manual_seed(3)
    engine = engine_with(convert_to_random_ltd(Net(), Layer))
    train(engine, 2)
    engine.save_checkpoint(tmp_path)
    losses, tokens = train(engine, 2), engine.token_drop.layer_tokens
    engine.destroy()

    engine = engine_with(Net())
    if converts_first:
        convert_to_random_ltd(engine, Layer)
    engine.load_checkpoint(tmp_path)
    if not converts_first:
        convert_to_random_ltd(engine, Layer)
    assert engine.token_drop.kept == 4
    assert train(engine, 2) == losses
    assert engine.module.lengths[1] == [8, 12]
    assert engine.token_drop.layer_tokens == tokens
    engine.destroy()


def test_tokens_before_an_older_checkpoint_are_counted(tmp_path: Path):
    engine = engine_of(0, Net(), train_micro_batch_size_per_gpu=2)
    train(engine, 3)
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    engine = engine_with(convert_to_random_ltd(Net(), Layer), train_micro_batch_size_per_gpu=2)
    engine.load_checkpoint(tmp_path)
    train(engine, 3)
    assert engine.token_drop.layer_tokens == 624
    engine.destroy()


def test_stages_agree_and_ranks_drop_other_tokens(ranks: RankPools):
    plain = ranks(2).run(drop, 0)
    assert plain[0] != plain[1]
    assert ranks(2).run(drop, 3) == plain


def drop(stage: int) -> list[float]:
    torch.manual_seed(3)
    engine = engine_with(convert_to_random_ltd(Net(), Layer), stage=stage)
    torch.manual_seed(5)  # the same on all ranks
    losses = train(engine, 3)
    assert comm.get_world_size() == 2
    engine.destroy()
    return losses


def test_the_monitors_write_tokens(tmp_path: Path):
    folder = {"enabled": True, "output_path": str(tmp_path), "job_name": "x"}
    model = convert_to_random_ltd(Net(), Layer)
    engine = engine_with(model, csv_monitor=folder, monitor={"extra": True})
    train(engine, 3)
    engine.destroy()
    kept = (tmp_path / "x" / "Train_Samples_random_ltd_kept.csv").read_text().split()
    assert [line.split(",")[1] for line in kept[1:]] == ["4", "4", "8"]


# ---- faults --------------------------------------------------------------------------------------


def test_layers_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match=r"no converted layer has the numbers 7; there are 0, 1"):
        engine_with(convert_to_random_ltd(Net(), Layer), section(random_ltd_layer_id=[1, 7]))
    twice = nn.ModuleDict({"a": Net(), "b": Net()})
    with pytest.raises(UsageError, match=r"1 is the number of a\.h\.1 and b\.h\.1; convert one"):
        engine_with(convert_to_random_ltd(twice, Layer))
    engine = engine_with(Net())
    with pytest.raises(UsageError, match="no layer was converted; call"):
        engine(torch.randn(2, 16, 8))
    engine.destroy()
    engine = engine_of(0)
    with pytest.raises(UsageError, match=r"random_ltd\.enabled is not true"):
        convert_to_random_ltd(engine, nn.Linear)
    engine.destroy()


def test_a_total_that_the_model_exceeds_is_refused():
    with pytest.raises(
        UsageError, match=r"random_ltd\.total_layer_num is 3, but 4 layers were con"
    ):
        engine_with(convert_to_random_ltd(Net(), Layer), section(total_layer_num=3))


@pytest.mark.parametrize(
    ("order", "length", "message"),
    [
        ("seq_batch_dim", 16, r"sees 2 tokens of 16 sequences, and keeps 8: .*hidden_state_order"),
        ("batch_seq_dim", 4, r"sees 4 tokens of 2 sequences, and keeps 8: .*min_value"),
        ("batch_seq_dim", 40, r"sees 40 tokens .* max_value 16: .* to the end; .*raise max_value"),
    ],
)
def test_a_length_that_does_not_fit_is_logged_once(caplog, order, length, message):
    model = convert_to_random_ltd(Net(), Layer)
    engine = engine_with(model, section(first=8, hidden_state_order=order))
    for _ in range(2):
        engine(torch.randn(2, length, 8))
    engine.destroy()
    assert len(re.findall(message, caplog.text)) == 1


def test_layers_that_nothing_drops_are_reported(caplog):
    engine = engine_of(0, convert_to_random_ltd(Net(), Layer))
    engine.destroy()
    assert "random_ltd.enabled is not true" in caplog.text and "Layer" in caplog.text


def test_a_missing_mask_is_reported():
    model = convert_to_random_ltd(Net(), Layer)
    engine = engine_with(model, section(model_mask_name="padding"))
    with pytest.raises(UsageError, match=r"layer h\.1 was called without it, with hidden; name"):
        engine(torch.randn(2, 16, 8))
    engine.destroy()


FAULTS = [
    ({"random_ltd_layer_id": None}, "random_ltd_layer_id", "add it"),
    ({"random_ltd_layer_id": [2, 1]}, "random_ltd_layer_id", "expected ascending numbers"),
    ({"random_ltd_layer_num": 3}, "random_ltd_layer_num", "set 2"),
    ({"total_layer_num": 1}, "total_layer_num", "1 is less than the 2 layers"),
    ({"model_type": "both"}, "model_type", "encoder"),
    ({"hidden_state_order": None}, "hidden_state_order", "add it"),
    ({"layer_token_lr_schedule": {"enabled": True}}, "layer_token_lr_schedule.enabled", "false"),
    ({"random_ltd_schedule": None}, "random_ltd_schedule", "add it"),
    ({"first": 0}, "random_ltd_schedule.min_value", ">= 1"),
    ({"first": 32}, "random_ltd_schedule.max_value", "16 is less than min_value 32"),
]


@pytest.mark.parametrize(("changes", "path", "message"), FAULTS)
def test_faults_are_reported_by_path(changes, path, message):
    source = {"train_batch_size": 1, "data_efficiency": around(section(**changes))}
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    faults = {fault.path: fault.message for fault in caught.value.faults}
    assert message in faults[f"{KEYS}.{path}"]


@pytest.mark.claims(
    f"{KEYS}.layer_token_lr_schedule",
    f"{KEYS}.layer_token_lr_schedule.enabled",
    f"{KEYS}.layer_token_lr_schedule.total_layer_tokens",
    f"{KEYS}.layer_token_lr_schedule.warmup_type",
    f"{KEYS}.layer_token_lr_schedule.warmup_layer_tokens",
    f"{KEYS}.global_batch_size",
    f"{KEYS}.micro_batch_size",
)
def test_arguments_without_effect_are_reported():
    """DeepSpeed writes the batch sizes itself; the others are of a schedule that cannot be on."""
    sizes = {"global_batch_size": 64, "micro_batch_size": 2}
    rate = {"total_layer_tokens": 10, "warmup_type": "linear", "warmup_layer_tokens": 5}
    ltd = section(**sizes, layer_token_lr_schedule={"enabled": False, **rate})
    config = load_config({"train_batch_size": 1, "data_efficiency": around(ltd)})
    assert config.notes == tuple(f"{KEYS}.{name}: {sizes[name]} has no effect" for name in sizes)


@pytest.mark.claims("data_efficiency.enabled", "data_efficiency.data_routing.enabled")
@pytest.mark.parametrize("where", ["data_efficiency", "data_efficiency.data_routing"])
def test_an_outer_switch_must_not_contradict(where):
    source = around(section())
    (source if where == "data_efficiency" else source["data_routing"])["enabled"] = False
    with pytest.raises(ConfigError, match=rf"false contradicts {KEYS}\.enabled"):
        load_config({"train_batch_size": 1, "data_efficiency": source})
    del (source if where == "data_efficiency" else source["data_routing"])["enabled"]
    assert load_config({"train_batch_size": 1, "data_efficiency": source}).notes == ()


# ---- models of transformers ----------------------------------------------------------------------


def small(kind: str, **changes: Any) -> tuple[nn.Module, type[nn.Module]]:
    import transformers

    sizes = {"num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 50}
    sizes |= {"max_position_embeddings": 32, "intermediate_size": 16, "attn_implementation": "sdpa"}
    if kind == "gpt2":
        sizes.pop("intermediate_size")
    family = {"gpt2": "GPT2", "llama": "Llama", "bert": "Bert"}[kind]
    config = getattr(transformers, f"{family}Config")
    heads = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "bert": "BertForMaskedLM"}
    torch.manual_seed(0)
    model = getattr(transformers, heads[kind])(config(**sizes, **changes))
    layers = {"gpt2": "transformer.h", "llama": "model.layers", "bert": "bert.encoder.layer"}
    return model, type(model.get_submodule(layers[kind])[0])


@pytest.mark.slow_cells("bert-True-False", "bert-True-True")
@pytest.mark.runs("transformers")
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_models_of_transformers_drop_tokens(kind, padded, recomputes):
    model, layers = small(kind)
    if recomputes:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    ltd = section(
        model_mask_name="attention_mask", model_type="encoder" if kind == "bert" else "decoder"
    )
    engine = engine_with(convert_to_random_ltd(model, layers), ltd)
    lengths: list[int] = []
    for module in model.modules():
        if type(module).__name__ in ("GPT2MLP", "LlamaMLP", "BertIntermediate"):
            module.register_forward_hook(lambda module, args, out: lengths.append(out.shape[1]))
    ids = torch.randint(50, (2, 16))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    if padded:
        batch["attention_mask"][1, 9:] = 0
    for _ in range(2):
        lengths.clear()
        loss = engine(**batch).loss
        assert lengths == [16, 4, 4, 16]
        engine.backward(loss)
        engine.step()
        assert loss.isfinite()
    engine.destroy()


@pytest.mark.runs("transformers")
def test_rotary_positions_are_those_of_the_kept_tokens():
    """With one layer that keeps the first tokens of a sequence, it computes as on these alone."""
    model, layers = small("llama")
    convert_to_random_ltd(model, layers)
    layer, inner = model.model.layers[0], model.model
    hidden = torch.randn(1, 16, 8)
    index = torch.tensor([[3, 7, 8, 12]])
    positions = torch.arange(16)[None]
    rotary = inner.rotary_emb(hidden, positions)
    kept = subset(index, 16)
    part = take(hidden, index, "batch_seq_dim")
    found = layer(part, position_embeddings=kept.of("position_embeddings", rotary))
    expected = layer(part, position_embeddings=inner.rotary_emb(part, index))
    assert torch.equal(found, expected)
