"""The wrapper that users step: `smp.DistributedOptimizer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwright.checkpoint.state import PARTIAL_MARK
from shardwright.data_parallel import grad_norm
from shardwright.engine.state import state
from shardwright.errors import UsageError
from shardwright.log import get_logger
from shardwright.pipeline.step import step_is_active
from shardwright.transport import objects

_log = get_logger(__name__)

StateDict = dict[str, Any]
_CLASSES: dict[type, type] = {}


def DistributedOptimizer(  # noqa: N802 - the contract's name
    optimizer: Any,
    static_loss_scale: float | None = 1.0,
    dynamic_loss_scale: bool = False,
    dynamic_loss_args: Mapping[str, Any] | None = None,
    **more_dynamic_loss_args: Any,
) -> Any:
    """Let an optimizer work on this rank's part of the wrapped model.

    Called by: every rank. The very object is returned: its class becomes a subclass of its own class, so isinstance
    holds, and every attribute stays its own. After partitioning its groups (same dicts) hold local parameters only.
    static_loss_scale, dynamic_loss_scale, dynamic_loss_args: only matter with fp16; accepted and ignored without.
    Raises: UsageError if the optimizer holds parameters that the wrapped model doesn't have, or is wrapped already.
    """
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
        raise UsageError(f"smp.DistributedOptimizer takes an optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, _Distributed):
        raise UsageError("this optimizer is wrapped already", remedy="call smp.DistributedOptimizer once")
    model = state.model
    if model is None:
        raise UsageError(
            "smp.DistributedOptimizer was called before smp.DistributedModel", remedy="wrap the model first"
        )
    cls = type(optimizer)
    if cls not in _CLASSES:
        _CLASSES[cls] = type(cls.__name__, (_Distributed, cls), {"__module__": cls.__module__})
    optimizer.__class__ = _CLASSES[cls]
    optimizer._connect(model)
    state.optimizer = optimizer
    model.optimizer_wrapped()
    return optimizer


class _Distributed:
    """What a wrapped optimizer does differently; mixed in before its own class."""

    param_groups: list[dict[str, Any]]
    state: Any

    def _connect(self, model: Any) -> None:
        names = {id(p): n for n, p in model.get_module().named_parameters()}
        strangers = [p for g in self.param_groups for p in g["params"] if id(p) not in names]
        if strangers:
            raise UsageError(
                f"the optimizer holds {len(strangers)} parameters that the wrapped model doesn't have, such as one of"
                f" shape {list(strangers[0].shape)}",
                remedy="build the optimizer from model.parameters() after smp.DistributedModel",
            )
        for number, group in enumerate(self.param_groups):
            unique = list(dict.fromkeys(group["params"]))
            if len(unique) < len(group["params"]):
                _log.info(
                    "parameter group %d lists %d parameters twice; each counts once",
                    number,
                    len(group["params"]) - len(unique),
                )
                group["params"][:] = unique
        self._sw_model = model
        self._sw_names = names
        self._sw_full_names = [[names[id(p)] for p in g["params"]] for g in self.param_groups]
        self._sw_deferred: list[StateDict] = []
        self.redefined_params = False
        if model.partitioned:
            self._shrink_groups()

    def _shrink_groups(self) -> None:
        """Keep the parameters that this rank updates; group dicts and their order stay."""
        ties = self._sw_model._ties
        local = {id(p) for p in self._sw_model.local_parameters()}
        for group in self.param_groups:
            group["params"][:] = [
                p for p in group["params"] if id(p) in local and not (ties is not None and ties.is_copy(p))
            ]
        deferred, self._sw_deferred = self._sw_deferred, []
        for content in deferred:
            self.load_state_dict(content)

    # ------------------------------------------------------------------ training

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's parameters. Called by: every rank, outside a step function."""
        if step_is_active():
            raise UsageError(
                "optimizer.step() was called inside a step function", remedy="call it after the step function returns"
            )
        if any(group["params"] for group in self.param_groups):
            result = super().step() if closure is None else super().step(closure)  # type: ignore[misc]
        else:
            result = None if closure is None else closure()
        ties = self._sw_model._ties
        if ties is not None:
            ties.send_weights()
        return result

    def zero_grad(self, set_to_none: bool = True, set_grads_to_None: bool | None = None) -> None:  # noqa: N803
        """Clear the gradients of all parameters that this rank holds."""
        to_none = set_to_none if set_grads_to_None is None else set_grads_to_None
        super().zero_grad(set_to_none=to_none)  # type: ignore[misc]
        ties = self._sw_model._ties
        if ties is not None:
            for parameter in self._sw_model.local_parameters():
                if ties.is_copy(parameter):
                    parameter.grad = None

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Clip by the norm of all gradients of the whole model; returns the norm before.

        Called by: every rank, after a step. Collectives: one all-reduce over PP_GROUP.
        """
        return float(clip_grad_norm(max_norm, norm_type, model=self._sw_model))

    # ------------------------------------------------------------------ state

    def orig_state_dict(self) -> StateDict:
        """The wrapped optimizer's own state dict of this rank, unmodified."""
        return super().state_dict()  # type: ignore[misc, no-any-return]

    def local_state_dict(self, gather_if_shard: bool = True) -> StateDict:
        """torch's form over this rank's parameters, plus `_smp_is_partial: True`. No communication."""
        return {**self.orig_state_dict(), PARTIAL_MARK: True}

    def state_dict(self) -> StateDict:
        """The whole model's optimizer state, keyed by index into the unpartitioned order of parameters.

        Called by: every rank of the MP_GROUP. Collectives: one object gather over the pipeline group.
        """
        mine = self.orig_state_dict()
        if not self._sw_model.partitioned or self._sw_model._num_stages == 1:
            return mine
        by_name = {name: mine["state"][i] for i, name in enumerate(_flat(self.group_names())) if i in mine["state"]}
        merged: StateDict = {}
        for part in objects.allgather_object(_to_cpu(by_name), "pp"):
            merged.update(part)
        full_names = self.full_group_names()
        index_of = {name: i for i, name in enumerate(_flat(full_names))}
        groups, start = [], 0
        for group, names in zip(mine["param_groups"], full_names, strict=True):
            groups.append({**group, "params": list(range(start, start + len(names)))})
            start += len(names)
        full_state = {index_of[n]: v for n, v in sorted(merged.items(), key=lambda item: index_of[item[0]])}
        return {"state": full_state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a partial (this rank's) or full dict; before partitioning it is remembered."""
        content = dict(state_dict)
        if not self._sw_model.partitioned:
            self._sw_deferred.append(content)
            return
        if content.pop(PARTIAL_MARK, False):
            self.load_local(content)
            return
        full_names = self.full_group_names()
        if len(full_names) != len(content["param_groups"]):
            raise UsageError(
                f"the optimizer state has {len(content['param_groups'])} parameter groups, the optimizer has"
                f" {len(full_names)}",
                remedy="build the optimizer with the same parameter groups",
            )
        state_of = {name: content["state"][i] for i, name in enumerate(_flat(full_names)) if i in content["state"]}
        local: StateDict = {"state": {}, "param_groups": []}
        index = 0
        for group, names in zip(content["param_groups"], self.group_names(), strict=True):
            indices = range(index, index + len(names))
            local["state"].update({i: state_of[n] for i, n in zip(indices, names, strict=True) if n in state_of})
            local["param_groups"].append({**group, "params": list(indices)})
            index += len(names)
        self.load_local(local)

    def load_local(self, state: StateDict) -> None:
        """Take over a dict in torch's form, indexed over this rank's groups."""
        super().load_state_dict({k: v for k, v in state.items() if k in ("state", "param_groups")})  # type: ignore[misc]

    def full_group_names(self) -> Sequence[Sequence[str]]:
        """Per group: plain names of all its parameters in the unpartitioned order."""
        return self._sw_full_names

    def group_names(self) -> Sequence[Sequence[str]]:
        """Per group: plain names of the parameters that this rank updates."""
        return [[self._sw_names[id(p)] for p in g["params"]] for g in self.param_groups]

    def _param_id_to_index(self) -> dict[int, int]:
        """id(parameter) -> index over the current groups."""
        return {id(p): i for i, p in enumerate(p for g in self.param_groups for p in g["params"])}

    def param_name_to_index(self) -> dict[str, int]:
        """Plain name -> index over the current groups."""
        return {name: i for i, name in enumerate(_flat(self.group_names()))}

    def _param_index_to_param_local(self) -> dict[int, Any]:
        """Index over the current groups -> parameter."""
        return dict(enumerate(p for g in self.param_groups for p in g["params"]))


def clip_grad_norm(max_norm: float, norm_type: float = 2.0, *, model: Any = None) -> torch.Tensor:
    """Clip all gradients of the wrapped model by their global norm; returns the norm before clipping.

    Called by: every rank, between the step call and optimizer.step(). Collectives: one all-reduce over PP_GROUP.
    max_norm: the factor is max_norm / (norm + 1e-6) where that is below 1, the same on every rank.
    Every parameter counts once: over stages, over copies of tied weights, over replicas.
    """
    wrapped = state.model if model is None else model
    if wrapped is None:
        raise UsageError("clip_grad_norm() needs a wrapped model", remedy="call smp.DistributedModel first")
    ties = wrapped._ties
    return grad_norm.clip_grad_norm_(
        wrapped.local_named_parameters(),
        max_norm,
        norm_type=norm_type,
        mp_axis="pp",
        counted_elsewhere=None if ties is None else lambda name, parameter: ties.is_copy(parameter),
    )


def _flat(groups: Sequence[Sequence[str]]) -> list[str]:
    return [name for group in groups for name in group]


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {k: _to_cpu(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_cpu(v) for v in value)
    return value
