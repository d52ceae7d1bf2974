"""A program written for DeepSpeed's pipelines, also in Megatron's way, runs unchanged."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from compat.clients import load
from ranks import RankPools
from torch import Tensor, nn


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, labels)


def train(folder: Path) -> list[float]:
    deepspeed, pipe = load("deepspeed"), load("deepspeed.pipe")
    LayerSpec, TiedLayerSpec = pipe.LayerSpec, pipe.TiedLayerSpec
    engine_type = load("deepspeed.runtime.pipe.engine").PipelineEngine
    error = load("deepspeed.runtime.pipe.module").PipelineError
    topology = load("deepspeed.runtime.pipe.topology").PipeDataParallelTopology(num_pp=2, num_dp=1)

    class Net(pipe.PipelineModule):  # type: ignore[misc, name-defined]
        def get_additional_losses(self) -> dict[str, Tensor]:
            return {"moe loss": torch.tensor(0.5)}

    def last(module: nn.Module, value: Tensor) -> Tensor:
        return value @ module.weight

    layers = [
        lambda value: value.float(),
        TiedLayerSpec("embed", nn.Linear, 4, 4, bias=False, tied_weight_attr="weight"),
        LayerSpec(nn.Linear, 4, 4),
        TiedLayerSpec("embed", nn.Linear, 4, 4, bias=False, forward_fn=last),
    ]
    net = Net(layers, topology=topology, loss_fn=loss_of, partition_method="type:linear")
    monitor = {"enabled": True, "output_path": str(folder), "job_name": "run"}
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "csv_monitor": monitor,
    }
    engine, optimizer, _, _ = deepspeed.initialize(
        model=net, model_parameters=[p for p in net.parameters() if p.requires_grad], config=config
    )
    assert type(engine) is engine_type and isinstance(engine, deepspeed.DeepSpeedEngine)
    assert optimizer is engine.optimizer and engine.pipeline_parallelism
    assert engine.mp_world_size == 2 and engine.dp_world_size == 1
    assert (
        engine.grid is net.mpu() is engine.mpu
        and engine.num_stages == 2 == net.num_pipeline_stages()
    )
    engine.set_batch_fn(lambda batch: (batch["x"], batch["y"]))
    engine.set_has_attention_mask(True)
    x = torch.ones(2, 4)
    found = []
    for _ in range(3):
        engine.reset_activation_shape()
        found.append(engine.train_batch(data_iter=iter([{"x": x, "y": -x}] * 4)).item())
        assert engine.was_step_applied() and engine.get_global_grad_norm().item() > 0
    assert engine.get_additional_losses() == {"moe loss": torch.tensor(0.5)}
    assert engine.agg_train_loss.item() == found[-1]
    assert engine.global_steps == 3 and engine.global_samples == 24 and engine.micro_steps == 0
    seen = engine.eval_batch(iter([{"x": x, "y": -x}] * 4))
    engine.micro_batches, known = 1, engine.micro_batches
    assert engine.eval_batch(iter([{"x": x, "y": -x}])).item() == seen.item() and known == 4
    engine.micro_batches = known
    for call in (engine, engine.backward, engine.step):
        with pytest.raises(error):
            call()
    engine.log_for_device("here")
    engine.tput_log("now")
    engine.destroy()
    return [*found, seen.item()]


def rows_of(folder: Path) -> dict[str, list[Any]]:
    return {
        file.stem: list(csv.reader(file.read_text().splitlines()))[1:]
        for file in sorted(folder.rglob("*.csv"))
    }


def test_a_program_in_stages(ranks: RankPools, tmp_path: Path) -> None:
    first, second = ranks(2).run(train, tmp_path)
    assert first == second and first[0] > first[1] > first[2] > first[3]
    rows = rows_of(tmp_path)
    losses = rows["Train_Samples_train_loss"]
    assert [int(step) for step, _ in losses] == [8, 16, 24]
    assert [float(value) for _, value in losses] == pytest.approx(first[:3])
    assert [(int(step), float(value)) for step, value in rows["Train_Samples_eval_loss"]] == [
        (24, pytest.approx(first[3]))
    ] * 2


def patched_train(batches: int) -> tuple[list[str], list[float]]:
    """Train with a program's own instructions, schedule and split; return what they saw."""
    deepspeed, pipe = load("deepspeed"), load("deepspeed.pipe")
    plan = load("deepspeed.runtime.pipe.schedule")
    module = load("deepspeed.runtime.pipe.module")
    engine_type = load("deepspeed.runtime.pipe.engine").PipelineEngine
    seen: list[str] = []

    class Note(plan.PipeInstruction):  # type: ignore[misc, name-defined]
        pass

    class Mine(plan.TrainSchedule):  # type: ignore[misc, name-defined]
        def steps(self) -> Any:
            yield [Note(text="begin")]
            for step, found in enumerate(super().steps()):
                micro_batch, is_forward = self._step_to_micro_batch(step)
                kind = plan.ForwardPass if is_forward else plan.BackwardPass
                buffers = [each.buffer_id for each in found if isinstance(each, kind)]
                is_valid = self._valid_micro_batch(micro_batch)
                assert buffers == ([self._buffer_idx(micro_batch)] if is_valid else [])
                yield found

    def forward(self: Any, buffer_id: int) -> None:
        seen.append(f"forward {buffer_id}")
        self._exec_forward_pass(buffer_id)

    def update(self: Any) -> None:
        seen.append("update")
        self._exec_optimizer_step()

    def count(self: Any) -> list[int]:
        return [2, *[1] * (len(self._layer_specs) - 1)]

    known = plan.TrainSchedule
    kept = dict(engine_type._INSTRUCTION_MAP), module.PipelineModule._count_layer_params
    layers = [pipe.LayerSpec(nn.Linear, 4, 4, bias=False) for _ in range(3)]
    config = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    try:
        module.PipelineModule._count_layer_params = count
        torch.manual_seed(0)
        net = module.PipelineModule(layers, num_stages=2, loss_fn=loss_of, seed_layers=True)
        assert net.parts == [0, 1, 3]  # the first layer weighs as much as the others together
        engine, *_ = deepspeed.initialize(model=net, config=config)
        engine._INSTRUCTION_MAP.update(
            {
                plan.ForwardPass: forward,
                plan.OptimizerStep: update,
                plan.ReduceGrads: lambda self: seen.append("reduce"),
                Note: lambda self, text: seen.append(text),
            }
        )
        plan.TrainSchedule = Mine
        data = [(torch.ones(1, 4) * number, torch.ones(1, 4)) for number in (1, 2)]
        losses = [engine.train_batch(iter(data)).item() for _ in range(batches)]
        if engine.stage_id == 0:  # the error comes to the other stage, which waits for this one
            del engine._INSTRUCTION_MAP[Note]
        with pytest.raises(RuntimeError, match=r"Note.*of a kind that this engine does not know"):
            engine.train_batch(iter(data))
    finally:
        engine_type._INSTRUCTION_MAP.clear()
        engine_type._INSTRUCTION_MAP.update(kept[0])
        module.PipelineModule._count_layer_params = kept[1]
        plan.TrainSchedule = known
    losses.append(engine.train_batch(iter(data)).item())
    with pytest.raises(RuntimeError, match="zero_bubble"):
        _ = engine.pipe_buffers
    engine.destroy()
    return seen, losses


