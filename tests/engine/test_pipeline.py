"""A model in stages trains like the whole one in one process, at any ZeRO stage."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import RankPool, RankPools, RanksFailed, on_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import hadal
from engine.toys import TINY
from hadal import comm
from hadal.engine.pipeline import PipelineEngine
from hadal.errors import (
    ChoiceError,
    CommunicationError,
    ConfigError,
    MismatchError,
    NotBuiltYetError,
    PipelineError,
    UsageError,
)
from hadal.plugins.pipeline import (
    LayerSpec,
    PipelineModule,
    PipeModelDataParallelTopology,
    TiedLayerSpec,
    later_weights,
)

WORDS, WIDTH, ROWS, LENGTH, MICRO, UPDATES = 7, 4, 2, 3, 4, 3
KEYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 128.0}},
}
# In one process the same products are rounded; only their sums may have another order.
CLOSE = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 2e-3}
CLIP = 0.3
ADAM = {"lr": 0.01, "weight_decay": 0.01, "eps": 1e-4}


def head(embedding: nn.Module, value: Tensor) -> Tensor:
    return value @ embedding.weight.T


def layers() -> list[Any]:
    """An embedding, which is the head as well, around blocks; a function among them."""
    return [
        TiedLayerSpec("emb", nn.Embedding, WORDS, WIDTH),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        torch.tanh,
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("emb", nn.Embedding, WORDS, WIDTH, forward_fn=head),
    ]


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.float().flatten(0, 1), labels.flatten())


def batch(number: int, rows: int = ROWS, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    words = torch.randint(WORDS, (2, rows, length), generator=generator)
    return words[0], words[1]


def batches(replica: int, replicas: int, updates: int = UPDATES) -> Iterator[tuple[Tensor, Tensor]]:
    for number in range(updates * MICRO):
        yield batch(number * replicas + replica)


class Whole(nn.Module):
    """The same model in one process, under the same names."""

    def __init__(self) -> None:
        super().__init__()
        for index in range(len(layers())):
            torch.manual_seed(1234 + index)
            spec = layers()[index]
            if index == 0:
                self.tied_modules = nn.ModuleDict({"emb": spec.build()})
            elif isinstance(spec, LayerSpec) and index < 5:
                self.add_module(str(index), spec.build())

    def forward(self, words: Tensor) -> Tensor:
        value = self.tied_modules["emb"](words)
        parts = dict(self.named_children())
        value = parts["3"](torch.tanh(parts["1"](value)))
        return head(self.tied_modules["emb"], parts["4"](value))


def module_of(stages: int, **options: Any) -> PipelineModule:
    given = {"loss_fn": loss_of, "seed_layers": True, "partition_method": "uniform"} | options
    return PipelineModule(layers(), num_stages=stages, **given)


def engine_of(stages: int, keys: dict[str, Any], module: Any = None) -> PipelineEngine:
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": ADAM},
        **keys,
    }
    engine, *_ = hadal.initialize(model=module or module_of(stages), config=config)
    assert type(engine) is PipelineEngine
    return engine


def train_whole(dtype: str, replicas: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and masters of one process."""
    masters = Whole()
    compute = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    model = Whole().to(compute)
    optimizer = torch.optim.AdamW(masters.parameters(), **ADAM)
    losses, norms = [], []
    scale = 128.0 if dtype == "fp16" else 1.0
    for update in range(UPDATES):
        total = 0.0
        sums = [torch.zeros_like(p) for p in masters.parameters()]
        for number in range(MICRO * replicas):
            inputs, labels = batch(update * MICRO * replicas + number)
            loss = loss_of(model(inputs), labels)
            (loss * scale).backward()
            for each, parameter in zip(sums, model.parameters(), strict=True):
                each += parameter.grad.float() / scale / (MICRO * replicas)
                parameter.grad = None
            total += loss.item() / (MICRO * replicas)
        for each, master in zip(sums, masters.parameters(), strict=True):
            master.grad = each
        norms.append(float(nn.utils.clip_grad_norm_(masters.parameters(), CLIP)))
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(total)
    return losses, norms, dict(masters.named_parameters())


def train(stages: int, zero: int, dtype: str, chunks: int = 1, **more: Any) -> None:
    replicas = comm.get_world_size() // stages
    tiny = {"stage": zero, "reduce_bucket_size": TINY["reduce_bucket_size"]}
    module = module_of(stages, chunks=chunks)
    engine = engine_of(stages, {"zero_optimization": tiny, **KEYS[dtype], **more}, module)
    data = batches(engine.grid.data_parallel_id, replicas)
    found = [engine.train_batch(data) for _ in range(UPDATES)]
    losses, norms, masters = train_whole(dtype, replicas)
    near = {"rtol": CLOSE[dtype], "atol": CLOSE[dtype]}
    torch.testing.assert_close([float(loss) for loss in found], losses, **near)
    norm = engine.get_global_grad_norm()
    assert norm == pytest.approx(norms[-1], rel=10 * CLOSE[dtype])
    assert norm > CLIP and engine.global_samples == UPDATES * MICRO * ROWS * replicas
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value.float(), masters[name].detach(), **near)
    with pytest.raises(StopIteration):
        engine.train_batch()
    assert engine.global_steps == UPDATES and engine.micro_steps == 0
    engine.destroy()


