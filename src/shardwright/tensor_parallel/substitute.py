"""Swapping marked modules for their distributed versions, when a model is wrapped.

Rules, in this order, from the root down:
- The outermost marked module that has a distributed version is replaced; what is below it goes with it.
- It is left alone, and what is below it is looked at, if a hook or an adapter declines, if a module below it was
  switched off by the script, if it shares weights with a module outside, or if sizes can't be cut. Every case is
  logged with its reason.
- Where no distributed version is known of a model or of anything in it, but it carries a tensor parallel plan, the
  modules that the plan names are replaced; see `plan`. A model that declines its plan isn't asked again further down.
- Single experts of a mixture are left alone where tp ranks bring different samples: each rank's routing sends another
  number of them to an expert, so there is no batch to exchange.
- The degree doesn't matter: with tensor_parallel_degree 1 modules are replaced as well.

Weights are carried over, so that the model computes what it did before; see `carry` for when they are fresh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import xxhash
from torch import nn

from shardwright.errors import ConfigError, ShapeError, UsageError
from shardwright.log import get_logger, rank_zero
from shardwright.tensor_parallel import construction, registry, scope
from shardwright.tensor_parallel.carry import Weights
from shardwright.tensor_parallel.module import act_on_scaled_batch, prescaled_batch, tp_size
from shardwright.tensor_parallel.nn.planned import sum_gradients
from shardwright.tensor_parallel.plan import resolve
from shardwright.tensor_parallel.registry import NotReplaced, Recipe, Renaming
from shardwright.transport import objects
from shardwright.transport.differentiable import only_shapes_count

_log = get_logger(__name__)

OnReplaced = Callable[[nn.Module, nn.Module], object]


@dataclass(frozen=True)
class Replaced:
    """One module that was replaced.

    name: in the model; "" is the root.   original, distributed: class names.   family: of the adapter, or "".
    fresh: why its weights are new ones, "" if they were carried over.   renaming: of its weights, or None.
    """

    name: str
    original: str
    distributed: str
    family: str = ""
    fresh: str = ""
    renaming: Renaming | None = None
    built_in: bool = False


@dataclass(frozen=True)
class Kept:
    """One marked module that has a distributed version but keeps its own class, and why.

    by_size: its sizes can't be cut by the degree.   built_in: a plain linear layer or embedding.
    """

    name: str
    original: str
    reason: str
    by_size: bool = False
    built_in: bool = False


@dataclass
class Report:
    """What a wrap did."""

    replaced: list[Replaced] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)


def substitute(root: nn.Module, on_replaced: OnReplaced | None = None) -> tuple[nn.Module, Report]:
    """Replace the marked modules of a model in place; the root itself may be another one afterwards.

    Called by: every rank, in `smp.DistributedModel`, before anything is moved or sent.
    Collectives: over TP_GROUP: one small object gather, for each replaced module one gather of hashes of its
        weights, and a broadcast of them where they differ; for fresh weights those of `module.fresh`.
    on_replaced: called with (original, distributed) before the original goes.
    Returns: the root, and what was done.
    Raises: ConfigError if the degree can't cut any of the model's blocks; UsageError if ranks would replace
        different modules.
    """
    work = _Substitution(root, on_replaced)
    work.run()
    construction.forget(work.root)
    _log_kept(work.report.kept)
    _check_something_was_cut(work.report)
    return work.root, work.report


class _Substitution:
    """One walk over a model."""

    def __init__(self, root: nn.Module, on_replaced: OnReplaced | None) -> None:
        self.root = root
        self.report = Report()
        self._on_replaced = on_replaced
        self._seen: set[int] = set()
        self._without_plan: set[int] = set()
        self._slots: dict[int, list[tuple[nn.Module, str]]] = {}
        self._holders: dict[int, dict[int, str]] = {}
        for name, module in root.named_modules():
            for key, child in module._modules.items():
                if child is not None:
                    self._slots.setdefault(id(child), []).append((module, key))
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._holders.setdefault(id(parameter), {})[id(module)] = name

    def run(self) -> None:
        _agree([f"{name} {mark.enabled} {type(module).__name__}" for name, module, mark in self._marked()])
        self._visit("", self.root, scope.UNMARKED)

    def _marked(self) -> Iterator[tuple[str, nn.Module, scope.Mark]]:
        """Every module with what holds for it."""
        marks = {"": scope.UNMARKED}
        for name, module in self.root.named_modules():
            above = marks[name.rpartition(".")[0]] if name else scope.UNMARKED
            marks[name] = scope.own_mark(module, above)
            yield name, module, marks[name]

    def _visit(self, name: str, module: nn.Module, above: scope.Mark) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        mark = scope.own_mark(module, above)
        if mark.enabled and _are_experts(name, module) and not prescaled_batch():
            reason = "each rank's samples go to other experts (set 'prescaled_batch' to split them)"
            self.report.kept.append(Kept(name, type(module).__name__, reason))
            return
        if mark.enabled and self._replace(name, module, mark):
            return
        for key, child in list(module._modules.items()):
            if child is not None:
                self._visit(f"{name}.{key}" if name else key, child, mark)

    def _replace(self, name: str, module: nn.Module, mark: scope.Mark) -> bool:
        """Replace a module if it can be; otherwise say why not."""
        recipe: Recipe | None = None
        by_size = False
        try:
            recipe = registry.recipe_for(module, mark.options)
            if recipe is None:
                return id(module) not in self._without_plan and self._follow_plan(name, module, mark)
            self._check_switches(module, mark)
            self._check_shared(module)
            made, fresh = Weights(module, recipe, mark).build()
        except NotReplaced as declined:
            reason = str(declined)
        except NotImplementedError as declined:
            reason = str(declined) or "not implemented"
        except (ConfigError, ShapeError) as refused:
            reason, by_size = refused.what, True
        else:
            self._put(module, made)
            registry.with_hooks(made, type(module), recipe)
            self.report.replaced.append(
                Replaced(
                    name,
                    type(module).__name__,
                    recipe.dist_class.__name__,
                    recipe.family,
                    fresh,
                    recipe.renaming,
                    recipe.built_in,
                )
            )
            return True
        if recipe is None:
            self._without_plan.update(id(found) for found in module.modules())
        built_in = recipe is not None and recipe.built_in
        self.report.kept.append(Kept(name, type(module).__name__, reason, by_size, built_in))
        return False

    def _follow_plan(self, name: str, module: nn.Module, mark: scope.Mark) -> bool:
        """Replace what the model's own plan names; everything is built before anything is put in place."""
        plan = registry.plan_of(module)
        if plan is None:
            return False
        self._check_switches(module, mark)
        resolved = resolve(module, plan, self._shared_outside(module))
        originals = {path: module.get_submodule(path) for path in resolved.recipes}
        built = {
            path: Weights(originals[path], recipe, mark).build() for path, recipe in resolved.recipes.items()
        }
        for first, *others in resolved.ties:
            for other in others:
                built[other][0].weight = built[first][0].weight
        start = f"{name}." if name else ""
        for path, (made, fresh) in built.items():
            self._put(originals[path], made)
            original, distributed = type(originals[path]).__name__, type(made).__name__
            self.report.replaced.append(Replaced(start + path, original, distributed, fresh=fresh))
        for path in resolved.summed:
            sum_gradients(module.get_submodule(path))
        for path, reason in resolved.kept.items():
            self.report.kept.append(Kept(start + path, type(module.get_submodule(path)).__name__, reason))
        act_on_scaled_batch(module)
        return True

    def _check_switches(self, module: nn.Module, mark: scope.Mark) -> None:
        """Raise NotReplaced if a module below is switched off."""
        marks = {"": mark}
        for path, found in module.named_modules():
            if path:
                marks[path] = scope.own_mark(found, marks[path.rpartition(".")[0]])
                if not marks[path].enabled:
                    raise NotReplaced(f"the script switched off '{path}' inside it")

    def _check_shared(self, module: nn.Module) -> None:
        """Raise NotReplaced if weights are shared with a module outside."""
        outside = self._shared_outside(module)
        for path, parameter in module.named_parameters():
            if id(parameter) in outside:
                raise NotReplaced(f"its weight '{path}' is shared with '{outside[id(parameter)]}'")

    def _shared_outside(self, module: nn.Module) -> dict[int, str]:
        """The first module outside that holds a parameter too, by the parameter's id."""
        inside = {id(found) for found in module.modules()}
        found: dict[int, str] = {}
        for parameter in module.parameters():
            for holder, name in self._holders[id(parameter)].items():
                if holder not in inside:
                    found.setdefault(id(parameter), name)
        return found

    def _put(self, module: nn.Module, made: nn.Module) -> None:
        """Everywhere in the model, the new module stands in place of the old one."""
        _take_over(module, made)
        if self._on_replaced is not None:
            self._on_replaced(module, made)
        for parent, key in self._slots.get(id(module), ()):
            parent._modules[key] = made
        if module is self.root:
            self.root = made


