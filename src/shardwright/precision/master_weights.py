"""fp32 copies of half precision tensors: the optimizer updates them, the model computes with their roundings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

HALF = (torch.float16, torch.bfloat16)


class MasterWeights:
    """Masters of what an optimizer's groups hold, group by group.

    groups: the tensors that get gradients: parameters, or any leaves that share the parameters' memory. A half
    precision tensor that requires grad gets a master; others stay what they are, and stand for themselves.
    halves, masters, others: per group, the half precision tensors, their masters in the same order, and fp32 tensors.

    Per optimizer step: `take_gradients`, what changes the masters' gradients, the optimizer's own step on the masters,
    `write_back`. Nothing here communicates.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]]) -> None:
        self._master_of: dict[int, nn.Parameter] = {}
        self._half_of: dict[int, Tensor] = {}
        self.halves: list[list[Tensor]] = []
        self.masters: list[list[nn.Parameter]] = []
        self.others: list[list[Tensor]] = []
        for number, group in enumerate(groups):
            self.held(group, number)

    def held(self, tensors: Sequence[Tensor], group: int) -> list[Tensor]:
        """What stands in the optimizer for these tensors of a group; masters are made for those that are new."""
        while len(self.halves) <= group:
            self.halves.append([])
            self.masters.append([])
            self.others.append([])
        return [self._stand_in(t, group) for t in tensors]

    def _stand_in(self, tensor: Tensor, group: int) -> Tensor:
        if id(tensor) in self._half_of:  # a master itself
            return tensor
        if id(tensor) in self._master_of:
            return self._master_of[id(tensor)]
        if tensor.dtype in HALF and tensor.requires_grad:
            master = nn.Parameter(tensor.detach().float())
            self._master_of[id(tensor)] = master
            self._half_of[id(master)] = tensor
            self.halves[group].append(tensor)
            self.masters[group].append(master)
            return master
        if tensor.dtype not in HALF and all(tensor is not t for t in self.others[group]):
            self.others[group].append(tensor)
        return tensor

    def half_of(self, held: Tensor) -> Tensor:
        """The tensor that a master is of; any other stands for itself."""
        return self._half_of.get(id(held), held)

    def pairs(self) -> Iterator[tuple[Tensor, nn.Parameter]]:
        """(half precision tensor, its master), over all groups."""
        for halves, masters in zip(self.halves, self.masters, strict=True):
            yield from zip(halves, masters, strict=True)

    @torch.no_grad()
    def take_gradients(self, scale: float, *, check: bool) -> bool:
        """Copy the gradients to the masters, divided by the loss scale; fp32 tensors' own are divided in place.

        check: whether to look for values that are not finite. Returns: were there any (here).
        """
        for half, master in self.pairs():
            if half.grad is None:
                master.grad = None
            elif master.grad is None or half.grad.is_sparse:
                master.grad = half.grad.detach().to(torch.float32, copy=True)
            else:
                master.grad.copy_(half.grad)
        if scale == 1.0 and not check:
            return False
        return _unscale([g for g in self._gradients() if g.numel()], 1.0 / scale)

    def _gradients(self) -> Iterator[Tensor]:
        for _, master in self.pairs():
            if master.grad is not None:
                yield master.grad
        for group in self.others:
            yield from (t.grad for t in group if t.grad is not None)

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into their tensors."""
        pairs = list(self.pairs())
        if pairs:
            torch._foreach_copy_([half for half, _ in pairs], [master for _, master in pairs])

    @torch.no_grad()
    def follow(self) -> None:
        """Masters take over tensors that were changed from outside; where one still rounds to its tensor, it stays."""
        for half, master in self.pairs():
            changed = master.to(half.dtype) != half
            if changed.any():
                master.copy_(torch.where(changed, half.float(), master))

    @torch.no_grad()
    def reload(self) -> None:
        """Masters become equal to their tensors."""
        for half, master in self.pairs():
            master.copy_(half)

    def clear_gradients(self) -> None:
        """Masters hold no gradient."""
        for _, master in self.pairs():
            master.grad = None


def _unscale(gradients: list[Tensor], factor: float) -> bool:
    """Multiply in place; was any value not finite before?"""
    found: dict[torch.device, Tensor] = {}
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        dense = gradient._values() if gradient.is_sparse else gradient
        groups.setdefault((dense.device, dense.dtype), []).append(dense)
    for (device, _), members in groups.items():
        flag = found.setdefault(device, torch.zeros(1, device=device))
        inverse = torch.full((1,), factor, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(members, flag, inverse)
    return any(bool(flag) for flag in found.values())
