"""The language model on tp ranks, against one process: losses, logits, gradients; field fault 19."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tp_reference as ref
from harness import RankPool
from shardwright.tensor_parallel.module import gather_full, load_full
from shardwright.tensor_parallel.nn.lm_head import DistributedTransformerLMHead
from shardwright.topology import context
from shardwright.transport import collectives

HIDDEN, LENGTH, SAMPLES, VOCABULARY = 12, 6, 3, 101
PRE: dict[str, Any] = {"pre_layernorm": True, "post_layernorm": False, "causal_mask_size": 16}
SIZES: dict[str, Any] = {
    "num_layers": 2, "num_attention_heads": 4, "attention_head_size": 3, "hidden_size": HIDDEN, "intermediate_size": 19,
    "vocab_size": VOCABULARY, "num_positions": 16,
}  # fmt: skip

CASES: dict[str, dict[str, Any]] = {
    "tied": {**PRE},
    "untied": {**PRE, "tie_word_embeddings": False, "lm_head_bias": True, "num_token_types": 2},
    "distributed": {**PRE, "distribute_embedding": True},
    "distributed untied": {
        **PRE, "distribute_embedding": True, "tie_word_embeddings": False, "lm_head_bias": True, "num_token_types": 2,
        "embedding_layernorm": True, "embedding_scale": 3.0,
    },
    "distributed without logits": {**PRE, "distribute_embedding": True, "gather_logits": False},
    "rotary": {
        **PRE, "num_positions": 0, "rotary_frequencies": [1.0], "norm": "rmsnorm", "gated": True, "activation": "silu",
        "num_key_value_heads": 2,
    },
    "encoder": {"add_lm_head": False, "embedding_layernorm": True, "num_token_types": 2},
    "distributed encoder": {"add_lm_head": False, "distribute_embedding": True},
    "cross": {**PRE, "add_cross_attention": True},
    "distributed cross": {**PRE, "add_cross_attention": True, "distribute_embedding": True, "shift_labels": False},
}  # fmt: skip


def _build(name: str) -> nn.Module:
    return DistributedTransformerLMHead(**{**SIZES, **CASES[name]})


def _inputs(name: str, samples: int) -> Sequence[Tensor]:
    generator = torch.Generator().manual_seed(10 + samples)
    ids = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    ids[0, 1] = 100
    lengths = torch.tensor([[LENGTH], [LENGTH - 1], [2 + samples]])
    masked = (torch.arange(LENGTH) >= lengths).long()
    labels = ids.masked_fill(masked.bool(), -100)  # another number of tokens counts on each rank
    types = torch.randint(0, 2, ids.shape, generator=generator)
    places = torch.randint(0, 16, ids.shape, generator=generator)
    states = torch.randn(SAMPLES, LENGTH + 2, HIDDEN, generator=generator)
    return [ids, masked, types, places, labels, states]


class Caller:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: nn.Module, *inputs: Tensor) -> Any:
        ids, masked, types, places, labels, states = inputs
        options = CASES[self.name]
        given: tuple[Any, ...] = (ids, masked, types if options.get("num_token_types") else None)
        given = (*given, None if self.name in ("tied", "distributed") else places)
        if options.get("add_cross_attention"):
            given = (*given, states, None)
        result = module((*given, labels))
        return result if options.get("gather_logits", True) else result[0]


def _loss(output: Any) -> Tensor:
    """Of (loss, logits), a loss, or hidden states."""
    if isinstance(output, tuple):
        loss, logits = output
        return loss * 3 + (logits[..., 7] + logits[..., 99]).tanh().sum()
    if output.dim() == 0:
        return output * 3
    weights = torch.arange(1.0, output.numel() + 1).view(output.shape).cos()
    return (output * weights).sum()


def _case(name: str) -> tuple[Any, ...]:
    return lambda: _build(name), Caller(name), lambda s: _inputs(name, s), _loss


def run_cases(names: list[str]) -> list[ref.Result]:
    return [ref.on_ranks(*_case(name)) for name in names]


def _check(pool: RankPool, tp: int, names: list[str], optimize: str, prescaled: bool) -> None:
    got = pool.run(run_cases, names, config=ref.config(tp, optimize, prescaled))
    for index, name in enumerate(names):
        want = ref.alone(*_case(name), num_samples=1 if prescaled else tp)
        try:
            ref.compare([results[index] for results in got], want)
        except AssertionError as error:
            raise AssertionError(f"{name}:\n{error}") from None


@pytest.mark.parametrize(("optimize", "prescaled"), ref.MODES)
def test_like_one_process_on_two(pool2: RankPool, optimize: str, prescaled: bool) -> None:
    _check(pool2, 2, list(CASES), optimize, prescaled)


@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_like_one_process_on_four(pool4: RankPool, optimize: str) -> None:
    _check(pool4, 4, list(CASES)[::2], optimize, prescaled=False)
    _check(pool4, 4, list(CASES)[1::2], optimize, prescaled=True)


# -- field fault 19: a vocabulary that the degree doesn't divide --------------------------------------------


def _train(model: nn.Module, num_ranks: int, samples: Sequence[int]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        total = 0.0
        for rank in samples:
            ids, *_ = _inputs("", 10 * step + rank)
            ids = ids[:, :5].clone()
            ids[:, -1] = 100
            loss, _ = model((ids, None, None, None, ids))
            loss.backward()
            total += float(loss.detach())
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            if len(samples) == 1 and num_ranks > 1 and not ref._scaled(model, name):
                collectives.all_reduce(parameter.grad, "tp")
            parameter.grad /= num_ranks
        optimizer.step()
        losses.append(total / len(samples))
    return losses


def run_training(name: str) -> tuple[list[float], dict[str, Tensor]]:
    model = _build(name).eval()
    load_full(model, ref.full_state(model, std=0.1))
    here = context.world()
    losses = _train(model, here.table.degrees.tp, [here.coordinates.tp])
    return losses, gather_full(model)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_ff19_vocabulary_not_divisible(request: pytest.FixtureRequest, tp: int, optimize: str) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{tp}")
    for name in ("distributed", "distributed untied"):
        got = pool.run(run_training, name, config=ref.config(tp, optimize))
        plain = _build(name).eval()
        load_full(plain, ref.full_state(plain, std=0.1))
        losses = _train(plain, tp, range(tp))
        for step in range(3):
            mean = sum(rank_losses[step] for rank_losses, _ in got) / tp
            assert mean == pytest.approx(losses[step], rel=1e-5)
        for _, weights in got:
            assert weights["word_embedding.weight"].shape == (VOCABULARY, HIDDEN)
            assert weights["lm_head.weight"].shape == (VOCABULARY, HIDDEN)
            load_full(plain, weights)  # strict: every name and every shape
            for key, weight in plain.named_parameters():
                assert torch.equal(weights[key], weight), key
        trained = _build(name).eval()
        load_full(trained, ref.full_state(trained, std=0.1))
        _train(trained, tp, range(tp))
        for key, weight in trained.named_parameters():
            difference = float((got[0][1][key] - weight.detach()).abs().max())
            assert difference < 1e-5 * max(1.0, float(weight.detach().abs().max())), key
