"""Sharded data parallelism: PyTorch's `fully_shard` on this library's shard groups.

What is gathered together is a unit: each repeated block of the model (an element of its outermost module lists and
sequences), and the root with all the rest. A parameter that several units use belongs to the root, which is gathered as long
as the model's forward runs; tied weights so stay one parameter. Within a shard group gradients are reduced unit by unit, while
backward goes on, after every microbatch; what ranks of other shard groups and tp ranks add comes once, at the end
(`fully_sharded_reducer`). Nothing here divides, except float16: sums are sums until then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwright.data_parallel.registered_parameters import users_of
from shardwright.data_parallel.shards import is_shard
from shardwright.errors import NotBuiltError, UsageError
from shardwright.log import get_logger, rank_zero
from shardwright.topology import context
from shardwright.transport import collectives

_log = get_logger(__name__)

Named = tuple[str, nn.Parameter]

_NEEDED = ("set_reduce_scatter_unused_params", "set_force_sum_reduction_for_comms", "reset_iter_state")


def divided_by(dtype: torch.dtype) -> int:
    """What `fully_shard` divides gradients of shards by, on the way, so that sums of float16 don't overflow."""
    return context.world().table.degrees.sdp if dtype is torch.float16 else 1


class Unit:
    """One module whose parameters are gathered together.

    names: the parameters that it gathers, by their names in the whole model.
    """

    def __init__(self, module: nn.Module, homes: dict[str, tuple[nn.Module, str]], size: int) -> None:
        self.module: Any = module
        self.names = tuple(homes)
        self.size = size
        self._unwatched = homes

    def watch(self, called: Callable[[], None], arrived: Callable[[str], None]) -> None:
        """Call `called()` at every forward, and `arrived(name)` whenever a gathered parameter got a gradient.

        `fully_shard` gathers into the same tensors every time; they are there, and known, from the first forward on.
        """

        def after_gathering(module: nn.Module, args: Any) -> None:
            called()
            for name, (home, key) in list(self._unwatched.items()):
                gathered = home._parameters[key]
                if gathered is not None and gathered.requires_grad and not hasattr(gathered, "placements"):
                    gathered.register_post_accumulate_grad_hook(lambda _, name=name: arrived(name))
                    del self._unwatched[name]

        self.module.register_forward_pre_hook(after_gathering)


