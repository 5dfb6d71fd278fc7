"""Optimizer state dicts in torch's form, and how they are joined and cut by parameter names. Pure.

Form: {"state": {index: values}, "param_groups": [{..., "params": [index, ...]}]}; indices count the
parameters of all groups in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from shardwright.errors import UsageError
from shardwright.sharding.spec import ShardSpec

StateDict = dict[str, Any]
GroupNames = Sequence[Sequence[str]]
# torch's own list of names, beside "params" in a group of an optimizer that was built from named parameters.
PARAM_NAMES = "param_names"


def in_torch_form(groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Any]) -> StateDict:
    """The state dict of any object that has torch's `param_groups` and `state`."""
    index_of: dict[int, int] = {}
    for group in groups:
        for parameter in group["params"]:
            index_of.setdefault(id(parameter), len(index_of))
    packed = [{**group, "params": [index_of[id(p)] for p in group["params"]]} for group in groups]
    state = {index_of[id(p)]: values for p, values in states.items() if id(p) in index_of}
    return {"state": state, "param_groups": packed}


def filter_group(group: dict[str, Any], keep: Sequence[bool]) -> None:
    """Drop parameters from a group in place: the dict and its list stay the same objects."""
    names = group.get(PARAM_NAMES)
    if names is not None:
        group[PARAM_NAMES] = [name for name, kept in zip(names, keep, strict=True) if kept]
    group["params"][:] = [p for p, kept in zip(group["params"], keep, strict=True) if kept]


def beside(parameter: torch.Tensor, values: Any) -> Any:
    """A parameter's state with the tensors of its shape on its device, to which it may have moved."""
    if not isinstance(values, dict):
        return values
    return {
        key: value.to(parameter.device)
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0
        else value
        for key, value in values.items()
    }


def by_name(content: Mapping[str, Any], index_of: Mapping[str, int]) -> dict[str, Any]:
    """The state of each parameter that has one, by name."""
    state = content["state"]
    return {name: state[index] for name, index in index_of.items() if index in state}


def joined(states: Iterable[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], names: GroupNames) -> StateDict:
    """One dict of the whole model from the named states of all stages.

    groups: of any stage, for their options.   names: per group, all its parameters in the unpartitioned
    order.
    """
    found: dict[str, Any] = {}
    for state in states:
        found.update(state)
    packed: list[dict[str, Any]] = []
    content: dict[int, Any] = {}
    index = 0
    for group, members in zip(groups, names, strict=True):
        whole = {**group, "params": list(range(index, index + len(members)))}
        if PARAM_NAMES in group:
            whole[PARAM_NAMES] = list(members)
        packed.append(whole)
        for name in members:
            if name in found:
                content[index] = found[name]
            index += 1
    return {"state": content, "param_groups": packed}


def narrowed(content: Mapping[str, Any], full_names: GroupNames, names: GroupNames) -> StateDict:
    """The part of a whole model's dict that belongs to the parameters `names`.

    full_names: per group, all parameters in the unpartitioned order, as in `content`.
    Raises: UsageError if the groups of `content` are others.
    """
    check_groups(content, full_names)
    flat = [name for group in full_names for name in group]
    state_of = {name: content["state"][i] for i, name in enumerate(flat) if i in content["state"]}
    local: StateDict = {"state": {}, "param_groups": []}
    index = 0
    for group, members in zip(content["param_groups"], names, strict=True):
        indices = list(range(index, index + len(members)))
        index += len(members)
        local["state"].update({i: state_of[n] for i, n in zip(indices, members, strict=True) if n in state_of})
        local["param_groups"].append({**options(group), "params": indices})
    return local


def merged(parts: Sequence[Any], spec: ShardSpec | None) -> Any:
    """One parameter's state from what all tp ranks hold.

    A tensor of the shape of the rank's slice is cut like the parameter; anything else is tp rank 0's. Tensors are
    copies.
    """
    first = parts[0]
    if spec is None:
        return owned(first)
    if isinstance(first, torch.Tensor):
        shapes = [tuple(part.shape) if isinstance(part, torch.Tensor) else None for part in parts]
        fits = all(shape == spec.local_shape(rank) for rank, shape in enumerate(shapes))
        return spec.merge(parts) if fits else owned(first)
    if isinstance(first, dict):
        return {key: merged([part[key] for part in parts], spec) for key in first}
    return first


def sliced(values: Any, spec: ShardSpec | None, rank: int) -> Any:
    """The part of one parameter's state that belongs to a tp rank's slice of it."""
    if spec is None:
        return values
    if isinstance(values, torch.Tensor):
        return spec.slice_of(values, rank) if tuple(values.shape) == spec.full_shape else values
    if isinstance(values, dict):
        return {key: sliced(item, spec, rank) for key, item in values.items()}
    return values


def check_groups(content: Mapping[str, Any], names: GroupNames) -> None:
    """Raise UsageError unless the dict has these groups, counted by their parameters."""
    saved = [len(group["params"]) for group in content["param_groups"]]
    present = [len(group) for group in names]
    if saved != present:
        raise UsageError(
            f"the optimizer state dict has {len(saved)} parameter groups of {saved} parameters, the optimizer"
            f" has {len(present)} of {present}",
            remedy="build the optimizer with the same parameter groups; a partial dict fits the partition"
            " it was taken from",
        )


def owned(value: Any) -> Any:
    """A copy whose tensors belong to the optimizer: training doesn't write into the caller's dict."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: owned(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(owned(item) for item in value)
    return value


def on_cpu(value: Any) -> Any:
    """The same with tensors detached and on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: on_cpu(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(on_cpu(item) for item in value)
    return value


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings. Without torch's list of names: loading then keeps the present ones."""
    return {key: value for key, value in group.items() if key not in ("params", PARAM_NAMES)}
