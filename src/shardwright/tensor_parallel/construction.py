"""How every module was built: the constructor arguments, from the import of this file on.

A registered class is rebuilt as its distributed version when the model is wrapped, long after it was made, and
the registration may come later still. So arguments are recorded for all modules. `nn.Module.__new__` sees them,
`nn.Module.__init__` confirms that a constructor runs (copying and unpickling call `__new__` as well).

Note [Records]: a module's `__dict__` holds a number; the arguments are in a table of this process. The number is
copied along by `copy.deepcopy` and `copy.copy`, so that a copy is known to be built like its original, and means
nothing in another process: numbers start at random. A record goes when the last module that carries its number
goes. Modules and tensors among the arguments are held weakly: a record keeps nothing of a model alive.
"""

from __future__ import annotations

import functools
import inspect
import secrets
import sys
import weakref
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import nn

_NUMBER = "_shardwright_built"
_ARGUMENTS = "_shardwright_arguments"
"""Where the arguments wait from `__new__` to `nn.Module.__init__`."""

_numbers = count(secrets.randbits(29) << 33)
_records: dict[int, _Record] = {}


@dataclass(frozen=True)
class Construction:
    """The arguments that a module's class was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Record:
    __slots__ = ("args", "cls", "holders", "kwargs")

    def __init__(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs
        self.holders: dict[int, _Holder] = {}


class _Holder(weakref.ref[nn.Module]):
    """A module that carries a record's number. Takes the record along when the last one goes."""

    __slots__ = ("key", "number")

    def __new__(cls, module: nn.Module, number: int) -> _Holder:
        return super().__new__(cls, module, _release)

    def __init__(self, module: nn.Module, number: int) -> None:
        super().__init__(module, _release)  # type: ignore[call-arg]
        self.number = number
        self.key = id(module)


class _Gone(Exception):
    """A module or tensor that was an argument is no more."""


class _Weak:
    """Stands for a module or tensor among the arguments."""

    __slots__ = ("reference",)

    def __init__(self, value: Any) -> None:
        self.reference = weakref.ref(value)


def construction_of(module: nn.Module) -> Construction | None:
    """The arguments a module was built with; None where they are not known.

    Not known are those of modules from another process, of classes whose own `__new__` changes the
    arguments, of modules whose class was exchanged, and arguments that are gone.
    """
    record = _records.get(vars(module).get(_NUMBER, -1))
    if record is None or record.cls is not type(module):
        return None
    try:
        return Construction(_firm(record.args), _firm(record.kwargs))
    except _Gone:
        return None


def forget(module: nn.Module) -> None:
    """Drop what is known of a module and of all below it. Called by: the wrap, once it is done."""
    for found in module.modules():
        number = vars(found).pop(_NUMBER, None)
        if number is not None:
            _records.pop(number, None)


def _loose(value: Any) -> Any:
    """The same with modules and tensors held weakly."""
    if isinstance(value, (nn.Module, torch.Tensor)):
        return _Weak(value)
    kind = type(value)
    if kind in (list, tuple):
        return kind([_loose(item) for item in value])
    if kind is dict:
        return {key: _loose(item) for key, item in value.items()}
    return value


def _firm(value: Any) -> Any:
    if type(value) is _Weak:
        alive = value.reference()
        if alive is None:
            raise _Gone
        return alive
    kind = type(value)
    if kind in (list, tuple):
        return kind([_firm(item) for item in value])
    if kind is dict:
        return {key: _firm(item) for key, item in value.items()}
    return value


def _hold(module: nn.Module, number: int, record: _Record) -> None:
    """Let the record live as long as the module."""
    record.holders[id(module)] = _Holder(module, number)


def _release(gone: Any) -> None:
    record = _records.get(gone.number)
    if record is not None:
        record.holders.pop(gone.key, None)
        if not record.holders:
            del _records[gone.number]


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    """`nn.Module.__new__`: what comes next in the class's order, and a note of the arguments."""
    following = super(nn.Module, cls).__new__  # type: ignore[misc]
    module = following(cls) if following is object.__new__ else following(cls, *args, **kwargs)
    if cls.__new__ is _new and isinstance(module, nn.Module):
        module.__dict__[_ARGUMENTS] = (args, kwargs)
    return module


def _confirm(method: Any) -> Any:
    """`nn.Module.__init__`: a constructor runs, so the arguments are worth a record."""

    @functools.wraps(method)
    def confirming(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        given = self.__dict__.pop(_ARGUMENTS, None)
        if given is not None:
            number = self.__dict__[_NUMBER] = next(_numbers)
            record = _records[number] = _Record(type(self), _loose(given[0]), _loose(given[1]))
            _hold(self, number, record)
        method(self, *args, **kwargs)

    confirming._shardwright_records = method  # type: ignore[attr-defined]
    return confirming


def _inherit(method: Any) -> Any:
    """`nn.Module.__setstate__`: a copy carries the number of its original, if that has one."""

    @functools.wraps(method)
    def inheriting(self: nn.Module, state: Any) -> None:
        self.__dict__.pop(_ARGUMENTS, None)
        method(self, state)
        number = self.__dict__.get(_NUMBER, -1)
        record = _records.get(number)
        if record is not None:
            _hold(self, number, record)

    inheriting._shardwright_records = method  # type: ignore[attr-defined]
    return inheriting


class _ConstructorSignature:
    """`inspect.signature(cls)` before Python 3.11: it prefers an inherited `__new__` to an inherited `__init__`."""

    def __get__(self, module: nn.Module | None, cls: type) -> inspect.Signature:
        if module is not None:
            raise AttributeError("__signature__")
        found = inspect.signature(cls.__init__)  # type: ignore[misc]
        return found.replace(parameters=list(found.parameters.values())[1:])


def _install() -> None:
    for name, wrap in (("__init__", _confirm), ("__setstate__", _inherit)):
        method = getattr(nn.Module, name)
        if not hasattr(method, "_shardwright_records"):
            setattr(nn.Module, name, wrap(method))
    nn.Module.__new__ = staticmethod(_new)  # type: ignore[assignment,method-assign]
    if sys.version_info < (3, 11):
        nn.Module.__signature__ = _ConstructorSignature()


_install()
