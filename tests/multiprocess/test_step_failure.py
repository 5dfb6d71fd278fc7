"""Steps that fail on one rank: every rank ends soon, with the right rank, module, microbatch and reason.

All scenarios run one after another in the same processes, each in a world of its own, so that what a failed step
leaves behind would show in the next.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import step_probe
from harness import RankPool
from step_probe import Ended

CONFIG = {
    "pipeline_parallel_degree": 2,
    "microbatches": 4,
    "auto_partition": False,
    "ddp": False,
    "timeout_s": 4,
    "log_level": "warning",
}
SOON_S = 3.0
LATE_S = CONFIG["timeout_s"] + 8.0  # type: ignore[operator]


def trained(body: Callable[..., Any] | None = None) -> tuple[Any, Callable[..., Any]]:
    """A model after two good steps, so that its turns are planned, and its step function."""
    import shardwright.torch as smp

    model = step_probe.wrapped()
    step = step_probe.make_step()
    for seed in range(2):
        step(model, step_probe.batch(seed))
    return model, step if body is None else smp.step(body)


def on_microbatch(index: int, action: Callable[[], None]) -> Callable[[Tensor], Tensor]:
    """An activation that acts when it is called for the index-th time."""
    count = iter(range(100))

    def act(x: Tensor) -> Tensor:
        if next(count) == index:
            action()
        return torch.tanh(x)

    return act


def fail() -> None:
    raise ZeroDivisionError("it broke")


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError("it broke")


# ------------------------------------------------------------------ scenarios, on every rank


def unit() -> None:
    model, step = trained()
    model.get_module().transformer.h[2].act = on_microbatch(1, fail)
    step(model, step_probe.batch())


def glue_on_the_holder() -> None:
    def body(model: Any, x: Tensor) -> Tensor:
        out = model(x)
        loss = out.square().mean()
        model.backward(loss + torch.linalg.cholesky(-(out @ out.T).detach()).sum())
        return loss

    model, step = trained(body)
    step(model, step_probe.batch())


def glue_everywhere() -> None:
    def body(model: Any, x: Tensor) -> Tensor:
        model(x)
        raise ZeroDivisionError("it broke")

    model, step = trained(body)
    step(model, step_probe.batch())


def in_backward() -> None:
    model, step = trained()
    model.get_module().transformer.h[1].act = FailsInBackward.apply
    step(model, step_probe.batch())


def optimizer_step() -> None:
    import shardwright.torch as smp

    model, step = trained()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    if smp.pp_rank() == 1:
        optimizer.register_step_pre_hook(lambda *_: fail())
    step(model, step_probe.batch())
    optimizer.step()
    step(model, step_probe.batch())


def split_of_inputs() -> None:
    class Broken:
        def smp_slice(self, num_mb: int, mb: int, axis: int) -> Any:
            fail()

    def body(model: Any, x: Tensor, extra: Any) -> Tensor:
        return model(x).sum()

    model, step = trained(body)
    step(model, step_probe.batch(), Broken())


def stops_answering() -> None:
    model, step = trained()
    model.get_module().transformer.h[2].act = on_microbatch(1, lambda: time.sleep(14))
    step(model, step_probe.batch())


def interrupted() -> None:
    import shardwright.torch as smp

    model, step = trained()
    model.get_module().transformer.h[2].act = on_microbatch(1, lambda: [time.sleep(0.05) for _ in range(200)])  # type: ignore[arg-type]
    if smp.rank() == 1:
        threading.Timer(0.5, _thread.interrupt_main).start()
    step(model, step_probe.batch())


def skips_a_call() -> None:
    import shardwright.torch as smp

    @smp.step
    def eval_step(model: Any, x: Tensor) -> Tensor:
        return model(x)

    model, step = trained()
    if smp.rank() == 0:
        step(model, step_probe.batch())
    eval_step(model, step_probe.batch())


def skips_the_last_call() -> None:
    import shardwright.torch as smp

    model, step = trained()
    if smp.rank() == 0:
        step(model, step_probe.batch())
    smp.barrier()


def skips_glue() -> None:
    def body(model: Any, x: Tensor) -> Tensor:
        out = model(x)
        if dist.get_rank() == 0:
            out = out * 2
        loss = out.square().mean()
        model.backward(loss)
        return loss

    model, step = trained(body)
    step(model, step_probe.batch())


def calls_another_module() -> None:
    def body(model: Any, x: Tensor) -> Tensor:
        blocks = model.get_module().transformer.h
        out = blocks[0](x)
        out = blocks[2](out) if dist.get_rank() == 0 else blocks[1](out)
        loss = blocks[3](out).square().mean()
        model.backward(loss)
        return loss

    model, step = trained(body)
    step(model, step_probe.batch())


def other_shapes() -> None:
    """What one rank sends has another size than what the other expects."""

    def body(model: Any, x: Tensor) -> Tensor:
        out = model(x)
        if dist.get_rank() == 0:
            out = torch.cat([out, out])
        loss = (out.relu() * model.get_module().head.weight.detach().sum()).mean()
        model.backward(loss)
        return loss

    model, step = trained(body)
    step(model, step_probe.batch())


def good() -> list[float]:
    model, step = trained()
    return step(model, step_probe.batch()).stack().tolist()


good_again = good


def run(names: list[str], config: dict[str, Any]) -> list[Ended]:
    return step_probe.in_turn([(globals()[name], ()) for name in names], config)


# ------------------------------------------------------------------ what must come of them


def one_fails(rank: int, what: str) -> Callable[[list[Ended]], None]:
    """Rank `rank` raises the user's own exception, the other one a RemoteRankError that says all of it."""

    def check(ended: list[Ended]) -> None:
        own, other = ended[rank], ended[1 - rank]
        assert own.kind == "ZeroDivisionError", own
        assert other.kind == "RemoteRankError", other
        assert f"rank {rank} failed: ZeroDivisionError: it broke" in other.error
        for text in (own.error, other.error):
            assert what in text, text
        assert own.seconds < SOON_S, own
        assert other.seconds < SOON_S, other

    return check


