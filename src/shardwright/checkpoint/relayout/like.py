"""The files of a layout, as another checkpoint of the same model has them."""

from __future__ import annotations

from shardwright.checkpoint import state
from shardwright.checkpoint.exchange.source import Source
from shardwright.checkpoint.flat_groups import MODULE
from shardwright.checkpoint.layout import StateRole
from shardwright.checkpoint.manifest import Entry
from shardwright.checkpoint.plan import Box, box_of
from shardwright.checkpoint.relayout.recut import Cut, saved_cuts
from shardwright.checkpoint.relayout.target import Member, ModelFile, OptimizerFile, Row, Target
from shardwright.errors import CheckpointError


def target_like(template: Source) -> Target:
    """Where a partial checkpoint has what. Its values aren't looked at. Raises: CheckpointError for a full one."""
    manifest = template.manifest
    if template.checkpoint.kind != "partial":
        raise CheckpointError(
            f"{template.checkpoint.name} is a full checkpoint, which has no layout", remedy="give a partial one as --like"
        )
    cuts = saved_cuts(manifest)
    entries = {entry.name: entry for entry in template.entries("model")}
    models = []
    optimizers = []
    for name, record in manifest.files.items():
        if record.role == "model":
            content = template.reader.outline(name, ())
            names = [key for key in content.get(MODULE, content) if key != state.PARTIAL_MARK]
            rows = [Row(key, _box(template, entries[key], name, cuts)) for key in names]
            models.append(ModelFile(name, record.writer, tuple(rows)))
        elif record.role == "optimizer":
            optimizers.append(_optimizer_file(template, name, record.writer, cuts, entries))
    return Target(manifest.layout, tuple(models), tuple(optimizers), manifest.partition)


def _box(template: Source, entry: Entry, file: str, cuts: dict[str, Cut]) -> Box:
    """What the model file of a rank has, or would have if it weren't in flat groups."""
    part = next((part for part in entry.slices if part.file == file), None)
    if part is not None:
        return box_of(part.offset, part.shape)
    if entry.slices[0].span is None or not entry.shape:
        return tuple((0, size if dim else 0) for dim, size in enumerate(entry.shape))
    (start, stop), *rest = _cut_box(template, file, entry.name, entry.shape, cuts)
    shard = int(file.removesuffix(".pt").rpartition("_")[2])
    rows = -(-(stop - start) // template.manifest.layout.sharded_data_parallel_degree)
    return ((min(start + shard * rows, stop), min(start + (shard + 1) * rows, stop)), *rest)


def _cut_box(template: Source, file: str, name: str, shape: tuple[int, ...], cuts: dict[str, Cut]) -> Box:
    """The part of a parameter that a tp rank has."""
    return cuts[name].box(_tp_of(template, file)) if name in cuts else box_of((0,) * len(shape), shape)


def _optimizer_file(
    template: Source, name: str, writer: int, cuts: dict[str, Cut], entries: dict[str, Entry]
) -> OptimizerFile:
    content = template.reader.value(name, ())
    names, spans = content[state.PARAM_NAMES], content.get(state.SPANS, {})

    def member(parameter: str) -> Member:
        box = _cut_box(template, name, parameter, entries[parameter].shape, cuts)
        span = spans.get(parameter)
        if span is None:
            return Member(Row(parameter, box))
        return Member(Row(parameter, box), (span[0], span[1]), tuple(span[3]) if len(span) > 3 else None)

    files: dict[StateRole, str] = {"optimizer": name, "fp16_states": "fp16_states" + name.removeprefix("optimizer")}
    groups = tuple(tuple(member(names[index]) for index in group["params"]) for group in content["param_groups"])
    return OptimizerFile(files, writer, groups)


def _tp_of(template: Source, name: str) -> int:
    """The tp rank in the name of a file: the first number with sharded data parallelism, else the second."""
    layout = template.manifest.layout
    numbers = [int(number) for number in name.removesuffix(".pt").split("_")[1:]]
    if layout.sharded_data_parallel_degree > 1:
        return numbers[0] if layout.tp > 1 else 0
    return numbers[1]
