"""Whole steps over stages: what the script sees, how backward may be called, and in which order things happen."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import step_probe
from harness import RankPool

CONFIG: dict[str, Any] = {
    "pipeline_parallel_degree": 2,
    "microbatches": 4,
    "auto_partition": False,
    "ddp": False,
    "timeout_s": 30,
    "log_level": "warning",
}


def with_dp(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "ddp": True}


def check_gradients(ranks: list[dict[str, Tensor]], expected: dict[str, Tensor], rel: float = 0.0) -> None:
    """Every parameter is on some rank, and its gradient there is as expected."""
    seen: set[str] = set()
    for found in ranks:
        for name, gradient in found.items():
            seen.add(name)
            if rel:
                torch.testing.assert_close(
                    gradient, expected[name], rtol=rel, atol=rel * float(expected[name].abs().max())
                )
            else:
                assert torch.equal(gradient, expected[name]), name
    assert seen == set(expected)


# ------------------------------------------------------------------ the script's view (design rule 7)


def _ranks() -> tuple[int, ...]:
    import shardwright.torch as smp

    return (smp.rank(), smp.local_rank(), smp.mp_rank(), smp.pp_rank(), smp.dp_rank(), smp.rdp_rank(), smp.tp_rank())


class _SeesRanks(torch.autograd.Function):
    seen: list[tuple[int, ...]]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _SeesRanks.seen.append(_ranks())
        return gradient


def look_around() -> dict[str, set[tuple[int, ...]]]:
    import shardwright.torch as smp

    model = step_probe.wrapped()
    seen: dict[str, set[tuple[int, ...]]] = {
        name: set() for name in ("body", "after the model", "after an error", "hook", "unit", "backward")
    }
    _SeesRanks.seen = []

    def act(x: Tensor) -> Tensor:
        seen["unit"].add(_ranks())
        return _SeesRanks.apply(torch.tanh(x))

    for block in model.get_module().transformer.h:
        block.act = act
    model.get_module().transformer.register_forward_hook(lambda *_: seen["hook"].add(_ranks()))

    @smp.step
    def train_step(model: nn.Module, x: Tensor) -> Tensor:
        seen["body"].add(_ranks())
        loss = model(x).square().mean()
        seen["after the model"].add(_ranks())
        try:
            loss.reshape(7, 7)
        except RuntimeError:
            seen["after an error"].add(_ranks())
        if smp.rank() == 0 or smp.rank() == 2:  # one of each pipeline group
            assert loss.item() > 0
        model.backward(loss)
        return loss

    for seed in range(2):
        train_step(model, step_probe.batch(seed))
    return seen | {"backward": set(_SeesRanks.seen), "main": {_ranks()}}


def test_the_script_is_pipeline_rank_0_and_units_are_their_own(pool4: RankPool) -> None:
    ranks = pool4.run(look_around, config={**with_dp(CONFIG), "placement_strategy": "cluster"}, timeout_s=60)
    own = [seen.pop("main") for seen in ranks]
    for rank, seen in enumerate(ranks):
        first = own[rank - rank % 2]  # pipeline groups are (0, 1) and (2, 3)
        for where in ("unit", "backward"):
            assert seen.pop(where) == own[rank], where
        for where, found in seen.items():
            assert found == first, where


# ------------------------------------------------------------------ surroundings (design rule 9)


def in_surroundings() -> dict[str, Any]:
    import shardwright.torch as smp

    model = step_probe.wrapped()
    step = step_probe.make_step()

    @smp.step
    def eval_step(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        return model(x), torch.ones(2)

    packed: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t):  # type: ignore[func-returns-value]
        step(model, step_probe.batch())
    results: dict[str, Any] = {"packed": len(packed)}
    for name, surroundings in {
        "plain": torch.enable_grad,
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "double": lambda: torch.device("cpu"),
    }.items():
        with surroundings():  # type: ignore[operator]
            out, ones = eval_step(model, step_probe.batch())
            results[name] = (out.concat().detach().clone(), ones.outputs[0].device.type)
    return results


def test_units_run_in_the_callers_surroundings(pool2: RankPool) -> None:
    net = step_probe.Net()
    for seen in pool2.run(in_surroundings, config=CONFIG):
        assert seen["packed"] > 0
        parts = step_probe.batch().chunk(4)
        with torch.no_grad():
            plain = torch.cat([net(part) for part in parts])
            with torch.autocast("cpu", torch.bfloat16):
                half = torch.cat([net(part) for part in parts])
        for name in ("plain", "no_grad", "inference", "double"):
            assert torch.equal(seen[name][0], plain), name
        assert seen["autocast"][0].dtype == torch.bfloat16
        assert torch.equal(seen["autocast"][0], half)


# ------------------------------------------------------------------ backward (design rule 10)


def one_step(body_name: str, *, input_grad: bool = False) -> Any:
    import shardwright.torch as smp

    model = step_probe.wrapped()
    step_probe.make_step()(model, step_probe.batch())  # the model is partitioned when it is first called as a whole
    step = smp.step(BODIES[body_name])
    for _ in range(2):  # the second one with planned turns
        model.zero_grad()
        x = step_probe.batch().requires_grad_(input_grad)
        step(model, x)
    return step_probe.gradients(model), x.grad


def several_backwards(model: Any, x: Tensor) -> Tensor:
    """Two independent graphs over the same parameters, and one more over a block of the other stage alone."""
    one = model(x).square().mean()
    two = model(x * 2).abs().mean()
    model.backward(one)
    model.backward(two)
    blocks = _inner(model).transformer.h
    model.backward(blocks[3](x).sum())
    model.backward(blocks[0](x).sum())
    return one


def unused_outputs(model: Any, x: Tensor) -> Tensor:
    """Calls whose results require grad and feed nothing, on either stage and across."""
    blocks = _inner(model).transformer.h
    blocks[0](x)
    early = blocks[1](x)
    loss = model(x).square().mean()
    blocks[3](early)
    model.backward(loss)
    blocks[2](early).sum()
    return loss


def partly_used(model: Any, x: Tensor) -> Tensor:
    """The head and the last block get no gradient from the even microbatches' loss."""
    blocks = _inner(model).transformer.h
    h = blocks[2](blocks[0](x))
    model(x)
    loss = h.square().mean()
    model.backward(loss)
    return loss


