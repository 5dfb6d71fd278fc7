"""What the library knows about this process, in one place that scripts read as `smp.state`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from shardwright.config.schema import Config
from shardwright.tensor_parallel.registry import Renaming
from shardwright.topology import context

if TYPE_CHECKING:
    from shardwright.engine.model import DistributedModel

StateDict: TypeAlias = dict[str, Any]
Translate: TypeAlias = Callable[[StateDict], StateDict]


@dataclass
class ModuleManager:
    """Knowledge about the wrapped model's modules.

    translate_functions: one (ours to Hugging Face, Hugging Face to ours) pair for each replaced family.
    renamings: for each replaced module, where it is ("" or "path."), and the table of its weights' names.
    """

    translate_functions: list[tuple[Translate, Translate]] = field(default_factory=list)
    renamings: list[tuple[str, Renaming]] = field(default_factory=list)


class State:
    """The state of this process. `engine` fills it in, clients read it.

    param_index_to_name_tp_group, param_name_to_index_tp_group: for each tp_rank of this group, optimizer
        parameter index <-> name.
    """

    def __init__(self) -> None:
        self._module_manager = ModuleManager()
        self._managed_world: object = None
        self.param_index_to_name_tp_group: list[dict[int, str]] = []
        self.param_name_to_index_tp_group: list[dict[str, int]] = []
        self._model: DistributedModel | None = None
        self._optimizer: Any = None
        self._world: object = None

    @property
    def cfg(self) -> Config:
        """The resolved configuration.

        Raises: NotInitializedError before `smp.init`.
        """
        return context.world().config

    @property
    def module_manager(self) -> ModuleManager:
        """What is known of the modules of this world's model."""
        groups = context.world().groups if context.is_initialized() else None
        if groups is not self._managed_world:
            self._module_manager, self._managed_world = ModuleManager(), groups
        return self._module_manager

    @property
    def model(self) -> DistributedModel | None:
        """The model wrapped last; None before that, and after `smp.shutdown`."""
        return self._model if self._is_current() else None

    @property
    def optimizer(self) -> Any:
        """The optimizer wrapped last, for this model; None before that."""
        return self._optimizer if self._is_current() else None

    def model_wrapped(self, model: DistributedModel) -> None:
        """Remember the model, without an optimizer yet."""
        self._model, self._optimizer, self._world = model, None, context.world().groups

    def optimizer_wrapped(self, optimizer: Any) -> None:
        """Remember the optimizer of the present model."""
        self._optimizer = optimizer

    def _is_current(self) -> bool:
        return context.is_initialized() and self._world is context.world().groups


state = State()
