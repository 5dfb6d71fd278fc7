"""Which modules are to be distributed: marks, set while a model is built or afterwards, read when it is wrapped.

Note [Marks]: a mark belongs to a module and to its subtree as it is when the model is wrapped. `creation` marks
come from the context in which a module was built (the innermost one), `script` marks from
`set_tensor_parallelism`. Going down from the root, the nearest script mark holds; where there is none, a module's own
creation mark, and where it has none, what holds for its parent.

Importing this file wraps `nn.Module.__init__` and `__setstate__` (for copies made inside a context). Outside of
contexts the wrappers do nothing.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwright.errors import NotBuiltError
from shardwright.topology import context

_CREATED = "_shardwright_tp_created"
_SET = "_shardwright_tp_set"


@dataclass(frozen=True)
class Mark:
    """Whether a module is to be distributed, and what overrides the arguments of its distributed version.

    blank: it was built while transformers' initialisation of weights was switched off by the script.
    """

    enabled: bool
    options: Mapping[str, Any] = field(default_factory=dict)
    blank: bool = False
    by_script: bool = False


UNMARKED = Mark(enabled=False)


class _Contexts(threading.local):
    def __init__(self) -> None:
        self.marks: list[tuple[bool, dict[str, Any]]] = []


_contexts = _Contexts()


@contextmanager
def tensor_parallelism(enabled: bool = True, **kwargs: Any) -> Iterator[None]:
    """Modules created inside are marked (or unmarked with enabled=False); the innermost context wins.

    kwargs: override constructor arguments of the distributed modules; each takes those that it knows.
    Called by: every rank alike, also before `smp.init`. Collectives: none. What is marked is replaced when the
    model is wrapped, if it is supported; see `substitute`.
    """
    _contexts.marks.append((bool(enabled), kwargs if enabled else {}))
    try:
        yield
    finally:
        _contexts.marks.pop()


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **kwargs: Any) -> None:
    """Mark a module that exists: the outermost supported modules in its subtree are to be distributed.

    enabled: False covers the whole subtree.   kwargs: as in `tensor_parallelism`.
    Called by: every rank alike, before the model is wrapped. Collectives: none.
    Raises: TypeError if `module` is not a module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"smp.set_tensor_parallelism takes a torch.nn.Module, not {type(module).__name__}")
    module.__dict__[_SET] = (bool(enabled), kwargs if enabled else {})


@contextmanager
def model_creation(
    tensor_parallelism: bool = False,
    zero_init: bool | None = None,
    dtype: torch.dtype | None = None,
    **tensor_parallel_config: Any,
) -> Iterator[None]:
    """Build a model: with marks as in `tensor_parallelism`, and with another default dtype.

    zero_init: with sharded data parallelism, parameters are partitioned when they are created.
    dtype: default dtype inside, restored on exit; None leaves it.
    tensor_parallel_config: as in `tensor_parallelism`; ignored if that is off.
    `from_pretrained` and `from_config` work inside.
    Called by: `engine.creation`, which adds what other techniques do while a model is built.
    Raises: NotBuiltError if parameters are to be partitioned.
    """
    config = context.world().config if context.is_initialized() else None
    if config is not None and config.sharded_data_parallel_degree > 1 and zero_init is not False:
        raise NotBuiltError(
            f"'sharded_data_parallel_degree' is {config.sharded_data_parallel_degree}, but parameters that are"
            " partitioned when they are created are not built yet",
            remedy="leave the key out",
        )
    before = torch.get_default_dtype()
    options = tensor_parallel_config if tensor_parallelism else {}
    with _marking(tensor_parallelism, **options):
        if dtype is not None:
            torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            if dtype is not None:
                torch.set_default_dtype(before)


_marking = tensor_parallelism
"""`model_creation` has an argument of that name."""


# ------------------------------------------------------------------ reading marks


def own_mark(module: nn.Module, above: Mark) -> Mark:
    """What holds for a module below one for which `above` holds; see Note [Marks]."""
    created = vars(module).get(_CREATED)
    blank = bool(created[2]) if created is not None else above.blank
    by_script = vars(module).get(_SET)
    if by_script is not None:
        return Mark(by_script[0], by_script[1], blank, by_script=True)
    if above.by_script or created is None:
        return Mark(above.enabled, above.options, blank, above.by_script)
    return Mark(created[0], created[1], blank)


def is_set(module: nn.Module) -> bool:
    """Did the script switch this very module on or off?"""
    return _SET in vars(module)


def forget(module: nn.Module) -> None:
    """Drop the marks of a module and of all below it. Called by: the wrap, once it is done."""
    for found in module.modules():
        vars(found).pop(_CREATED, None)
        vars(found).pop(_SET, None)


def initialisation_is_blank() -> bool:
    """Has the script replaced transformers' `init_weights` by a function that does nothing?

    Scripts of the time did that, because the original drew new weights anyway when it replaced a module.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    function = getattr(getattr(modeling, "PreTrainedModel", None), "init_weights", None)
    if function is None or getattr(function, "__module__", "").startswith("transformers"):
        return False
    code = getattr(function, "__code__", None)
    return code is not None and not code.co_names and not code.co_freevars


# ------------------------------------------------------------------ marking while modules are built


def _mark_creation(method: Any) -> Any:
    @functools.wraps(method)
    def marking(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)
        if _contexts.marks:
            enabled, options = _contexts.marks[-1]
            self.__dict__[_CREATED] = (enabled, options, enabled and initialisation_is_blank())

    marking._shardwright_marks = method  # type: ignore[attr-defined]
    return marking


def _install() -> None:
    for name in ("__init__", "__setstate__"):
        method = getattr(nn.Module, name)
        if not hasattr(method, "_shardwright_marks"):
            setattr(nn.Module, name, _mark_creation(method))


_install()
