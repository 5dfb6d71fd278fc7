"""Which classes have a distributed version, and how one is built and called in place of the other.

Three sources, the first that knows a class counts: what the script registered, families of models that adapters know
(`integrations` registers a finder for them), and the built-in entries below. Classes are compared exactly: a subclass
of a registered class may do anything.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn

from shardwright.errors import UsageError
from shardwright.tensor_parallel import construction

Hook = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_HOOKS = "_shardwright_tp_hooks"


class NotReplaced(Exception):
    """A module that has a distributed version keeps its own class; the text says why."""


class Renaming(Protocol):
    """Whole state dicts of one family, from one form to the other. Both empty what they are given."""

    def to_distributed(self, state: dict[str, Any], /) -> dict[str, Any]:
        """From the names of the original."""

    def to_huggingface(self, state: dict[str, Any], /) -> dict[str, Any]:
        """To the names of the original."""


class Family(Protocol):
    """What an adapter says about a module that it knows."""

    @property
    def name(self) -> str:
        """Short name of the family, for messages."""

    def dist_class(self) -> type[nn.Module]:
        """The distributed class."""

    def arguments(self, module: nn.Module) -> Mapping[str, Any] | None:
        """Keyword arguments for it; None or NotImplementedError(reason) leave the module alone."""

    @property
    def forward_hook(self) -> Hook | None:
        """From the original's call to the distributed one's: returns (args, kwargs)."""

    def return_hook(self, module: nn.Module) -> Hook | None:
        """From the distributed output to the original's."""

    def renaming(self, module: nn.Module) -> Renaming:
        """How weights travel."""


