"""The base of distributed modules: built from global sizes, holding this rank's slices.

Names and full shapes of parameters are those of the plain model in both modes; what part of a parameter a
rank holds is said by `shard_specs`. Nothing is marked on tensors.

Note [Fresh weights]: a fresh parameter is drawn whole, from a stream of its own, and then sliced. The seed of
the stream is one number drawn from torch's generator, that of tp rank 0 for all tp ranks. So initial weights
don't depend on the tp degree, slices differ, replicas agree, and the sequence of numbers drawn is the same
for every degree.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Union

import torch
from torch import Tensor, nn

from shardwright.errors import ConfigError, ShapeError
from shardwright.sharding.slices import Units
from shardwright.sharding.spec import ShardSpec
from shardwright.topology import context
from shardwright.transport import collectives, differentiable

Draw = Callable[[Tensor, torch.Generator], object]
"""Fills a whole CPU tensor with initial values, drawing from the generator."""
Init = Union[Draw, float]  # noqa: UP007 - evaluated when this is imported
"""How a parameter begins: drawn, or one value everywhere."""

_SEED_BITS = 62
_SCALED = "_shardwright_scaled_batch"
_initialise = True


class DistributedModule(nn.Module):
    """A module whose parameters are slices, one on each tensor parallel rank.

    Called by: every rank of the tp group, in the same order (construction and forward).
    indivisible: its forward contains collectives, so the partitioner must not cut it; containers of
        distributed modules have only glue in their forward.
    scaled_batch: its parameters act on the samples of the whole tp group, so gradients are reduced over rdp;
        otherwise on this rank's own samples, and gradients are reduced over dp. Holds for its subtree, until a
        module in it says otherwise.
    """

    indivisible: ClassVar[bool] = False
    scaled_batch: bool = True

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Return how this module's own (direct) parameters and buffers are cut, by name; only those cut."""
        return dict(self.__dict__.get("_shard_specs", {}))

    @classmethod
    def accepted_arguments(cls) -> frozenset[str]:
        """Return the names of the constructor's arguments: what `tensor_parallelism(**kwargs)` may set."""
        return frozenset(inspect.signature(cls).parameters)

    def add_parameter(
        self,
        name: str,
        full_shape: Sequence[int],
        init: Init,
        dim: int | None = None,
        units: Units = Units(),  # noqa: B008 - frozen
    ) -> None:
        """Create a parameter of which this rank holds a slice; see Note [Fresh weights].

        dim: cut along it, evenly, but never through one of `units`; None for a replicated parameter.
        """
        rank, num_ranks = tp_rank(), tp_size()
        spec = ShardSpec.replicated(full_shape) if dim is None else ShardSpec.even(full_shape, dim, num_ranks, units)
        self.register_parameter(name, nn.Parameter(fresh(spec, rank, init)))
        self.describe(name, spec)

    def describe(self, name: str, spec: ShardSpec) -> None:
        """Take note how a direct parameter or buffer is cut."""
        if spec.dim is not None:
            self.__dict__.setdefault("_shard_specs", {})[name] = spec


def act_on_scaled_batch(module: nn.Module) -> None:
    """Take note that the parameters of a plain module and of its subtree act on the samples of the whole tp group.

    Called by: replacement, for a model of which some modules are distributed, and the others see what they see.
    """
    module.__dict__[_SCALED] = True


def scaled_batch_of(module: nn.Module, above: bool | None) -> bool | None:
    """Return whether a module's parameters act on the scaled batch, where `above` holds for the module around it."""
    if isinstance(module, DistributedModule):
        return module.scaled_batch
    return True if _SCALED in vars(module) else above


def tp_size() -> int:
    """Return the tensor parallel degree; 1 before `init`, so that modules can be built without it."""
    return differentiable.size()


def tp_rank() -> int:
    """Return this rank's own place in its tp group, whatever the script's view is."""
    return differentiable.position()


def keeps_hidden_sliced() -> bool:
    """Return whether the mode is `optimize="memory"`, in which hidden states stay sliced over the ranks."""
    return context.is_initialized() and context.world().config.optimize == "memory"


def prescaled_batch() -> bool:
    """Return whether tp ranks bring the same samples."""
    return context.is_initialized() and context.world().config.prescaled_batch


def parameter_dtype() -> torch.dtype:
    """Return the dtype in which distributed modules create parameters: float16 with `fp16_params`."""
    if context.is_initialized() and context.world().config.fp16_params:
        return torch.float16
    return torch.get_default_dtype()


def check_divisible(name: str, size: int, what: str = "tensor_parallel_degree") -> None:
    """Raise ConfigError if a size can't be shared equally by the tp ranks.

    Called by: constructors, so that a bad degree shows when the model is wrapped, not in forward.
    """
    if size % tp_size():
        raise ConfigError(
            f"'{name}' is {size}, expected a multiple of '{what}' ({tp_size()})",
            remedy=f"choose a degree that divides {size}, or leave this module undistributed",
        )


# -- fresh weights -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_initial_values() -> Iterator[None]:
    """Parameters created inside have storage but no values: for modules whose weights are loaded at once.

    Called by: replacement, around the construction of a module that gets its weights by `load_full`.
    Nothing is drawn and nothing is sent.
    """
    global _initialise
    before, _initialise = _initialise, False
    try:
        yield
    finally:
        _initialise = before


