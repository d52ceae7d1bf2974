"""What a codec loses of one message is added to the next one (error feedback)."""

from __future__ import annotations

import torch
from torch import Tensor

from hadal.comm.codecs.codec import Codec


class ErrorFeedback:
    """A codec, and what it has lost of the messages so far of one bucket in one direction.

    What is sent is the values and the residual together. With `decay` the residual is a moving
    average of what is lost (LoCo, Xie 2024): residual = decay x residual + (1 - decay) x (values +
    residual - what is decoded of them); at 0 it is all that the last message lost (Seide 2014).
    """

    def __init__(self, codec: Codec, dtype: torch.dtype, decay: float = 0.0) -> None:
        self.codec = codec
        self.residual: Tensor | None = None
        """What will be added, in `dtype`; None: nothing has been lost yet, or it was dropped."""
        self._dtype = dtype
        self._decay = decay

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Write 1-D `values`, always as many, and what the last messages lost into `out`."""
        if self.residual is None:
            self.residual = torch.zeros_like(values, dtype=self._dtype)
        residual = self.residual.add_(values)
        self.codec.encode(residual, out)
        # In place: decay x (sent - values) + (1 - decay) x (sent - decoded).
        if self._decay:
            residual.sub_(values, alpha=self._decay)
        self.codec.decode_add(out, residual, self._decay - 1.0)
        # A message that overflowed is not learned from: its update is skipped.
        residual.nan_to_num_(0.0, 0.0, 0.0)

    def rescale(self, factor: float) -> None:
        """The next values are `factor` times as large as they would have been."""
        if self.residual is not None:
            self.residual.mul_(factor)

    def drop(self) -> None:
        """Begin anew."""
        self.residual = None