@dataclass(frozen=True)
class Recipe:
    """How to replace one module.

    dist_class: to be called with `args`, `kwargs`.   forward_hook, return_hook: around its forward, or None.
    renaming: of weights; None where names are equal.   family: name of the adapter, "" without one.
    built_in: one of the entries below.
    """

    dist_class: type[nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    forward_hook: Hook | None = None
    return_hook: Hook | None = None
    renaming: Renaming | None = None
    family: str = ""
    built_in: bool = False


@dataclass(frozen=True)
class _Registered:
    dist_class: type[nn.Module]
    init_hook: Hook | None
    forward_hook: Hook | None
    return_hook: Hook | None


_registered: dict[type, _Registered] = {}
_finders: list[Callable[[nn.Module], Family | None]] = []
_planners: list[Callable[[nn.Module], Mapping[str, Any] | None]] = []


def tp_register(
    dist_module: type[nn.Module],
    init_hook: Hook | None = None,
    forward_hook: Hook | None = None,
    return_hook: Hook | None = None,
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Class decorator: `dist_module` is the distributed version of the class; see `tp_register_with_module`."""

    def register(cls: type[nn.Module]) -> type[nn.Module]:
        tp_register_with_module(cls, dist_module, init_hook, forward_hook, return_hook)
        return cls

    return register


def tp_register_with_module(
    module_cls: type[nn.Module],
    dist_module: type[nn.Module],
    init_hook: Hook | None = None,
    forward_hook: Hook | None = None,
    return_hook: Hook | None = None,
) -> None:
    """Name the distributed version of a class. Called by: every rank alike, before the model is wrapped.

    dist_module: derives from `smp.nn.DistributedModule`.
    init_hook: called as the original's constructor (without self); returns (args, kwargs) for `dist_module`, or
        None to leave this instance alone.   forward_hook: called as the original's forward; returns (args, kwargs)
    for the distributed one.   return_hook: from its output to what the original returned.
    Without a hook arguments pass unchanged. A class that is registered again gets the new entry.
    Raises: UsageError if the classes are not what they should be.
    """
    from shardwright.tensor_parallel.module import DistributedModule

    if not (isinstance(module_cls, type) and issubclass(module_cls, nn.Module)):
        raise UsageError(f"tp_register: {module_cls!r} is not a class of modules")
    if not (isinstance(dist_module, type) and issubclass(dist_module, DistributedModule)):
        raise UsageError(
            f"tp_register of {module_cls.__name__}: {dist_module!r} doesn't derive from smp.nn.DistributedModule",
            remedy="derive the distributed version from smp.nn.DistributedModule",
        )
    for name, hook in (("init", init_hook), ("forward", forward_hook), ("return", return_hook)):
        if hook is not None and not callable(hook):
            raise UsageError(f"tp_register of {module_cls.__name__}: the {name} hook is {hook!r}, expected a callable")
    _registered[module_cls] = _Registered(dist_module, init_hook, forward_hook, return_hook)


def register_finder(find: Callable[[nn.Module], Family | None]) -> None:
    """Let an adapter be asked for each marked module. Called by: the public face, when it is imported."""
    if find not in _finders:
        _finders.append(find)


def register_planner(find: Callable[[nn.Module], Mapping[str, Any] | None]) -> None:
    """Let an adapter say what a model's own plan cuts. Called by: the public face, when it is imported.

    find: from a marked module to the cuts (`plan.Cut`) of the modules in it, by path; None without a plan;
        NotImplementedError(reason) if the plan can't be served.
    """
    if find not in _planners:
        _planners.append(find)


def plan_of(module: nn.Module) -> Mapping[str, Any] | None:
    """What a model's own plan cuts; None without one, or if a script or a family knows something inside the model.

    Raises: NotReplaced with the reason, if the plan can't be served.
    """
    try:
        plan = next((plan for find in _planners if (plan := find(module)) is not None), None)
    except NotImplementedError as error:
        if _knows_inside(module):
            return None
        raise NotReplaced(str(error) or "not implemented") from error
    return None if plan is None or _knows_inside(module) else plan


def _knows_inside(module: nn.Module) -> bool:
    return any(type(found) in _registered or _family_of(found) is not None for found in module.modules())


def recipe_for(module: nn.Module, options: Mapping[str, Any]) -> Recipe | None:
    """How to replace a module; None if its class has no distributed version.

    options: override the arguments of the distributed class that it knows.
    Raises: NotReplaced with the reason, if it has one but this instance can't have it.
    """
    cls = type(module)
    registered = _registered.get(cls)
    if registered is not None:
        return _with_options(_by_script(module, registered), options)
    family = _family_of(module)
    if family is not None:
        return _with_options(_by_family(module, family), options)
    recipe = _built_in(module, options)
    return None if recipe is None else _with_options(recipe, options)


def _family_of(module: nn.Module) -> Family | None:
    return next((family for find in _finders if (family := find(module)) is not None), None)


def _by_script(module: nn.Module, entry: _Registered) -> Recipe:
    made = construction.construction_of(module)
    if made is None:
        raise NotReplaced("its constructor arguments are not known")
    args, kwargs = made.args, made.kwargs
    if entry.init_hook is not None:
        try:
            found = entry.init_hook(*args, **kwargs)
        except NotImplementedError as error:
            raise NotReplaced(f"its init hook says: {error or 'not implemented'}") from error
        if found is None:
            raise NotReplaced("its init hook declined")
        args, kwargs = _checked_pair(found, f"the init hook of {type(module).__name__}")
    renaming = None
    family = _family_of(module)
    if family is not None and family.dist_class() is entry.dist_class:
        renaming = family.renaming(module)
    return Recipe(entry.dist_class, tuple(args), dict(kwargs), entry.forward_hook, entry.return_hook, renaming)


def _by_family(module: nn.Module, family: Family) -> Recipe:
    try:
        arguments = family.arguments(module)
    except NotImplementedError as error:
        raise NotReplaced(str(error) or "not implemented") from error
    if arguments is None:
        raise NotReplaced("its configuration has no distributed version")
    return Recipe(
        family.dist_class(),
        (),
        dict(arguments),
        family.forward_hook,
        family.return_hook(module),
        family.renaming(module),
        family.name,
    )


def _built_in(module: nn.Module, options: Mapping[str, Any]) -> Recipe | None:
    """Linear layers always; embeddings where `distribute_embedding` asks for it. Arguments are read off the module."""
    from shardwright.tensor_parallel.nn.embedding import DistributedEmbedding
    from shardwright.tensor_parallel.nn.linear import DistributedLinear

    if type(module) is nn.Linear:
        sizes = (module.in_features, module.out_features, module.bias is not None)
        return Recipe(DistributedLinear, sizes, {}, built_in=True)
    if type(module) is nn.Embedding and options.get("distribute_embedding"):
        names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
        kept = {name: getattr(module, name) for name in names}
        return Recipe(DistributedEmbedding, (module.num_embeddings, module.embedding_dim), kept, built_in=True)
    return None


def _with_options(recipe: Recipe, options: Mapping[str, Any]) -> Recipe:
    """The recipe with the script's options in place of arguments; those that the class doesn't know are left out."""
    parameters = list(inspect.signature(recipe.dist_class.__init__).parameters.values())[1:]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    known = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    chosen = {name: value for name, value in options.items() if takes_all or name in known}
    if not chosen:
        return recipe
    places = {p.name: i for i, p in enumerate(parameters) if p.kind is p.POSITIONAL_OR_KEYWORD}
    args = list(recipe.args)
    kwargs = dict(recipe.kwargs)
    for name, value in chosen.items():
        if places.get(name, len(args)) < len(args):
            args[places[name]] = value
        else:
            kwargs[name] = value
    return replace(recipe, args=tuple(args), kwargs=kwargs)


# ------------------------------------------------------------------ calling


def with_hooks(module: nn.Module, original: type[nn.Module], recipe: Recipe) -> None:
    """Let a distributed module be called like the original. Its class becomes a subclass of its own class."""
    if recipe.forward_hook is None and recipe.return_hook is None:
        return
    module.__class__ = _called_like(type(module), original)
    module.__dict__[_HOOKS] = (recipe.forward_hook, recipe.return_hook)


_classes: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def _called_like(dist_class: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """A subclass whose forward runs the hooks that the instance holds. A plain class attribute, not an attribute of
    the instance: a forward of an instance's own would look like a patch of the script.
    """
    known = _classes.get((dist_class, original))
    if known is not None:
        return known
    plain = dist_class.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before, after = self.__dict__[_HOOKS]
        if before is not None:
            args, kwargs = _checked_pair(before(*args, **kwargs), f"the forward hook of {original.__name__}")
        output = plain(self, *args, **kwargs)
        return output if after is None else after(output)

    forward.__doc__ = original.forward.__doc__
    forward.__signature__ = inspect.signature(original.forward)  # type: ignore[attr-defined]

    def reduce(self: nn.Module, protocol: Any) -> Any:
        return _rebuilt, (dist_class, original), self.__dict__

    names = {"__module__": dist_class.__module__, "__qualname__": dist_class.__qualname__}
    members = {"__doc__": dist_class.__doc__, "forward": forward, "__reduce_ex__": reduce}
    made = type(dist_class.__name__, (dist_class,), {**names, **members})
    _classes[dist_class, original] = made
    return made


def _rebuilt(dist_class: type[nn.Module], original: type[nn.Module]) -> nn.Module:
    """An empty instance, for copies and pickles."""
    cls = _called_like(dist_class, original)
    made: nn.Module = cls.__new__(cls)
    return made


def _checked_pair(found: Any, what: str) -> Arguments:
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)):
        raise UsageError(f"{what} returned {type(found).__name__}, expected a pair (args, kwargs)")
    args = found[0]
    if not isinstance(args, (tuple, list)):
        raise UsageError(f"{what} returned {type(args).__name__} as positional arguments, expected a tuple")
    return tuple(args), dict(found[1])
