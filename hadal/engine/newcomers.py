"""Parameters that were added to a model, or unfrozen, after `initialize`."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hadal.errors import UsageError, few
from hadal.zero.bucket import Bucket
from hadal.zero.kinds import is_foreign

_log = logging.getLogger(__name__)


class Newcomers:
    """Detector of parameters that would get gradients and never be trained.

    Those that required gradients and were not trained at `initialize` were left out on purpose.
    """

    def __init__(self, model: nn.Module, bucket_of: Mapping[nn.Parameter, Bucket]) -> None:
        self._model = model
        self._bucket_of = bucket_of
        self._left_out: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._reported: WeakIdKeyDictionary = WeakIdKeyDictionary()
        for parameter in model.parameters():
            self._known[parameter] = True
            if not self._is_expected(parameter):
                self._left_out[parameter] = True

    def check(self, where: str) -> None:
        """Refuse new parameters that are not trained; warn of unfrozen ones, once each.

        Raises:
            UsageError: a parameter that requires gradients was added to the model.
        """
        if all(self._is_expected(parameter) for parameter in self._model.parameters()):
            return
        found = [(n, p) for n, p in self._model.named_parameters() if not self._is_expected(p)]
        asking = [(n, p) for n, p in found if p.requires_grad]
        added = [name for name, parameter in asking if parameter not in self._known]
        if added:
            raise UsageError(
                f"{where}: {few(added)} would get gradients and never be trained: added to the"
                " model after initialize. Pass them to optimizer.add_param_group({'params': [...]})"
                " on every rank, or freeze them (requires_grad_(False)); to train them yourself,"
                " add them before initialize and leave them out of model_parameters."
            )
        if asking:
            _log.warning(
                "%s: %s get gradients but are not trained: unfrozen after initialize. Pass them to"
                " optimizer.add_param_group({'params': [...]}), or freeze them again.",
                where,
                few([name for name, _ in asking]),
            )
        frozen = [name for name, parameter in found if not parameter.requires_grad]
        if frozen:
            _log.warning(
                "%s: %s were added to the model after initialize, frozen: each rank computes with"
                " its own values; the next optimizer.add_param_group sends rank 0's to all",
                where,
                few(frozen),
            )
        for _, parameter in found:
            (self._left_out if parameter.requires_grad else self._reported)[parameter] = True

    def _is_expected(self, parameter: nn.Parameter) -> bool:
        if parameter in self._left_out:
            return True
        bucket = self._bucket_of.get(parameter)
        if bucket is not None and bucket.trainable:
            return True  # the usual case, first: the parameter itself may be freed
        if parameter.requires_grad:
            return False
        has_come = parameter not in self._known and parameter not in self._reported
        return bucket is not None or not has_come or is_foreign(parameter)