def _take_over(module: nn.Module, made: nn.Module) -> None:
    """What scripts and frameworks look for on the module: its configuration, plain values, training flag, and hooks."""
    made.train(module.training)
    for name, value in vars(module).items():
        # such as the kind of attention of a layer, by which the model around it chooses the mask
        if isinstance(value, (str, bool, int, float)) and not name.startswith("_") and not hasattr(made, name):
            setattr(made, name, value)
    made.__dict__["original_class"] = module.__dict__.get("original_class", type(module))
    config = module.__dict__.get("config")
    if config is not None and not hasattr(made, "config"):
        made.config = config
        if "generation_config" in module.__dict__:
            made.__dict__["generation_config"] = module.__dict__["generation_config"]
        if hasattr(module, "save_pretrained") and not hasattr(made, "save_pretrained"):
            made.__dict__["save_pretrained"] = partial(_save_as, type(module), config)
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        if getattr(module, name):
            setattr(made, name, getattr(module, name))  # the same object: handles go on to work
            for more in (f"{name}_with_kwargs", f"{name}_always_called"):
                if hasattr(module, more):
                    setattr(made, more, getattr(module, more))


def _save_as(cls: Callable[[Any], Any], config: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
    """The original's `save_pretrained`, for weights in the original's names; its own are not needed.

    Raises: UsageError without them: those of the distributed module are slices in other names.
    """
    if state_dict is None:
        raise UsageError(
            "a distributed module can't save itself", remedy="call save_pretrained() of the wrapped model, on all ranks"
        )
    with torch.device("meta"):
        shell = cls(config)
    return shell.save_pretrained(*args, state_dict=state_dict, **kwargs)


def _agree(lines: Sequence[str]) -> None:
    """Raise UsageError on every rank of the tp group unless all would replace the same modules."""
    if tp_size() == 1 or only_shapes_count():
        return
    told = objects.allgather_object((len(lines), xxhash.xxh3_64_hexdigest("\n".join(lines).encode())), "tp")
    if len(set(told)) == 1:
        return
    everyone = objects.allgather_object(list(lines), "tp")
    for position in range(max(map(len, everyone))):
        versions = [found[position] if position < len(found) else "nothing" for found in everyone]
        if len(set(versions)) > 1:
            shown = ", ".join(f"tp rank {rank}: {version}" for rank, version in enumerate(versions))
            raise UsageError(
                f"tp ranks hold different models, or marked other modules; module {position} (name, marked, class) is"
                f" {shown}",
                remedy="build and mark the model alike on every rank",
            )


def _log_kept(kept: Sequence[Kept]) -> None:
    """One line for each class and reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for found in kept:
        groups.setdefault((found.original, found.reason), []).append(found.name or "(root)")
    if rank_zero():
        for (original, reason), names in groups.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            _log.info("not distributed: %s%s (%s): %s", ", ".join(names[:3]), more, original, reason)


def _are_experts(name: str, module: nn.Module) -> bool:
    """Is it a mixture's list of experts, marked only because something around it is?"""
    return name.rpartition(".")[2] == "experts" and isinstance(module, nn.ModuleList) and not scope.is_set(module)


def _check_something_was_cut(report: Report) -> None:
    """A degree that cuts none of the blocks of a model must show at once, not as a job that is merely slow."""
    refused = [kept for kept in report.kept if kept.by_size]
    blocks = [kept for kept in refused if not kept.built_in]
    done = [found for found in report.replaced if not found.built_in]
    if tp_size() == 1 or not refused or (not blocks and report.replaced) or (blocks and done):
        return
    first = (blocks or refused)[0]
    raise ConfigError(
        f"nothing of the model can be split over tensor_parallel_degree {tp_size()}: '{first.name or '(root)'}'"
        f" ({first.original}): {first.reason}",
        remedy="choose a degree that divides these sizes, or smp.set_tensor_parallelism(module, False)",
    )
