"""Tensors whose content is still in a file of an object store, for code that thinks that it has them.

A state dict of such tensors is renamed, cut and handed on like any other. Views of them, and copies, read nothing. What is
computed of them is only noted. Bytes are read when they land in a tensor of this process (`copy_`), or when
somebody looks at values; and then just those of the views that were taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwright.checkpoint import range_reads
from shardwright.checkpoint.deferred import IN_PLACE, Deferred
from shardwright.checkpoint.storage import RemotePath

_HELD_BYTES = 256 << 20
"""Of views that are read together because something is computed of them."""
_COPIES = ("clone", "contiguous", "cpu", "detach")

Landing = tuple[Tensor, "Unread"]

_landings: ContextVar[list[Landing] | None] = ContextVar("landings", default=None)


class Unread(Deferred):
    """A tensor of a file, a view of one, or what is computed of such. Its values never change: copies are the tensor itself."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if func == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        if name == "copy_" and not isinstance(args[0], Unread):
            return _land(args[0], args[1])
        if name in _COPIES and isinstance(args[0], Unread):
            return args[0]._again()
        if name.startswith("new_") or name.endswith("_like"):
            args, kwargs = _mapped(Unread, _shaped, (args, kwargs or {}))
            return func(*args, **kwargs)
        if name == "as_strided" and not args[0].is_contiguous():
            return func(*here(args), **here(kwargs or {}))  # a copy may have been meant, which has other strides
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except (NotImplementedError, RuntimeError, TypeError):
            if IN_PLACE.fullmatch(name):
                raise
            return func(*here(args), **here(kwargs or {}))


    def _again(self) -> Unread:
        """Another tensor of the same content."""
        with torch._C.DisableTorchFunctionSubclass():
            made = self.detach().as_subclass(Unread)
        made.__dict__.update(self.__dict__)
        return made


def unread(path: RemotePath, content: Any) -> Any:
    """Nested content with the tensors of a file that are still there, see `range_reads`."""
    made: dict[int, Any] = {}

    def wrap(tensor: Tensor) -> Tensor:
        if not range_reads.is_elsewhere(tensor) or isinstance(tensor, Unread):
            return tensor
        if id(tensor) not in made:
            tensor.untyped_storage()._checkpoint_path = path  # type: ignore[attr-defined]
            made[id(tensor)] = tensor.as_subclass(Unread)
        return made[id(tensor)]  # type: ignore[no-any-return]

    return _mapped(Tensor, wrap, content)


def here(content: Any) -> Any:
    """Nested content with all of it in memory, each tensor once."""
    found = {id(leaf): leaf for leaf in tree_leaves(content) if isinstance(leaf, Unread)}
    made = {key: _room(tensor) for key, tensor in found.items()}
    fill([(made[key], tensor) for key, tensor in found.items()])
    return _mapped(Unread, lambda tensor: made[id(tensor)], content) if found else content


def identity(tensor: Unread) -> tuple[Any, ...]:
    """Equal for two tensors that are the same bytes of one file in the same form."""
    if _path_of(tensor) is None:
        return (id(tensor),)
    with torch._C.DisableTorchFunctionSubclass():
        begin = tensor.untyped_storage()._checkpoint_offset, tensor.storage_offset()  # type: ignore[attr-defined]
        return str(_path_of(tensor)), begin, tensor.dtype, tensor.shape, tensor.stride()


@contextmanager
def landing_together() -> Iterator[None]:
    """What is copied into tensors inside gets its values when the block ends well: each file is read once, in its order.

    Called around code that doesn't look at what it has copied.
    """
    before = _landings.set([])
    try:
        yield
        found = _landings.get()
    finally:
        _landings.reset(before)
    fill(found or [])


@torch.no_grad()
def fill(landings: Sequence[Landing]) -> None:
    """Copy values into tensors."""
    last = {(t.data_ptr(), t.shape, t.stride(), t.dtype): (t, s) for t, s in landings if t.numel()}  # tied ones once
    plain: dict[RemotePath, list[tuple[Tensor, Tensor]]] = {}
    computed: list[Landing] = []
    size = 0
    for target, source in last.values():
        if (path := _path_of(source)) is not None:
            plain.setdefault(path, []).append((target, source))
            continue
        computed.append((target, source))
        size += sum(leaf.numel() * leaf.element_size() for leaf in _leaves(source))
        if size >= _HELD_BYTES:
            _compute(computed)
            computed, size = [], 0
    for path, pairs in plain.items():
        _read(path, pairs)
    _compute(computed)


def _land(target: Tensor, source: Unread) -> Tensor:
    waiting = _landings.get()
    if waiting is None or target.shape != source.shape:
        return target.copy_(here(source))
    waiting.append((target, source))
    return target


def _compute(landings: Sequence[Landing]) -> None:
    leaves = {id(leaf): leaf for _, source in landings for leaf in _leaves(source)}
    values = {key: _room(leaf) for key, leaf in leaves.items()}
    plain: dict[RemotePath, list[tuple[Tensor, Tensor]]] = {}
    for key, leaf in leaves.items():
        path = _path_of(leaf)
        assert path is not None
        plain.setdefault(path, []).append((values[key], leaf))
    for path, pairs in plain.items():
        _read(path, pairs)
    for target, source in landings:
        target.copy_(_made(source, values))


def _read(path: RemotePath, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        range_reads.read_all(path, [(target, view.as_subclass(Tensor)) for target, view in pairs])


def _path_of(tensor: Tensor) -> RemotePath | None:
    """Which file it is a view of; None if it is computed."""
    with torch._C.DisableTorchFunctionSubclass():
        return getattr(tensor.untyped_storage(), "_checkpoint_path", None)


def _leaves(tensor: Unread) -> Iterator[Unread]:
    """The views of files that it is made of."""
    if _path_of(tensor) is not None:
        yield tensor
        return
    for leaf in tree_leaves((tensor._origin.args, dict(tensor._origin.kwargs))):
        if isinstance(leaf, Unread):
            yield from _leaves(leaf)


def _made(tensor: Unread, values: dict[int, Tensor]) -> Tensor:
    if id(tensor) in values:
        return values[id(tensor)]
    origin = tensor._origin
    args, kwargs = _mapped(Unread, lambda t: _made(t, values), (origin.args, dict(origin.kwargs)))
    assert origin.function is not None
    result: Any = origin.function(*args, **kwargs)
    return result if origin.place is None else result[origin.place]  # type: ignore[no-any-return]


def _room(tensor: Unread) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.empty_like(tensor.as_subclass(Tensor), device="cpu")


def _shaped(tensor: Unread) -> Tensor:
    """A tensor of this shape that takes no memory."""
    return torch.empty((), dtype=tensor.dtype).expand(tensor.shape)


def _mapped(kind: type[Any], change: Callable[[Any], Any], content: Any) -> Any:
    made = tree_map_only(kind, change, content)
    if hasattr(content, "_metadata"):
        made._metadata = content._metadata
    return made
