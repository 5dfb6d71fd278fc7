"""The part of a wrapped optimizer that deals with pieces of parameters, when optimizer state is sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardwright.checkpoint.state import SPANS, Spans
from shardwright.data_parallel import sync
from shardwright.data_parallel.optimizer_state import Piece
from shardwright.engine import piece_state
from shardwright.engine.model import DistributedModel
from shardwright.engine.optimizer_state import GroupNames, StateDict
from shardwright.errors import UsageError
from shardwright.topology import context
from shardwright.transport import objects


class PieceHolder:
    """A base of wrapped optimizers: pieces in the groups, and state dicts that are those of pieces.

    In order: `_begin_holding` at the wrap; `_hold_pieces` at the end of the first step, by the model; then, in every
    optimizer step, `_gather_pieces`. Without sharded state none of them does anything.
    redefined_params: virtual parameters have taken the place of real ones.
    """

    param_groups: list[dict[str, Any]]
    state: Any
    redefined_params: bool
    _sw_model: DistributedModel
    _sw_names: dict[int, str]

    def _begin_holding(self) -> None:
        self._sw_pieces: dict[int, Piece] = {}
        self._sw_waiting: list[StateDict] = []
        self._sw_swapped: dict[int, tuple[Tensor, Tensor]] = {}
        self._sw_loaded: tuple[bool, StateDict] | None = None
        self.redefined_params = False

    if TYPE_CHECKING:  # what the wrapped optimizer itself brings

        def _take_over(self, content: StateDict) -> None: ...
        def load_state_dict(self, state_dict: Mapping[str, Any]) -> None: ...
        def _in_torch_form(self) -> Any: ...
        def _group_names(self) -> GroupNames: ...

    def _hold_pieces(self) -> None:
        """Put this rank's pieces in the place of the parameters that are shared with other ranks.

        Called by: the model at the end of the first step, and of others in which parameters began to be trained. Group
        dicts and their order stay. State that there is becomes that of the pieces; state that waited for them is loaded.
        """
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                piece = self._sw_model._sharding.piece(parameter)
                if piece is None:
                    continue
                group["params"][index] = piece.tensor
                self._sw_pieces[id(piece.tensor)] = piece
                self._sw_names[id(piece.tensor)] = piece.name
                if parameter in self.state:
                    self.state[piece.tensor] = piece_state.cut(self.state.pop(parameter), piece)
        self.redefined_params = bool(self._sw_pieces)
        self._sw_groups_settled()
        waiting, self._sw_waiting = self._sw_waiting, []
        for content in waiting:
            present = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
            groups = [{**g, **now} for g, now in zip(content["param_groups"], present, strict=True)]
            self._take_over({**content, "param_groups": groups})

    def _held_pieces(self) -> list[Piece | None]:
        """For each place in all groups the piece that belongs there: a script may have put another object in its place."""
        pieces = {piece.name: piece for piece in self._sw_pieces.values()}
        return [pieces.get(name) for names in self._group_names() for name in names]

    def _sw_real(self, held: Tensor) -> Tensor:
        """The model's parameter, or the piece of one, that a tensor of the groups stands for."""
        if id(held) in self._sw_names:
            return held
        if id(held) not in self._sw_swapped:
            self._sw_swapped = {id(p): (p, real) for p, real in self._by_place()}
        return self._sw_swapped.get(id(held), (held, held))[1]

    def _by_place(self) -> Iterator[tuple[Tensor, Tensor]]:
        """What the groups hold, and what belongs there."""
        parameters = dict(self._sw_model._part.parameters())
        names = [name for group in self._group_names() for name in group]
        held = [p for group in self.param_groups for p in group["params"]]
        for tensor, name, piece in zip(held, names, self._held_pieces(), strict=True):
            yield tensor, parameters.get(name, tensor) if piece is None else piece.tensor

    def _sw_groups_settled(self) -> None:
        """The groups hold what this rank updates: parameters, or pieces of them."""

    def _gather_pieces(self) -> None:
        """Give all replicas the parameters that this step has updated. Collectives: see `ShardedState.gather`."""
        if self._sw_pieces:
            self._sw_model._sharding.gather([piece.parameter for piece in self._held_pieces() if piece is not None])

    # ------------------------------------------------------------------ state

    def _spans(self) -> Spans:
        return {piece.name: piece_state.span_of(piece) for piece in self._held_pieces() if piece is not None}

    def _joined_pieces(self, named: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The state of what each tp rank of this stage has, from that of all owners' pieces.

        Called by: every rank of a DP_GROUP. Collectives: one object gather over it.
        """
        pieces = {piece.name: piece for piece in self._held_pieces() if piece is not None}
        mine = {n: piece_state.part_of(pieces[n], values) if n in pieces else values for n, values in named.items()}
        tp_rank, distribution = context.world().coordinates.tp, self._sw_model._part.distribution
        everyone = objects.allgather_object((tp_rank, mine), "dp")
        found: list[dict[str, Any]] = []
        for rank in range(context.world().table.degrees.tp):
            own = next(content for tp, content in everyone if tp == rank)
            whole = dict(own)
            for name in own.keys() & pieces.keys():
                over_rdp = distribution.is_scaled(pieces[name].parameter)
                owners = [content for tp, content in everyone if tp == rank or not over_rdp]
                whole[name] = piece_state.joined([content[name] for content in owners])
            found.append(whole)
        return found

    def _pick_own(self, content: StateDict) -> None:
        """Keep this rank's entry of a gathered state."""
        rank = context.world().coordinates.rdp
        if len(content["state"]) <= rank:
            raise UsageError(
                f"the optimizer state has {len(content['state'])} shards, this rank is rdp_rank {rank}",
                remedy="load it with as many replicas as it was saved with; optimizer.state_dict() is whole and fits"
                " everywhere",
            )
        content["state"] = content["state"][rank]
        if SPANS in content:
            content[SPANS] = content[SPANS][rank]

    def _note_loaded(self, state_dict: Mapping[str, Any], *, is_own: bool) -> None:
        """Remember what was loaded, for replicas on which nothing was. is_own: it is a shard, of no use to them."""
        if self._sw_model._gradients.shards:
            self._sw_loaded = (is_own, {} if is_own else dict(state_dict))

    def _level_replicas(self) -> None:
        """After loading on some replicas: all take over what was loaded on one.

        Called by: every rank of an RDP_GROUP. Collectives: a broadcast of the state of rdp_rank 0; with sharded state
        an object gather, and an object broadcast if some replica has loaded nothing.
        Raises: UsageError if shards were loaded, but not on every rank.
        """
        if not self._sw_model._gradients.shards:
            sync.broadcast_optimizer_state(self._in_torch_form(), "rdp", source=0)
            return
        told = objects.allgather_object(None if self._sw_loaded is None else self._sw_loaded[0], "rdp")
        if None in told and False in told:
            source = told.index(False)
            content = objects.broadcast_object(None if self._sw_loaded is None else self._sw_loaded[1], "rdp", source)
            if self._sw_loaded is None:
                self.load_state_dict(content)
        elif None in told and True in told:
            raise UsageError(
                f"optimizer.load_state_dict() was called with a shard of the state on {told.count(True)} of {len(told)}"
                " replicas, but every rank has a shard of its own",
                remedy="load every rank's own shard, or a whole state",
            )
        self._sw_loaded = None