def weighted(model: Any, x: Tensor) -> Tensor:
    """Gradients for outputs that aren't numbers: ordinary ones, and placed ones."""
    out = model(x)
    side = _inner(model).transformer.h[0](x)
    model.backward([out, side], [torch.full((2, 1), 0.5), side.detach() * 2])
    return out.detach()


def plain(model: Any, x: Tensor) -> Tensor:
    loss = (model(x) * x.sum(1, keepdim=True)).square().mean()
    model.backward(loss)
    return loss


def _inner(model: Any) -> Any:
    return model.get_module() if hasattr(model, "get_module") else model


BODIES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    f.__name__: f for f in (several_backwards, unused_outputs, partly_used, weighted, plain)
}


class _OneProcess(step_probe.Net):
    """The net with the wrapper's `backward`."""

    def backward(self, tensors: Any, gradients: Any = None) -> None:
        roots = [tensors] if isinstance(tensors, Tensor) else tensors
        seeds = [torch.ones_like(t) for t in roots] if gradients is None else gradients
        torch.autograd.backward(roots, [s / 4 for s in seeds])


def expected_of(body_name: str, *, input_grad: bool = False) -> tuple[dict[str, Tensor], Tensor | None]:
    net = _OneProcess()
    x = step_probe.batch().requires_grad_(input_grad)
    for part in x.chunk(4):
        BODIES[body_name](net, part)
    return {n: p.grad for n, p in net.named_parameters() if p.grad is not None}, x.grad


@pytest.mark.parametrize("body_name", BODIES)
@pytest.mark.parametrize("schedule", ["interleaved", "simple"])
def test_ways_to_call_backward(body_name: str, schedule: str, pool2: RankPool) -> None:
    ranks = pool2.run(one_step, body_name, config={**CONFIG, "pipeline": schedule})
    expected, _ = expected_of(body_name)
    found = [{n: g for n, g in gradients.items() if g is not None} for gradients, _ in ranks]
    check_gradients(found, expected, rel=1e-6 if body_name in ("several_backwards", "weighted") else 0.0)


def input_gradient() -> Any:
    return one_step("plain", input_grad=True)