def test_a_program_s_own_instructions_run(ranks: RankPools) -> None:
    first, second = ranks(2).run(patched_train, 2)
    batch = ["begin", "forward 0", "forward 1", "reduce", "update"]
    assert first[0] == 2 * batch and second[0] == [*batch, *batch, "begin"]
    losses = first[1]
    assert losses == second[1] and losses[0] > losses[1] > losses[2]


class Cached(nn.Module):
    """A layer that mixes each token with those before; in evaluation it remembers these."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4, bias=False)
        self.before: Tensor | None = None

    def forward(self, value: Tensor) -> Tensor:
        seen = value if self.before is None else torch.cat([self.before, value], 1)
        if not self.training:
            self.before = seen
        mean = seen.cumsum(1)[:, -value.shape[1] :]
        return value + torch.tanh(self.mix(mean))


def of_tokens() -> list[nn.Module]:
    torch.manual_seed(11)
    return [nn.Embedding(7, 4), Cached(), Cached(), nn.Linear(4, 7)]


def in_stages() -> Any:
    pipe = load("deepspeed.pipe")
    net = pipe.PipelineModule(
        of_tokens(),
        num_stages=2,
        partition_method="uniform",
        loss_fn=lambda scores, labels: nn.functional.cross_entropy(scores.transpose(1, 2), labels),
    )
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
    }
    return load("deepspeed").initialize(model=net, config=config)[0]


def generated() -> tuple[list[list[int]], float]:
    """Train, generate with a cache, and train on sequences of another length."""
    engine = in_stages()
    engine.set_batch_fn(lambda batch: (batch["text"][:, :-1], batch["text"][:, 1:]))
    engine.train_batch(iter([{"text": torch.arange(5).expand(2, 5)}] * 2))
    tokens, new = torch.tensor([[1, 2, 3], [4, 5, 6]]), 3
    last = engine.grid.stage_to_global(engine.num_stages - 1)
    engine.eval()
    with torch.no_grad():
        for _ in range(3):
            given = iter([{"text": nn.functional.pad(tokens[:, -new:], (0, 1))}])
            before, engine.micro_batches = engine.micro_batches, 1
            engine.first_output_send = True
            engine.pipe_recv_buf = None
            _, scores = engine.eval_batch(given, return_logits=True)
            engine.micro_batches = before
            chosen = torch.zeros(2, dtype=torch.long) if scores is None else scores[:, -1].argmax(1)
            torch.distributed.broadcast(chosen, last)
            tokens, new = torch.cat([tokens, chosen[:, None]], 1), 1
    for layer in engine.module.modules():
        if isinstance(layer, Cached):
            layer.before = None
    engine.train()
    engine.first_output_send, engine.pipe_recv_buf = True, None
    loss = engine.train_batch(iter([{"text": torch.arange(4).expand(2, 4)}] * 2)).item()
    engine.destroy()
    return tokens.tolist(), loss


def test_a_program_generates_with_stages(ranks: RankPools) -> None:
    model = nn.Sequential(*of_tokens())
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    for length in (5, 4):
        text = torch.arange(length).expand(2, length)
        loss = nn.functional.cross_entropy(model(text[:, :-1]).transpose(1, 2), text[:, 1:])
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(3 if length == 5 else 0):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(2)], 1)
    found = ranks(2).run(generated)
    assert found == [(tokens.tolist(), pytest.approx(losses[1]))] * 2


def scored() -> list[Tensor]:
    """Evaluate as programs do that want the outputs, not the loss."""
    loader = load("deepspeed.runtime.state_dict_factory").MegatronSDLoader
    loader.sanity_check = lambda self, ckpt_file_name: None
    engine = in_stages()
    engine._compute_loss = False
    engine.fwd_outputs = []
    engine.set_batch_fn(lambda tokens: (tokens, tokens))
    found = []
    for length in (3, 5):
        engine.micro_batches = 3
        batches = iter(torch.arange(2 * length).view(2, length) % 7 for _ in range(3))
        outputs = engine.eval_batch(batches, compute_loss=False, reduce_output=None)
        found += [] if outputs is None else [torch.cat(outputs)]
        engine.total_loss = None
        for layer in engine.module.modules():
            if isinstance(layer, Cached):
                layer.before = None
    engine.destroy()
    return found


def test_a_program_asks_for_outputs_of_several_lengths(ranks: RankPools) -> None:
    first, second = ranks(2).run(scored)
    assert first == [] and [tuple(one.shape) for one in second] == [(6, 3, 7), (6, 5, 7)]
    for scores, length in zip(second, (3, 5), strict=True):
        plain = nn.Sequential(*of_tokens())(torch.arange(2 * length).view(2, length) % 7)
        torch.testing.assert_close(scores[:2], plain)


def with_buffers() -> list[str]:
    """Train with a program's own zero-bubble instructions, then without them."""
    plan = load("deepspeed.runtime.pipe.schedule")
    engine_type = load("deepspeed.runtime.pipe.engine").PipelineEngine

    class BackwardOnlyPass(plan.BufferOpInstruction):  # type: ignore[misc, name-defined]
        pass

    def execute(self: Any, buffer_id: int) -> None:
        self.mem_status("before")
        torch.autograd.backward(self.pipe_buffers["outputs"][buffer_id], self.grad_layer)

    class Mine(plan.TrainSchedule):  # type: ignore[misc, name-defined]
        def steps(self) -> Any:
            for found in super().steps():
                last = {plan.BackwardPass: BackwardOnlyPass} if self.is_last_stage else {}
                yield [last.get(type(one), type(one))(**one.kwargs) for one in found]

    engine, known = in_stages(), plan.TrainSchedule
    data = [(torch.arange(6).view(2, 3), torch.arange(6).view(2, 3))] * 2
    engine_type._INSTRUCTION_MAP[BackwardOnlyPass] = execute
    try:
        engine.train_batch(iter(data))  # it is no part of the schedule
        plan.TrainSchedule = Mine
        with pytest.raises(RuntimeError) as found:
            engine.train_batch(iter(data))
    finally:
        del engine_type._INSTRUCTION_MAP[BackwardOnlyPass]
        plan.TrainSchedule = known
    engine.train_batch(iter(data))
    engine.destroy()
    return [str(found.value)]


def test_instructions_on_deepspeed_s_own_buffers_are_refused_before_the_batch(
    ranks: RankPools,
) -> None:
    for (text,) in ranks(2).run(with_buffers):
        assert text.startswith("execute, the program's BackwardOnlyPass, uses the engine's pipe_b")
        assert 'set pipeline.schedule to "zero_bubble"' in text
