"""`shardwright ckpt export`: a checkpoint in the form of somebody else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.sizes import format_size
from shardwright.errors import UsageError

_BY_SUFFIX = {".safetensors": "safetensors"}


def export(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The folder that was passed to save_checkpoint.")],
    out: Annotated[Path, typer.Argument(help="A new file or folder.")],
    tag: Annotated[str | None, typer.Option(help="Which checkpoint; the one in 'newest' by default.")] = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="torch or safetensors: one file; dcp: a folder for torch.distributed.checkpoint. By default "
            "safetensors for a name that ends so, else torch.",
        ),
    ] = "",
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Also the optimizer's state: torch and dcp.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    trust: Annotated[bool, typer.Option("--trust", help="Read files that could run code.")] = False,
) -> None:
    """Write the whole model of a checkpoint in another form, in the names that it has there.

    A dcp folder has the keys "model" and "optim".
    """
    from shardwright.checkpoint.exchange.export import FORMATS, num_bytes
    from shardwright.checkpoint.exchange.source import Source
    from shardwright.checkpoint.inspection import find
    from shardwright.cli import progress

    form = form or _BY_SUFFIX.get(out.suffix, "torch")
    if form not in FORMATS:
        raise UsageError(f"--format is '{form}', expected one of {', '.join(FORMATS)}")
    check_new(out)
    source = Source(find(path, tag), trust=trust)
    with progress.bar(f"writing {out.name}", num_bytes(source, with_optimizer=optimizer)) as advance:
        count = FORMATS[form](source, out, with_optimizer=optimizer, advance=advance)
    size = size_of(out)
    if as_json:
        told = {"name": source.checkpoint.name, "out": str(out), "format": form, "tensors": count, "bytes": size}
        typer.echo(json.dumps(told, indent=2))
        return
    typer.echo(f"{count} tensors of {source.checkpoint.name} written to {out} ({form}), {format_size(size)}")


def check_new(out: Path) -> None:
    """Raise UsageError if there is something of that name, or no folder to put it into."""
    if out.exists():
        raise UsageError(f"{out} exists", remedy="give the name of a new file or folder")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out.parent} is no folder", remedy="create it first, or give another name")


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
