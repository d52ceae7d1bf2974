"""An unmodified transformers decoder in stages: each stage keeps its own blocks of the model.

A stage calls the model's own forward. Blocks of other stages are skipped. Every stage but the first
passes hidden states instead of embeddings, and every stage but the last ends before the final norm.
So the model itself computes masks, rotary angles and types of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hadal.device import has_values
from hadal.errors import ModelError, UsageError, few
from hadal.plugins.pipeline.grid import group_of
from hadal.plugins.pipeline.module import PipelineModule
from hadal.plugins.pipeline.specs import Tie
from hadal.plugins.pipeline.topology import ProcessTopology

_HIDDEN = "hidden"
_CARRIED = ("attention_mask", "position_ids")
"""Inputs that every block reads, and that are sent along."""
_PLAIN = (str, int, float, bool, type(None))


class PassedBlock(nn.Module):
    """A block of another stage: returns its hidden states unchanged."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        for name, value in vars(block).items():
            if not name.startswith("_") and isinstance(value, _PLAIN):
                setattr(self, name, value)  # models read the attention type of blocks

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the hidden states."""
        return hidden_states


class DecoderBlocks(nn.ModuleList):
    """All blocks of the model by number; only some of them run."""

    def __init__(self, blocks: list[nn.Module], note: Callable[[int], None]) -> None:
        super().__init__(blocks)
        self._note = note
        self._passed = [PassedBlock(block) for block in blocks]
        self.running = range(0)
        """The blocks that the next forward runs."""

    def __iter__(self) -> Iterator[nn.Module]:
        for number, passed in enumerate(self._passed):
            if number in self.running:
                self._note(number)
                yield super().__getitem__(number)
            else:
                yield passed

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        return self._passed[index] if index not in self.running else super().__getitem__(index)


class Sequences(Protocol):
    """Splits sequences over ranks, in training."""

    def cut(self, inputs: Mapping[str, Any], labels: Tensor) -> tuple[dict[str, Any], Any]:
        """Return this rank's slice of a micro-batch, and keywords of the loss function."""

    def whole_loss(self, part: Tensor) -> Tensor:
        """Return the loss of whole sequences, with the gradient of this rank's part."""


