"""Many small step functions on several ranks in one go, each compared with a plain loop in one process.

    CASES = [Case("identity", Net, train, place={"a": 0, "b": 1}), ...]
    verdicts = run_cases(pool, CASES)          # one run of the pool; every case in a world of its own
    check(CASES[0], verdicts["identity"])      # raises AssertionError with what differs

A case's body is called as `body(model, *args, **kwargs)`, on ranks under `smp.step`, in the reference once per
microbatch with a plain stand-in for the model.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import reference
from harness import RankPool

Inputs = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass
class Case:
    """One model and step function.

    build: makes the model; called with the torch seed 0.   body: the step function's body.
    inputs: step number -> (args, kwargs) of the call, on pipeline rank 0.   dummies: what other ranks pass.
    place: module name -> stage; all else is on stage 0.
    reordered: why gradients may be summed in another order; "" asks for bitwise equality.
    prepare: called with the plain model on every rank and in the reference, before it is wrapped.
    before_step: called with (model, step) on every rank and in the reference.
    grad: steps train; else they run under `torch.no_grad()` and the optimizer does nothing.
    error: a pattern that the error of every rank must show; such a case has no reference.
    timeout_s: of every wait inside the step.   config: more settings.
    """

    name: str
    build: Callable[[], nn.Module]
    body: Callable[..., Any]
    inputs: Inputs
    place: Mapping[str, int]
    steps: int = 2
    microbatches: int = 2
    pp: int = 2
    reordered: str = ""
    grad: bool = True
    schedule: str = "interleaved"
    prepare: Callable[[nn.Module], None] | None = None
    before_step: Callable[[Any, int], None] | None = None
    dummies: Inputs | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    timeout_s: float = 30
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Verdict:
    """What one rank saw of one case; tensors by the plain model's names."""

    outputs: list[Any] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0


def optimizer_of(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def make(case: Case) -> nn.Module:
    torch.manual_seed(0)
    model = case.build()
    if case.prepare is not None:
        case.prepare(model)
    return model


# ------------------------------------------------------------------ on the ranks


def run_cases(pool: RankPool, cases: Sequence[Case], timeout_s: float = 120) -> dict[str, list[Verdict]]:
    """Run cases on the pool; returns each case's verdicts, one per rank.

    cases: of one test module, which must list them all in `CASES`.
    """
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), "two cases have one name"
    found = pool.run(_run_named, cases[0].body.__module__, names, timeout_s=timeout_s)
    return {name: [rank[name] for rank in found] for name in names}


def _run_named(module: str, names: Sequence[str]) -> dict[str, Verdict]:
    import importlib

    cases = {case.name: case for case in importlib.import_module(module).CASES}
    return {name: _run_one(cases[name], number) for number, name in enumerate(names)}


def _run_one(case: Case, number: int) -> Verdict:
    from shardwright.topology import context, failure

    config = {
        "pipeline_parallel_degree": case.pp,
        "microbatches": case.microbatches,
        "pipeline": case.schedule,
        "auto_partition": False,
        "timeout_s": case.timeout_s,
        "log_level": "warning",
        **case.config,
    }
    before = os.environ["SHARDWRIGHT_INIT_METHOD"]
    os.environ["SHARDWRIGHT_INIT_METHOD"] = f"{before}.{number}"
    verdict = Verdict()
    start = time.monotonic()
    try:
        context.init(config)
        try:
            _train(case, verdict)
        except BaseException as error:
            verdict.error = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            failure.board().report(error)
    finally:
        context.shutdown(linger=not verdict.error)
        os.environ["SHARDWRIGHT_INIT_METHOD"] = before
    verdict.seconds = time.monotonic() - start
    return verdict


def _train(case: Case, verdict: Verdict) -> None:
    import shardwright.torch as smp

    plain = make(case)
    for name, stage in case.place.items():
        smp.set_partition(plain.get_submodule(name), stage)
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(optimizer_of(list(model.parameters())))
    step = smp.step(**case.options)(case.body)
    torch.manual_seed(1)
    for number in range(case.steps):
        if case.before_step is not None:
            case.before_step(plain, number)
        optimizer.zero_grad(set_to_none=True)
        give = case.inputs if smp.pp_rank() == 0 or case.dummies is None else case.dummies
        args, kwargs = give(number)
        with torch.set_grad_enabled(case.grad):
            outputs = step(model, *args, **kwargs)
        verdict.outputs.append(portable(outputs))
        verdict.gradients.append(
            {n: None if p.grad is None else p.grad.clone() for n, p in model.local_named_parameters()}
        )
        if case.grad:
            optimizer.step()
    verdict.weights = reference.copies(dict(model.local_named_parameters()))
    verdict.buffers = reference.copies(dict(model.local_named_buffers()))


# ------------------------------------------------------------------ in one process


class Plain:
    """The model as the reference's body sees it: a backward that averages over microbatches."""

    def __init__(self, module: nn.Module, num_microbatches: int) -> None:
        self.module = module
        self._num = num_microbatches

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def backward(self, loss: Tensor | Sequence[Tensor]) -> None:
        losses = [loss] if isinstance(loss, Tensor) else list(loss)
        torch.autograd.backward(losses, [torch.full_like(x, 1.0 / self._num) for x in losses])


