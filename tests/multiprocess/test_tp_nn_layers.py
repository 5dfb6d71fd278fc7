"""Attention, output layer, transformer layer and stack on tp ranks, against one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tp_reference as ref
from harness import RankPool
from shardwright.tensor_parallel.module import gather_full, spec_of, tp_size
from shardwright.tensor_parallel.nn.attention import DistributedAttentionLayer
from shardwright.tensor_parallel.nn.functional import column_linear
from shardwright.tensor_parallel.nn.mixture import DistributedMixtureOutputLayer
from shardwright.tensor_parallel.nn.mlp import DistributedTransformerOutputLayer
from shardwright.tensor_parallel.nn.transformer import DistributedTransformer, DistributedTransformerLayer
from shardwright.topology import context

HIDDEN, HEADS, HEAD, LENGTH, SAMPLES = 12, 4, 5, 6, 3
PRE: dict[str, Any] = {"pre_layernorm": True, "post_layernorm": False}
ROTARY = {"rotary_frequencies": [1.0, 0.1], "rotary_scale": 1.1}

ATTENTION: dict[str, dict[str, Any]] = {
    "post norm": {},
    "pre norm causal": {**PRE, "causal_mask_size": 16},
    "both norms": {"pre_layernorm": True, "post_layernorm": True},
    "cross": {"cross_attention": True},
    "window": {**PRE, "causal_mask_size": 16, "window_size": 3},
    "alibi": {**PRE, "causal_mask_size": 16, "use_alibi": True},
    "rotary": {**PRE, "causal_mask_size": 16, **ROTARY},
    "interleaved rotary without biases": {
        **PRE, **ROTARY, "rotary_interleaved": True, "qkv_bias": False, "dense_bias": False,
    },
    "grouped heads": {**PRE, "causal_mask_size": 16, "num_key_value_heads": 2},
    "one key head": {**PRE, "causal_mask_size": 16, "num_key_value_heads": 1},
    "query and key norm": {**PRE, "norm": "rmsnorm", "qk_norm": True, "num_key_value_heads": 2, **ROTARY},
    "scaled by layer": {**PRE, "scale_attn_by_layer_idx": True, "layer_idx": 2, "scale_attention_scores": False},
    "in float32": {**PRE, "attention_in_fp32": True, "query_key_layer_scaling": True, "fp32_residual_addition": True},
    "relative bias": {**PRE, "relative_attention_buckets": 8, "relative_attention_max_distance": 4},
    "relative bias one way": {
        **PRE, "causal_mask_size": 16, "relative_attention_buckets": 8, "relative_attention_bidirectional": False,
    },
    "three key heads for six": {"num_attention_heads": 6, "num_key_value_heads": 3, **PRE},
}  # fmt: skip

OUTPUT: dict[str, dict[str, Any]] = {
    "post norm": {},
    "pre norm": {**PRE, "activation": "gelu_new"},
    "gated without biases": {**PRE, "activation": "silu", "gated": True, "mlp_bias": False, "norm": "rmsnorm"},
    "relu, quick": {"activation": "quick_gelu", "fp32_residual_addition": True},
}

MIXTURE: dict[str, dict[str, Any]] = {
    "split": {**PRE},
    "by experts": {**PRE, "norm": "rmsnorm", "split_experts": "experts"},
    "replicated": {"split_experts": None, "normalize_router": False},
}

LAYER: dict[str, dict[str, Any]] = {
    "post norm": {},
    "pre norm": {**PRE, "causal_mask_size": 16},
    "cross": {**PRE, "causal_mask_size": 16, "add_cross_attention": True},
    "shared norm": {**PRE, "causal_mask_size": 16, "parallel_residual": "shared_norm", **ROTARY},
    "two norms": {**PRE, "causal_mask_size": 16, "parallel_residual": "two_norms", **ROTARY},
    "gated": {**PRE, "norm": "rmsnorm", "gated": True, "activation": "silu", "mlp_bias": False},
    "mixture": {**PRE, "norm": "rmsnorm", "activation": "silu", "num_experts": 5, "experts_per_token": 2},
}

STACK: dict[str, dict[str, Any]] = {
    "post norm": {},
    "both norms": {"pre_layernorm": True, "post_layernorm": True},
    "windows": {**PRE, "causal_mask_size": 16, "attention_windows": [None, 2], "final_layernorm": True},
    "relative bias": {**PRE, "relative_attention_buckets": 8, "norm": "rmsnorm", "final_layernorm": True},
    "cross": {"add_cross_attention": True},
    "alibi": {**PRE, "use_alibi": True, "scale_attn_by_layer_idx": True},
}

CASES = [
    *(("attention", name) for name in ATTENTION),
    *(("output", name) for name in OUTPUT),
    *(("mixture", name) for name in MIXTURE),
    *(("layer", name) for name in LAYER),
    *(("stack", name) for name in STACK),
]


def _build(kind: str, name: str) -> nn.Module:
    sizes: dict[str, Any] = {"num_attention_heads": HEADS, "attention_head_size": HEAD, "hidden_size": HIDDEN}
    if kind == "attention":
        return DistributedAttentionLayer(**{**sizes, **ATTENTION[name]})
    if kind == "output":
        return DistributedTransformerOutputLayer(hidden_size=HIDDEN, intermediate_size=19, **OUTPUT[name])
    if kind == "mixture":
        return DistributedMixtureOutputLayer(
            hidden_size=HIDDEN, intermediate_size=7, num_experts=5, experts_per_token=2, **MIXTURE[name]
        )
    if kind == "layer":
        return DistributedTransformerLayer(**sizes, intermediate_size=19, **LAYER[name])
    return DistributedTransformer(**sizes, num_layers=2, intermediate_size=19, **STACK[name])


def _crosses(kind: str, name: str) -> bool:
    return name == "cross" and kind != "output"


def _inputs(kind: str, name: str, samples: int) -> Sequence[Tensor]:
    generator = torch.Generator().manual_seed(10 + samples)
    hidden = torch.randn(SAMPLES, LENGTH, HIDDEN, generator=generator)
    if kind in ("output", "mixture"):
        return [hidden]
    states = torch.randn(SAMPLES, LENGTH + 2, HIDDEN, generator=generator)
    lengths = torch.tensor([[LENGTH], [LENGTH - 1], [2 + samples]])  # masks differ between ranks
    mask = (torch.arange(LENGTH) >= lengths).float() * -1e4
    cross_mask = (torch.arange(LENGTH + 2) >= lengths + 1).float() * -1e4
    masks = [tensor[:, None, None, :].detach() for tensor in (mask, cross_mask)]
    return [hidden, *masks, states] if _crosses(kind, name) else [hidden, masks[0]]


class Caller:
    """Calls a module with the tuple that its kind takes."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind = kind
        self.crosses = _crosses(kind, name)

    def __call__(self, module: nn.Module, *inputs: Tensor) -> Any:
        if self.kind in ("output", "mixture"):
            return module(inputs[0])
        inputs = (inputs[0], *(tensor.detach() for tensor in inputs[1:3]), *inputs[3:])
        if not self.crosses:
            result = module(inputs)
        elif self.kind == "attention":
            result = module((inputs[0], inputs[3], inputs[2]))
        else:
            result = module((inputs[0], inputs[3], inputs[1], inputs[2]))
            assert result[1] is inputs[3]
            assert result[3] is inputs[2]
        if isinstance(result, tuple) and self.kind != "attention":
            assert self.crosses or result[1] is inputs[1], "the mask comes back as it was given"
        return result[0] if isinstance(result, tuple) else result


