"""`shardwright ckpt export` and `reshard`: a checkpoint in the form of somebody else, or in another layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli.places import place
from shardwright.cli.sizes import format_size
from shardwright.errors import UsageError

if TYPE_CHECKING:
    from shardwright.checkpoint.exchange.source import Source
    from shardwright.checkpoint.layout import Layout
    from shardwright.checkpoint.manifest import Manifest
    from shardwright.checkpoint.relayout.target import Target
    from shardwright.checkpoint.storage import Place

_BY_SUFFIX = {".safetensors": "safetensors"}
_HUGGING_FACE = "hf"


def export(
    path: Annotated[Any, typer.Argument(metavar="PATH", parser=place, help="The folder that was passed to save_checkpoint, or its URL.")],
    out: Annotated[Any, typer.Argument(parser=place, help="A new file or folder, or its URL.")],
    tag: Annotated[str | None, typer.Option(help="Which checkpoint; the one in 'newest' by default.")] = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="torch or safetensors: one file; dcp: a folder for torch.distributed.checkpoint; hf: a folder for "
            "from_pretrained of transformers. By default safetensors for a name that ends so, else torch.",
        ),
    ] = "",
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Also the optimizer's state: torch and dcp.")] = False,
    max_shard_size: Annotated[str, typer.Option(help="hf: the most that one file holds.")] = "5GB",
    config: Annotated[
        Path | None, typer.Option(help="hf: a folder with config.json, for a checkpoint that doesn't say what model it is of.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    trust: Annotated[bool, typer.Option("--trust", help="Read files that could run code.")] = False,
) -> None:
    """Write the whole model of a checkpoint in another form, in the names that it has there; hf: in those of transformers.

    A dcp folder has the keys "model" and "optim".
    """
    from shardwright.checkpoint.exchange.export import FORMATS, num_bytes
    from shardwright.checkpoint.exchange.source import Source
    from shardwright.checkpoint.inspection import find
    from shardwright.cli import progress

    form = form or _BY_SUFFIX.get(out.suffix, "torch")
    if form not in (*FORMATS, _HUGGING_FACE):
        raise UsageError(f"--format is '{form}', expected one of {', '.join((*FORMATS, _HUGGING_FACE))}")
    if form == _HUGGING_FACE and optimizer:
        raise UsageError("a folder of Hugging Face holds no optimizer state", remedy="--format dcp or torch")
    check_new(out)
    source = Source(find(path, tag), trust=trust)
    with progress.bar(f"writing {out.name}", num_bytes(source, with_optimizer=optimizer)) as advance:
        if form == _HUGGING_FACE:
            from shardwright.integrations.huggingface.export import export_from_files

            count = export_from_files(source, out, max_shard_size=max_shard_size, config=config, advance=advance)
        else:
            count = FORMATS[form](source, out, with_optimizer=optimizer, advance=advance)
    size = size_of(out)
    if as_json:
        told = {"name": source.checkpoint.name, "out": str(out), "format": form, "tensors": count, "bytes": size}
        typer.echo(json.dumps(told, indent=2))
        return
    typer.echo(f"{count} tensors of {source.checkpoint.name} written to {out} ({form}), {format_size(size)}")


def reshard(
    source: Annotated[Any, typer.Argument(metavar="PATH/TAG", parser=place, help="A checkpoint, partial or full.")],
    out: Annotated[Any, typer.Argument(parser=place, help="The folder or URL for the new checkpoint; jobs resume from it.")],
    pp: Annotated[int | None, typer.Option("--pp", min=1, help="Pipeline stages.", show_default="as saved")] = None,
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="Tensor parallel ranks.", show_default="as saved")] = None,
    rdp: Annotated[int | None, typer.Option("--rdp", min=1, help="Replicas.", show_default="as saved")] = None,
    sharded: Annotated[
        bool | None,
        typer.Option("--shard-optimizer-state/--whole-optimizer-state", help="As in the job.", show_default="as saved"),
    ] = None,
    sdp: Annotated[
        int | None, typer.Option("--sharded-data-parallel-degree", min=1, help="As in the job.", show_default="as saved")
    ] = None,
    placement: Annotated[
        str | None, typer.Option("--placement-strategy", help="As in the job.", show_default="as saved")
    ] = None,
    like: Annotated[
        Any,
        typer.Option(metavar="PATH/TAG", parser=place, help="A checkpoint of the same model in the wanted layout; in place of the options above."),
    ] = None,
    partition: Annotated[
        Path | None,
        typer.Option(help="What `shardwright plan --json` wrote. By default the saved partition, or modules cut by sizes."),
    ] = None,
    bucket_cap_mb: Annotated[
        float, typer.Option(min=0.001, help="As the job gives it to smp.DistributedModel; for --shard-optimizer-state.")
    ] = 25,
    tag: Annotated[str | None, typer.Option(help="Of the new checkpoint.", show_default="that of the old one")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    trust: Annotated[bool, typer.Option("--trust", help="Read files that could run code.")] = False,
) -> None:
    """Write a checkpoint as a job of another layout would have saved it, file by file.

    A job of that layout resumes from it by the fast path, with the same values as from the old one. The old checkpoint stays.

    Example: shardwright ckpt reshard ckpts/step_100 ckpts_pp2 --pp 2 --rdp 2 --shard-optimizer-state
    """
    import dataclasses

    from shardwright.checkpoint import layout as layouts
    from shardwright.checkpoint.exchange.export import num_bytes
    from shardwright.checkpoint.exchange.source import Source
    from shardwright.checkpoint.inspection import find
    from shardwright.checkpoint.relayout.like import target_like
    from shardwright.checkpoint.relayout.rewrite import rewrite
    from shardwright.cli import progress
    from shardwright.integrations.huggingface.running_names import in_running_names

    old = in_running_names(Source(find(source.parent, source.name), trust=trust))
    wanted: dict[str, Any] = {
        "pp": pp,
        "tp": tp,
        "rdp": rdp,
        "shard_optimizer_state": sharded,
        "sharded_data_parallel_degree": sdp,
        "placement": placement,
    }
    changes = {name: value for name, value in wanted.items() if value is not None}
    layout = dataclasses.replace(old.manifest.layout, **changes)
    if like is None:
        _check_layout(layout)
        target = _target(old, layout, partition, bucket_cap_mb)
    else:
        if changes or partition is not None:
            raise UsageError("--like says all of the layout, so there can be no other option for it", remedy="leave those out")
        target = target_like(Source(find(like.parent, like.name), trust=trust))
        precise = dataclasses.replace(target.layout, precision=layout.precision)
        target = dataclasses.replace(target, layout=precise)
    name = tag if tag is not None else old.checkpoint.name.removesuffix(layouts.PARTIAL_SUFFIX)
    layouts.check_tag(name)
    with progress.bar(f"writing {name}", num_bytes(old, with_optimizer=True)) as advance:
        manifest = rewrite(old, target, out, name, trust=trust, advance=advance)
    _tell(manifest, out / layouts.partial_folder(name), as_json)


def _target(old: Source, layout: Layout, partition: Path | None, bucket_cap_mb: float) -> Target:
    from shardwright.engine.relayout import target_of
    from shardwright.partition.plan import PartitionPlan

    plan = None
    if partition is not None:
        try:
            plan = PartitionPlan.from_json(partition.read_text())
        except OSError as error:
            raise UsageError(f"can't read --partition {partition}: {error.strerror}") from error
    return target_of(old.manifest, layout, partition=plan, bucket_cap_mb=bucket_cap_mb)


def _check_layout(layout: Layout) -> None:
    """Raise the error that a job would raise if it were configured so."""
    from shardwright.config.parse import resolve
    from shardwright.config.rules import check_world

    keys: dict[str, Any] = {
        "pipeline_parallel_degree": layout.pp,
        "tensor_parallel_degree": layout.tp,
        "placement_strategy": layout.placement,
        "shard_optimizer_state": layout.shard_optimizer_state,
        "sharded_data_parallel_degree": layout.sharded_data_parallel_degree,
        "ddp": True,
    }
    config = resolve(keys, {}).config
    check_world(config, layout.world_size)


def _tell(manifest: Manifest, written: Place, as_json: bool) -> None:
    """What was written."""
    from rich.console import Console
    from rich.table import Table

    if as_json:
        told = {
            "name": written.name,
            "out": str(written),
            "layout": manifest.layout.describe(),
            "bytes": sum(record.size_bytes for record in manifest.files.values()),
            "files": {name: record.size_bytes for name, record in manifest.files.items()},
        }
        typer.echo(json.dumps(told, indent=2))
        return
    table = Table("file", "rank", "size", box=None, pad_edge=False)
    for name, record in manifest.files.items():
        table.add_row(name, str(record.writer), format_size(record.size_bytes))
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    console.print(f"{written} written, {manifest.layout.describe()}")


def check_new(out: Place) -> None:
    """Raise UsageError if there is something of that name, or no folder to put it into."""
    if out.exists():
        raise UsageError(f"{out} exists", remedy="give the name of a new file or folder")
    if isinstance(out, Path) and not out.absolute().parent.is_dir():
        raise UsageError(f"{out.parent} is no folder", remedy="create it first, or give another name")


def size_of(path: Place) -> int:
    """Bytes of a file, or of all files in a folder."""
    if path.is_file():
        return path.stat().st_size
    if not isinstance(path, Path):
        return sum(path.sizes().values())
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