def run_plain(case: Case) -> Verdict:
    """The case in one process: a loop over microbatches on the plain module."""
    import inspect

    from shardwright.pipeline.microbatch import split_arguments
    from shardwright.pipeline.outputs import collect_outputs

    module = make(case)
    optimizer = optimizer_of(list(module.parameters()))
    verdict = Verdict()
    torch.manual_seed(1)
    signature = inspect.signature(case.body)
    for number in range(case.steps):
        if case.before_step is not None:
            case.before_step(module, number)
        optimizer.zero_grad(set_to_none=True)
        args, kwargs = case.inputs(number)
        parts = split_arguments(
            signature, (None, *args), kwargs, case.microbatches,
            case.options.get("non_split_inputs"), case.options.get("input_split_axes"), allow_uneven=not case.grad,
        )  # fmt: skip
        model = Plain(module, len(parts))
        with torch.set_grad_enabled(case.grad):
            results = [case.body(model, *part.args[1:], **part.kwargs) for part in parts]
        weights = [p.num_samples for p in parts]
        known = None if any(w is None for w in weights) else [w for w in weights if w is not None]
        verdict.outputs.append(portable(collect_outputs(results, detach_outputs=True, weights=known)))
        verdict.gradients.append(
            {n: None if p.grad is None else p.grad.clone() for n, p in reference.named_parameters(module).items()}
        )
        if case.grad:
            optimizer.step()
    verdict.weights = reference.copies(reference.named_parameters(module))
    verdict.buffers = reference.copies(dict(module.named_buffers(remove_duplicate=False)))
    return verdict


# ------------------------------------------------------------------ comparison


def check(case: Case, verdicts: Sequence[Verdict]) -> None:
    """Raises AssertionError naming what differs between a rank and one process, or the wrong error."""
    if case.error:
        for rank, verdict in enumerate(verdicts):
            assert verdict.error, f"rank {rank} raised nothing"
            assert re.search(case.error, verdict.error), f"rank {rank}: {verdict.error}"
        return
    errors = [f"rank {r}: {v.error}" for r, v in enumerate(verdicts) if v.error]
    assert not errors, "\n".join(errors)
    truth = run_plain(case)
    failures: list[str] = []

    def compare(what: str, got: Any, want: Any) -> None:
        difference = differs(got, want, bool(case.reordered))
        if difference:
            failures.append(f"{what}: {difference}")

    for rank, verdict in enumerate(verdicts):
        for step in range(case.steps):
            compare(f"outputs of step {step}, rank {rank}", verdict.outputs[step], truth.outputs[step])
            for name, gradient in verdict.gradients[step].items():
                compare(f"gradient of {name}, step {step}, rank {rank}", gradient, truth.gradients[step][name])
        for name, weight in verdict.weights.items():
            compare(f"weight {name}, rank {rank}", weight, truth.weights[name])
        for name, buffer in verdict.buffers.items():
            compare(f"buffer {name}, rank {rank}", buffer, truth.buffers[name])
    here = {name for verdict in verdicts for name in verdict.weights}
    missing = [n for n, _ in make(case).named_parameters() if n not in here]
    assert not missing, f"parameters on no rank: {missing}"
    assert not failures, f"{len(failures)} differences:\n" + "\n".join(failures[:20])


def portable(value: Any) -> Any:
    """A step's result as plain lists, dicts and tensors, with the names of its classes."""
    from shardwright.pipeline.outputs import StepOutput

    if isinstance(value, StepOutput):
        return [t.detach().clone() for t in value.outputs]
    if isinstance(value, Mapping):
        return (type(value).__name__, {k: portable(v) for k, v in value.items()})
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [portable(v) for v in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value).__name__, {f.name: portable(getattr(value, f.name)) for f in dataclasses.fields(value)})
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value


def differs(got: Any, want: Any, reordered: bool) -> str:
    """In words how two portable values differ; "" if they don't."""
    if isinstance(want, Tensor) or isinstance(got, Tensor):
        if not (isinstance(want, Tensor) and isinstance(got, Tensor)):
            return f"{_show(got)}, expected {_show(want)}"
        if type(got) is not type(want) and isinstance(got, nn.Parameter) == isinstance(want, nn.Parameter):
            return f"a {type(got).__name__}, expected {type(want).__name__}"
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"{_show(got)}, expected {_show(want)}"
        if torch.equal(got, want) or (got.isnan() & want.isnan() | (got == want)).all():
            return ""
        difference = float((got.double() - want.double()).abs().max())
        size = max(float(want.double().abs().max()), 1e-3)
        return "" if reordered and difference <= 1e-5 * size else f"differs by {difference:.3e} of {size:.3e}"
    if type(got) is not type(want):
        return f"{got!r}, expected {want!r}"
    if isinstance(want, dict):
        if list(got) != list(want):
            return f"keys {list(got)}, expected {list(want)}"
        found = [(k, differs(got[k], want[k], reordered)) for k in want]
        return "; ".join(f"[{k!r}] {d}" for k, d in found if d)
    if isinstance(want, (list, tuple)):
        if len(got) != len(want):
            return f"{len(got)} elements, expected {len(want)}"
        found = [(i, differs(g, w, reordered)) for i, (g, w) in enumerate(zip(got, want, strict=True))]
        return "; ".join(f"[{i}] {d}" for i, d in found if d)
    return "" if got == want else f"{got!r}, expected {want!r}"


def _show(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
