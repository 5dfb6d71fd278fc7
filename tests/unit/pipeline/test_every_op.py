"""Every operation that torch tests itself, as glue: values, dtypes and gradients are those of plain torch.

The operations and their arguments come from torch's own table. Long, so it belongs to the matrix.
"""

from __future__ import annotations

import itertools
import sys
import types
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from one_frame import KeptWire, glue, make_frame, placed_leaf, real
from shardwright.errors import UnsupportedOperationError
from shardwright.pipeline.aliasing import resolve
from shardwright.pipeline.placed import PlacedTensor

_SAMPLES = 2
# They draw numbers, on streams of their own, or return memory as they find it.
_RANDOM = (
    "cauchy", "exponential", "geometric", "log_normal", "normal", "uniform", "bernoulli", "multinomial", "rand",
    "empty", "dropout", "rrelu", "fractional_max_pool", "scaled_dot_product", "pca_lowrank", "svd_lowrank",
    "multi_head_attention",
)  # fmt: skip
_REFUSED = {"nn.functional.batch_norm", "nn.functional.instance_norm", "resize_", "resize_as_"}


def _ops() -> list[Any]:
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=object))  # type: ignore[arg-type]
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if not any(word in op.name for word in _RANDOM)]


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


def _copy(value: Any) -> Any:
    def copy(t: Any) -> Any:
        return t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t

    return pytree.tree_map(copy, value)


def _call(function: Any, arguments: Any, in_place: bool) -> Any:
    subject, args, kwargs = arguments
    if in_place:  # leaves can't be changed
        subject = pytree.tree_map(lambda t: t * 1 if isinstance(t, Tensor) else t, subject)
    result = function(subject, *args, **kwargs)
    return (result, subject) if in_place else result


def _loss(result: Any) -> Any:
    torch.manual_seed(1)
    parts = [t for t in _tensors(result) if t.requires_grad and t.is_floating_point()]
    return sum(((t * torch.randn(t.shape).to(t.dtype)).sum() for t in parts), torch.zeros(()))


def _differences(function: Any, arguments: Any, in_place: bool) -> list[str]:
    """What differs between one op on plain tensors, and on tensors placed on rank 0 as ranks 0 and 1 see it."""
    plain, placed = _copy(arguments), _copy(arguments)
    try:
        want = _call(function, plain, in_place)
    except Exception:
        return []
    if any(t.layout is not torch.strided for t in _tensors((want, plain))):
        return []
    loss = _loss(want)
    try:
        if loss.requires_grad:
            loss.backward()
    except RuntimeError:
        loss = torch.zeros(())
    wire = KeptWire()
    frames = make_frame(0, wire), make_frame(1, wire)
    results = []
    for frame in frames:
        with glue(frame):
            inputs = pytree.tree_map(lambda t, f=frame: placed_leaf(f, t) if isinstance(t, Tensor) else t, placed)
            result = _call(function, inputs, in_place)
            for t in _tensors(result):
                if type(t) is PlacedTensor:
                    resolve(frame, t)
            results.append((result, _loss(result) if loss.requires_grad else None))
    got, got_loss = results[0]
    found = []
    if frames[0].calls != frames[1].calls or wire.messages:
        found.append(f"rank 0 made {frames[0].calls}, rank 1 {frames[1].calls}")
    for w, g in zip(_tensors(want), _tensors(got), strict=True):
        value = real(frames[0], g)
        if (value.dtype, value.shape) != (w.dtype, w.shape) or not torch.allclose(value, w, equal_nan=True):
            found.append(f"{value}, expected {w}")
    if loss.requires_grad and not found:
        with glue(frames[0]):
            frames[0].backward([got_loss], None)
        for w, g in zip(_tensors(plain), _tensors(placed), strict=True):
            wanted = torch.zeros_like(w) if w.grad is None else w.grad
            given = torch.zeros_like(w) if g.grad is None else g.grad
            if not torch.allclose(wanted, given, rtol=1e-3, atol=1e-4, equal_nan=True):
                found.append(f"gradient {given}, expected {wanted}")
    return found


@pytest.mark.heavy
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64], ids=str)
def test_every_op_as_in_plain_torch(dtype: torch.dtype) -> None:
    num_ops, found = 0, []
    for op in _ops():
        if dtype not in op.supported_dtypes("cpu"):
            continue
        grad = op.supports_autograd and dtype != torch.int64
        samples = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), _SAMPLES))
        functions = [(op.op, False)] + ([(op.inplace_variant, True)] if op.inplace_variant else [])
        for (function, in_place), sample in itertools.product(functions, samples):
            num_ops += 1
            try:
                different = _differences(function, (sample.input, sample.args, sample.kwargs), in_place)
            except UnsupportedOperationError as error:
                different = [] if op.name in _REFUSED else [str(error)]
            except Exception as error:
                different = [f"{type(error).__name__}: {error}"]
            if different:
                found.append(f"{op.name} {op.variant_test_name} {'in place' if in_place else ''}: {different[0][:300]}")
    assert not found, f"{len(found)} of {num_ops}:\n" + "\n".join(found)
    assert num_ops > 500