def _loss(output: Tensor) -> Tensor:
    weights = torch.arange(1.0, output.numel() + 1).view(output.shape).cos()
    return (output * weights).sum()


def _case(kind: str, name: str) -> tuple[Any, ...]:
    return lambda: _build(kind, name), Caller(kind, name), lambda s: _inputs(kind, name, s), _loss


def run_cases(cases: list[tuple[str, str]]) -> list[ref.Result]:
    return [ref.on_ranks(*_case(kind, name)) for kind, name in cases]


@pytest.mark.parametrize(("optimize", "prescaled"), ref.MODES)
def test_like_one_process_on_two(pool2: RankPool, optimize: str, prescaled: bool) -> None:
    _check(pool2, 2, CASES, optimize, prescaled)


@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_like_one_process_on_four(pool4: RankPool, optimize: str) -> None:
    cases = [case for case in CASES if case != ("attention", "three key heads for six")]
    _check(pool4, 4, cases[::2], optimize, prescaled=False)
    _check(pool4, 4, cases[1::2], optimize, prescaled=True)


def _check(pool: RankPool, tp: int, cases: list[tuple[str, str]], optimize: str, prescaled: bool) -> None:
    got = pool.run(run_cases, cases, config=ref.config(tp, optimize, prescaled))
    for index, (kind, name) in enumerate(cases):
        want = ref.alone(*_case(kind, name), num_samples=1 if prescaled else tp)
        try:
            ref.compare([results[index] for results in got], want)
        except AssertionError as error:
            raise AssertionError(f"{kind}, {name}:\n{error}") from None


