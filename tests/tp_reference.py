"""Distributed modules beside plain ones: what each rank runs, and the comparison with one process.

A case is built twice from global sizes: on tp ranks, and with tp 1 in the test's own process (or as another
plain module). Weights are set from one full state dict; every rank gets its own samples (or all the same ones
with `prescaled_batch`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.sharding.spec import ShardSpec
from shardwright.tensor_parallel.module import DistributedModule, gather_full, load_full, spec_of
from shardwright.topology import context
from shardwright.transport import collectives

MODES = [(optimize, prescaled) for optimize in ("speed", "memory") for prescaled in (False, True)]


def config(tp: int, optimize: str = "speed", prescaled: bool = False) -> dict[str, Any]:
    return {
        "tensor_parallel_degree": tp,
        "ddp": True,
        "optimize": optimize,
        "prescaled_batch": prescaled,
        "log_level": "warning",
    }


@dataclass
class Result:
    """What one rank has seen. Gradients and weights are full ones, the former summed over all samples."""

    output: Any
    input_grads: list[Tensor | None]
    grads: dict[str, Tensor | None]
    weights: dict[str, Tensor]
    bitwise_equal: dict[str, bool] = field(default_factory=dict)


def full_state(module: nn.Module, seed: int = 0, std: float = 0.2) -> dict[str, Tensor]:
    """Random values for every parameter, by full name and shape; far from zero where ones are usual."""
    generator = torch.Generator().manual_seed(seed)
    specs = spec_of(module)
    full = {}
    for name, parameter in module.named_parameters():
        shape = specs.get(name, ShardSpec.replicated(parameter.shape)).full_shape
        center = 1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0
        full[name] = center + std * torch.randn(shape, generator=generator)
    return full


def on_ranks(
    build: Callable[[], nn.Module],
    forward: Callable[..., Any],
    inputs_of: Callable[[int], Sequence[Tensor]],
    loss_of: Callable[[Any], Tensor],
    seed: int = 0,
) -> Result:
    """Run one forward and backward on this tp rank; all gradients come back full and summed over the samples."""
    here = context.world()
    torch.manual_seed(77 + here.rank)  # ranks must not need equal generators
    module = build().eval()
    load_full(module, full_state(module, seed))
    samples = 0 if here.config.prescaled_batch else here.coordinates.tp
    inputs = [_leaf(tensor) for tensor in inputs_of(samples)]
    output = forward(module, *inputs)
    loss_of(output).backward()
    specs = spec_of(module)
    grads: dict[str, Tensor | None] = {}
    equal: dict[str, bool] = {}
    for name, parameter in module.named_parameters():
        grad = parameter.grad
        if grad is None:
            grads[name] = None
            continue
        if not _scaled(module, name) and not here.config.prescaled_batch:
            collectives.all_reduce(grad, "tp")
        if name not in specs:
            copies = collectives.all_gather(grad, "tp")
            equal[name] = all(torch.equal(copies[0], other) for other in copies)
        grads[name] = gather_full({name: grad}, specs)[name]
    weights = gather_full(module)
    return Result(_detached(output), [tensor.grad for tensor in inputs], grads, weights, equal)


def alone(
    build: Callable[[], nn.Module],
    forward: Callable[..., Any],
    inputs_of: Callable[[int], Sequence[Tensor]],
    loss_of: Callable[[Any], Tensor],
    num_samples: int,
    seed: int = 0,
) -> list[Result]:
    """The same in one process: one result for each rank's samples, gradients summed over them."""
    module = build().eval()
    load_full(module, full_state(module, seed))
    results = []
    for samples in range(num_samples):
        inputs = [_leaf(tensor) for tensor in inputs_of(samples)]
        output = forward(module, *inputs)
        loss_of(output).backward()
        results.append(Result(_detached(output), [tensor.grad for tensor in inputs], {}, {}))
    for result in results:
        result.grads = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
        result.weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    return results


def compare(got: Sequence[Result], want: Sequence[Result], rel: float = 2e-5) -> None:
    """Every rank's output, input gradients, full gradients and weights against one process.

    rel: of the tensor's largest value; sums run in another order on ranks. A gradient that is zero but for rounding
    is measured by the largest gradient of the model times 1e-2.
    """
    faults: list[str] = []
    for rank, result in enumerate(got):
        truth = want[rank] if len(want) > 1 else want[0]
        scale = max(float(g.abs().max()) for g in truth.grads.values() if g is not None and g.numel())
        pairs: list[tuple[str, Any, Any, float]] = []
        for i, (a, b) in enumerate(zip(_flat(result.output), _flat(truth.output), strict=True)):
            pairs.append((f"output {i}", a, b, 0.0))
        for i, (a, b) in enumerate(zip(result.input_grads, truth.input_grads, strict=True)):
            pairs.append((f"gradient of input {i}", a, b, 0.0))
        assert result.grads.keys() == truth.grads.keys()
        pairs += [(f"gradient of {n}", g, truth.grads[n], scale) for n, g in result.grads.items()]
        faults += [f"rank {rank}: {fault}" for pair in pairs if (fault := _fault(*pair, rel))]
        for name, weight in truth.weights.items():
            if not torch.equal(result.weights[name], weight):
                faults.append(f"rank {rank}: weight {name} differs")
        faults += [
            f"rank {rank}: gradient of replicated {n} differs on ranks"
            for n, e in result.bitwise_equal.items()
            if not e
        ]
    assert not faults, "\n".join(faults)


def _fault(what: str, got: Any, want: Any, scale: float, rel: float) -> str | None:
    if got is None or want is None:
        return None if got is want else f"{what}: {type(got)}, expected {type(want)}"
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{what}: {got.dtype} {list(got.shape)}, expected {want.dtype} {list(want.shape)}"
    if not got.numel():
        return None
    difference = float((got.double() - want.double()).abs().max())
    size = max(float(want.double().abs().max()), 1e-2 * scale)
    return None if difference <= rel * size else f"{what}: differs by {difference:.3e} of {size:.3e}"


def _scaled(module: nn.Module, name: str) -> bool:
    scaled = True
    path = name.split(".")[:-1]
    for part in [None, *path]:
        module = module if part is None else getattr(module, part)
        scaled = getattr(module, "scaled_batch", scaled) if _says(module) else scaled
    return scaled


def _says(module: nn.Module) -> bool:
    return (
        not isinstance(module, DistributedModule)
        or "scaled_batch" in vars(module)
        or "scaled_batch" in vars(type(module))
    )


def _leaf(tensor: Tensor) -> Tensor:
    tensor = copy.deepcopy(tensor)
    return tensor.requires_grad_() if tensor.is_floating_point() and tensor.dim() > 2 else tensor


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [leaf for item in value or () for leaf in _flat(item)] if isinstance(value, (tuple, list)) else []


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return tuple(_detached(item) for item in value) if isinstance(value, (tuple, list)) else value