def fresh(spec: ShardSpec, rank: int, init: Init) -> Tensor:
    """Return this rank's part of a fresh tensor; see Note [Fresh weights].

    Called by: every rank of the tp group. Collectives: one broadcast of the seed. On the meta device, or
    within `without_initial_values`: none, and no values.
    """
    device, dtype = torch.get_default_device(), parameter_dtype()
    if device.type == "meta" or not _initialise:
        return torch.empty(spec.local_shape(rank), dtype=dtype)
    if isinstance(init, float):
        return torch.full(spec.local_shape(rank), init, dtype=dtype)
    generator = torch.Generator("cpu")
    generator.manual_seed(_common_seed())
    with torch.no_grad():
        full = torch.empty(spec.full_shape, device="cpu")
        init(full, generator)
        return spec.slice_of(full, rank).to(device, dtype, copy=True, memory_format=torch.contiguous_format)


def _common_seed() -> int:
    seed = torch.randint(1 << _SEED_BITS, (1,), device="cpu")
    if tp_size() > 1:
        collectives.broadcast_tensor(seed, "tp")
    return int(seed.item())


def normal(std: float) -> Draw:
    """Normal numbers around zero."""
    return lambda tensor, generator: tensor.normal_(0.0, std, generator=generator)


def uniform(bound: float) -> Draw:
    """Numbers from -bound to bound."""
    return lambda tensor, generator: tensor.uniform_(-bound, bound, generator=generator)


# -- whole weights in and out ------------------------------------------------------------------------------


def spec_of(root: nn.Module) -> dict[str, ShardSpec]:
    """Return how every cut parameter and buffer of a tree is cut, by full name; all names of a tied one."""
    found: dict[str, ShardSpec] = {}
    by_tensor: dict[int, ShardSpec] = {}
    for prefix, module in root.named_modules(remove_duplicate=False):
        if isinstance(module, DistributedModule):
            for name, spec in module.shard_specs().items():
                found[f"{prefix}.{name}" if prefix else name] = spec
                tensor = module._parameters.get(name)
                if tensor is not None:
                    by_tensor[id(tensor)] = spec
    for name, parameter in root.named_parameters(remove_duplicate=False):
        if name not in found and id(parameter) in by_tensor:
            found[name] = by_tensor[id(parameter)]
    return found


def load_full(module: nn.Module, full: Mapping[str, Tensor], *, strict: bool = True) -> None:
    """Copy this rank's slices of full tensors into a module.

    full: by name relative to `module`. A tied parameter may be given under any of its names.
    Called by: any rank, alone. Collectives: none.
    Raises: ShapeError naming a tensor of another shape; with `strict` KeyError naming what is missing or
        unknown.
    """
    specs = spec_of(module)
    rank = tp_rank()
    targets = _named_tensors(module)
    filled: set[int] = set()
    with torch.no_grad():
        for name, tensor in targets.items():
            if name not in full or id(tensor) in filled:
                continue
            spec = specs.get(name) or ShardSpec.replicated(tensor.shape)
            try:
                tensor.copy_(spec.slice_of(full[name], rank))
            except ShapeError as error:
                raise ShapeError(f"'{name}': {error.what}") from None
            filled.add(id(tensor))
    if strict:
        missing = [name for name, tensor in targets.items() if id(tensor) not in filled]
        unknown = [name for name in full if name not in targets]
        if missing or unknown:
            raise KeyError(f"missing: {missing}; unknown: {unknown}")


def gather_full(
    source: nn.Module | Mapping[str, Tensor],
    specs: Mapping[str, ShardSpec] | None = None,
    *,
    to: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """Return full tensors by name: of a module's parameters and persistent buffers, or of named tensors.

    specs: how named tensors are cut (names without one are whole). Also works for gradients and optimizer
        state, which are cut like their parameters.
    to: where the full tensors go, one by one.
    Called by: every rank of the tp group, with the same names in the same order.
    Collectives: one all-gather for each cut tensor.
    """
    if isinstance(source, nn.Module):
        specs = spec_of(source)
        source = _named_tensors(source)
    return {name: _whole(tensor.detach(), (specs or {}).get(name), to) for name, tensor in source.items()}


def _whole(tensor: Tensor, spec: ShardSpec | None, to: torch.device | str | None) -> Tensor:
    if spec is None or spec.dim is None or tp_size() == 1:
        return tensor.to(to or tensor.device, copy=True)
    return spec.merge(_parts(tensor, spec)).to(to or tensor.device)


def _parts(tensor: Tensor, spec: ShardSpec) -> list[Tensor]:
    """All ranks' parts. Uneven ones travel padded, for all-gather wants equal shapes."""
    assert spec.dim is not None
    lengths = [stop - start for start, stop in spec.ranges]
    longest = max(lengths)
    if tensor.shape[spec.dim] < longest:
        padded = tensor.new_zeros((*tensor.shape[: spec.dim], longest, *tensor.shape[spec.dim + 1 :]))
        padded.narrow(spec.dim, 0, tensor.shape[spec.dim]).copy_(tensor)
        tensor = padded
    gathered = collectives.all_gather(tensor, "tp")
    return [part.narrow(spec.dim, 0, length) for part, length in zip(gathered, lengths, strict=True)]


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    named: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    persistent: dict[str, Any] = module.state_dict(keep_vars=True)
    named.update((name, buffer) for name, buffer in module.named_buffers(remove_duplicate=False) if name in persistent)
    return named
