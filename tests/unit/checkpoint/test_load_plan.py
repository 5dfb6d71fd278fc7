"""Plans of reads, carried out on small tensors, give exactly what is wanted."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.checkpoint import plan
from shardwright.checkpoint.manifest import Entry, Slice
from shardwright.checkpoint.reader import fill, relative
from shardwright.errors import CheckpointError

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


def cuts(draw: st.DrawFn, size: int, most: int = 4) -> list[tuple[int, int]]:
    """Ranges that make up [0, size), empty ones too."""
    inner = sorted(draw(st.lists(st.integers(0, size), max_size=most - 1)))
    edges = [0, *inner, size]
    return list(itertools.pairwise(edges))


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Slice]:
    """A tensor over tp slices of one dim, some of them over pieces; with copies, and in any order."""
    dim = draw(st.integers(0, len(shape) - 1)) if shape else None
    parts: list[Slice] = []
    for number, (start, stop) in enumerate(cuts(draw, shape[dim]) if dim is not None else [(0, 1)]):
        offset = tuple(start if d == dim else 0 for d in range(len(shape)))
        local = tuple(stop - start if d == dim else size for d, size in enumerate(shape))
        file = f"f{number}"
        if not prod(local) or draw(st.booleans()):
            parts.append(Slice(file, ("x",), offset, local))
            continue
        strides = None
        if draw(st.booleans()):
            order = draw(st.permutations(range(len(shape))))
            steps = {d: prod(local[e] for e in order[place + 1 :]) for place, d in enumerate(order)}
            strides = tuple(steps[d] for d in range(len(shape)))
        for piece, (low, high) in enumerate(cuts(draw, prod(local))):
            if low < high:
                parts.append(Slice(f"{file}_{piece}", ("x",), offset, local, (low, high), strides))
    parts += draw(st.lists(st.sampled_from(parts), max_size=2))
    return draw(st.permutations(parts))


def content_of(part: Slice, whole: torch.Tensor) -> torch.Tensor:
    """What the file of a slice holds."""
    local = whole[relative(plan.box_of(part.offset, part.shape), (0,) * whole.dim())]
    if part.span is None:
        return local
    order = plan.slow_to_fast(part.shape, part.strides)
    return local.permute(order).reshape(-1)[part.span[0] : part.span[1]]


def read(parts: Sequence[Slice], whole: torch.Tensor, box: plan.Box) -> tuple[torch.Tensor, int]:
    """Carry out the plan of one box; also how many elements were read."""
    files: dict[str, torch.Tensor] = {part.file: content_of(part, whole) for part in parts}
    copies = plan.plan(Entry("model", "w", None, tuple(whole.shape), "float32", tuple(parts)), [box])
    target = torch.full([stop - start for start, stop in box], -1.0)
    for copy in copies:
        fill(target, tuple(start for start, _ in box), copy, files[copy.source.file])
    return target, sum(copy.num_elements for copy in copies)


@given(st.data(), SHAPES)
def test_every_wanted_box_comes_out_and_each_element_is_read_once(data: st.DataObject, shape: tuple[int, ...]) -> None:
    whole = torch.arange(float(prod(shape))).reshape(shape)
    parts = data.draw(layouts(shape))
    box = tuple(sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size)))) for size in shape)
    wanted = tuple((low, high) for low, high in box)
    got, num_read = read(parts, whole, wanted)
    assert torch.equal(got, whole[relative(wanted, (0,) * len(shape))])
    assert num_read == got.numel()


@given(SHAPES, st.data())
def test_a_run_is_cut_into_few_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = prod(shape)
    start, stop = sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size))))
    places = torch.arange(size).reshape(shape)
    boxes = list(plan.run_boxes(shape, start, stop))
    found = [places[tuple(slice(a, b) for a, b in box)].reshape(-1) for box, _ in boxes]
    assert torch.cat([torch.empty(0, dtype=torch.long), *found]).tolist() == list(range(start, stop))
    assert [int(f[0]) for f in found] == [first for _, first in boxes]
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_what_is_nowhere_is_an_error_by_name() -> None:
    entry = Entry("optimizer", "a.weight", "exp_avg", (4, 4), "float32", (Slice("f", ("x",), (0, 0), (2, 4)),))
    with pytest.raises(CheckpointError, match=r"a\.weight \(exp_avg\).*\[2:4, 0:4\] of \[4, 4\] is in no file"):
        plan.plan(entry, [((0, 4), (0, 4))])


def test_a_trillion_parameters_are_planned_at_once() -> None:
    """Saved by 1024 ranks (pp 16, tp 8, moments over rdp 8), loaded by 768 (pp 12, tp 8, rdp 8)."""
    hidden, layers, tp, rdp = 25600, 128, 8, 8
    shapes = {"qkv": (3 * hidden, hidden), "dense": (hidden, hidden), "up": (4 * hidden, hidden), "down": (hidden, 4 * hidden)}

    def saved(layer: int, name: str, state: str | None) -> Entry:
        shape, dim = shapes[name], 1 if name in ("dense", "down") else 0
        slices = []
        for t in range(tp):
            local = tuple(size // tp if d == dim else size for d, size in enumerate(shape))
            offset = tuple(t * local[d] if d == dim else 0 for d in range(2))
            if state is None:
                slices.append(Slice(f"model_{layer // 8}_{t}.pt", (name,), offset, local))
                continue
            share = -(-prod(local) // rdp)
            for r in range(rdp):
                span = (r * share, min((r + 1) * share, prod(local)))
                slices.append(Slice(f"optimizer_{layer // 8}_{t}_{r}.pt", (name,), offset, local, span))
        role = "model" if state is None else "optimizer"
        return Entry(role, f"layers.{layer}.{name}", state, shape, "float32", tuple(slices))

    assert layers * sum(prod(shape) for shape in shapes.values()) > 1e12
    mine = [saved(layer, n, s) for layer in range(11) for n in shapes for s in (None, "exp_avg", "exp_avg_sq", "master")]
    started = time.process_time()
    num_wanted = num_read = 0
    for entry in mine:
        name = entry.name.rpartition(".")[2]
        dim = 1 if name in ("dense", "down") else 0
        local = [size // tp if d == dim else size for d, size in enumerate(entry.shape)]
        offset = [3 * local[d] if d == dim else 0 for d in range(2)]
        wanted = [plan.box_of(offset, local)]
        if entry.state is not None:  # the piece of rdp rank 5
            share = -(-prod(local) // rdp)
            runs = plan.run_boxes(local, 5 * share, min(6 * share, prod(local)))
            wanted = [tuple((o + a, o + b) for o, (a, b) in zip(offset, box, strict=True)) for box, _ in runs]
        num_wanted += sum(map(plan.volume, wanted))
        num_read += sum(copy.num_elements for copy in plan.plan(entry, wanted))
    seconds = time.process_time() - started
    print(f"{seconds:.2f} s of one core")  # the goal is 1
    assert seconds < 10
    assert num_read == num_wanted