class DecoderModule(PipelineModule):
    """A causal language model of transformers as a list: embedding, blocks, and norm with head.

    A micro-batch is a dictionary of the model's arguments with `labels`, or a pair of such a
    dictionary (or token ids) and labels. Parameters keep the model's own names. The model is split
    in place: a stage drops the blocks of the others. All ranks must create it.

    Args:
        model: a decoder with `embed_tokens`, `layers` and `norm`, and a head.
        num_stages, topology, partition_method, chunks: as in `PipelineModule`.
        plan: the tensor-parallel cuts of the whole model, which the caller applies.

    Raises:
        ModelError: the model is not supported, or changes hidden states outside its blocks.
        UsageError: as in `PipelineModule`.
    """

    def __init__(
        self,
        model: nn.Module,
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        *,
        partition_method: str = "parameters",
        chunks: int = 1,
        plan: Any = None,
    ) -> None:
        decoder = check_decoder(model)
        whole: Any = model
        self._whole = whole, decoder  # not submodules: only their children are
        head = nn.ModuleList([decoder.norm, whole.lm_head])
        super().__init__(
            [decoder.embed_tokens, *decoder.layers, head],
            num_stages=num_stages,
            topology=topology,
            partition_method=partition_method,
            chunks=chunks,
        )
        self.loss_fn = self._loss
        self.plan = plan
        self.sequences: Sequences | None = None
        """Ranks that share each sequence; None if sequences are not split."""

    @property
    def whole_model(self) -> nn.Module:
        """The model itself, in which blocks of other stages are skipped."""
        found: nn.Module = self._whole[0]
        return found

    @property
    def has_ties(self) -> bool:
        """True if the head is tied to the embedding, and they are on different stages."""
        return self._is_tied and self.stage_owner(0) != self.stage_owner(len(self._layer_specs) - 1)

    def train(self, mode: bool = True) -> DecoderModule:
        """Set training mode, also on the model itself."""
        self._whole[0].training = self._whole[1].training = mode
        super().train(mode)
        return self

    def _build(self) -> None:
        model, decoder = self._whole
        own = {index for chunk in self.chunks for index in chunk}
        last = len(self._layer_specs) - 1
        self._functions = {
            index: self._layer_specs[index]  # type: ignore[misc]
            for index in sorted(own)
        }
        self._is_tied = decoder.embed_tokens.weight is model.lm_head.weight
        names = {parameter: name for name, parameter in model.named_parameters()}
        name = names[decoder.embed_tokens.weight]
        blocks = [
            block if number + 1 in own else PassedBlock(block)
            for number, block in enumerate(decoder.layers)
        ]
        decoder.layers = DecoderBlocks(blocks, self._note)
        if 0 not in own:
            if self._is_tied and last in own:
                self.renamed = {model.lm_head.weight: name}
            decoder.embed_tokens = nn.Identity()
        if last not in own:
            decoder.norm, model.lm_head = nn.Identity(), nn.Identity()
        for name, child in model.named_children():
            self.add_module(name, child)

    def _tie(self) -> dict[str, Tie]:
        """Return the tie of embedding and head, if this stage has one of them."""
        model, decoder = self._whole
        stages = [self.stage_owner(0), self.stage_owner(len(self._layer_specs) - 1)]
        if not self.has_ties or self.stage_id not in stages:
            return {}
        holder = nn.Module()  # only the weight: a head may have a bias, too
        is_first = self.stage_id == stages[0]
        holder.weight = (decoder.embed_tokens if is_first else model.lm_head).weight
        ranks = group_of([self.mpu().stage_to_global(stage) for stage in stages])
        return {"embed_tokens": Tie("embed_tokens", holder, ("weight",), ranks)}

    def _note(self, number: int) -> None:
        self.curr_layer = number + 1

    def forward(self, forward_input: Any, chunk: int = 0) -> Any:
        """Return the hidden states after a chunk of this stage's blocks; logits after the last."""
        model, decoder = self._whole
        layers = self.chunks[chunk]
        is_first, is_last = 0 in layers, len(self._layer_specs) - 1 in layers
        self._forwards[chunk] += 1
        decoder.layers.running = range(layers.start - 1, layers.stop - 1)
        self.curr_layer = layers.start
        given = inputs_of(forward_input) if is_first else dict(forward_input)
        carried = {name: given[name] for name in _CARRIED if given.get(name) is not None}
        if not is_first:
            given["inputs_embeds"] = given.pop(_HIDDEN)
        if is_last:
            return model(**given, use_cache=False).logits
        with _without_norm(decoder):
            hidden = decoder(**given, use_cache=False).last_hidden_state
        return {_HIDDEN: hidden, **carried}

    def set_checkpoint_interval(self, interval: int) -> None:
        """Refuse to recompute blocks together: the model does so itself.

        Raises:
            UsageError: `interval` is not 0.
        """
        if interval:
            raise UsageError(
                f"pipeline.activation_checkpoint_interval is {interval}, but the blocks of a"
                " transformers model are called by the model itself: leave the key out, and use"
                " activation_checkpointing.modules or model.gradient_checkpointing_enable()"
            )

    def pair_of(self, batch: Any) -> Any:
        """Return the inputs and the labels of a micro-batch."""
        if isinstance(batch, Mapping):
            if "labels" not in batch:
                raise UsageError(
                    f"a micro-batch has {few(list(batch))} but no labels, which the loss needs;"
                    " pass labels, for example a copy of input_ids"
                )
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            batch = inputs, batch["labels"]
        if self.sequences is None or not self.training:
            return batch
        inputs, labels = batch
        return self.sequences.cut(with_positions(inputs_of(inputs)), labels)

    def _loss(self, logits: Tensor, labels: Any) -> Tensor:
        model = self._whole[0]
        size = model.config.get_text_config().vocab_size
        # The labels of sequence slices are shifted already.
        given = labels if isinstance(labels, Mapping) else {"labels": labels}
        found: Tensor = model.loss_function(
            logits=logits, vocab_size=size, **{"labels": None, **given}
        )
        if isinstance(labels, Mapping) and self.sequences is not None:
            return self.sequences.whole_loss(found)
        return found