def test_a_step_input_that_requires_grad(pool2: RankPool) -> None:
    (gradients, of_input), (others, elsewhere) = pool2.run(input_gradient, config=CONFIG)
    expected, expected_of_input = expected_of("plain", input_grad=True)
    check_gradients([gradients, others], expected)
    torch.testing.assert_close(of_input, expected_of_input)
    assert elsewhere is None


def backward_twice() -> list[str]:
    import shardwright.torch as smp
    from shardwright.errors import PipelineError

    model = step_probe.wrapped()

    @smp.step
    def train_step(model: nn.Module, x: Tensor) -> str:
        loss = model(x).square().mean()
        model.backward(loss)
        try:
            model.backward(loss * 2)
        except PipelineError as error:
            return str(error)
        return "nothing"

    return list(train_step(model, step_probe.batch()))


def test_a_second_backward_raises_alike_on_all_ranks(pool2: RankPool) -> None:
    first, second = pool2.run(backward_twice, config=CONFIG)
    assert first == second
    assert all("second time" in text for text in first)


# ------------------------------------------------------------------ order of work


def real_turns(schedule: str) -> Any:
    from shardwright.pipeline import pipeline_step
    from shardwright.pipeline import step as steps
    from shardwright.pipeline.executor import Executor

    made: list[Executor] = []

    class Recorded(Executor):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    pipeline_step.Executor = Recorded  # type: ignore[misc]
    try:
        model = step_probe.wrapped()
        step = step_probe.make_step()
        for seed in range(4):
            step(model, step_probe.batch(seed))
        (kinds,) = steps._driver.pipeline._known.values()  # type: ignore[union-attr]
        (known,) = kinds.values()
        assert known.table is not None
        return [tuple(e.turns) for e in made], known.table.turns
    finally:
        pipeline_step.Executor = Executor  # type: ignore[misc]


@pytest.mark.parametrize("schedule", ["interleaved", "simple"])
def test_the_turns_are_those_of_the_timetable_on_every_replica(schedule: str, pool4: RankPool) -> None:
    ranks = pool4.run(real_turns, schedule, config={**with_dp(CONFIG), "pipeline": schedule})
    tables = [table for _, table in ranks]
    assert all(table == tables[0] for table in tables)
    for rank, (turns, table) in enumerate(ranks):
        assert turns[1:] == [table[rank % 2]] * 3
        assert turns[0] == ranks[rank % 2][0][0]  # the cautious first step, the same on replicas
    if schedule == "interleaved":
        assert tables[0][0] == (0, 1, 0, 2, 1, 3, 2, 3)


def changing_programs() -> Any:
    """A loss of its own in every third step, another order in every fifth; the turns were planned for another."""
    import shardwright.torch as smp

    model = step_probe.wrapped()
    number = 0

    @smp.step
    def train_step(model: nn.Module, x: Tensor) -> Tensor:
        blocks = _inner(model).transformer.h
        loss = model(x).square().mean()
        if number % 3 == 2:
            loss = loss + blocks[0](blocks[3](blocks[1](x))).mean()
        if number % 5 == 4:
            loss = loss * loss.detach().item()
        model.backward(loss)
        if number % 7 == 6:
            model.backward(blocks[2](blocks[1](x)).mean())
        return loss

    for number in range(16):
        train_step(model, step_probe.batch(number))
    return step_probe.gradients(model)


def changing_programs_of_one_process() -> dict[str, Tensor]:
    net = step_probe.Net()
    blocks = net.transformer.h
    for number in range(16):
        for x in step_probe.batch(number).chunk(4):
            loss = net(x).square().mean()
            if number % 3 == 2:
                loss = loss + blocks[0](blocks[3](blocks[1](x))).mean()
            if number % 5 == 4:
                loss = loss * loss.detach().item()
            (loss / 4).backward()
            if number % 7 == 6:
                (blocks[2](blocks[1](x)).mean() / 4).backward()
    return {n: p.grad for n, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("schedule", ["interleaved", "simple"])
def test_programs_that_change_from_step_to_step(schedule: str, pool4: RankPool) -> None:
    config = {**CONFIG, "pipeline_parallel_degree": 4, "pipeline": schedule}
    ranks = pool4.run(changing_programs, config=config)
    check_gradients(ranks, changing_programs_of_one_process(), rel=1e-5)


def paths_by_ordinary_tensors() -> Any:
    """Microbatches take different ways without a word between ranks; kinds of calls are new in the middle of a step."""
    import shardwright.torch as smp

    model = step_probe.wrapped()

    @smp.step
    def train_step(model: nn.Module, x: Tensor) -> Tensor:
        loss = _path(_inner(model), x)
        model.backward(loss)
        return loss

    step_probe.make_step()(model, step_probe.batch())
    train_step(model, step_probe.batch().abs())  # one program for all, and planned for the next step
    model.zero_grad()
    for number in range(3):
        train_step(model, _signed_batch(number))
    return step_probe.gradients(model)


def _path(net: Any, x: Tensor) -> Tensor:
    """In steps after the first only some microbatches leave the planned program; all read a buffer in glue then."""
    blocks = net.transformer.h
    h = blocks[2](x) if x.sum() > 0 else blocks[0](x)
    return blocks[3](blocks[1](h) + net.shift).square().mean()


def _signed_batch(number: int) -> Tensor:
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0]).roll(number).repeat_interleave(2)
    return step_probe.batch(number).abs() * signs[:, None]


