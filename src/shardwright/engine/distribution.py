"""What of a wrapped model is cut over tp ranks, and on whose samples each parameter acts.

Names are those of the wrapped module after modules were replaced. With tensor_parallel_degree 1 nothing is cut.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shardwright.data_parallel.optimizer_state import Piece
from shardwright.errors import UsageError
from shardwright.sharding.spec import ShardSpec
from shardwright.tensor_parallel.module import (
    DistributedModule,
    gather_full,
    scaled_batch_of,
    spec_of,
    tp_rank,
    tp_size,
)


class Distribution:
    """The slices of one model on this rank.

    specs: how every cut parameter and buffer is cut, by each of its names.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        specs = spec_of(root)
        strange = [name for name, spec in specs.items() if spec.dim is not None and len(spec.ranges) != tp_size()]
        if strange:
            raise UsageError(
                f"'{strange[0]}' is cut for {len(specs[strange[0]].ranges)} tp ranks, but tensor_parallel_degree is"
                f" {tp_size()}: its module was built before smp.init()",
                remedy="build smp.nn modules after smp.init()",
            )
        self.specs: dict[str, ShardSpec] = specs if tp_size() > 1 else {}
        self._axis_of: dict[int, ShardSpec] = {}
        self._scaled: set[int] = set()
        self._inside: dict[int, bool] = {}
        self._below: set[int] = set()
        for name, parameter in root.named_parameters(remove_duplicate=False):
            if name in self.specs:
                self._axis_of[id(parameter)] = self.specs[name]
        self._follow(root, None, False)
        if tp_size() > 1:
            self._check_ties()

    def _follow(self, module: nn.Module, above: bool | None, below: bool) -> None:
        """Learn for each module whether its parameters act on the scaled batch; None outside of distributed ones
        and of models with some in them that act on it as a whole.

        below: it is below a distributed module.
        """
        if id(module) in self._inside:
            return
        below = below or isinstance(module, DistributedModule)
        if below:
            self._below.add(id(module))
        scaled = scaled_batch_of(module, above)
        if scaled is not None:
            self._inside[id(module)] = scaled
            if scaled:
                self._scaled.update(id(p) for p in module._parameters.values() if p is not None)
        for child in module._modules.values():
            if child is not None:
                self._follow(child, scaled, below)

    def _check_ties(self) -> None:
        """A parameter counts as acting on the scaled batch only if it does so wherever it is used."""
        for module in self._root.modules():
            if not self._inside.get(id(module), False):
                self._scaled.difference_update(id(p) for p in module._parameters.values() if p is not None)

    @property
    def is_cut(self) -> bool:
        """Does a rank hold less than its stage's whole tensors?"""
        return bool(self.specs)

    # ------------------------------------------------------------------ questions

    def modules(self) -> Iterator[nn.Module]:
        """Distributed modules."""
        return (module for module in self._root.modules() if isinstance(module, DistributedModule))

    def spec(self, parameter: Tensor) -> ShardSpec | None:
        """How a parameter is cut; None for a whole one."""
        return self._axis_of.get(id(parameter))

    def is_cut_buffer(self, buffer: Tensor) -> bool:
        """Is this buffer a slice?"""
        return any(found is buffer and name in self.specs for name, found in self._root.named_buffers())

    def is_scaled(self, parameter: Tensor) -> bool:
        """Does a parameter act on the samples of the whole tp group?"""
        return id(parameter) in self._scaled

    def is_scaled_buffer(self, buffer: Tensor) -> bool:
        """Does a buffer belong to a module that acts on the samples of the whole tp group?"""
        return any(
            self._inside.get(id(module), False) and any(b is buffer for b in module._buffers.values())
            for module in self._root.modules()
        )

    def is_inside(self, module: nn.Module) -> bool:
        """Is it a distributed module, or below one?"""
        return id(module) in self._below

    # ------------------------------------------------------------------ whole and cut

    def whole_shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        """The shape of the tensor of this name in the unsplit model."""
        return self.specs[name].full_shape if name in self.specs else tuple(tensor.shape)

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """All ranks' parts joined; a tensor that isn't cut comes back as it is.

        Also for gradients and optimizer state, which are cut like their parameters.
        Called by: every rank of a tp group, with the same names in the same order. Collectives: one all-gather if
        the tensor is cut.
        """
        if name not in self.specs:
            return tensor
        return gather_full({name: tensor}, {name: self.specs[name]})[name]

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor, as a view. No communication."""
        return self.specs[name].slice_of(whole, tp_rank()) if name in self.specs else whole

    def offset(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        """Where this rank's part begins in the whole tensor."""
        spec = self.specs.get(name)
        if spec is None or spec.dim is None:
            return (0,) * tensor.dim()
        return (*(0,) * spec.dim, spec.ranges[tp_rank()][0], *(0,) * (tensor.dim() - spec.dim - 1))

    def counted_here(self, parameter: Tensor, gradient: Tensor, piece: Piece | None = None) -> Tensor | None:
        """The part of a gradient that this rank counts in a norm over the tp group; None for nothing.

        Whole parameters count on tp rank 0. Of slices that overlap, an element counts on the first rank that has it.
        piece: what of the parameter the gradient is of, if not all.
        """
        if tp_size() == 1:
            return gradient
        spec = self.spec(parameter)
        if spec is None or spec.dim is None:
            return gradient if tp_rank() == 0 else None
        start, stop = spec.ranges[tp_rank()]
        earlier = spec.ranges[: tp_rank()]
        if all(b <= start or stop <= a for a, b in earlier):
            return gradient
        kept = torch.ones(stop - start, dtype=torch.bool)
        for a, b in earlier:
            kept[max(0, a - start) : max(0, b - start)] = False
        if piece is not None:
            shape = [1] * parameter.dim()
            shape[spec.dim] = -1
            return gradient[piece.cut(kept.view(shape).expand(parameter.shape)).to(gradient.device)]
        rows = kept.nonzero().flatten().to(gradient.device)
        return gradient.index_select(spec.dim, rows) if len(rows) else None