def check_decoder(model: nn.Module) -> Any:
    """Return the decoder inside a causal language model.

    Raises:
        ModelError: it cannot be split between its blocks.
    """
    kind = type(model).__name__
    get_decoder: Any = getattr(model, "get_decoder", lambda: None)
    decoder = get_decoder()
    parts = ("embed_tokens", "layers", "norm")
    missing = [f"decoder.{name}" for name in parts if not hasattr(decoder, name)]
    missing += [name for name in ("lm_head", "loss_function", "config") if not hasattr(model, name)]
    if missing:
        raise ModelError(
            f"pipeline.auto splits causal language models of transformers between their blocks;"
            f" {kind} has no {few(missing)}. Write it as a PipelineModule"
        )
    loose = [name for name, _ in model.named_parameters(recurse=False)]
    loose += [name for name, _ in decoder.named_parameters(recurse=False)]
    if loose or getattr(model.config, "output_router_logits", False):
        what = few(loose) if loose else "config.output_router_logits"
        raise ModelError(
            f"pipeline.auto: {kind} has {what} outside its blocks, which belong to no single"
            " stage. Write it as a PipelineModule"
        )
    _check_between_blocks(model, decoder)
    return decoder


def _check_between_blocks(model: nn.Module, decoder: Any) -> None:
    """Raise `ModelError` if the decoder changes hidden states outside its blocks."""
    device, dtype = decoder.norm.weight.device, decoder.norm.weight.dtype
    if not has_values(decoder.norm.weight):
        return
    width = decoder.norm.weight.shape[-1]
    hidden = torch.linspace(-1, 1, 2 * width, device=device).view(1, 2, width).to(dtype)
    layers = decoder.layers
    decoder.layers = DecoderBlocks(list(layers), lambda _: None)
    modes = {module: module.training for module in decoder.modules()}
    decoder.train()
    # No random generator advances, and no other device is touched.
    kept = torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)
    try:
        with torch.no_grad(), _without_norm(decoder), kept:
            found = decoder(inputs_embeds=hidden, use_cache=False).last_hidden_state
        is_same = found.shape == hidden.shape and torch.equal(found, hidden)
    finally:
        decoder.layers = layers
        for module, mode in modes.items():
            module.training = mode
    if not is_same:
        raise ModelError(
            f"pipeline.auto: {type(model).__name__} scales, drops or adds to its embeddings outside"
            " its blocks, which every stage would repeat. Write it as a PipelineModule"
        )


@contextmanager
def _without_norm(decoder: Any) -> Iterator[None]:
    norm, decoder._modules["norm"] = decoder.norm, nn.Identity()
    try:
        yield
    finally:
        decoder._modules["norm"] = norm


def with_positions(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a micro-batch with positions, which slices of its sequences need."""
    if inputs.get("position_ids") is not None:
        return inputs
    words = inputs["input_ids"]
    numbers = torch.arange(words.shape[1], device=words.device)
    return {**inputs, "position_ids": numbers.expand(words.shape[0], -1)}


def inputs_of(given: Any) -> dict[str, Any]:
    """Return the model's inputs of a micro-batch: token ids, and the inputs sent along.

    Raises:
        UsageError: there are other inputs, which would not reach later stages.
    """
    inputs = {"input_ids": given} if isinstance(given, Tensor) else dict(given)
    others = inputs.keys() - {"input_ids", *_CARRIED}
    if others or "input_ids" not in inputs:
        raise UsageError(
            f"a micro-batch of a decoder in stages has {few(sorted(inputs))}; expected input_ids,"
            f" labels, and perhaps {' and '.join(_CARRIED)}"
        )
    return inputs
