"""The weights of a distributed module that takes the place of another: carried over, or fresh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
import xxhash
from torch import Tensor, nn

from shardwright.tensor_parallel.module import load_full, spec_of, tp_size, without_initial_values
from shardwright.tensor_parallel.registry import Recipe
from shardwright.tensor_parallel.scope import Mark
from shardwright.transport import collectives
from shardwright.transport.differentiable import only_shapes_count


class Weights:
    """Building the distributed version of a module with the weights that it should have.

    They are those of the original, except where it has none worth keeping: where parameters are on the meta device,
    where the script switched off their initialisation (unless they were loaded since), or where no way is known
    to translate names.
    """

    def __init__(self, module: nn.Module, recipe: Recipe, mark: Mark) -> None:
        self._module = module
        self._recipe = recipe
        self._mark = mark

    def build(self) -> tuple[nn.Module, str]:
        """The new module, and why its weights are fresh ("" if they were carried over)."""
        fresh = self._reason_for_fresh()
        if not fresh:
            made = self._construct(blank=True)
            state: dict[str, Tensor] = {
                n: t.detach() for n, t in self._module.state_dict(keep_vars=True).items() if isinstance(t, Tensor)
            }
            _level(state)
            if self._recipe.renaming is not None:
                full = self._recipe.renaming.to_distributed(state)
                load_full(made, full)
                self._carry_flags(made)
                return made, ""
            fresh = _misfit(made, state)
            if not fresh:
                load_full(made, state)
                self._carry_flags(made)
                return made, ""
        made = self._construct(blank=False)
        self._carry_flags(made)
        return made, fresh

    def _reason_for_fresh(self) -> str:
        tensors = list(self._module.parameters())
        # With delayed initialisation a tensor says "cpu": what is done to it is noted, and done where it is kept.
        if any(tensor.device.type == "meta" for tensor in tensors):
            return "the original's are on the meta device"
        if self._mark.blank and not _was_loaded(self._module):
            return "the script switched off the original's initialisation"
        return ""

    def _construct(self, *, blank: bool) -> nn.Module:
        tensors = list(self._module.parameters())
        device = next((t.device for t in tensors if t.device.type not in ("cpu", "meta")), torch.device("cpu"))
        if only_shapes_count():
            device = torch.device("meta")
        dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.get_default_dtype())
        with _default_dtype(dtype), device, without_initial_values() if blank else nullcontext():
            return self._recipe.dist_class(*self._recipe.args, **self._recipe.kwargs)

    def _carry_flags(self, made: nn.Module) -> None:
        """Frozen weights stay frozen."""
        flags = {name: p.requires_grad for name, p in self._module.named_parameters(remove_duplicate=False)}
        if all(flags.values()):
            return
        if not any(flags.values()):
            made.requires_grad_(False)
            return
        state = self._module.state_dict(keep_vars=True)
        marks = {
            n: torch.full((), float(flags.get(n, False)), device="cpu").expand(t.shape)
            for n, t in state.items()
            if isinstance(t, Tensor)
        }
        if self._recipe.renaming is not None:
            marks = self._recipe.renaming.to_distributed(dict(marks))
        for name, parameter in made.named_parameters(remove_duplicate=False):
            if name in marks:
                parameter.requires_grad_(bool((marks[name] > 0).any()))


def _was_loaded(module: nn.Module) -> bool:
    """Has transformers loaded weights into any part of the module? It leaves this attribute then."""
    named = (*module.modules(), *module.parameters())
    return any(bool(vars(found).get("_is_hf_initialized", False)) for found in named)


def _misfit(made: nn.Module, state: Mapping[str, Tensor]) -> str:
    """Why a state dict can't be loaded by equal names; "" if it can."""
    specs = spec_of(made)
    wanted = {
        n: specs[n].full_shape if n in specs else tuple(t.shape)
        for n, t in made.state_dict(keep_vars=True).items()
        if isinstance(t, Tensor)
    }
    given = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if given == wanted:
        return ""
    odd = sorted({*(given.items() - wanted.items()), *(wanted.items() - given.items())})
    return f"no translation of names is known, and '{odd[0][0]}' {list(odd[0][1])} differs"


def _level(state: Mapping[str, Tensor]) -> None:
    """Make the weights equal on all tp ranks: those of tp rank 0, if they aren't equal already. Delayed ones are.

    Called by: every rank of a tp group, with the same names in the same order.
    """
    if tp_size() == 1 or not state:
        return
    present = [tensor for tensor in state.values() if tensor.untyped_storage().device.type != "meta"]
    hashes = torch.tensor([_hash(tensor) for tensor in present], dtype=torch.int64)
    everyone = torch.stack(list(collectives.all_gather(hashes, "tp")))
    differs = (everyone != everyone[0]).any(dim=0).tolist()
    for tensor, different in zip(present, differs, strict=True):
        if different:
            value = tensor.contiguous()
            collectives.broadcast_tensor(value, "tp")
            if value is not tensor:
                tensor.copy_(value)


def _hash(tensor: Tensor) -> int:
    data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    return int.from_bytes(xxhash.xxh3_64_digest(data.numpy().data), "big", signed=True)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