def run_autocast(optimize: str) -> tuple[Tensor, dict[str, Tensor], set[torch.dtype]]:
    torch.manual_seed(0)
    layer = DistributedTransformerLayer(HEADS, HEAD, HIDDEN, 20, 0.0, 0.0, pre_layernorm=True, post_layernorm=False)
    x = torch.randn(2, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1))
    seen: set[torch.dtype] = set()
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = layer((x, None))
        (query,) = column_linear(
            torch.zeros(2, HIDDEN // (tp_size() if optimize == "memory" else 1)),
            [layer.attention.query.weight],
            [None],
            sliced=optimize == "memory",
        )
        seen.add(query.dtype)
    output.float().pow(2).sum().backward()
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return output.detach().float(), gather_full(grads, spec_of(layer)), seen


@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_autocast(pool2: RankPool, optimize: str) -> None:
    results = pool2.run(run_autocast, optimize, config=ref.config(2, optimize, prescaled=True))
    want, want_grads, _ = run_autocast("speed")
    for output, grads, dtypes in results:
        assert dtypes == {torch.bfloat16}
        torch.testing.assert_close(output, want, rtol=0.05, atol=0.05)
        for name, grad in grads.items():
            scale = float(want_grads[name].abs().max())
            if "key.bias" not in name:
                torch.testing.assert_close(grad, want_grads[name], rtol=0.05, atol=0.05 * scale)


def run_hooked(optimize: str) -> int:
    """Norms that somebody watches are called as modules are."""
    layer = DistributedTransformerOutputLayer(HIDDEN, 20, pre_layernorm=True, post_layernorm=False)
    calls: list[int] = []
    assert isinstance(layer.pre_layernorm, nn.Module)
    layer.pre_layernorm.register_forward_hook(lambda *_: calls.append(1))
    layer(torch.randn(2, LENGTH, HIDDEN)).sum().backward()
    return len(calls)


def test_hooks_on_norms_are_called(pool2: RankPool) -> None:
    assert pool2.run(run_hooked, "memory", config=ref.config(2, "memory")) == [1, 1]


def run_refusals() -> list[str]:
    """What a degree of two can't share, refused when the module is built; the messages."""
    attempts: list[Any] = [
        lambda: DistributedAttentionLayer(3, 11, 33),
        lambda: DistributedTransformerLayer(2, 3, 33, pre_layernorm=True),
        lambda: DistributedMixtureOutputLayer(8, 4, num_experts=1, experts_per_token=1, split_experts="experts"),
    ]
    messages = []
    for attempt in attempts:
        with pytest.raises(ValueError) as caught:
            attempt()
        messages.append(str(caught.value))
    return messages


def test_ff01_impossible_degrees_are_refused_at_once(pool2: RankPool) -> None:
    for heads, hidden, experts in pool2.run(run_refusals, config=ref.config(2, "memory")):
        assert "'num_attention_heads' is 3, expected a multiple of 'tensor_parallel_degree' (2)" in heads
        assert "'hidden_size' is 33, expected a multiple of 'tensor_parallel_degree' (2)" in hidden
        assert "'num_experts' is 1, expected at least 'tensor_parallel_degree' (2)" in experts


def run_counted() -> tuple[int, int]:
    """Collectives of one layer inside a stack, forward and backward."""
    layer = DistributedTransformerLayer(HEADS, HEAD, HIDDEN, 20, pre_layernorm=True, post_layernorm=False, nested=True)
    layer.eval()
    here = context.world()
    own = HIDDEN // here.table.degrees.tp if here.config.optimize == "memory" else HIDDEN
    x = torch.randn(2, LENGTH, own, requires_grad=True)
    start = here.groups.count_call("tp")
    output, _ = layer((x, None))
    middle = here.groups.count_call("tp")
    output.sum().backward()
    return middle - start - 1, here.groups.count_call("tp") - middle - 1


def test_collectives_of_a_layer(pool2: RankPool) -> None:
    assert pool2.run(run_counted, config=ref.config(2, "speed")) == [(2, 2)] * 2
    # a gather and a scatter around each half, norms' numbers; in backward each gathered input once more
    assert pool2.run(run_counted, config=ref.config(2, "memory")) == [(6, 8)] * 2
