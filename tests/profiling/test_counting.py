"""Operations are counted exactly: against formulas, torch's own counter, and known models."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from hadal.plugins.profiling import Count, Counter, get_model_profile


def counted(act, *args) -> Counter:
    counter = Counter()
    counter.start()
    act(*args)
    counter.stop()
    return counter


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, groups=2, bias=False)
        self.fc = nn.Linear(16, 10)

    def forward(self, pictures: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.bn1(self.conv1(pictures))), 2)
        return self.fc(F.adaptive_avg_pool2d(torch.relu(self.conv2(x)), 1).flatten(1))


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2)),
        nn.Sequential(nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2)),
        nn.Sequential(nn.Conv2d(16, 120, 5), nn.Tanh(), nn.Flatten()),
        nn.Sequential(nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10), nn.Softmax(dim=1)),
    )


def transformer(attention: str, layers: int = 2) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=layers, n_head=2, n_embd=64, vocab_size=128, n_positions=32, use_cache=False
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.bos_token_id = config.eos_token_id = 0
    config._attn_implementation = attention
    return transformers.GPT2LMHeadModel(config)


class Elementwise(nn.Module):
    """Operations that torch can also compose of others, which then round otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.by_channel = nn.RMSNorm(9), nn.BatchNorm2d(4)

    def forward(self, pictures: Tensor) -> Tensor:
        x = F.mish(F.silu(self.by_channel(self.norm(pictures))))
        x = F.channel_shuffle(F.dropout(x, 0.5), 2)
        return F.interpolate(F.interpolate(x, scale_factor=3.7), size=(5, 5), mode="bilinear")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_counting_changes_no_bit(dtype: torch.dtype) -> None:
    model = Elementwise().to(dtype)
    pictures = torch.randn(3, 4, 7, 9, dtype=dtype)

    def results() -> list[Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        out = model(pictures)
        out.float().square().sum().backward()
        return [out, *(each.grad for each in model.parameters())]

    plain, others = results(), []
    counted(lambda: others.extend(results()))
    assert all(a.equal(b) for a, b in zip(plain, others, strict=True))


TOKENS = torch.arange(32).reshape(2, 16)


@pytest.mark.parametrize(
    ("model", "shape", "flops", "macs", "numel"),
    [
        (Pictures, (2, 3, 32, 32), 1_083_328, 499_136, 986),
        (lenet, (64, 1, 32, 32), 866_076_672 // 16, 426_516_480 // 16, 61_706),
    ],
)
def test_pictures_are_counted_as_deepspeed_counts_them(model, shape, flops, macs, numel):
    found = get_model_profile(model(), shape, print_profile=False, as_string=False)
    assert found[1:] == (macs, numel)
    assert found[0] == pytest.approx(flops, rel=0.01)


@pytest.mark.parametrize(("attention", "others"), [("eager", 53_248), ("sdpa", 51_200)])
def test_a_transformer_is_counted_to_the_operation(attention, others):
    """The products are torch's own count and twice the MACs; norms cost 5, softmax 1 an element."""
    model = transformer(attention)
    assert get_model_profile(model, args=[TOKENS], print_profile=False, as_string=False) == (
        7_077_888 + others,
        3_538_944,
        110_336,
    )
    per_module = counted(model, TOKENS).forward_of(model)
    attention_of_a_layer = 2 * (393_216 + 131_072 + 65_536)
    assert per_module["transformer.h.1.attn"].products == attention_of_a_layer
    assert per_module["lm_head"].products == 524_288
    assert per_module[""].products == 7_077_888


def test_backward_and_recomputation_are_counted():
    model = transformer("sdpa").train()
    counter = counted(lambda: model(TOKENS, labels=TOKENS).loss.backward())
    assert (counter.forward.products, counter.backward.products) == (7_077_888, 14_286_848)
    assert counter.recomputed == Count()
    recompute = getattr(model, "activation_checkpointing_enable", None)
    (recompute or model.gradient_checkpointing_enable)({"use_reentrant": False})
    counter = counted(lambda: model(TOKENS, labels=TOKENS).loss.backward())
    assert counter.backward.products == 18_743_296
    assert counter.recomputed.products == 4_456_448


def test_forward_and_backward_take_six_operations_a_weight_and_token():
    model = transformer("sdpa", layers=6)
    counter = counted(lambda: model(TOKENS, labels=TOKENS).loss.backward())
    products = counter.forward.products + counter.backward.products
    embedded = model.transformer.wpe.weight.numel()  # the head's own is tied to the other one
    weights = sum(parameter.numel() for parameter in model.parameters()) - embedded
    assert products == pytest.approx(6 * weights * TOKENS.numel(), rel=0.05)


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 6), st.integers(1, 4)
)
def test_attention_of_any_shape_is_counted(batch, groups, length, keys, width):
    """Queries may share keys: two products of each query with each key, of 8 and `width`."""
    query = torch.randn(batch, 2 * groups, length, 8, requires_grad=True)
    key, value = torch.randn(batch, groups, keys, 8), torch.randn(batch, groups, keys, 8 * width)

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    macs = batch * 2 * groups * length * keys * (8 + 8 * width)
    assert counted(attend).forward.macs == macs


@pytest.mark.parametrize(
    ("act", "macs"),
    [
        (lambda x: nn.Linear(8, 5)(x), 240),
        (lambda x: x @ torch.ones(8, 5), 240),
        (lambda x: torch.einsum("bij,jk->bik", x, torch.ones(8, 5)), 240),
        (lambda x: torch.baddbmm(torch.ones(2, 3, 5), x, torch.ones(2, 8, 5)), 240),
        (lambda x: nn.LSTM(8, 5)(x), 6 * 4 * 5 * (8 + 5)),
        (lambda x: nn.GRU(8, 5)(x), 6 * 3 * 5 * (8 + 5)),
        (lambda x: F.conv1d(x.transpose(1, 2), torch.ones(4, 8, 3)), 2 * 4 * 8 * 3),
        (lambda x: F.conv_transpose1d(x, torch.ones(3, 4, 3)), 2 * 8 * 3 * 4 * 3),
    ],
)
def test_products_are_counted_by_the_operation_that_runs(act, macs):
    assert counted(act, torch.ones(2, 3, 8)).forward.macs == macs


@pytest.mark.parametrize(
    ("act", "each"),
    [
        (nn.LayerNorm(8), 5),
        (nn.LayerNorm(8, elementwise_affine=False), 4),
        (nn.GroupNorm(1, 3), 5),
        (nn.BatchNorm1d(3), 5),
        (nn.BatchNorm1d(3).eval(), 2),
        (nn.GELU(), 1),
        (nn.Softmax(dim=-1), 1),
        (nn.PReLU(), 1),
        (nn.Dropout(0.0), 0),
    ],
)
def test_elementwise_layers_cost_a_few_operations_an_element(act, each):
    assert counted(act, torch.ones(2, 3, 8)).forward == Count(0, 48 * each)


def test_repeated_forwards_count_twice_and_leave_no_hooks():
    layer = nn.Linear(4, 4)
    counter = counted(lambda: layer(layer(torch.ones(1, 4))))
    assert counter.forward.flops == 64
    layer(torch.ones(1, 4))
    assert counter.forward.flops == 64
    counter.start()
    layer(torch.ones(1, 4))
    counter.stop()
    assert counter.forward.flops == 96


def test_a_compiled_model_is_counted_too():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    model.compile(backend="aot_eager")
    model(torch.ones(3, 4))
    assert counted(model, torch.ones(3, 4)).forward.macs == 3 * (4 * 8 + 8 * 2)
