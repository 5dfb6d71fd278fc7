"""What a job of another layout would hold of a checkpoint's model: partition, slices and pieces, without that job.

Everything comes from the manifest: the tree of modules is cut by sizes where the number of stages changes, tp slices follow
from those that were saved, pieces from the same packing of buckets that the job does. No process group.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from shardwright.checkpoint.layout import Layout
from shardwright.checkpoint.manifest import OBJECT, Manifest
from shardwright.checkpoint.plan import Box, box_of
from shardwright.checkpoint.relayout.recut import Cut, check_names, origin_of, target_cuts
from shardwright.checkpoint.relayout.target import At, Rules, Span, Target, lay_out
from shardwright.config.parse import resolve
from shardwright.data_parallel.buckets import MIB, TensorInfo, contiguous_strides, plan_buckets
from shardwright.data_parallel.flat_layout import ShardLayout
from shardwright.errors import CheckpointError
from shardwright.partition.build import plan_of_tree
from shardwright.partition.plan import PartitionPlan
from shardwright.partition.tree import from_record
from shardwright.topology.ranks import Degrees, RankTable

_LIKE = "save one checkpoint with a job of that layout, and give it as --like PATH/TAG; or resume there directly"


def target_of(
    manifest: Manifest, layout: Layout, *, partition: PartitionPlan | None = None, bucket_cap_mb: float = 25
) -> Target:
    """What each file of a layout holds.

    partition: the job's, for another number of stages than was saved; by default the tree of modules is cut by sizes.
    bucket_cap_mb: as the job gives it to `smp.DistributedModel`; it decides who updates what with `shard_optimizer_state`.
    Raises: CheckpointError saying what of the layout doesn't follow from the manifest, and how to tell.
    """
    model = _Model(manifest, layout, bucket_cap_mb)
    record = model.partition(partition)
    rules = Rules(
        stage_of=model.stages(record),
        cut=model.cut,
        shard=model.shard,
        pieces=model.pieces,
        strides=model.strides(),
        rank_at=lambda at: model.table.rank_at(pp=at.pp, tp=at.tp, rdp=at.rdp),
    )
    return lay_out(layout, list(model.shapes), manifest.param_groups, rules, record)


class _Model:
    """The model of a checkpoint, in a layout."""

    def __init__(self, manifest: Manifest, layout: Layout, bucket_cap_mb: float) -> None:
        self.shapes = {e.name: e.shape for e in manifest.entries if e.role == "model"}
        self.table = RankTable(
            Degrees(layout.pp, layout.tp, layout.rdp, layout.sharded_data_parallel_degree), layout.placement
        )
        self._manifest = manifest
        self._layout = layout
        self._saved_tp = 1 if manifest.kind == "full" else manifest.layout.tp
        self._cap_bytes = int(bucket_cap_mb * MIB)
        self._dtypes = {e.name: e.dtype for e in manifest.entries if e.role == "model"}
        self._cuts: Mapping[str, Cut] = target_cuts(manifest, layout.tp)
        self._ties = {name: names for names in manifest.ties for name in names}
        self._stages: dict[str, int] = {}

    # ------------------------------------------------------------------ stages

    def partition(self, given: PartitionPlan | None) -> Mapping[str, Any] | None:
        """The partition as JSON values; None with one stage."""
        saved, pp = self._manifest, self._layout.pp
        if given is not None and given.num_stages != pp:
            raise CheckpointError(f"the partition has {given.num_stages} stages, the layout pp={pp}")
        if pp == 1:
            return None
        if given is not None:
            record: Mapping[str, Any] = json.loads(given.to_json())
            return record
        check_names(saved)
        origin = origin_of(saved)
        if origin is not None and origin["layout"]["pp"] == pp and origin["partition"] is not None:
            return dict(origin["partition"])
        if saved.layout.pp == pp and saved.partition is not None:
            return saved.partition
        if saved.structure is None:
            raise CheckpointError(
                f"the checkpoint doesn't tell the modules of the model, so it can't be cut into {pp} stages",
                remedy="give the partition that `shardwright plan --json` writes as --partition; or " + _LIKE,
            )
        sizes = {
            name: (math.prod(shape), math.prod(shape) * _itemsize(self._dtypes[name]))
            for name, shape in self.shapes.items()
            if self._dtypes[name] != OBJECT
        }
        tree = from_record(saved.structure, sizes)
        config = resolve({"pipeline_parallel_degree": pp}, {}).config
        plan: Mapping[str, Any] = json.loads(plan_of_tree(tree, config, pp).to_json())
        return plan

    def stages(self, record: Mapping[str, Any] | None) -> dict[str, int]:
        """The stage that answers for each name of the state dict."""
        stage_of: Mapping[str, int] = {"": 0} if record is None else record["stage_of"]
        replicas = () if record is None else record.get("replicas", ())
        owners = {tied["name"]: tied["owner"] for tied in replicas}
        for name in self.shapes:
            names = self._ties.get(name, (name,))
            owner = next((owners[n] for n in names if n in owners), None)
            self._stages[name] = _stage(stage_of, names[0]) if owner is None else owner
        return self._stages

    # ------------------------------------------------------------------ slices

    def cut(self, name: str, tp: int) -> Box:
        """What a tp rank has of a tensor."""
        shape = self.shapes[name]
        return self._cuts[name].box(tp) if name in self._cuts else box_of((0,) * len(shape), shape)

    def shard(self, name: str, box: Box, rdp: int) -> Box:
        """With sharded data parallelism, the rows of a parameter that a rank has."""
        degree = self._layout.sharded_data_parallel_degree
        if degree == 1 or not box or name not in self._parameters():
            return box
        start, stop = ShardLayout(_shape(box), degree).rows(rdp % degree)
        return ((box[0][0] + start, box[0][0] + stop), *box[1:])

    def _parameters(self) -> set[str]:
        """Names of parameters, tied ones under each of their names."""
        names = {row[0] for row in self._structure("parameters")}
        return names | {other for name in names for other in self._ties.get(name, ())}

    def _structure(self, key: str) -> Any:
        structure = self._manifest.structure
        if structure is None:
            raise CheckpointError(
                "the checkpoint doesn't tell which tensors of the model are parameters, so they can't be sharded", remedy=_LIKE
            )
        check_names(self._manifest)
        return structure[key]

    # ------------------------------------------------------------------ pieces

    def pieces(self, at: At) -> dict[str, Span]:
        """What a rank updates of each parameter that is in pieces, see `data_parallel.optimizer_state`, Note [Pieces]."""
        degree = self._layout.sharded_data_parallel_degree
        rank = self.table.rank_at(pp=at.pp, tp=at.tp, rdp=at.rdp)
        coordinates = self.table.coordinates(rank)
        if degree > 1:
            layouts = {n: ShardLayout(_shape(self.cut(n, at.tp)), degree) for n, _, _ in self._structure("parameters")}
            return {name: cut.held(coordinates.shard) for name, cut in layouts.items() if cut.shape}
        if not self._layout.shard_optimizer_state:
            return {}
        here = [n for n, trained, _ in self._structure("parameters") if trained and self._stages[n] == at.pp]
        scaled = set(self._structure("scaled"))
        if self._manifest.layout.tp == 1 < self._layout.tp and (tied := sorted(scaled & self._ties.keys())):
            # With one tp rank such a parameter counts as acting on the scaled batch if it does so anywhere.
            raise CheckpointError(
                f"who updates {tied[0]!r}, which is tied, with more tp ranks doesn't follow from a checkpoint of one", remedy=_LIKE
            )
        found: dict[str, Span] = {}
        found.update(self._shares([n for n in here if n in scaled], at, self.table.size("rdp"), coordinates.rdp))
        found.update(self._shares([n for n in here if n not in scaled], at, self.table.size("dp"), coordinates.dp))
        return found

    def _shares(self, names: list[str], at: At, num_owners: int, owner: int) -> dict[str, Span]:
        """The pieces of one axis."""
        if num_owners == 1 or not names:
            return {}
        strides = self.strides()
        infos = []
        for name in names:
            shape = _shape(self.cut(name, at.tp))
            stride = strides.get(name, contiguous_strides(shape))
            infos.append(TensorInfo(name, shape, stride, getattr(torch, self._dtypes[name]), torch.device("cpu")))
        first = min(MIB, self._cap_bytes)
        found: dict[str, Span] = {}
        for bucket in plan_buckets(infos, cap_bytes=self._cap_bytes, first_cap_bytes=first, reverse=True):
            share = bucket.padded_elements(num_owners) // num_owners
            for slot in bucket.slots:
                start = min(max(owner * share - slot.offset, 0), slot.num_elements)
                stop = max(min((owner + 1) * share - slot.offset, slot.num_elements), start)
                found[slot.name] = (start, stop)
        return found

    def strides(self) -> dict[str, tuple[int, ...]]:
        """Of parameters that were saved in pieces and aren't row-major. Only as they were cut by the same tp degree."""
        if self._saved_tp != self._layout.tp:
            return {}
        parts = ((e.name, part.strides) for e in self._manifest.entries for part in e.slices)
        return {name: strides for name, strides in parts if strides is not None}


def _stage(stage_of: Mapping[str, int], name: str) -> int:
    """The stage of the innermost known module on the way to a name."""
    above = name.rpartition(".")[0]
    while above and above not in stage_of:
        above = above.rpartition(".")[0]
    if not above and "." in name and len(stage_of) > 1:
        raise CheckpointError(
            f"{name!r} is in no module of the partition",
            remedy="a full checkpoint has the names of the original model if tensor parallelism has replaced modules; save it"
            " with translate_if_full=False, or convert a partial one",
        )
    return stage_of[above]


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _itemsize(dtype: str) -> int:
    found: torch.dtype = getattr(torch, dtype)
    return found.itemsize
