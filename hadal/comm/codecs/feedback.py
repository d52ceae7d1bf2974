"""Error feedback: the error of one message is added to the next.

Tests: tests/comm/test_codecs.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from hadal.comm.codecs.codec import Codec


class ErrorFeedback:
    """A codec, and the residual of the messages so far of one bucket in one direction.

    A message is the values plus the residual. With `decay` the residual is a moving average of the
    error (LoCo, Xie 2024): residual = decay x residual + (1 - decay) x (values + residual - their
    decoded values); at 0 it is the whole error of the last message (Seide 2014).
    """

    def __init__(self, codec: Codec, dtype: torch.dtype, decay: float = 0.0) -> None:
        self.codec = codec
        self.residual: Tensor | None = None
        """The values to add, in `dtype`; None: nothing was lost yet."""
        self._dtype = dtype
        self._decay = decay

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Write 1-D `values`, always as many, plus the residual into `out`."""
        if self.residual is None:
            self.residual = torch.zeros_like(values, dtype=self._dtype)
        residual = self.residual.add_(values)
        self.codec.encode(residual, out)
        # In place: decay x (sent - values) + (1 - decay) x (sent - decoded).
        if self._decay:
            residual.sub_(values, alpha=self._decay)
        self.codec.decode_add(out, residual, self._decay - 1.0)
        # An overflowed message leaves the residual alone: its update is skipped.
        residual.nan_to_num_(0.0, 0.0, 0.0)

    def rescale(self, factor: float) -> None:
        """Scale the residual: the next values are `factor` times as large."""
        if self.residual is not None:
            self.residual.mul_(factor)