def test_microbatches_that_differ_by_ordinary_tensors(pool2: RankPool) -> None:
    net = step_probe.Net()
    for number in range(3):
        for x in _signed_batch(number).chunk(4):
            (_path(net, x) / 4).backward()
    expected = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    ranks = pool2.run(paths_by_ordinary_tensors, config=CONFIG, timeout_s=60)
    found = [{n: g for n, g in gradients.items() if g is not None} for gradients in ranks]
    check_gradients(found, expected, rel=1e-6)


def _with_total(net: Any, x: Tensor, total: Tensor) -> Tensor:
    """Each microbatch is weighted by what those before it have added up, in glue on the last stage."""
    loss = net(x).square().mean()
    weighted: Tensor = loss * (1 + 0.1 * total)
    total += loss.detach()
    return weighted


def running_total() -> Any:
    import shardwright.torch as smp

    model = step_probe.wrapped()
    total = torch.zeros(())

    @smp.step
    def train_step(model: nn.Module, x: Tensor) -> Tensor:
        loss = _with_total(model, x, total)
        model.backward(loss)
        return loss

    for number in range(4):
        train_step(model, step_probe.batch(number))
    return step_probe.gradients(model), total


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", ["interleaved", "simple"])
def test_microbatches_that_wait_for_those_before_them(schedule: str, pp: int, pool2: RankPool, pool4: RankPool) -> None:
    net = step_probe.Net()
    total = torch.zeros(())
    for number in range(4):
        for x in step_probe.batch(number).chunk(4):
            (_with_total(net, x, total) / 4).backward()
    expected = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    config = {**CONFIG, "pipeline": schedule, "pipeline_parallel_degree": pp}
    ranks = (pool2 if pp == 2 else pool4).run(running_total, config=config)
    check_gradients([gradients for gradients, _ in ranks], expected, rel=1e-6)
    for _, seen in ranks:
        torch.testing.assert_close(seen, total)


# ------------------------------------------------------------------ accumulation, data parallelism (FF-11)


def accumulate(passes: int) -> Any:
    import shardwright.torch as smp

    model = step_probe.wrapped(backward_passes_per_step=passes)
    step = step_probe.make_step()
    for length in (16, 12):
        step(model, _sequences(length, smp.dp_rank()))
    return step_probe.gradients(model)


def _sequences(length: int, replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * length + replica)
    return torch.randn(8, length, step_probe.WIDTH, generator=generator)


@pytest.mark.parametrize(("dp", "passes"), [(1, 1), (2, 1), (2, 2)])
def test_gradients_add_up_over_step_calls(dp: int, passes: int, pool2: RankPool, pool4: RankPool) -> None:
    pool = pool4 if dp == 2 else pool2
    ranks = pool.run(accumulate, passes, config={**CONFIG, "ddp": dp == 2})
    data = [[_sequences(length, replica) for length in (16, 12)] for replica in range(dp)]
    each = [step_probe.reference_gradients(batches, 4) for batches in data]
    expected = {name: sum(e[name] for e in each) / dp for name in each[0]}  # type: ignore[misc]
    check_gradients(ranks, expected, rel=1e-6)  # type: ignore[arg-type]


