"""What a wrapped optimizer does in half precision: fp32 masters, the loss scale, and steps that all ranks skip."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.checkpoint.state import MASTER, SPANS, Spans
from shardwright.data_parallel.grad_norm import HeldGradient
from shardwright.engine.grad_clipping import clip
from shardwright.engine.model import DistributedModel
from shardwright.engine.optimizer_state import StateDict
from shardwright.errors import UsageError
from shardwright.log import get_logger, rank_zero
from shardwright.pipeline.step import step_is_active
from shardwright.precision.loss_scaler import DynamicLossScaler, LossScaler, make_scaler
from shardwright.precision.master_weights import MasterWeights
from shardwright.precision.policy import Policy, policy_of
from shardwright.topology import context
from shardwright.topology.ranks import Axis
from shardwright.transport import collectives

_log = get_logger(__name__)

_SCALER = "loss_scaler"
HALF_PRECISION_KEYS = (MASTER, _SCALER, "dynamic_loss_scale", "overflow")
"""What a state dict has beside torch's own keys."""


class HalfPrecisionOptimizer:
    """Mixed in before `WrappedOptimizer` with fp16 or bf16. Called by: every rank.

    After a step call, in order: `update_master_grads`, `clip_master_grads`, `step`; each does what was left out before
    it. Whether gradients overflowed is agreed by all ranks that update parts of the model: all skip, or none.

    optimizer: the torch optimizer inside, with the same groups and state. Schedulers may use either.
    overflow: was the last step skipped?   loss_scaler: holds the scale.
    fp16_groups, fp32_from_fp16_groups, fp32_from_fp32_groups: per group, half precision parameters, their masters, and
        fp32 parameters.
    """

    # Of WrappedOptimizer and of the optimizer's own class, which come behind this class.
    param_groups: list[dict[str, Any]]
    state: Any
    redefined_params: bool
    _sw_model: DistributedModel
    _sw_names: dict[int, str]
    _spans: Callable[[], Spans]

    optimizer: torch.optim.Optimizer
    loss_scaler: LossScaler

    def _sw_begin_half(self, inner: torch.optim.Optimizer, policy: Policy, scaler: LossScaler) -> None:
        """Before the optimizer learns whose parameters it has."""
        self.optimizer = inner
        self.loss_scaler = scaler
        self.dynamic_loss_scale = isinstance(scaler, DynamicLossScaler)
        self.overflow = False
        self.first_closure_call_this_step = True
        self.master_params_created = False
        self.master_is_distributed: dict[int, bool] = {}
        self.master_distribution_axis: dict[int, int | None] = {}
        self._sw_policy = policy
        self._sw_masters = MasterWeights([])
        self._sw_taken: int | None = None

    # ------------------------------------------------------------------ masters

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """Per group: half precision parameters that are trained."""
        if self.master_params_created:
            return self._sw_masters.halves
        return [[p for p in g["params"] if p.dtype is self._sw_policy.compute] for g in self.param_groups]

    @property
    def fp32_from_fp16_groups(self) -> list[list[nn.Parameter]]:
        """Per group: the masters, in the order of `fp16_groups`."""
        return self._sw_masters.masters

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """Per group: parameters that are fp32 themselves."""
        return self._sw_masters.others

    @property
    def fp32_from_fp16_paramid_groups(self) -> list[list[int]]:
        """Per group: ids of the masters."""
        return [[id(master) for master in group] for group in self._sw_masters.masters]

    @property
    def fp32paramid_from_fp16paramid(self) -> dict[int, int]:
        """id of a half precision parameter -> id of its master."""
        return {id(half): id(master) for half, master in self._sw_masters.pairs()}

    def _sw_real(self, held: Tensor) -> Tensor:
        return super()._sw_real(self._sw_masters.half_of(held))  # type: ignore[misc,no-any-return]

    def _sw_groups_settled(self) -> None:
        """Let masters stand in the groups for what this rank updates."""
        super()._sw_groups_settled()  # type: ignore[misc]
        self._sw_adopt()
        self.master_params_created = True

    def _sw_adopt(self) -> None:
        """Masters for parameters that have none yet; their state goes along."""
        for number, group in enumerate(self.param_groups):
            before = list(group["params"])
            group["params"][:] = self._sw_masters.held(before, number)
            for half, master in zip(before, group["params"], strict=True):
                if half is master:
                    continue
                self._sw_names[id(master)] = self._sw_names[id(half)]
                piece = self._sw_model._sharding.piece_behind(half)
                real = half if piece is None else piece.parameter
                spec = self._sw_model._part.distribution.spec(real)
                self.master_is_distributed[id(master)] = spec is not None
                self.master_distribution_axis[id(master)] = None if spec is None else spec.dim
                if half in self.state:
                    self.state[master] = {k: _in_full(v) for k, v in self.state.pop(half).items()}

    def _sw_weights_changed(self) -> None:
        """Called by the model when weights were loaded or exchanged: masters follow."""
        self._sw_masters.follow()

    def reload_model_params(self) -> None:
        """Make the masters equal to the model's weights. Called after a script has changed those itself."""
        self._sw_masters.reload()

    # ------------------------------------------------------------------ scale

    @property
    def loss_scale(self) -> float:
        """What backward multiplies the loss with."""
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.loss_scaler.loss_scale = scale

    @property
    def _sw_backward_scale(self) -> float:
        return self.loss_scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the scale, for a backward that isn't `model.backward`, which scales by itself."""
        return loss.float() * self.loss_scale

    def backward(self, loss: Tensor, update_master_grads: bool = True) -> None:
        """`model.backward(loss)`. Inside a step function master gradients are updated later, by `step()` at the latest."""
        self._sw_model.backward(loss)
        if update_master_grads and not step_is_active():
            self.update_master_grads()

    # ------------------------------------------------------------------ a step

    def update_master_grads(self) -> None:
        """Copy the model's gradients to the masters, divided by the scale; agree on an overflow.

        Does nothing if no backward came since the last time. Collectives: with fp16 one all-reduce of a flag over
        MP_GROUP, with sharded optimizer state over the world.
        """
        generation = self._sw_model._gradients.generation
        if self._sw_taken == generation:
            return
        if not self._sw_model._gradients.shards:  # there parameters become pieces first, at the end of a step
            self._sw_adopt()
        found = self._sw_masters.take_gradients(self.loss_scale, check=self._sw_policy.scales_loss)
        if self._sw_policy.scales_loss:
            flag = torch.tensor([found], dtype=torch.int32, device=context.world().device)
            axis: Axis = "world" if self._sw_model._gradients.sharded else "mp"
            collectives.all_reduce(flag, axis, op="max")
            found = bool(flag)
        self.overflow = found
        self._sw_taken = generation

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Clip the masters' gradients by the norm over the whole model.

        Collectives: those of `update_master_grads`, and one all-reduce over MP_GROUP.
        Returns: the norm before clipping; -1 after an overflow.
        """
        self.update_master_grads()
        if self.overflow:
            return -1.0
        return float(clip(self._sw_model, self._sw_gradients(), max_norm, norm_type))

    def _sw_gradients(self) -> Iterator[HeldGradient]:
        for held in (p for g in self.param_groups for p in g["params"]):
            if held.grad is not None:
                real = self._sw_real(held)
                piece = self._sw_model._sharding.piece_behind(real)
                yield HeldGradient(real if piece is None else piece.parameter, held.grad, piece)

    def _sw_update(self, closure: Callable[[], Any] | None) -> Any:
        """Update masters and weights, or skip the step after an overflow; then update the scale."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self.update_master_grads()
        self._sw_taken = None
        scale = self.loss_scale
        self.loss_scaler.update_scale(self.overflow)
        if self.overflow:
            if rank_zero():
                _log.info("gradients overflowed, step skipped; loss scale %g, now %g", scale, self.loss_scale)
            return result
        self._sw_before_update()  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self._sw_masters.write_back()
        return result

    def zero_grad(self, set_to_none: bool | None = None, set_grads_to_None: bool | None = None) -> None:
        """Clear the gradients of the masters and of the model."""
        super().zero_grad(set_to_none, set_grads_to_None)  # type: ignore[misc]
        choice = set_grads_to_None if set_to_none is None else set_to_none
        self._sw_taken = None
        self._sw_model._sharding.clear_gradients(set_to_none=choice is not False)
        for parameter in self._sw_model.parameters():
            if parameter.grad is None:
                continue
            if choice is False:
                parameter.grad.zero_()
            else:
                parameter.grad = None

    # ------------------------------------------------------------------ state

    def _own_state_dict(self) -> StateDict:
        content: StateDict = super()._own_state_dict()  # type: ignore[misc]
        content["state"] = dict(content["state"])
        for index, held in enumerate(p for g in self.param_groups for p in g["params"]):
            if self._sw_masters.half_of(held) is not held:
                content["state"][index] = {**content["state"].get(index, {}), MASTER: held.detach()}
        return {**content, **self._sw_scaler_state()}

    def _sw_scaler_state(self) -> dict[str, Any]:
        return {
            _SCALER: self.loss_scaler.state_dict(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
        }

    def _sw_to_script(self, content: StateDict) -> StateDict:
        """Masters and the scaler beside torch's own keys."""
        shards = content["state"] if isinstance(content["state"], list) else [content["state"]]
        masters = [{i: values[MASTER] for i, values in shard.items() if MASTER in values} for shard in shards]
        states = [without_masters(shard) for shard in shards]
        gathered = isinstance(content["state"], list)
        return {
            **content,
            "state": states if gathered else states[0],
            MASTER: masters if gathered else masters[0],
            **self._sw_scaler_state(),
        }

    def _sw_from_script(self, content: StateDict) -> StateDict:
        state, masters = content["state"], content.get(MASTER)
        if isinstance(state, list):
            state = [_with_masters(s, m) for s, m in zip(state, masters or [None] * len(state), strict=True)]
        else:
            state = _with_masters(state, masters)
        return {**{k: v for k, v in content.items() if k != MASTER}, "state": state}

    def _load_local(self, content: StateDict) -> None:
        super()._load_local({**content, "state": without_masters(content["state"])})  # type: ignore[misc]
        self.optimizer.state, self.optimizer.param_groups = self.state, self.param_groups
        held = [p for g in self.param_groups for p in g["params"]]
        with torch.no_grad():
            for index, values in content["state"].items():
                if MASTER in values:
                    held[index].copy_(values[MASTER])
        self._sw_load_scaler(content)

    def _sw_load_scaler(self, content: Mapping[str, Any]) -> None:
        self.loss_scaler.load_state_dict(content.get(_SCALER, {}))
        self.overflow = bool(content.get("overflow", self.overflow))

    def _sw_half_state(self) -> StateDict:
        """Masters, each in the state of its parameter, the groups' indices, and the scaler."""
        content = self._own_state_dict()
        state = {i: {MASTER: values[MASTER]} for i, values in content["state"].items() if MASTER in values}
        groups = [{"params": group["params"]} for group in content["param_groups"]]
        spans = {SPANS: self._spans()} if self.redefined_params else {}
        return {"state": state, "param_groups": groups, **spans, **self._sw_scaler_state()}


def half_optimizer_settings(
    static_scale: float | None, dynamic: bool, arguments: Mapping[str, Any]
) -> tuple[Policy, LossScaler] | None:
    """What the configuration and the arguments of `smp.DistributedOptimizer` ask for; None in full precision.

    With bf16 the scale is 1, whatever the arguments say: scripts pass them always.
    """
    policy = policy_of(context.world().config)
    if policy is None:
        return None
    return policy, make_scaler(static_scale, dynamic, arguments) if policy.scales_loss else LossScaler()


def inner_view(optimizer: Any, model: DistributedModel) -> torch.optim.Optimizer:
    """An optimizer of the same class with the very groups, state and hooks of this one.

    Raises: UsageError for an optimizer that can't have fp32 masters of the library's making.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"'fp16' or 'bf16' is on, but {type(optimizer).__name__} is no torch optimizer, and may have masters of its"
            " own",
            remedy="pass the torch optimizer itself, or leave out 'fp16' and 'bf16' and let that class do the work",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS evaluates the loss several times in one step, which half precision can't do",
            remedy="use another optimizer, or leave out 'fp16' and 'bf16'",
        )
    if any(isinstance(other, HalfPrecisionOptimizer) for other in model._optimizers):
        raise UsageError(
            "a second optimizer was wrapped with 'fp16' or 'bf16', where there is one loss scale",
            remedy="give one optimizer several parameter groups",
        )
    view: torch.optim.Optimizer = object.__new__(type(optimizer))
    view.__dict__.update(optimizer.__dict__)
    return view


def _in_full(value: Any) -> Any:
    half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if half else value


def without_masters(state: Mapping[int, Any]) -> dict[int, Any]:
    """State of parameters that have any besides a master."""
    plain = {i: {key: value for key, value in values.items() if key != MASTER} for i, values in state.items()}
    return {i: values for i, values in plain.items() if values or MASTER not in state[i]}


def _with_masters(state: Mapping[int, Any], masters: Mapping[int, Tensor] | None) -> dict[int, Any]:
    joined = {i: dict(values) for i, values in state.items()}
    for index, master in (masters or {}).items():
        joined.setdefault(index, {})[MASTER] = master
    return joined
