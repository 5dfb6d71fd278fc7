"""`shardwright ckpt import`: what others have saved, as a checkpoint to resume from."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from shardwright.cli.places import place
from shardwright.cli.sizes import format_size


def import_(
    source: Annotated[
        Any,
        typer.Argument(
            metavar="SRC",
            parser=place,
            help="A torch or safetensors file, a Hugging Face folder, or a folder of torch.distributed.checkpoint; or its URL.",
        ),
    ],
    path: Annotated[
        Any, typer.Argument(metavar="PATH", parser=place, help="The folder or URL for the checkpoint; jobs resume from it.")
    ],
    tag: Annotated[str, typer.Option(help="A new tag.")],
    model_key: Annotated[str | None, typer.Option(help="Where the model is in nested content.", show_default="model, ...")] = None,
    optimizer_key: Annotated[
        str | None, typer.Option(help="Where the optimizer's state is.", show_default="optimizer, optim, ...")
    ] = None,
    optimizer: Annotated[bool, typer.Option("--optimizer/--no-optimizer", help="Take the optimizer's state, if there is one.")] = True,
    remove_prefix: Annotated[str, typer.Option(help="To be dropped from names: module. or model.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    trust: Annotated[bool, typer.Option("--trust", help="Read files that could run code.")] = False,
) -> None:
    """Make a full checkpoint of what others have saved, which any layout resumes from with partial=False.

    Example: shardwright ckpt import gpt2/ ckpts --tag pretrained
    """
    from rich.console import Console

    from shardwright.checkpoint.exchange import importing

    with Console(stderr=True).status(f"importing {source}"):
        found = importing.read(
            source,
            model_key=model_key,
            optimizer_key=optimizer_key,
            with_optimizer=optimizer,
            remove_prefix=remove_prefix,
            trust=trust,
        )
        size = importing.write(path, tag, found, trust=trust)
    parameters = 0 if found.optimizer is None else len(found.optimizer["param_names"])
    if as_json:
        told = {"name": tag, "out": str(path / tag), "tensors": len(found.model), "optimizer": parameters, "bytes": size}
        typer.echo(json.dumps(told, indent=2))
        return
    state = f"the optimizer's state of {parameters} parameters" if parameters else "no optimizer state"
    typer.echo(f"{len(found.model)} tensors and {state} written to {path / tag}, {format_size(size)}")
