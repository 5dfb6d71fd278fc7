"""The wrapper that users step: `smp.DistributedOptimizer`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from shardwright.checkpoint import unread
from shardwright.checkpoint.state import PARTIAL_MARK, SPANS
from shardwright.engine import optimizer_state, piece_state
from shardwright.engine.collective_calls import collective_call
from shardwright.engine.fully_sharded_optimizer import FullyShardedOptimizer, shards_everything
from shardwright.engine.grad_clipping import clip_grad_norm
from shardwright.engine.half_optimizer import HalfPrecisionOptimizer, half_optimizer_settings, inner_view
from shardwright.engine.model import DistributedModel
from shardwright.engine.optimizer_state import StateDict
from shardwright.engine.piece_holder import PieceHolder
from shardwright.engine.sharded_state import check_can_shard
from shardwright.engine.state import state
from shardwright.engine.weights import CALLERS
from shardwright.engine.whole_norms import ModelNorms
from shardwright.errors import UsageError
from shardwright.log import get_logger, once
from shardwright.optim.lamb import FusedLamb
from shardwright.optim.novograd import FusedNovoGrad
from shardwright.pipeline.step import step_is_active
from shardwright.topology import context
from shardwright.transport import objects

_log = get_logger(__name__)

_CLASSES: dict[tuple[type, bool, bool], type] = {}
OWNERS = "every rank of an RDP_GROUP"


class RepeatedParameterError(UsageError, ValueError):
    """One parameter in several groups of an optimizer: it would be updated several times in a step."""


def DistributedOptimizer(
    optimizer: Any,
    static_loss_scale: float | None = 1.0,
    dynamic_loss_scale: bool = False,
    dynamic_loss_args: Mapping[str, Any] | None = None,
    **more_dynamic_loss_args: Any,
) -> Any:
    """Let an optimizer work on this rank's part of the wrapped model.

    Called by: every rank. The very object is returned: its class becomes a subclass of its own class, so
    isinstance holds, and every attribute stays its own. After partitioning its groups (same dicts) hold local
    parameters only.
    optimizer: a torch optimizer, or any object with `param_groups` and `state`, such as one that wraps a
    torch optimizer in `.optimizer`.
    static_loss_scale: what the loss is multiplied with; dynamic_loss_scale: a scale that adapts, with
    dynamic_loss_args (or further keywords), see `precision.loss_scaler.DynamicLossScaler`. They only matter with
    fp16; accepted and ignored without. With fp16 and bf16 see `HalfPrecisionOptimizer`.
    With `shard_optimizer_state` its groups hold pieces of parameters from the end of the first step on, and `step()`
    brings the parameters together again. With sharded data parallelism they hold pieces at once, and it has what
    `FullyShardedOptimizer` says.
    Raises: UsageError if the optimizer holds parameters that the wrapped model doesn't have, is wrapped
    already, or can't work on a part of the model, or on pieces; ValueError if one is in two groups.
    """
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
        raise UsageError(f"smp.DistributedOptimizer takes an optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, WrappedOptimizer):
        raise UsageError("this optimizer is wrapped already", remedy="call smp.DistributedOptimizer once")
    model = state.model
    if model is None:
        raise UsageError(
            "smp.DistributedOptimizer was called before smp.DistributedModel", remedy="wrap the model first"
        )
    if isinstance(optimizer, torch.optim.LBFGS) and context.world().table.degrees.pp > 1:
        raise UsageError(
            "LBFGS takes all parameters together, so it can't work on each stage by itself",
            remedy="use an optimizer that updates each parameter by itself, or one pipeline stage",
        )
    key = "sharded_data_parallel_degree" if shards_everything() else "shard_optimizer_state"
    if (model._gradients.shards or shards_everything()) and not check_can_shard(optimizer, key):
        once(
            _log,
            logging.INFO,
            "%s updates pieces of parameters, as one-dimensional tensors: that is right if it treats every element by"
            " itself",
            type(optimizer).__name__,
        )
    names = {id(p): name for name, p in model.get_module().named_parameters()}
    _check_groups(optimizer.param_groups, names)
    arguments = {**(dynamic_loss_args or {}), **more_dynamic_loss_args}
    half = half_optimizer_settings(static_loss_scale, dynamic_loss_scale, arguments)
    inner = None
    if half is not None or (shards_everything() and isinstance(optimizer, torch.optim.Optimizer)):
        inner = inner_view(optimizer, model)
    optimizer.__class__ = _wrapped_class(type(optimizer), half is not None)
    if half is not None:
        optimizer._sw_begin_half(inner, *half)
    elif inner is not None:
        optimizer.optimizer = inner
    optimizer._connect(model, names)
    state.optimizer_wrapped(optimizer)
    model.optimizer_wrapped(optimizer)
    return optimizer


def _wrapped_class(cls: type, half: bool) -> type:
    """A subclass of an optimizer's own class; what that defines beyond torch's interface stays its own."""
    key = (cls, half, shards_everything())
    if key not in _CLASSES:
        kept = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        if hasattr(cls, "clip_master_grads"):
            kept["clip_master_grads"] = cls.clip_master_grads
        mixed_in = (*((FullyShardedOptimizer,) if key[2] else ()), *((HalfPrecisionOptimizer,) if half else ()))
        _CLASSES[key] = type(cls.__name__, (*mixed_in, WrappedOptimizer, cls), kept)
    return _CLASSES[key]


def _check_groups(groups: Sequence[dict[str, Any]], names: Mapping[int, str]) -> None:
    """Refuse parameters of another model; drop repeated ones, which would count twice and break loading."""
    strangers = [(n, p) for n, group in enumerate(groups) for p in group["params"] if id(p) not in names]
    if strangers:
        shown = ", ".join(f"{list(p.shape)} in group {number}" for number, p in strangers[:5])
        rest = f" and {len(strangers) - 5} more" if len(strangers) > 5 else ""
        raise UsageError(
            f"the optimizer holds {len(strangers)} parameters that the wrapped model doesn't have, of shape"
            f" {shown}{rest}",
            remedy="build the optimizer from model.parameters() after the last change of the model's modules",
        )
    for number, group in enumerate(groups):
        params = group["params"]
        keep = [all(p is not q for q in params[:i]) for i, p in enumerate(params)] if _repeats(params) else []
        if keep:
            optimizer_state.filter_group(group, keep)
            _log.info("parameter group %d lists %d parameters twice; each counts once", number, keep.count(False))
    _check_once(names[id(p)] for group in groups for p in group["params"])


def _check_once(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise RepeatedParameterError(
                f"parameter '{name}' is in more than one parameter group", remedy="put each parameter in one group"
            )
        seen.add(name)


def _repeats(params: Sequence[Any]) -> bool:
    return len({id(p) for p in params}) < len(params)


class WrappedOptimizer(PieceHolder):
    """What a wrapped optimizer does differently; mixed in before its own class."""

    _sw_backward_scale: float = 1.0
    """What `model.backward` multiplies the loss with for this optimizer."""

    def _connect(self, model: DistributedModel, names: dict[int, str]) -> None:
        """Learn whose parameters these are. names: by id of each of the model's parameters."""
        self._sw_model = model
        self._sw_names = names
        self._sw_full_names = [[names[id(p)] for p in g["params"]] for g in self.param_groups]
        self._sw_local_names = self._sw_full_names
        self._sw_deferred: list[StateDict] = []
        self._begin_holding()
        # A scheduler made before the wrap has put a step on the object itself; it is the one to call from here.
        self._sw_own_step = vars(self).pop("step", None)
        for optimizer in (self, getattr(self, "optimizer", None)):
            if isinstance(optimizer, (FusedLamb, FusedNovoGrad)):
                optimizer.norms = ModelNorms(model, self._sw_real)

    def _keep_local(self) -> None:
        """Keep the parameters that this rank updates; group dicts and their order stay.

        Called by: the model, when this rank knows its part. State of other parameters is dropped.
        """
        local = {id(p) for p in self._sw_model.local_parameters() if not self._sw_model.is_copy(p)}
        local |= self._sw_pieces.keys()
        for group in self.param_groups:
            kept = [id(self._sw_real(p)) in local for p in group["params"]]
            for parameter, keep in zip(group["params"], kept, strict=True):
                if not keep:
                    self.state.pop(parameter, None)
                elif parameter in self.state:
                    self.state[parameter] = optimizer_state.beside(parameter, self.state[parameter])
            optimizer_state.filter_group(group, kept)
        self._note_local_names()
        if not (self._sw_model._gradients.shards or shards_everything()):  # there pieces come first
            self._sw_groups_settled()
        deferred, self._sw_deferred = self._sw_deferred, []
        for content in deferred:
            self.load_state_dict(content)

    def _sw_load_scaler(self, content: Mapping[str, Any]) -> None:
        """Take over what of a state dict counts at once, beside settings of groups."""

    def _sw_weights_changed(self) -> None:
        """Called by the model: weights were loaded or exchanged."""

    def _note_local_names(self) -> None:
        self._sw_local_names = [[self._sw_names[id(p)] for p in g["params"]] for g in self.param_groups]
        # Ranks of a tp group hold slices of the same parameters, so that one rank's names are those of all.
        names = dict(enumerate(_flat(self._sw_local_names)))
        degree = context.world().table.degrees.tp
        state.param_index_to_name_tp_group = [dict(names) for _ in range(degree)]
        state.param_name_to_index_tp_group = [{n: i for i, n in names.items()} for _ in range(degree)]

    # ------------------------------------------------------------------ training

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's parameters. Called by: every rank, outside a step function.

        Collectives: with pieces, an all-gather for every flat buffer of parameters.
        """
        if step_is_active():
            raise UsageError(
                "optimizer.step() was called inside a step function",
                remedy="call it after the step function returns",
            )
        result = self._sw_update(closure)
        self._opt_called = True
        self._gather_pieces()
        self._sw_model.refresh_copies(buffers=False)
        return result

    def _sw_update(self, closure: Callable[[], Any] | None) -> Any:
        """The step of the optimizer's own class."""
        self._sw_before_update()
        own = self._sw_own_step
        plain = super().step if own is None else own  # type: ignore[misc]
        return plain() if closure is None else plain(closure)

    def _sw_before_update(self) -> None:
        """Gradients are complete, and about to be used."""

    # torch wraps the step of every class once, to run hooks; the inner step is wrapped already. Schedulers wrap the
    # step of every object once, to know that it was called.
    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool | None = None, set_grads_to_None: bool | None = None) -> None:
        """Clear the gradients of the parameters that this rank updates, and of copies of tied ones.

        Without an argument the optimizer's own class decides between None and zero.
        """
        choice = set_grads_to_None if set_to_none is None else set_to_none
        plain = super().zero_grad  # type: ignore[misc]
        accepted = inspect.signature(plain).parameters
        spelling = next((s for s in ("set_to_none", "set_grads_to_None") if s in accepted), None)
        if choice is None or spelling is None:
            plain()
        else:
            plain(**{spelling: choice})
        for parameter in self._sw_model.copies():
            parameter.grad = None
        for piece in self._sw_pieces.values():
            piece.parameter.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters; after partitioning the local ones of them.

        Raises: ValueError for a parameter that is in a group already.
        """
        super().add_param_group(param_group)  # type: ignore[misc]
        added = self.param_groups[-1]
        try:
            _check_groups([added], self._sw_names)
            _check_once([*_flat(self._sw_full_names), *(self._sw_names[id(p)] for p in added["params"])])
        except UsageError:
            self.param_groups.pop()
            raise
        self._sw_full_names.append([self._sw_names[id(p)] for p in added["params"]])
        if self._sw_model.partitioned:
            self._keep_local()
        if self._sw_model._sharding.is_settled:
            self._hold_pieces()

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Clip by the norm of all gradients of the whole model; returns the norm before.

        Called by: every rank, after a step. Collectives: one all-reduce over MP_GROUP.
        """
        return float(clip_grad_norm(max_norm, norm_type, model=self._sw_model))

    # ------------------------------------------------------------------ state

    def orig_state_dict(self) -> StateDict:
        """The wrapped optimizer's own state dict of this rank, unmodified."""
        content: StateDict = super().state_dict()  # type: ignore[misc]
        return content

    def local_state_dict(self, gather_if_shard: bool = True) -> StateDict:
        """torch's form over this rank's parameters, plus `_smp_is_partial: True`.

        With sharded state: the state of this rank's pieces, and where they lie, "_smp_spans". With gather_if_shard it is
        gathered: on rdp_rank 0, "state" and "_smp_spans" are lists with an entry for each rdp_rank.
        Called by: every rank of an RDP_GROUP if state is sharded and gathered, else any rank by itself.
        Collectives: one object gather over RDP_GROUP, or none.
        """
        self._sw_model._duties.check_loaded()
        return self._sw_local_state_dict(gather_if_shard)

    def _sw_local_state_dict(self, gather_if_shard: bool) -> StateDict:
        """The same, whether or not the values are of use."""
        content = {**self._own_state_dict(), PARTIAL_MARK: True}
        if not self._sw_pieces:
            return self._sw_to_script(content)
        content[SPANS] = self._spans()
        if gather_if_shard:
            with collective_call("optimizer.local_state_dict()", OWNERS):
                mine = optimizer_state.on_cpu((content["state"], content[SPANS]))
                everyone = objects.allgather_object(mine, "rdp")
            if context.world().coordinates.rdp == 0:
                content["state"], content[SPANS] = [s for s, _ in everyone], [spans for _, spans in everyone]
        return self._sw_to_script(content)

    def _sw_to_script(self, content: StateDict) -> StateDict:
        """A state dict of the library's own form as scripts get it."""
        return content

    def _sw_from_script(self, content: StateDict) -> StateDict:
        """The inverse of `_sw_to_script`; the dict that is given stays as it is."""
        return content

    def _own_state_dict(self) -> StateDict:
        """This rank's state in torch's form."""
        if isinstance(self, torch.optim.Optimizer):
            return self.orig_state_dict()
        return optimizer_state.in_torch_form(self.param_groups, self.state)

    def state_dict(self) -> StateDict:
        """The whole model's optimizer state, keyed by index into the unpartitioned order of parameters.

        Called by: every rank of the MP_GROUP; with sharded state every rank. Collectives: one object gather over
        TP_GROUP if the model is cut over it, with sharded state over DP_GROUP instead, and one over PP_GROUP with
        stages; tensors are on the CPU then.
        """
        self._sw_model._duties.check_loaded()
        mine = self._own_state_dict()
        distribution = self._sw_model._part.distribution
        stages = context.world().table.degrees.pp
        if not self._sw_model.partitioned or (stages == 1 and not distribution.is_cut and not self._sw_pieces):
            return self._sw_to_script(mine)
        named = optimizer_state.on_cpu(optimizer_state.by_name(mine, self.param_name_to_index()))
        with collective_call("optimizer.state_dict()", "every rank" if self._sw_pieces else CALLERS):
            if self._sw_pieces:
                parts = self._joined_pieces(named)
            elif distribution.is_cut:
                parts = objects.allgather_object(named, "tp")
            else:
                parts = [named]
            named = {n: optimizer_state.merged([p[n] for p in parts], distribution.specs.get(n)) for n in parts[0]}
            everyone = objects.allgather_object(named, "pp")
        whole = optimizer_state.joined(everyone, mine["param_groups"], self._full_group_names())
        return self._sw_to_script(whole)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a partial (this rank's) or full dict; before partitioning it is remembered.

        Called by: every rank, or those with rdp_rank() == 0: the other replicas take over the state in the
        next training step. The caller's dict and its tensors are not changed, now or later. A shard, as
        `local_state_dict(gather_if_shard=False)` returns it, is loaded by every rank. With `shard_optimizer_state`
        settings of groups count at once, and state from the end of the first step on.
        Raises: UsageError if the parameter groups are others, or a shard belongs to other pieces.
        """
        content = self._sw_from_script(dict(state_dict))
        partial = bool(content.pop(PARTIAL_MARK, False))
        is_own = SPANS in content and not isinstance(content["state"], list)
        if isinstance(content["state"], list):  # one for each rdp_rank
            self._pick_own(content)
        if not partial:
            optimizer_state.check_groups(content, self._full_group_names())
        if not self._sw_model.partitioned:
            self._sw_deferred.append(dict(state_dict))
            return
        if not partial:
            rest = {key: value for key, value in content.items() if key not in ("state", "param_groups")}
            content = optimizer_state.narrowed(content, self._full_group_names(), self._group_names())
            names = _flat(self._group_names())
            distribution = self._sw_model._part.distribution
            rank = context.world().coordinates.tp
            content["state"] = {
                i: optimizer_state.sliced(values, distribution.specs.get(names[i]), rank)
                for i, values in content["state"].items()
            }
            content.update(rest)
        self._take_over(content)
        self._note_loaded(state_dict, is_own=is_own)
        self._sw_model.optimizer_loaded()

    def _take_over(self, content: StateDict, *, keep: bool = False) -> None:
        """Take over a dict in torch's form, indexed over this rank's groups: state of its parameters, or of its pieces.

        With "_smp_spans" it is that of pieces. Before pieces are held, only the settings of the groups are taken over.
        keep: its tensors are the optimizer's from now on; else they are copied.
        """
        optimizer_state.check_groups(content, self._group_names())
        if self._sw_model._gradients.shards and not self._sw_model._sharding.is_settled:
            for group, loaded in zip(self.param_groups, content["param_groups"], strict=True):
                group.update(optimizer_state.options(loaded))
            self._sw_load_scaler(content)
            self._sw_waiting.append(content)
            return
        if SPANS in content:
            piece_state.check_spans(content[SPANS], self._spans())
            self._load_local(unread.here(content if keep else optimizer_state.owned(content)))
            return
        states: dict[int, Any] = content["state"]
        pieces = self._held_pieces()
        own = {
            i: piece_state.cut(values, piece) if piece is not None else values if keep else optimizer_state.owned(values)
            for i, values, piece in ((i, values, pieces[i]) for i, values in states.items())
        }
        self._load_local(unread.here({**content, "state": own}))

    def _load_local(self, content: StateDict) -> None:
        """Take over a dict in torch's form, indexed over this rank's groups. Group dicts stay the same
        objects.

        content: its tensors are the optimizer's from now on.
        """
        optimizer_state.check_groups(content, self._group_names())
        inner = self if isinstance(self, torch.optim.Optimizer) else getattr(self, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            raise UsageError(
                f"no state can be loaded into {type(self).__name__}: neither it nor its '.optimizer' is a"
                " torch optimizer"
            )
        before = list(self.param_groups)
        plain = {key: value for key, value in content.items() if key in ("state", "param_groups")}
        torch.optim.Optimizer.load_state_dict(inner, plain)
        for group, loaded in zip(before, inner.param_groups, strict=True):
            if group is not loaded:
                group.clear()
                group.update(loaded)
        inner.param_groups[:] = before

    def _full_group_names(self) -> optimizer_state.GroupNames:
        """Per group: plain names of all its parameters in the unpartitioned order."""
        return self._sw_full_names

    def _group_names(self) -> optimizer_state.GroupNames:
        """Per group: plain names of the parameters that this rank updates, by their places in the group.

        The script may put another object in the place of a parameter, such as an fp32 master.
        """
        return self._sw_local_names

    def _in_torch_form(self) -> LocalState:
        """This rank's state alone, for exchange between replicas."""
        return LocalState(self)

    def _param_id_to_index(self) -> dict[int, int]:
        """id(parameter) -> index over the current groups."""
        return {id(p): i for i, p in enumerate(p for g in self.param_groups for p in g["params"])}

    def param_name_to_index(self) -> dict[str, int]:
        """Plain name -> index over the current groups."""
        return {name: i for i, name in enumerate(_flat(self._group_names()))}

    def _param_index_to_param_local(self) -> dict[int, Any]:
        """Index over the current groups -> parameter."""
        return dict(enumerate(p for g in self.param_groups for p in g["params"]))


class LocalState:
    """One rank's part of an optimizer, with the two calls of torch's optimizers that move state."""

    def __init__(self, optimizer: WrappedOptimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> StateDict:
        """This rank's state, without communication."""
        return self._optimizer._own_state_dict()

    def load_state_dict(self, content: StateDict) -> None:
        """Take over a state like the one of `state_dict`."""
        self._optimizer._load_local(content)


def _flat(groups: optimizer_state.GroupNames) -> list[str]:
    return [name for group in groups for name in group]