def is_interrupted(ended: list[Ended]) -> None:
    assert ended[1].kind == "KeyboardInterrupt"
    assert ended[0].kind == "RemoteRankError"
    assert "rank 1 failed: KeyboardInterrupt" in ended[0].error
    assert max(e.seconds for e in ended) < SOON_S + 1.5, ended


def all_fail(ended: list[Ended]) -> None:
    assert {e.kind for e in ended} <= {"ZeroDivisionError", "RemoteRankError"}, ended
    assert all("it broke" in e.error for e in ended)
    assert max(e.seconds for e in ended) < SOON_S, ended


def holder_fails(ended: list[Ended]) -> None:
    assert (ended[0].kind, ended[1].kind) == ("RemoteRankError", "_LinAlgError"), ended
    assert "cholesky" in ended[0].error
    assert "microbatch 0" in ended[0].error
    assert max(e.seconds for e in ended) < SOON_S, ended


def silence_is_named(ended: list[Ended]) -> None:
    assert ended[0].kind == "CommunicationTimeout", ended[0]
    assert "missing: rank 1" in ended[0].error
    assert ended[1].kind == "RemoteRankError", ended[1]
    assert "missing: rank 1" in ended[1].error
    assert max(e.seconds for e in ended) < LATE_S, ended


def other_call(ended: list[Ended]) -> None:
    assert (ended[0].kind, ended[1].kind) == ("RemoteRankError", "AgreementError"), ended
    for e in ended:
        assert "pipeline rank 0 in train_step(), pipeline rank 1 in eval_step()" in e.error, e
        assert e.seconds < SOON_S, e


def missing_call(ended: list[Ended]) -> None:
    for e in ended:
        assert "missing: rank 1" in e.error or "barrier" in e.error, e
        assert e.kind in ("CommunicationTimeout", "RemoteRankError"), e
        assert e.seconds < LATE_S, e


def first_difference(*words: str) -> Callable[[list[Ended]], None]:
    def check(ended: list[Ended]) -> None:
        for e in ended:
            assert e.kind == "AgreementError", e
            assert "torch.distributed.get_rank(), the likely cause" in e.error
            for word in words:
                assert word in e.error, (word, e.error)
            assert e.seconds < LATE_S, e

    return check


def is_good(ended: list[Ended]) -> None:
    assert ended[0].value == ended[1].value, ended
    assert ended[0].kind is None, ended


EXPECTED: dict[str, Callable[[list[Ended]], None]] = {
    "good": is_good,
    "unit": one_fails(1, "microbatch 1, module 'transformer.h.2'"),
    "glue_on_the_holder": holder_fails,
    "glue_everywhere": all_fail,
    "in_backward": one_fails(0, "microbatch 0, module 'backward of transformer.h.1'"),
    "optimizer_step": one_fails(1, "it broke"),
    "split_of_inputs": all_fail,
    "stops_answering": silence_is_named,
    "interrupted": is_interrupted,
    "skips_a_call": other_call,
    "skips_the_last_call": missing_call,
    "skips_glue": first_difference("microbatch 0, call 5", "pipeline rank 0: 'mul'", "pipeline rank 1: 'square'"),
    "calls_another_module": first_difference(
        "microbatch 0, call 1", "pipeline rank 0: 'transformer.h.2'", "pipeline rank 1: 'transformer.h.1'"
    ),
    "other_shapes": first_difference("pipeline rank 0: 'cat'", "pipeline rank 1: 'relu'"),
    "good_again": is_good,
}


@pytest.fixture(scope="module")
def ended(pool2: RankPool) -> dict[str, list[Ended]]:
    pool2.run(run, ["good"], {**CONFIG, "timeout_s": 60}, timeout_s=60)  # first times are slow
    names = list(EXPECTED)
    ranks = pool2.run(run, names, CONFIG, timeout_s=150)
    return {name: [results[i] for results in ranks] for i, name in enumerate(names)}


@pytest.mark.parametrize("name", EXPECTED)
def test_how_it_ends(name: str, ended: dict[str, list[Ended]]) -> None:
    EXPECTED[name](ended[name])


def fewer_steps_on_a_replica() -> None:
    import shardwright.torch as smp

    model, step = trained()
    if smp.dp_rank() == 0:
        step(model, step_probe.batch())
    smp.barrier()


@pytest.mark.heavy
def test_a_replica_with_fewer_steps_is_shown_with_its_count(pool4: RankPool) -> None:
    config = {**CONFIG, "ddp": True, "timeout_s": 15}
    outcomes = pool4.outcomes(fewer_steps_on_a_replica, config=config, timeout_s=90, grace_s=20)
    for outcome in outcomes:
        assert "(in step call 3, train_step())" in (outcome.error or ""), outcome.error
        assert "barrier over world, call 1 (after step call 2, train_step())" in (outcome.error or "")