def train_all(stages: int, cases: list[tuple[int, str]], keys: Any = None) -> None:
    for zero, dtype in cases:
        train(stages, zero, dtype, **(keys or {}))


@pytest.mark.fast_cells("2")
@pytest.mark.parametrize("stages", [1, 2])
def test_stages_equal_one_process(stages: int, ranks: RankPools) -> None:
    cases = [(0, "fp32"), (1, "bf16"), (2, "fp16")] if stages > 1 else [(0, "fp32")]
    ranks(stages).run(train_all, stages, cases)


@pytest.mark.fast_cells("2")
@pytest.mark.parametrize("stages", [2, 4])
def test_stages_and_replicas_equal_one_process(stages: int, ranks: RankPools) -> None:
    ranks(4).run(train_all, stages, [(0, "bf16"), (1, "fp16"), (1, "fp32"), (2, "fp32")])


@pytest.mark.claims("pipeline.activation_checkpoint_interval", "pipeline.use_reentrant", "pipeline")
def test_recomputed_stages_equal_one_process(ranks: RankPools) -> None:
    section = {"activation_checkpoint_interval": 2, "use_reentrant": False}
    ranks(2).run(train_all, 2, [(1, "fp32")], {"pipeline": section})


SCHEDULES = [("gpipe", 1), ("zero_bubble", 1), ("interleaved", 2), ("interleaved", 3)]


@pytest.mark.fast_cells("interleaved-3")
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_schedules_equal_one_process(schedule: str, chunks: int, ranks: RankPools) -> None:
    keys = {"pipeline": {"schedule": schedule}, "chunks": chunks}
    ranks(2).run(train_all, 2, [(0, "fp32"), (1, "bf16"), (2, "fp16")], keys)
    keys["pipeline"] |= {"activation_checkpoint_interval": 1}
    ranks(2).run(train_all, 2, [(1, "fp32")], keys)


