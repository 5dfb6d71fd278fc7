"""`shardwright ckpt`: look at checkpoints, verify, compare, reshard, export, import and prune them; no job and no accelerator needed."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli.places import place
from shardwright.errors import UsageError

if TYPE_CHECKING:
    from shardwright.checkpoint.inspection import Checkpoint

Root = Annotated[Any, typer.Argument(metavar="PATH", parser=place, help="The folder that was passed to save_checkpoint, or its URL.")]
Tag = Annotated[str | None, typer.Argument(help="Which checkpoint; the one in 'newest' by default.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Trust = Annotated[bool, typer.Option("--trust", help="Read files that could run code.")]


def register(app: typer.Typer) -> None:
    """Add this file's commands to the command line."""
    ckpt = typer.Typer(help="Look at checkpoints, verify, compare, reshard, export, import and prune them.", no_args_is_help=True)
    from shardwright.cli import conversion, importing

    for name, function in (
        ("ls", list_all),
        ("show", show),
        ("verify", verify),
        ("diff", diff),
        ("export", conversion.export),
        ("import", importing.import_),
        ("reshard", conversion.reshard),
        ("prune", prune),
    ):
        ckpt.command(name)(function)
    app.add_typer(ckpt, name="ckpt")


def list_all(path: Root, as_json: AsJson = False) -> None:
    """List the checkpoints of a folder, the oldest first."""
    from shardwright.checkpoint.inspection import checkpoints

    found = checkpoints(path)
    if as_json:
        _print_json([_summary(checkpoint) for checkpoint in found])
        return
    rows = [
        (
            ("* " if c.is_newest else "  ") + c.name,
            c.kind,
            _when(c),
            _size(c.num_bytes),
            c.manifest.layout.describe() if c.manifest else "",
            "complete" if c.is_whole else "incomplete",
        )
        for c in found
    ]
    _print_table(("  name", "kind", "saved", "size", "layout", "state"), rows)


