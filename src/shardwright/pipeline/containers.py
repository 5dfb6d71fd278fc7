"""Look into a nested Python value, and build the same value again around other contents.

What counts as a container is the contract's list (api.md 3.3 and 3.4): list, tuple, set, dict, their
subclasses (namedtuple, OrderedDict, transformers' ModelOutput) and other mappings such as BatchEncoding.
Dataclasses are containers only where a caller says so, because a step argument that is a dataclass passes
unchanged.

A container is rebuilt *without running its constructor*: ModelOutput.__post_init__ inspects its first field,
and constructors of user classes may do anything.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch


def is_dataclass_instance(value: Any) -> bool:
    """True for an object whose class is a dataclass (not for the class itself)."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def contents(value: Any, *, dataclass_too: bool = False) -> tuple[list[str], list[Any]] | None:
    """Return the labels and the elements of a container, or None for a value that is not one.

    Labels read as a path behind the container's own name: "['key']", "[0]", ".field". The elements come in
    the order in which `with_contents` takes them back.
    """
    if isinstance(value, Mapping):
        return [f"[{key!r}]" for key in value], list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)) and not isinstance(value, torch.Size):
        names = getattr(value, "_fields", None)
        labels = [f".{n}" for n in names] if names else [f"[{i}]" for i in range(len(value))]
        return labels, list(value)
    if dataclass_too and is_dataclass_instance(value):
        names = [f.name for f in dataclasses.fields(value)]
        return [f".{n}" for n in names], [getattr(value, n) for n in names]
    return None


def with_contents(value: Any, elements: Sequence[Any]) -> Any:
    """Return a container of the class of `value` that holds `elements` instead of its own.

    elements: as many as `contents(value)` gave, in the same order. `value` is not changed; instance
    attributes that are not elements (a default factory, extra attributes of a subclass) are carried over.
    """
    if isinstance(value, dict):
        return _dict_like(value, dict(zip(value, elements, strict=True)))
    if isinstance(value, Mapping):
        return _other_mapping(value, dict(zip(value, elements, strict=True)))
    if isinstance(value, list):
        return _list_like(value, elements)
    if isinstance(value, (tuple, set, frozenset)):
        return _tuple_or_set_like(value, elements)
    return _dataclass_like(value, elements)


def _dict_like(value: dict[Any, Any], items: dict[Any, Any]) -> Any:
    cls = type(value)
    if cls is dict:
        return items
    base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    new = cls.__new__(cls)
    if isinstance(value, defaultdict):
        new.default_factory = value.default_factory  # type: ignore[attr-defined]
    old_attributes = getattr(value, "__dict__", None)
    if old_attributes is not None:
        # ModelOutput keeps each present field twice, as a key and as an attribute: both must change.
        mirrored = {
            k: items[k] for k in old_attributes if k in items and old_attributes[k] is dict.get(value, k)
        }
        new.__dict__.update(old_attributes)
        new.__dict__.update(mirrored)
    for key, element in items.items():
        base.__setitem__(new, key, element)
    return new


def _other_mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if not isinstance(value, MutableMapping):
        return items
    new = copy.copy(value)
    for key, element in items.items():
        new[key] = element
    return new


def _list_like(value: list[Any], elements: Sequence[Any]) -> Any:
    cls = type(value)
    if cls is list:
        return list(elements)
    new = cls.__new__(cls)
    list.extend(new, elements)
    if hasattr(value, "__dict__"):
        new.__dict__.update(value.__dict__)
    return new


def _tuple_or_set_like(value: Any, elements: Sequence[Any]) -> Any:
    cls: Any = type(value)
    base: Any = next(b for b in (tuple, set, frozenset) if isinstance(value, b))
    if hasattr(value, "n_sequence_fields"):  # torch.return_types.*: only their own constructor makes them
        return cls(elements)
    if base is set:
        new = cls.__new__(cls)
        set.update(new, elements)
    else:
        new = base.__new__(cls, elements)
    if hasattr(value, "__dict__"):
        new.__dict__.update(value.__dict__)
    return new


def _dataclass_like(value: Any, elements: Sequence[Any]) -> Any:
    new = object.__new__(type(value))
    if hasattr(value, "__dict__"):
        new.__dict__.update(value.__dict__)
    for field, element in zip(dataclasses.fields(value), elements, strict=True):
        object.__setattr__(new, field.name, element)
    return new
