"""The treatment of parameters that differ from the others: their ranks, and their ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from hadal.comm.expert_groups import expert_groups
from hadal.config import Config
from hadal.config.report import written
from hadal.engine.policies import partition_of
from hadal.engine.tiers import Offloading
from hadal.engine.topology import expert_sharing_of
from hadal.errors import ConfigError, Fault
from hadal.zero.grouping import Treatment
from hadal.zero.sharing import Sharing, Tied

Named = Iterable[tuple[str, nn.Parameter]]
_GROUPS = "zero_optimization.groups"


def expert_group_of(parameter: nn.Parameter) -> str | None:
    """Return the name of an expert parameter's groups, by DeepSpeed's marks; None: it is dense."""
    if getattr(parameter, "allreduce", True):
        return None
    found: str | None = getattr(parameter, "group_name", None)
    return found


class Treatments:
    """Chooser of each parameter's ranks and partition.

    Experts that are distributed over ranks are shared by fewer ranks than dense parameters;
    `zero_optimization.groups` sets a lower ZeRO stage for some modules.
    """

    def __init__(
        self, model: nn.Module, config: Config, sharing: Sharing, offloading: Offloading
    ) -> None:
        self._model = model
        self._config = config
        self._offloading = offloading
        self._sharings: dict[str | None, Sharing] = {None: sharing}
        """Keyed by the name of an experts' group; None: dense parameters."""
        self.usual = self._treatment(sharing, None)
        """The treatment of most parameters."""

    def sharing_of(self, parameter: nn.Parameter) -> Sharing:
        """Return the ranks that hold a parameter. All ranks must call it, in the same order.

        Raises:
            UsageError: it belongs to groups of experts that do not exist.
            ConfigError: model states are shared in a way that is not built for experts.
        """
        tied: Tied | None = getattr(parameter, "hadal_tied", None)
        if tied is not None:
            return replace(self._sharings[None], tied=tied)
        name = expert_group_of(parameter)
        if name is not None and name not in self._sharings:
            dense, groups = self._sharings[None], expert_groups(name)
            self._sharings[name] = expert_sharing_of(self._config, groups, dense)
        return self._sharings[name]

    def of(self, named: Named) -> dict[nn.Parameter, Treatment]:
        """Return the treatments that differ from the usual one."""
        found, modules = {}, self._modules()
        for name, parameter in named:
            treatment = self._treatment(self.sharing_of(parameter), self._stage_of(name, modules))
            if treatment != self.usual:
                found[parameter] = treatment
        return found

    def _modules(self) -> dict[str, int]:
        """Return the modules that `zero_optimization.groups` names, with the number of the group.

        Raises:
            ConfigError: a pattern matches no module.
        """
        found: dict[str, int] = {}
        faults = []
        for number, group in enumerate(self._config.zero_optimization.groups):
            for pattern in group.modules:
                mine = [n for n, m in self._model.named_modules() if n and _matches(pattern, n, m)]
                found |= {name: number for name in mine if name not in found}
                if not mine:
                    faults.append(Fault(f"{_GROUPS}[{number}].modules", _unmatched(pattern)))
        if faults:
            raise ConfigError(written("the configuration", tuple(faults)), tuple(faults))
        return found

    def _stage_of(self, name: str, modules: Mapping[str, int]) -> int | None:
        """Return the stage of a parameter's first group; None if it is in none."""
        path = name.split(".")
        above = (".".join(path[:count]) for count in range(1, len(path)))
        numbers = [modules[module] for module in above if module in modules]
        groups = self._config.zero_optimization.groups
        return groups[min(numbers)].stage if numbers else None

    def _treatment(self, sharing: Sharing, stage: int | None) -> Treatment:
        partition = partition_of(
            self._config,
            sharing.ranks.size,
            stage,
            keeps_weights_off=self._offloading.keeps_weights_off,
            lands_gradients=self._offloading.lands_gradients,
        )
        return Treatment(partition, sharing)


def _matches(pattern: str, name: str, module: nn.Module) -> bool:
    """Return whether a module has this class, or a full name that ends like the pattern."""
    if type(module).__name__ == pattern:
        return True
    wanted = pattern.split(".")
    parts = name.split(".")[-len(wanted) :]
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _unmatched(pattern: str) -> str:
    return (
        f"{pattern!r} matches no module: set a class's name, or the end of full names, in which *"
        ' is any part between two dots, such as "mlp.experts.*"'
    )
