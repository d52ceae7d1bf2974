"""Parameters that are frozen while their bucket is trained: an update leaves their values alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from hadal.device import unwatched
from hadal.zero.bucket import Bucket, refresh_all


def has_frozen(bucket: Bucket) -> bool:
    """Return True if a parameter of a trained bucket requires no gradient now."""
    with unwatched():
        return not all(parameter.requires_grad for parameter in bucket.parameters)


@contextmanager
def held_still(buckets: Iterable[Bucket]) -> Iterator[None]:
    """Restore the values of frozen parameters in these buckets after an update.

    A gradient of zero is not enough: momentum and weight decay would move a frozen parameter. All
    ranks must name the same buckets. The optimizer's state does see a gradient of zero.
    """
    held = list(buckets)
    kept = []
    for bucket in held:
        with bucket.present(writes=False):
            kept.append([cut.clone() for cut in _frozen_cuts(bucket)])
    yield
    for bucket, values in zip(held, kept, strict=True):
        with bucket.present():
            for cut, value in zip(_frozen_cuts(bucket), values, strict=True):
                cut.copy_(value)
            bucket.write_back(0, bucket.span[1] - bucket.span[0])
    refresh_all(held)


def _frozen_cuts(bucket: Bucket) -> Iterator[Tensor]:
    """Yield the master values of frozen parameters in this rank's span."""
    assert bucket.master is not None  # it is trained
    for part in bucket.layout.fragments(*bucket.span):
        if not bucket.parameters[part.slot].requires_grad:
            yield bucket.master[part.offset : part.offset + part.numel]