def count_put_off() -> int:
    """The gradients of weights that this stage computes later, in one update."""
    found, original = 0, later_weights.gradients_of

    def count(put_off: Any) -> Any:
        nonlocal found
        found += len(put_off)
        return original(put_off)

    engine = engine_of(2, {"pipeline": {"schedule": "zero_bubble"}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(later_weights, "gradients_of", count)
        engine.train_batch(batches(0, 1))
    engine.destroy()
    assert not any("forward" in vars(layer) for layer in engine.module.modules())
    return found


def test_linear_layers_compute_their_weights_later(ranks: RankPools) -> None:
    assert ranks(2).run(count_put_off) == [MICRO, MICRO]


@pytest.mark.fast_cells("interleaved-2")
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES[:3])
def test_schedules_of_replicas_equal_one_process(
    schedule: str, chunks: int, ranks: RankPools
) -> None:
    keys = {"pipeline": {"schedule": schedule}, "chunks": chunks}
    ranks(4).run(train_all, 2, [(2, "fp32")], keys)
    if chunks == 1:
        ranks(4).run(train_all, 4, [(1, "fp32")], keys)


def count_recomputed() -> tuple[int, int]:
    """The forwards of this stage's layers in one update, by the key."""
    found = []
    for interval in (0, 1):
        module, calls = module_of(2), 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1

        for index in module.chunks[0]:
            if isinstance(module.layer(index), nn.Module):
                module.layer(index).register_forward_pre_hook(count)
        engine = engine_of(2, {"pipeline": {"activation_checkpoint_interval": interval}}, module)
        engine.train_batch(batches(0, 1))
        found.append(calls)
    return found[0], found[1]


@pytest.mark.claims("pipeline.activation_checkpoint_interval")
def test_layers_are_computed_again(ranks: RankPools) -> None:
    assert ranks(2).run(count_recomputed) == [(2 * MICRO, 4 * MICRO)] * 2


@on_ranks(2)
def test_evaluation_between_updates() -> None:
    engine = engine_of(2, {"gradient_clipping": 0.0})
    last = engine.is_last_stage()
    whole = Whole()
    data = batches(0, 1, 20)
    with torch.no_grad():
        expected = [loss_of(whole(words), labels).item() for words, labels in batches(0, 1, 1)]
        outputs = [whole(words) for words, _ in batches(0, 1, 1)]
    mean = sum(expected) / MICRO
    loss, logits = engine.eval_batch(batches(0, 1), return_logits=True)
    assert float(loss) == pytest.approx(mean, rel=1e-6) and engine.module.training
    if last:
        torch.testing.assert_close(logits, outputs[-1])
    for _ in range(2):
        engine.train_batch(data)
        total = engine.total_loss
        each = engine.eval_batch(batches(0, 1), reduce_output=None)
        assert (len(each) == MICRO) if last else each is None
        seen = engine.eval_batch(batches(0, 1), compute_loss=False, num_micro_batches=3)
        assert seen.shape == (ROWS, LENGTH, WORDS) if last else seen is None
        assert engine.total_loss is total
    assert (engine.eval_batch(batches(0, 1), bcast_loss=False) is None) != last
    with pytest.raises(ChoiceError, match="reduce_output is 'sum'"):
        engine.eval_batch(batches(0, 1), reduce_output="sum")
    for call in (engine, engine.backward, engine.step):
        with pytest.raises(PipelineError, match="train_batch"):
            call()
    with torch.no_grad(), pytest.raises(UsageError, match="no_grad"):
        engine.train_batch(data)


@on_ranks(2)
def test_shapes_that_change() -> None:
    """Other lengths at each update, by either way; a change that is not announced is refused."""
    engine = engine_of(2, {}, module_of(2, dynamic_shape=True))
    for number in range(4):
        engine.train_batch(iter([batch(n, length=number + 1 + n % 2) for n in range(MICRO)]))
    engine = engine_of(2, {})
    for length in (2, 3):
        engine.reset_activation_shape()
        engine.train_batch(iter([batch(n, length=length) for n in range(MICRO)]))
    first = engine.is_first_stage()
    kind, told = (UsageError, "reset_activation_shape") if first else (PipelineError, "stage 0")
    with pytest.raises(kind, match=told):
        engine.train_batch(iter([batch(n, length=5) for n in range(MICRO)]))
    before = engine.state_dict()
    engine.train_batch(iter([batch(n, length=5) for n in range(MICRO)]))
    assert not torch.equal(before["tied_modules.emb.weight"], engine.module.tied_modules.emb.weight)


def read_data(zero: int) -> tuple[list[float], Any]:
    """Samples of `training_data`, in their order, again and again; a function makes the pairs."""
    words = torch.arange(2 * 3 * ROWS).remainder(WORDS).view(-1, 3)
    module = module_of(2)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "zero_optimization": {"stage": zero},
    }
    data = TensorDataset(words, words)
    engine, _, loader, _ = hadal.initialize(model=module, config=config, training_data=data)
    seen: list[int] = []

    def note(pair: Any) -> Any:
        seen.append(int(pair[0][0, 0]))
        return pair[0], pair[1]

    engine.set_batch_fn(note)
    assert isinstance(engine, PipelineEngine) and loader is not None
    losses = [float(engine.train_batch()) for _ in range(4)]
    return losses, seen


def test_data_in_its_order_over_and_over(ranks: RankPools) -> None:
    found = ranks(2).run(read_data, 1)
    assert found[0][0] == found[1][0] and found[0][0][0] == pytest.approx(found[0][0][2])
    assert found[0][1] == found[1][1] == [0, 3, 6, 2] * 2