def uneven_stages(seed: int, num_steps: int) -> Any:
    """Every unit, and every message, takes as long as it likes; gradients are reduced while backward goes on."""
    import shardwright.torch as smp
    from shardwright.transport import collectives

    model = step_probe.wrapped(bucket_cap_mb=0.0005)
    step = step_probe.make_step()
    delays = random.Random(1000 * seed + smp.rank())
    reduced: list[tuple[str, int]] = []
    plain_all_reduce = collectives.all_reduce

    def all_reduce(tensor: Tensor, axis: Any, *args: Any, **kwargs: Any) -> Any:
        reduced.append((axis, tensor.numel()))
        return plain_all_reduce(tensor, axis, *args, **kwargs)

    def act(x: Tensor) -> Tensor:
        time.sleep(delays.choice([0.0, 0.0, 0.001, 0.01]))
        return torch.tanh(x)

    for block in model.get_module().transformer.h:
        block.act = act
    collectives.all_reduce = all_reduce  # type: ignore[assignment]
    try:
        for number in range(num_steps):
            step(model, step_probe.batch(10 * number + smp.dp_rank()))
    finally:
        collectives.all_reduce = plain_all_reduce
    return step_probe.gradients(model), reduced


def check_uneven(ranks: list[Any], pp: int, dp: int, num_steps: int) -> None:
    each = [
        step_probe.reference_gradients([step_probe.batch(10 * n + replica) for n in range(num_steps)], 4)
        for replica in range(dp)
    ]
    expected = {name: sum(e[name] for e in each) / dp for name in each[0]}
    check_gradients([gradients for gradients, _ in ranks], expected, rel=1e-5)  # type: ignore[arg-type]
    for rank, (_, reduced) in enumerate(ranks):
        assert len(reduced) > num_steps
        assert reduced == ranks[rank % pp][1], "replicas reduced in another order"


@pytest.mark.parametrize("seed", [0, 1])
def test_races_change_nothing(seed: int, pool4: RankPool) -> None:
    ranks = pool4.run(uneven_stages, seed, 6, config=with_dp(CONFIG))
    check_uneven(ranks, pp=2, dp=2, num_steps=6)


@pytest.mark.heavy
def test_soak_of_four_stages_and_two_replicas() -> None:
    with RankPool(8) as pool:
        config = {**with_dp(CONFIG), "pipeline_parallel_degree": 4, "timeout_s": 120}
        ranks = pool.run(uneven_stages, 7, 50, config=config, timeout_s=280)
    check_uneven(ranks, pp=4, dp=2, num_steps=50)


# ------------------------------------------------------------------ nothing is left behind


def many_steps(num_steps: int) -> Any:
    import gc
    import threading
    import weakref

    from shardwright.pipeline import pipeline_step
    from shardwright.pipeline.frame import Frame

    frames: weakref.WeakSet[Any] = weakref.WeakSet()
    watching: list[bool] = []  # from the second step on: the first one partitions the model

    class Watched(Frame):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if watching:
                frames.add(self)

    pipeline_step.Frame = Watched  # type: ignore[misc]
    model = step_probe.wrapped()
    step = step_probe.make_step()
    marks = []
    x = torch.randn(64, 64, step_probe.WIDTH)
    step(model, x)
    watching.append(True)
    gc.collect()
    before = _num_messages()
    gc.disable()
    try:
        for number in range(num_steps):
            step(model, x)
            if number in (num_steps // 4, num_steps - 1):
                marks.append((_resident_mb(), threading.active_count()))
        alive = len(frames)
        sent = _num_messages() - before
    finally:
        gc.enable()
        pipeline_step.Frame = Frame  # type: ignore[misc]
    return marks, alive, sent


def _num_messages() -> int:
    import gc

    from shardwright.transport import p2p

    return sum(isinstance(o, p2p.Sent) and o._doing.startswith("send to") for o in gc.get_objects())


def _resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


@pytest.mark.parametrize("num_steps", [60, pytest.param(400, marks=pytest.mark.heavy)])
def test_memory_and_threads_do_not_grow(num_steps: int, pool2: RankPool) -> None:
    for marks, alive, sent in pool2.run(many_steps, num_steps, config=CONFIG, timeout_s=120):
        (early_mb, early_threads), (late_mb, late_threads) = marks
        assert late_threads == early_threads
        assert late_mb < early_mb + 4, marks
        assert alive == 0, "microbatches of old steps are kept alive"
        assert sent == 0, "messages of old steps are kept alive"
