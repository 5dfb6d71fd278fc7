"""`shardwright plan`: how a model would be cut over pipeline stages, before any accelerator is rented."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from shardwright.errors import UsageError

if TYPE_CHECKING:
    from shardwright.partition.plan import PartitionPlan

_Choice = TypeVar("_Choice", bound=str)


def register(app: typer.Typer) -> None:
    """Add this file's command to the command line."""
    app.command("plan")(plan)


def plan(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_SCRIPT_OR_HF_CONFIG",
            help="A Python file that defines model() and perhaps example_inputs(), or a transformers config "
            "(config.json or its folder). No weights are loaded.",
        ),
    ],
    pp: Annotated[int, typer.Option("--pp", min=1, help="Number of pipeline stages.")],
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches per step.")] = 8,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples per step; one per microbatch by default.")
    ] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens per sample of a language model.")] = None,
    optimize: Annotated[
        str, typer.Option(help="'memory' or 'speed', as in the configuration; sets the memory weight.")
    ] = "memory",
    memory_weight: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Weight of memory against time, 0 to 1.")
    ] = None,
    tied_weights: Annotated[
        str, typer.Option(help="'colocate' or 'replicate', as in the configuration.")
    ] = "colocate",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the plan as JSON.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the stages.")] = None,
    png: Annotated[
        Path | None, typer.Option(help="Draw the stages as PNG (needs the cairosvg package).")
    ] = None,
) -> None:
    """Show how a model is cut over pipeline stages: bytes and FLOPs of each, and the bubble to expect."""
    from rich.console import Console

    batch = microbatches if batch is None else batch
    if batch % microbatches:
        raise UsageError(
            f"--batch is {batch}, expected a multiple of --microbatches ({microbatches})",
            remedy=f"--batch {-(-batch // microbatches) * microbatches}",
        )
    if png is not None:
        _check_png()
    console = Console(soft_wrap=True, highlight=False)
    with console.status("reading and tracing the model"):
        title, result = _make(
            source,
            pp=pp,
            microbatches=microbatches,
            batch=batch // microbatches,
            seq=seq,
            memory_weight=_memory_weight(optimize, memory_weight),
            tied_weights=_one_of("tied_weights", tied_weights, ("colocate", "replicate")),
        )
    console.print(f"{title} on {pp} stages, microbatches of {batch // microbatches}", style="bold")
    console.print(result.explain(microbatches), markup=False)
    if json_file is not None:
        _write(json_file, result.to_json())
        console.print(f"plan written to {json_file}")
    if svg is not None or png is not None:
        from shardwright.partition.picture import draw_svg

        drawing = draw_svg(result, title=title, microbatches=microbatches)
        if svg is not None:
            _write(svg, drawing)
            console.print(f"picture written to {svg}")
        if png is not None:
            _write_png(png, drawing)
            console.print(f"picture written to {png}")


def _make(
    source: str,
    *,
    pp: int,
    microbatches: int,
    batch: int,
    seq: int | None,
    memory_weight: float,
    tied_weights: Literal["colocate", "replicate"],
) -> tuple[str, PartitionPlan]:
    from shardwright.cli.model_source import load_model
    from shardwright.config.schema import Config
    from shardwright.partition.build import make_plan

    loaded = load_model(source, batch=batch, seq=seq)
    config = Config(
        pipeline_parallel_degree=pp,
        microbatches=microbatches,
        memory_weight=memory_weight,
        tied_weights=tied_weights,
        skip_tracing=not loaded.has_inputs,
    )
    return loaded.title, make_plan(loaded.module, loaded.args, loaded.kwargs, config=config, pp=pp)


def _memory_weight(optimize: str, given: float | None) -> float:
    from shardwright.config.schema import MEMORY_WEIGHT

    return MEMORY_WEIGHT[_one_of("optimize", optimize, tuple(MEMORY_WEIGHT))] if given is None else given


def _one_of(name: str, value: str, allowed: tuple[_Choice, ...]) -> _Choice:
    for choice in allowed:
        if choice == value:
            return choice
    raise UsageError(f"--{name.replace('_', '-')} is '{value}', expected one of {', '.join(allowed)}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"can't write '{path}': {error.strerror}", remedy="choose another path") from error


def _check_png() -> None:
    import importlib.util

    if importlib.util.find_spec("cairosvg") is None:
        raise UsageError(
            "--png needs the package cairosvg, which is not installed",
            remedy="pip install cairosvg, or write the same picture with --svg",
        )


def _write_png(path: Path, drawing: str) -> None:
    import cairosvg  # type: ignore[import-not-found, unused-ignore]

    try:
        cairosvg.svg2png(bytestring=drawing.encode(), write_to=str(path), scale=2.0)
    except OSError as error:
        raise UsageError(f"can't write '{path}': {error}", remedy="choose another path") from error
