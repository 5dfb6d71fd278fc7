"""`shardwright run`: start a training script on several processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from shardwright.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add `run` to the command line; what follows the script's name belongs to the script."""
    app.command("run", context_settings={"allow_interspersed_args": False})(run)


def run(
    script: Annotated[str, typer.Argument(help="The training script.", metavar="SCRIPT")],
    script_args: Annotated[
        list[str] | None, typer.Argument(help="Everything after it goes to the script.", metavar="ARGS")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(help="Processes on this host.", show_default="what --pp and --tp need")
    ] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages (pipeline_parallel_degree).")] = None,
    tp: Annotated[
        int | None, typer.Option(help="Ranks that share each layer (tensor_parallel_degree).")
    ] = None,
    microbatches: Annotated[int | None, typer.Option(help="Slices of a step's batch.")] = None,
    schedule: Annotated[str | None, typer.Option(help="simple or interleaved (key pipeline).")] = None,
    ddp: Annotated[
        bool | None, typer.Option("--ddp/--no-ddp", help="Average gradients over data-parallel replicas.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="JSON file with configuration keys; options here win over it.")
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("-o", metavar="KEY=VALUE", help="Any other configuration key. Repeatable."),
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
    nnodes: Annotated[
        int | None,
        typer.Option(help="Hosts of the job; start this command on each.", show_default="1, or what srun says"),
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(help="Which of them this host is, from 0.", show_default="0, or what srun says")
    ] = None,
    master_addr: Annotated[
        str | None, typer.Option(help="Address of node 0.", show_default="this host")
    ] = None,
    master_port: Annotated[
        int | None, typer.Option(help="Port on node 0.", show_default="a free one; 29500 with several nodes")
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option("--rdzv-endpoint", metavar="HOST[:PORT]", help="Both of them, in torchrun's spelling."),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(help="Start all workers again, up to so many times, when one failed.")
    ] = 0,
    grace_s: Annotated[
        float, typer.Option(help="Seconds that workers have to end after Ctrl-C or SIGTERM.")
    ] = 10.0,
    tag_output: Annotated[bool, typer.Option("--tag-output", help="Begin each line with its rank.")] = False,
    log_dir: Annotated[
        str | None, typer.Option(help="Folder for each rank's complete output, in files of its own.")
    ] = None,
    emulate_cuda: Annotated[
        bool,
        typer.Option("--emulate-cuda", help="Run a script written for GPUs on a machine without: cuda means cpu."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the torchrun command and exit.")] = False,
    emit: Annotated[
        str | None,
        typer.Option(metavar="FORM", help="Print a file that starts this job, and exit: slurm, kubernetes, command."),
    ] = None,
    image: Annotated[str | None, typer.Option(help="Container image for --emit kubernetes.")] = None,
) -> None:
    """Start a training script on several processes, and stop them all when one fails.

    Configuration keys given here win over those in the script. The exit code is the first failing worker's.

    Example: shardwright run --pp 2 --microbatches 4 train.py --epochs 3
    """
    from shardwright.launch import command, process
    from shardwright.launch.emit import emit as emitted
    from shardwright.launch.nodes import place_by_slurm, split_endpoint

    options = {
        "pipeline_parallel_degree": pp,
        "tensor_parallel_degree": tp,
        "microbatches": microbatches,
        "pipeline": schedule,
        "ddp": ddp,
    }
    if rdzv_endpoint is not None:
        if master_addr is not None or master_port is not None:
            raise ConfigError("--rdzv-endpoint is given beside --master-addr or --master-port, expected one spelling")
        master_addr, master_port = split_endpoint(rdzv_endpoint)
    place = None if emit is not None or node_rank is not None else place_by_slurm(os.environ)
    if place is not None and nnodes in (None, place.nnodes):
        nnodes, node_rank = place.nnodes, place.node_rank
        master_addr = master_addr or place.master_addr
    if emit in ("slurm", "kubernetes"):
        master_addr = master_addr or "node 0"  # such a file finds it by itself
    settings = command.settle(
        script,
        script_args or [],
        module=module,
        nproc=nproc,
        nnodes=1 if nnodes is None else nnodes,
        node_rank=node_rank or 0,
        master_addr=master_addr,
        master_port=master_port,
        config=command.merge_config(_read_config(config), options, override or []),
        grace_s=grace_s,
        tag_output=tag_output,
        log_dir=log_dir,
        emulate_cuda=emulate_cuda,
        max_restarts=max_restarts,
    )
    if emit is not None:
        text = emitted(emit, settings, image=image, inherited=os.environ, num_cores=process.usable_cores())
        typer.echo(text, nl=False)
        return
    if dry_run:
        typer.echo(command.torchrun_equivalent(settings, os.environ, process.usable_cores()))
        return
    raise typer.Exit(process.run(settings))


def _read_config(path: Path | None) -> dict[str, object]:
    if path is None:
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"--config {path} can't be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"--config {path} holds {content!r:.80}, expected a JSON object of configuration keys"
        )
    return content