class Halved(nn.Module):
    """Notes what arrives; the same on both slices."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(self.linear(value))


def in_slices(partitioned: bool) -> tuple[float, int]:
    """The loss of one update, and the bytes that this rank sends to its neighbour."""
    from hadal.plugins.pipeline import wires

    sent, start = 0, wires.start_send

    def count(tensor: Tensor, *rest: Any) -> Any:
        nonlocal sent
        sent += tensor.nbytes if tensor.is_floating_point() else 0
        return start(tensor, *rest)

    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    specs = [LayerSpec(Halved) for _ in range(4)]
    module = PipelineModule(specs, topology=topology, loss_fn=nn.MSELoss(), seed_layers=True)
    section = {"pipe_partitioned": partitioned, "grad_partitioned": partitioned}
    engine = engine_of(2, {"pipeline": section, "gradient_clipping": 0.0}, module)
    torch.manual_seed(0)
    data = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)) for _ in range(2 * MICRO)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wires, "start_send", count)
        first = engine.train_batch(iter(data[:MICRO]))
    second = engine.train_batch(iter(data[MICRO:]))
    return float(first + second), sent


@pytest.mark.claims("pipeline.pipe_partitioned", "pipeline.grad_partitioned")
def test_tensors_between_stages_are_sent_in_slices(ranks: RankPools) -> None:
    whole, cut = (ranks(4).run(in_slices, kind) for kind in (False, True))
    nbytes = MICRO * ROWS * WIDTH * 4
    assert [sent for _, sent in whole] == [nbytes] * 4
    assert [sent for _, sent in cut] == [nbytes // 2] * 4
    assert {loss for loss, _ in whole} == {loss for loss, _ in cut}


class Broken(nn.Linear):
    """Raises at the third micro-batch that is trained."""

    calls = 0

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3 and self.training:
            raise ValueError("no such token")
        return super().forward(value)


def fail_and_go_on() -> str:
    specs = [LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(Broken, WIDTH, WIDTH)]
    module = PipelineModule(specs, num_stages=2, loss_fn=nn.MSELoss(), seed_layers=True)
    engine = engine_of(2, {"zero_optimization": {"stage": 1}}, module)
    data = [(torch.ones(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)) for _ in range(MICRO)]
    with pytest.raises((ValueError, PipelineError)) as caught:
        engine.train_batch(iter(data))
    first = engine.train_batch(iter(data))
    assert engine.train_batch(iter(data)) < first and engine.global_steps == 2
    return str(caught.value)


def test_an_error_names_its_place_and_training_may_continue(ranks: RankPools) -> None:
    first, second = ranks(2).run(fail_and_go_on, timeout=60)
    assert second == "no such token"
    assert first == (
        "stage 1 (layer 1), layer 1 (Broken) stopped in the forward of micro-batch 2 of batch 1:"
        " ValueError: no such token"
    )


@on_ranks(2)
def test_impossible_arguments_are_refused() -> None:
    def refused(kind: type[Exception], text: str, keys: Any = None, **options: Any) -> None:
        with pytest.raises(kind, match=text):
            engine_of(2, keys or {}, module_of(2, **options))

    refused(ConfigError, "choose 0, 1 or 2", {"zero_optimization": {"stage": 3}})
    refused(ConfigError, "managed_gradient", {"managed_gradient_accumulation": False})
    refused(ConfigError, "sparse_gradients", {"sparse_gradients": True})
    refused(ConfigError, "flops_profiler  not built yet", {"flops_profiler": {"enabled": True}})
    one_bit = {"type": "OneBitAdam", "params": {"lr": 0.01}}
    refused(NotBuiltYetError, "OneBitAdam", {"optimizer": one_bit})
    specs = [LayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh]
    with pytest.raises((UsageError, MismatchError), match="no trainable parameters"):
        engine_of(2, {}, PipelineModule(specs, num_stages=2, partition_method="uniform"))
    with pytest.raises(UsageError, match="leave mpu out"):
        hadal.initialize(model=module_of(2), config={}, mpu=object())
    refused(ConfigError, "has chunks=2", chunks=2)
    refused(ConfigError, "has chunks=1", {"pipeline": {"schedule": "interleaved"}})
    odd = {"pipeline": {"schedule": "interleaved"}, "gradient_accumulation_steps": 3}
    refused(ConfigError, "choose a multiple of 2", odd, chunks=2)
    engine = engine_of(2, {})
    with pytest.raises((UsageError, PipelineError), match="has no data"):
        engine.train_batch()
    with pytest.raises((UsageError, PipelineError), match="expected a pair"):
        engine.train_batch(iter([torch.ones(2)]))


@on_ranks(2)
def test_a_run_resumes(tmp_path: Any) -> None:
    """A checkpoint loads at the same number of stages, optimizer included."""
    keys = {"zero_optimization": {"stage": 1}}
    data = list(batches(0, 1))
    engine = engine_of(2, keys)
    engine.train_batch(iter(data[:MICRO]))
    engine.save_checkpoint(tmp_path)
    expected = engine.train_batch(iter(data[MICRO:]))
    other = engine_of(2, keys, module_of(2, base_seed=7))
    other.load_checkpoint(tmp_path)
    assert other.train_batch(iter(data[MICRO:])) == expected
    assert other.get_global_grad_norm() == engine.get_global_grad_norm()
    own = other.state_dict()
    assert all(torch.equal(value, own[name]) for name, value in engine.state_dict().items())


class Killed(nn.Linear):
    """Its process ends without a word in the third forward."""

    calls = 0

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(value)


def lose_a_stage() -> None:
    specs = [LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(Killed, WIDTH, WIDTH)]
    module = PipelineModule(specs, num_stages=2, loss_fn=nn.MSELoss())
    engine = engine_of(2, {}, module)
    data = [(torch.ones(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)) for _ in range(MICRO)]
    engine.train_batch(iter(data))


def test_a_killed_stage_ends_the_others_with_its_name(
    fresh_ranks: Callable[[int], RankPool],
) -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        fresh_ranks(2).run(lose_a_stage, timeout=60)
    assert time.monotonic() - began < 50
    error = caught.value.errors[0]
    assert isinstance(error, CommunicationError)
    places = r"the (activation from stage 0|gradient from stage 1) \(layer [01]\) \(rank [01]\) to"
    assert re.search(places, str(error)), error
    assert re.search(r"micro-batch \d of batch 1", str(error)), error
