"""What a wrapped optimizer has besides with sharded data parallelism: built-in clipping, and what scripts of the original read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.data_parallel import shards
from shardwright.data_parallel.grad_norm import HeldGradient
from shardwright.engine.grad_clipping import clip, held_gradients, whole_norm
from shardwright.topology import context

if TYPE_CHECKING:
    from shardwright.engine.model import DistributedModel


class FullyShardedOptimizer:
    """Mixed in before `WrappedOptimizer`. Its groups hold pieces: this rank's rows of each parameter, flat; or masters of them.

    optimizer: a torch optimizer with the same groups and state; schedulers may use either.
    _global_grad_norm: the norm of all gradients before clipping, at the last step; 0.0 before the first.
    """

    _sw_model: DistributedModel
    _group_names: Callable[[], Sequence[Sequence[str]]]
    _sw_missing: Sequence[Sequence[tuple[int, Tensor]]] = ()
    param_groups: list[dict[str, Any]]
    _global_grad_norm: float = 0.0

    def _sw_before_update(self) -> None:
        """Clip by the norm of all gradients, as `sdp_gradient_clipping` says.

        Called by: `step()` on every rank, unless the step is skipped. Collectives: one all-reduce over the world.
        """
        limit = context.world().config.sdp_gradient_clipping
        model = self._sw_model
        gradients: Callable[[], Iterable[HeldGradient]] = getattr(self, "_sw_gradients", lambda: held_gradients(model))
        norm = clip(model, gradients(), limit, 2.0) if limit else whole_norm(model, gradients())
        self._global_grad_norm = float(norm)
        inner: Any = getattr(self, "optimizer", None)
        if isinstance(inner, torch.optim.Optimizer):
            inner._opt_called = True  # type: ignore[attr-defined]  # a scheduler on it asks

    def _sw_groups_settled(self) -> None:
        super()._sw_groups_settled()  # type: ignore[misc]
        self._sw_exchange()

    def _gather_pieces(self) -> None:
        super()._gather_pieces()  # type: ignore[misc]
        self._sw_exchange()

    def _sw_exchange(self) -> None:
        """What is missing here of the flat blocks. Collectives: see `shards.missing_elements`."""
        held, parameters = self._sw_held(), self._sw_parameters()
        self._sw_missing = shards.missing_elements(held, [shards.layout_of(p) for p in parameters])

    def _sw_held(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _sw_parameters(self) -> list[Any]:
        named = dict(self._sw_model._part.parameters())
        return [named[name] for group in self._group_names() for name in group]

    def _load_local(self, content: dict[str, Any]) -> None:
        super()._load_local(content)  # type: ignore[misc]
        inner: Any = getattr(self, "optimizer", None)
        if isinstance(inner, torch.optim.Optimizer):
            inner.state, inner.param_groups = self.state, self.param_groups  # type: ignore[attr-defined]

    @property
    def ds_param_shard_group(self) -> dist.ProcessGroup:
        """The process group of the ranks that share one copy of the parameters."""
        return context.world().groups.process_group("shard")

    @property
    def fp16_groups(self) -> list[list[torch.nn.Parameter]]:
        """Per group: the model's parameters, whose names `model.named_parameters()` knows."""
        return self._sw_by_group(self._sw_parameters())

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """Per group: this rank's flat blocks of its parameters (in half precision of the masters) back to back, in fp32.

        Each is padded to ceil(elements / degree). For reading: copies, made when it is read; nothing is communicated. Elements
        that other ranks hold are those after the last `optimizer.step()`.
        """
        groups = [[part.float() for part in group] for group in self._sw_flat_parts()]
        return [torch.cat(group) if group else torch.zeros(0) for group in groups]

    def _sw_flat_parts(self) -> list[list[Tensor]]:
        """Per group what lies in its flat tensor back to back, in the memory that holds it."""
        layouts = [shards.layout_of(p) for p in self._sw_parameters()]
        rows = zip(self._sw_held(), layouts, self._sw_missing, strict=True)
        blocks = self._sw_by_group([shards.flat_parts(*row) for row in rows])
        return [[part for block in group for part in block] for group in blocks]

    def _sw_by_group(self, items: list[Any]) -> list[list[Any]]:
        rest = iter(items)
        return [[next(rest) for _ in group["params"]] for group in self.param_groups]


def shards_everything() -> bool:
    """Is sharded data parallelism on?"""
    return context.world().table.degrees.sdp > 1
