"""Parameters that came into a model, or began to ask for gradients, after `initialize`."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hadal.errors import UsageError
from hadal.zero.bucket import Bucket

_log = logging.getLogger(__name__)


class Newcomers:
    """Notices parameters that would get gradients and never be trained.

    What asked for gradients and was not trained when the engine was made was left out on purpose.
    """

    def __init__(self, model: nn.Module, bucket_of: Mapping[nn.Parameter, Bucket]) -> None:
        self._model = model
        self._bucket_of = bucket_of
        self._left_out: WeakIdKeyDictionary = WeakIdKeyDictionary()
        for parameter in model.parameters():
            if not self._is_expected(parameter):
                self._left_out[parameter] = True

    def check(self, where: str) -> None:
        """Refuse parameters that can never be trained; warn of those that could be, once each.

        Raises:
            UsageError: a parameter that asks for gradients was put into the model.
        """
        if all(self._is_expected(parameter) for parameter in self._model.parameters()):
            return
        found = [(n, p) for n, p in self._model.named_parameters() if not self._is_expected(p)]
        added = [name for name, parameter in found if parameter not in self._bucket_of]
        if added:
            raise UsageError(
                f"{where}: {_few(added)} would get gradients and never be trained: put into the"
                " model after initialize. Initialize anew, or freeze them (requires_grad_(False));"
                " to train them yourself, put them in before initialize and leave them out of"
                " model_parameters."
            )
        _log.warning(
            "%s: %s get gradients and are not trained: thawed after initialize. Give them to"
            " optimizer.add_param_group({'params': [...]}), or freeze them again.",
            where,
            _few([name for name, _ in found]),
        )
        for _, parameter in found:
            self._left_out[parameter] = True

    def _is_expected(self, parameter: nn.Parameter) -> bool:
        bucket = self._bucket_of.get(parameter)
        trained = bucket is not None and bucket.trainable
        return trained or not parameter.requires_grad or parameter in self._left_out


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