class FullySharded:
    """A model whose parameters are sharded over the shard group.

    Made by: every rank. Unit by unit parameters are prepared and sharded, so that no rank holds more than its shards and one
    whole unit beside what it came with.
    prepare: puts the named parameters on this rank's device and makes them equal on all ranks.
    units: the root is the first.   whole: names of parameters that stay whole, because they have no dims.
    max_live: at most so many elements gathered at one time, where that can be had (`sdp_max_live_parameters`).
    Raises: UsageError for a model that can't be sharded; NotBuiltError with a PyTorch that is too old.
    """

    def __init__(self, root: nn.Module, *, prepare: Callable[[Sequence[Named]], None], max_live: int) -> None:
        self._root: Any = root
        self._arrived: Callable[[str], None] = lambda name: None
        self._calls = 0
        named = dict(root.named_parameters())
        self.whole = tuple(name for name, p in named.items() if p.dim() == 0)
        owner = _owners(root, named)
        modules = [root, *dict.fromkeys(m for m in owner.values() if m is not root)]
        for module in modules:
            _check_dtypes(module, [n for n, m in owner.items() if m is module], named)
        sizes = {name: p.numel() for name, p in named.items()}
        for module in modules:
            mine = [(n, named[n]) for n, m in owner.items() if m is module]
            prepare(mine)
            for _, parameter in mine:
                parameter.data = parameter.data.contiguous()
            self._shard(module, {id(p) for _, p in mine})
            for name, parameter in mine:
                if name not in self.whole:  # others may hold on to it
                    parameter.data = parameter.data.new_empty(0)
        homes = _homes(root)
        self.units = [
            Unit(
                module,
                {n: homes[n] for n, m in owner.items() if m is module and n not in self.whole},
                sum(sizes[n] for n, m in owner.items() if m is module),
            )
            for module in modules
        ]
        self.parameters = dict(root.named_parameters())
        from shardwright.data_parallel.sharded_parameter import describe

        describe(self.parameters.values())
        self.refresh_descriptions()
        for name in self.whole:
            if self.parameters[name].requires_grad:
                self.parameters[name].register_hook(lambda _, name=name: self._arrived(name))
        for index, unit in enumerate(self.units):
            unit.watch(functools.partial(self._note_call, index), lambda name: self._arrived(name))
        self._limit(max_live)

    def on_gradient(self, arrived: Callable[[str], None]) -> None:
        """Call `arrived(name)` for each gradient that autograd makes, before `fully_shard` or autograd adds it to `.grad`."""
        self._arrived = arrived

    def _note_call(self, index: int) -> None:
        self._calls = hash((self._calls, index))

    def check_calls(self) -> None:
        """Raise UsageError if ranks of a shard group have called different units: what one gathers all must send.

        Called by: every rank of a shard group, from time to time. Collectives: one all-reduce of two numbers.
        Units of unequal sizes would have stopped the program; of equal ones each rank would have got the other's weights.
        """
        mine = self._calls >> 2
        both = torch.tensor([mine, -mine])
        collectives.all_reduce(both, "shard", op="max")
        self._calls = 0
        if both[0] != -both[1]:
            raise UsageError(
                "ranks of a shard group have called different blocks of the model, or in another order, but with sharded data"
                " parallelism every rank takes part in gathering each block",
                where=context.world().describe(),
                remedy="call the same blocks on every rank: no branches on a rank's own data around them",
            )

    def _shard(self, module: nn.Module, mine: set[int]) -> None:
        """Shard the parameters with these ids, which lie in `module`. Units may be sharded in any order."""
        from torch.distributed.fsdp import fully_shard

        others = {p for p in module.parameters() if id(p) not in mine or p.dim() == 0}
        fully_shard(module, mesh=context.world().groups.shard_mesh, ignored_params=others)
        unit: Any = module
        missing = [name for name in _NEEDED if not hasattr(unit, name)]
        if missing:
            raise NotBuiltError(
                f"'sharded_data_parallel_degree' needs a PyTorch whose fully_shard has {', '.join(missing)};"
                f" this is {torch.__version__}",
                remedy="install PyTorch 2.13 or later",
            )
        halves = any(p.dtype is torch.float16 and is_shard(p) for p in module.parameters())
        unit.set_gradient_divide_factor(float(divided_by(torch.float16 if halves else torch.float32)))
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_reduce_scatter_unused_params(True)

    def _limit(self, max_live: int) -> None:
        """Keep backward from gathering the next unit early where that would exceed the limit."""
        root, blocks = self.units[0].size, sorted((u.size for u in self.units[1:]), reverse=True)
        if root + sum(blocks[:1]) > max_live and rank_zero():
            _log.warning(
                "'sdp_max_live_parameters' is %d, but the largest block and what lies outside of blocks have %d elements,"
                " which are gathered together",
                max_live,
                root + sum(blocks[:1]),
            )
        if root + sum(blocks[:2]) > max_live:
            for unit in self.units[1:]:
                unit.module.set_modules_to_backward_prefetch([unit.module])  # itself: nothing that isn't there

    def refresh_descriptions(self) -> None:
        """Weights have changed: what scripts read off the parameters follows, see `sharded_parameter.refresh`."""
        from shardwright.data_parallel import sharded_parameter

        sharded_parameter.refresh(list(self.parameters.values()))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the model's forward. Without gradients nothing stays gathered afterwards.

        Raises: UsageError, with what to do, where a forward meets a parameter that isn't gathered.
        """
        try:
            yield
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise UsageError(
                "a forward uses a parameter of a block outside of that block's own forward, where it isn't gathered",
                where=context.world().describe(),
                remedy="call smp.register_parameter(module that uses it, parameter) before smp.DistributedModel",
            ) from error
        if not torch.is_grad_enabled():
            self.reshard()

    def reshard(self) -> None:
        """Let go of whatever is gathered. Called by: any rank by itself, outside of forward and backward."""
        for unit in self.units:
            unit.module.reshard()

    def abandon(self) -> None:
        """Forget a forward or backward that raised."""
        self._calls = 0
        self._root.reset_iter_state()


def _owners(root: nn.Module, named: dict[str, nn.Parameter]) -> dict[str, nn.Module]:
    """For each parameter the module of the unit that gathers it."""
    block_of: dict[int, nn.Module] = {}
    for block in repeated_blocks(root):
        for module in block.modules():
            block_of.setdefault(id(module), block)
    holders: dict[int, list[nn.Module]] = {}
    for module in root.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append(module)
    found = {}
    for name, parameter in named.items():
        blocks = [block_of.get(id(m), root) for m in (*holders[id(parameter)], *users_of(parameter))]
        found[name] = blocks[0] if all(block is blocks[0] for block in blocks) else root
    return found


def repeated_blocks(root: nn.Module) -> Sequence[nn.Module]:
    """The elements of the outermost module lists and sequences, in order, each once.

    A list inside a list is looked into; its elements have a forward of their own, a list has none.
    """
    blocks: dict[int, nn.Module] = {}

    def visit(module: nn.Module) -> None:
        several = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1
        for child in module.children():
            if several and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                blocks.setdefault(id(child), child)
            else:
                visit(child)

    visit(root)
    return list(blocks.values())


def _homes(root: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Where each parameter hangs, by its first name."""
    found: dict[str, tuple[nn.Module, str]] = {}
    seen: set[int] = set()
    for prefix, module in root.named_modules():
        for key, parameter in _present(module):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found[f"{prefix}.{key}" if prefix else key] = (module, key)
    return found


def _present(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((key, p) for key, p in module._parameters.items() if p is not None)


def _check_dtypes(module: nn.Module, names: Sequence[str], named: dict[str, nn.Parameter]) -> None:
    trained = {named[n].dtype: n for n in names if named[n].requires_grad and named[n].dim() > 0}
    if len(trained) > 1:
        shown = ", ".join(f"'{name}' is {dtype}" for dtype, name in trained.items())
        raise UsageError(
            f"sharded data parallelism reduces the gradients of a {type(module).__name__} together, but its parameters are of"
            f" several dtypes: {shown}",
            remedy="use one dtype for the trained parameters of a block",
        )
