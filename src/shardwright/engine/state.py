"""What the library knows about this process, in one place that scripts read as `smp.state`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from shardwright.config.schema import Config

StateDict: TypeAlias = dict[str, Any]
Translate: TypeAlias = Callable[[StateDict], StateDict]


@dataclass
class ModuleManager:
    """Knowledge about the wrapped model's modules.

    translate_functions: one (ours to Hugging Face, Hugging Face to ours) pair for each replaced family.
    """

    translate_functions: list[tuple[Translate, Translate]] = field(default_factory=list)


class State:
    """The state of this process. `engine` fills it in, clients read it.

    model, optimizer: the wrappers created last, or None.
    param_index_to_name_tp_group, param_name_to_index_tp_group: for each tp_rank of this group, optimizer
        parameter index <-> name.
    """

    def __init__(self) -> None:
        self.module_manager = ModuleManager()
        self.model: Any = None
        self.optimizer: Any = None
        self.param_index_to_name_tp_group: list[dict[int, str]] = []
        self.param_name_to_index_tp_group: list[dict[str, int]] = []

    @property
    def cfg(self) -> Config:
        """The resolved configuration.

        Raises: NotInitializedError before `smp.init`.
        """
        from shardwright.topology import context

        return context.world().config


state = State()
