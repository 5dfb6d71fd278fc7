"""A plan as a drawing (SVG): the stages side by side, what each holds, its share of time and memory."""

from __future__ import annotations

import html
import textwrap

from shardwright.partition.plan import PartitionPlan, compress_names
from shardwright.partition.table import format_bytes, format_count

_WIDTH, _GAP, _MARGIN, _LINE, _BAR = 230, 44, 24, 17, 206
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#eeca3b")
_MAX_LINES = 14


def draw_svg(plan: PartitionPlan, *, title: str, microbatches: int) -> str:
    """Draw the plan; returns the text of an SVG file. Long lists of modules are cut short."""
    stages = [_module_lines(stage.modules) for stage in plan.stages]
    body = _MARGIN + 52
    box_height = 30 + _LINE * max(len(lines) for lines in stages) + 112
    width = 2 * _MARGIN + len(stages) * _WIDTH + (len(stages) - 1) * _GAP
    height = body + box_height + 46
    time_bars = _Bars([stage.work for stage in plan.stages])
    memory_bars = _Bars([float(stage.memory_bytes) for stage in plan.stages])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" font-size="12">',
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#555"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(_MARGIN, _MARGIN + 8, title, size=16, bold=True),
        _text(_MARGIN, _MARGIN + 30, _summary(plan, microbatches), colour="#555"),
    ]
    for index, (stage, lines) in enumerate(zip(plan.stages, stages, strict=True)):
        left = _MARGIN + index * (_WIDTH + _GAP)
        colour = _COLOURS[index % len(_COLOURS)]
        if index:
            middle = body + box_height / 2
            parts.append(
                f'<line x1="{left - _GAP + 4}" y1="{middle}" x2="{left - 4}" y2="{middle}" stroke="#555" '
                'stroke-width="2" marker-end="url(#tip)"/>'
            )
        parts.append(
            f'<rect x="{left}" y="{body}" width="{_WIDTH}" height="{box_height}" rx="8" fill="{colour}" '
            f'fill-opacity="0.10" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(_text(left + 12, body + 20, f"stage {index}", size=14, bold=True))
        for number, line in enumerate(lines):
            parts.append(_text(left + 12, body + 42 + _LINE * number, line, mono=True))
        foot = body + box_height - 94
        held = f"{format_count(stage.num_parameters)} parameters, {format_bytes(stage.parameter_bytes)}"
        parts.append(_text(left + 12, foot, held, colour="#333"))
        parts.append(_text(left + 12, foot + 18, f"{format_count(stage.flops)} FLOPs forward", colour="#333"))
        parts += time_bars.draw(left + 12, foot + 36, "time", stage.work, colour)
        memory_label = f"memory {format_bytes(stage.memory_bytes)}"
        parts += memory_bars.draw(left + 12, foot + 66, memory_label, stage.memory_bytes, colour)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _summary(plan: PartitionPlan, microbatches: int) -> str:
    return (
        f"{plan.num_stages} stages, {microbatches} microbatches: bubble {plan.bubble(microbatches):.1%}, "
        f"slowest stage {plan.imbalance:.2f} x the mean, "
        f"expected efficiency {plan.efficiency(microbatches):.1%}"
    )


def _module_lines(modules: tuple[str, ...]) -> list[str]:
    lines = [
        part for name in compress_names(modules) for part in textwrap.wrap(name, 31, subsequent_indent="  ")
    ]
    if len(lines) > _MAX_LINES:
        hidden = len(lines) - _MAX_LINES + 1
        lines = [*lines[: _MAX_LINES - 1], f"... {hidden} more"]
    return lines or ["(nothing)"]


class _Bars:
    """Bars of one quantity: as long as its part of the largest, labelled with its part of the sum."""

    def __init__(self, values: list[float]) -> None:
        self._sum = sum(values) or 1.0
        self._largest = max(values) or 1.0

    def draw(self, left: float, top: float, label: str, value: float, colour: str) -> list[str]:
        return [
            _text(left, top, f"{label}: {value / self._sum:.1%}", colour="#333", size=11),
            f'<rect x="{left}" y="{top + 4}" width="{_BAR}" height="8" fill="#ddd"/>',
            f'<rect x="{left}" y="{top + 4}" width="{_BAR * value / self._largest:.1f}" height="8" '
            f'fill="{colour}"/>',
        ]


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    bold: bool = False,
    mono: bool = False,
    colour: str = "#111",
) -> str:
    extra = ' font-weight="bold"' if bold else ""
    extra += ' font-family="Menlo, Consolas, monospace"' if mono else ""
    size = 11 if mono else size
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}"{extra}>{html.escape(text)}</text>'
