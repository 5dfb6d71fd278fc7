"""`shardwright plan`: how a model would be cut, what each rank would hold, and what fits, before anything is rented."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from shardwright.cli.sizes import format_size, parse_size
from shardwright.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from shardwright.engine.planning.fit import Outcome
    from shardwright.engine.planning.layout import Layout
    from shardwright.engine.planning.memory import Habits
    from shardwright.engine.planning.model import Subject

_BASE = {"cuda": "1GiB", "cpu": "512MiB"}
_Choice = TypeVar("_Choice", bound=str)


def register(app: typer.Typer) -> None:
    """Add this file's command to the command line."""
    app.command("plan")(plan)


def plan(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_SCRIPT_OR_HF_CONFIG",
            help="A Python file that defines model() and perhaps example_inputs() and loss(output), or a transformers "
            "config (config.json or its folder). No weights are loaded.",
        ),
    ],
    pp: Annotated[int, typer.Option("--pp", min=1, help="Number of pipeline stages.")] = 1,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Ranks that share each layer.")] = 1,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Ranks of the job.", show_default="what --pp and --tp need")
    ] = None,
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
    override: Annotated[
        list[str] | None,
        typer.Option("-o", metavar="KEY=VALUE", help="Any other configuration key, such as bf16=true. Repeatable."),
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="Of torch.optim or smp.optimizers, with what changes its state: sgd,momentum=0.9")
    ] = "adamw",
    activation_checkpointing: Annotated[
        bool, typer.Option("--activation-checkpointing", help="Repeated blocks are recomputed in backward.")
    ] = False,
    bucket_view: Annotated[
        bool, typer.Option("--gradient-as-bucket-view", help="As that argument of smp.DistributedModel.")
    ] = False,
    device: Annotated[str, typer.Option(help="'cuda' or 'cpu': how optimizers update, and where offloading goes.")] = "cuda",
    fit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Propose what fits into so much on each rank: 24GiB, 80GB.")
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(min=1, help="With --fit: samples per step of the whole job.", show_default="8 on each rank"),
    ] = None,
    precision: Annotated[
        str, typer.Option(help="With --fit: fp32 (the model as it is), bf16, fp16, or any (fp32 and bf16).")
    ] = "any",
    base: Annotated[
        str | None,
        typer.Option(help="What interpreter and libraries take on each rank.", show_default="1GiB on cuda, 512MiB on cpu"),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="With --fit: most proposals.")] = 8,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the plan, or the proposals, as JSON.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the stages.")] = None,
    png: Annotated[
        Path | None, typer.Option(help="Draw the stages as PNG (needs the cairosvg package).")
    ] = None,
) -> None:
    """Show how a model is cut over stages, what each rank holds, and what to expect - or, with --fit, how it would fit.

    Example: shardwright plan gpt2/config.json --gpus 8 --fit 24GiB --seq 1024
    """
    from rich.console import Console

    batch = microbatches if batch is None else batch
    if batch % microbatches:
        raise UsageError(
            f"--batch is {batch}, expected a multiple of --microbatches ({microbatches})",
            remedy=f"--batch {-(-batch // microbatches) * microbatches}",
        )
    if png is not None:
        _check_png()
    ranks = pp * tp if gpus is None else gpus
    devices: tuple[Literal["cuda", "cpu"], ...] = ("cuda", "cpu")
    where = _one_of("device", device, devices)
    limit = None if fit is None else parse_size("fit", fit)
    base_bytes = parse_size("base", base or _BASE[where])
    console = Console(soft_wrap=True, highlight=False)
    with console.status("reading and tracing the model"):
        title, subject = _subject(source, batch // microbatches, seq)
        habits = _habits(optimizer, activation_checkpointing, bucket_view, where)
        if limit is None:
            keys = {
                "pipeline_parallel_degree": pp,
                "tensor_parallel_degree": tp,
                "microbatches": microbatches,
                "optimize": _one_of("optimize", optimize, ("memory", "speed")),
                "memory_weight": memory_weight,
                "tied_weights": _one_of("tied_weights", tied_weights, ("colocate", "replicate")),
                "ddp": True if ranks > pp else None,
            }
            layout, note = _layout(subject, keys, override or [], ranks, habits)
        else:
            outcome = _outcome(
                subject, limit, ranks, global_batch, precision, override or [], habits, base_bytes, top
            )
    if limit is not None:
        from shardwright.cli import memory_report

        console.print(f"{title} on {ranks} ranks of {format_size(limit)}", style="bold")
        console.print(memory_report.proposals(outcome, base_bytes), markup=False)
        if json_file is not None:
            _write(json_file, memory_report.proposals_json(outcome, limit, base_bytes))
            console.print(f"proposals written to {json_file}")
        if not outcome.proposals:
            raise typer.Exit(1)
        return
    _show(console, title, layout, note, base_bytes, batch // microbatches, json_file, svg, png)


def _show(
    console: Console,
    title: str,
    layout: Layout,
    note: str,
    base_bytes: int,
    size: int,
    json_file: Path | None,
    svg: Path | None,
    png: Path | None,
) -> None:
    from shardwright.cli import memory_report

    result, microbatches = layout.plan, layout.config.microbatches
    console.print(f"{title} on {result.num_stages} stages, microbatches of {size}", style="bold")
    console.print(result.explain(microbatches), markup=False)
    console.print("\n" + memory_report.ranks(layout, base_bytes, note), markup=False)
    if json_file is not None:
        _write(json_file, memory_report.plan_json(layout, base_bytes))
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


def _subject(source: str, size: int, seq: int | None) -> tuple[str, Subject]:
    from shardwright.cli.model_source import load_model
    from shardwright.engine.planning.model import Subject
    from shardwright.integrations.huggingface import families
    from shardwright.integrations.huggingface import plan as plans_of_models
    from shardwright.tensor_parallel import registry

    registry.register_finder(families.find)
    registry.register_planner(plans_of_models.find)
    loaded = load_model(source, batch=size, seq=seq)
    return loaded.title, Subject(loaded.module, loaded.args, loaded.kwargs, loaded.loss, loaded.has_inputs)


def _habits(optimizer: str, checkpointing: bool, bucket_view: bool, device: Literal["cuda", "cpu"]) -> Habits:
    from shardwright.engine.planning.memory import Habits
    from shardwright.engine.planning.optimizer import optimizer_class, probe
    from shardwright.launch.command import parse_override

    name, *options = optimizer.split(",")
    cls = optimizer_class(name)
    try:
        needs = probe(cls, dict(map(parse_override, options)), at_once=device == "cuda")
    except (TypeError, ValueError) as error:
        raise UsageError(f"--optimizer is '{optimizer}', but {cls.__name__} can't be made so: {error}") from error
    return Habits(needs, checkpointing=checkpointing, as_view=bucket_view, device=device)


def _layout(
    subject: Subject, keys: dict[str, object], overrides: list[str], ranks: int, habits: Habits
) -> tuple[Layout, str]:
    """The layout, and what to say about it."""
    from shardwright.config.parse import resolve
    from shardwright.config.rules import check_world
    from shardwright.engine.planning.layout import work_out
    from shardwright.engine.planning.model import look
    from shardwright.launch.command import merge_config

    config = resolve(merge_config({}, keys, overrides), {}).config
    check_world(config, ranks)
    view = look(subject, config, ranks, device=habits.device)
    notes = [f"activations are not counted: {view.note or 'no example inputs'}"] if view.footprint is None else []
    return work_out(view, config, ranks, habits), "\n".join(notes)


def _outcome(
    subject: Subject,
    limit: int,
    ranks: int,
    samples: int | None,
    precision: str,
    overrides: list[str],
    habits: Habits,
    base_bytes: int,
    top: int,
) -> Outcome:
    from shardwright.engine.planning.fit import Wish, fit
    from shardwright.launch.command import merge_config

    if not subject.has_inputs:
        raise UsageError(
            "--fit needs to run the model on fake tensors, but there are no inputs for it",
            remedy="let the Python file define example_inputs(), one microbatch",
        )
    choices: tuple[Literal["any", "fp32", "bf16", "fp16"], ...] = ("any", "fp32", "bf16", "fp16")
    chosen = _one_of("precision", precision, choices)
    unit = subject.num_samples
    samples = 8 * ranks * unit if samples is None else samples
    if samples % unit:
        raise UsageError(
            f"--global-batch is {samples}, expected a multiple of the samples in a microbatch ({unit})",
            remedy=f"--global-batch {-(-samples // unit) * unit}",
        )
    wish = Wish(
        limit_bytes=limit,
        num_ranks=ranks,
        samples=samples,
        sample_unit=unit,
        precisions=("fp32", "bf16") if chosen == "any" else (chosen,),
        habits=habits,
        given=merge_config({}, {}, overrides),
        base_bytes=base_bytes,
    )
    return fit(subject, wish, most=top)


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