def show(path: Root, tag: Tag = None, tensors: Annotated[bool, typer.Option(help="List every tensor.")] = False,
         as_json: AsJson = False) -> None:  # fmt: skip
    """Show what is in a checkpoint."""
    from shardwright.checkpoint.inspection import find, label, usable_manifest

    checkpoint = find(path, tag)
    manifest = usable_manifest(checkpoint)
    listed = [(label(e), e.role, e.dtype, "x".join(map(str, e.shape)), str(len(e.slices))) for e in manifest.entries]
    if as_json:
        files = {n: {"bytes": f.size_bytes, "role": f.role} for n, f in manifest.files.items()}
        keys = ("name", "role", "dtype", "shape", "parts")
        _print_json(
            {
                **_summary(checkpoint),
                "versions": dict(manifest.versions),
                "files": files,
                **({"tensors": [dict(zip(keys, row, strict=True)) for row in listed]} if tensors else {}),
            }
        )
        return
    _print_table(
        ("", ""),
        [
            ("name", checkpoint.name),
            ("saved", _when(checkpoint)),
            ("layout", manifest.layout.describe()),
            ("precision", manifest.layout.precision),
            ("written by", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
            ("parameters and buffers", f"{_num_elements(manifest, 'model'):,}"),
            ("optimizer state", f"{_num_elements(manifest, 'optimizer'):,}"),
            ("files", f"{len(manifest.files)}, {_size(checkpoint.num_bytes)}"),
            ("state", "complete" if checkpoint.is_whole else f"incomplete: {checkpoint.problems[0]}"),
        ],
    )
    if tensors:
        _print_table(("tensor", "role", "dtype", "shape", "parts"), listed)


def verify(
    path: Root,
    tag: Tag = None,
    everything: Annotated[bool, typer.Option("--all", help="All checkpoints of the folder.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read all files and compare them with their checksums; exit with 1 if something is wrong."""
    from rich.console import Console

    from shardwright.checkpoint import integrity
    from shardwright.checkpoint.inspection import checkpoints, find
    from shardwright.checkpoint.inspection import verify as problems_of

    chosen = checkpoints(path) if everything else [find(path, tag)]
    result = {}
    for checkpoint in chosen:
        with Console(stderr=True).status(f"reading {checkpoint.name}"):
            result[checkpoint.name] = problems_of(checkpoint)
    if as_json:
        _print_json({n: [{"kind": p.kind, "file": p.file, "detail": p.detail} for p in ps] for n, ps in result.items()})
    else:
        _print_table(
            ("checkpoint", "result"),
            [(n, "; ".join(map(str, found)) or "every file is what was saved") for n, found in result.items()],
        )
    if any(integrity.harmful(found) for found in result.values()):
        raise typer.Exit(1)


def diff(
    one: Annotated[Any, typer.Argument(parser=place, help="PATH/TAG of a checkpoint.")],
    other: Annotated[Any, typer.Argument(parser=place, help="PATH/TAG of another one, of whatever layout.")],
    tolerance: Annotated[float, typer.Option(min=0.0, help="Values may differ by so much.")] = 0.0,
    as_json: AsJson = False,
    trust: Trust = False,
) -> None:
    """Compare two checkpoints tensor by tensor; exit with 1 if they differ."""
    from rich.console import Console

    from shardwright.checkpoint.inspection import differences, find

    pair = [find(path.parent, path.name) for path in (one, other)]
    with Console(stderr=True).status("comparing"):
        found = [d for d in differences(*pair, trust=trust) if d.largest is None or not d.largest <= tolerance]
    if as_json:
        _print_json([{"tensor": d.what, "detail": d.detail, "largest": d.largest} for d in found])
    elif found:
        _print_table(("tensor", "difference"), [(d.what, d.detail) for d in found])
    else:
        typer.echo("no difference")
    if found:
        raise typer.Exit(1)


def prune(
    path: Root,
    keep: Annotated[int, typer.Option(min=1, help="How many partial checkpoints stay.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which would go.")] = False,
) -> None:
    """Delete the oldest partial checkpoints; incomplete ones go first, the one in 'newest' stays."""
    from shardwright.checkpoint import folder, layout, retention, storage
    from shardwright.checkpoint.inspection import checkpoints

    newest = next((c.name for c in checkpoints(path) if c.is_newest), "")
    if not newest:
        raise UsageError(
            f"{path / layout.NEWEST} names no checkpoint of this folder, so it is not known which must stay",
            remedy=f"write the name of the one to keep into {layout.NEWEST!r}",
        )
    doomed = retention.surplus(folder.partial_checkpoints(path), newest=newest, keep=keep)
    for name in doomed:
        if not dry_run:
            storage.of(path).remove(path / name, unique=uuid.uuid4().hex)
        typer.echo(f"{'would delete' if dry_run else 'deleted'} {name}")
    if not doomed:
        typer.echo("nothing to delete")


# ------------------------------------------------------------------ words


def _summary(checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "name": checkpoint.name,
        "kind": checkpoint.kind,
        "newest": checkpoint.is_newest,
        "complete": checkpoint.is_whole,
        "bytes": checkpoint.num_bytes,
        "saved_at_s": manifest.saved_at_s if manifest else None,
        "layout": manifest.layout.describe() if manifest else None,
        "problems": [str(problem) for problem in checkpoint.problems],
    }


def _num_elements(manifest: Any, role: str) -> int:
    from math import prod

    from shardwright.checkpoint.manifest import OBJECT

    return sum(prod(e.shape) for e in manifest.entries if e.role == role and e.dtype != OBJECT)


def _when(checkpoint: Checkpoint) -> str:
    if checkpoint.manifest is None:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(checkpoint.manifest.saved_at_s))


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def _print_table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=any(columns), pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else 200  # a file or a pipe has no width; lines stay whole
    Console(soft_wrap=True, highlight=False, markup=False, width=width).print(table)
