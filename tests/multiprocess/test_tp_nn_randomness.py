"""Dropout inside and outside of what is split over tp ranks: field fault 30; and recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tp_reference as ref
from harness import RankPool
from shardwright.tensor_parallel import randomness
from shardwright.tensor_parallel.nn.lm_head import DistributedTransformerLMHead, HiddenDropout
from shardwright.tensor_parallel.nn.transformer import DistributedTransformerLayer
from shardwright.topology import context


def _model() -> DistributedTransformerLMHead:
    return DistributedTransformerLMHead(
        2, 4, 4, 16, 32, 50, 16, 0.5, 0.5, causal_mask_size=16, pre_layernorm=True, post_layernorm=False
    )


def run_masks(seed: int) -> dict[str, Any]:
    """Masks of this rank, and the loss of a model that trains with dropout."""
    here = context.world()
    torch.manual_seed(seed + 31 * here.rank)  # scripts seed as they like
    randomness.begin()
    before = torch.default_generator.get_state()
    x = torch.ones(2, 4, 8)
    copied = randomness.dropout(x, 0.5, True, split=False)
    split = randomness.dropout(x, 0.5, True, split=True)
    again = randomness.dropout(x, 0.5, True, split=False)
    own = HiddenDropout(0.5, split=not here.config.prescaled_batch)(x)
    torch.default_generator.set_state(before)
    still = randomness.dropout(x, 0.5, False, split=False)
    assert still is x, "nothing is dropped in eval mode"
    assert torch.equal(torch.default_generator.get_state(), before), "and nothing is drawn"
    model = _model()
    samples = here.coordinates.rdp if here.config.prescaled_batch else here.rank
    ids = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(samples))
    loss, _ = model((ids, None, None, None, ids))
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if "layernorm" in n}
    return {
        "copied": copied, "split": split, "again": again, "own": own, "loss": loss.detach(), "grads": grads,
        "tp": here.coordinates.tp, "rdp": here.coordinates.rdp,
    }  # fmt: skip


@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_ff30_peers_reading_the_same_samples(pool4: RankPool, optimize: str) -> None:
    first = pool4.run(run_masks, 5, config=ref.config(2, optimize, True))
    by_place = {(run["rdp"], run["tp"]): run for run in first}
    for rdp in (0, 1):
        one, other = by_place[rdp, 0], by_place[rdp, 1]
        assert torch.equal(one["copied"], other["copied"])
        assert not torch.equal(one["split"], other["split"])
        assert not torch.equal(one["copied"], one["again"]), "every block draws anew"
        assert torch.equal(one["own"], other["own"])
        assert torch.equal(one["loss"], other["loss"])
        if optimize == "speed":
            assert one["grads"].keys()
            assert all(torch.equal(one["grads"][n], other["grads"][n]) for n in one["grads"])
    assert not torch.equal(by_place[0, 0]["copied"], by_place[1, 0]["copied"]), "replicas have other masks"
    for run, rerun in zip(first, pool4.run(run_masks, 5, config=ref.config(2, optimize, True)), strict=True):
        assert all(torch.equal(run[key], rerun[key]) for key in ("copied", "split", "again", "own", "loss"))


def test_ff30_peers_reading_different_samples(pool4: RankPool) -> None:
    runs = pool4.run(run_masks, 5, config=ref.config(2, "speed", False))
    own = [run["own"] for run in runs]
    assert all(not torch.equal(a, b) for i, a in enumerate(own) for b in own[:i])


def run_recomputed() -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of a layer with dropout: kept activations, and recomputed ones, two microbatches in flight."""
    torch.manual_seed(3 + context.world().rank)
    layer = DistributedTransformerLayer(4, 4, 16, 32, 0.5, 0.5)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(2, 5, 16, generator=generator) for _ in range(2)]
    results = []
    for recompute in (False, True):
        torch.manual_seed(9)
        randomness.begin(4)
        layer.zero_grad()
        losses = []
        for x in batches:
            y = checkpoint(layer, (x, None), use_reentrant=False) if recompute else layer((x, None))
            losses.append((y[0] * torch.arange(y[0].numel()).view(y[0].shape).cos()).sum())
        for loss in reversed(losses):
            loss.backward()
        results.append([p.grad.clone() for p in layer.parameters() if p.grad is not None])
    return results[0], results[1]


@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_recomputed_blocks_draw_the_same_masks(pool2: RankPool, optimize: str) -> None:
    for kept, recomputed in pool2.run(run_recomputed, config=ref.config(2, optimize)):
        assert len(kept) == 16
        assert all(torch.equal(a, b) for a, b in zip(kept, recomputed, strict=True))


def run_continued() -> tuple[Tensor, Tensor]:
    x = torch.ones(50)
    randomness.begin(1)
    randomness.dropout(x, 0.5, True, split=True)
    kept = randomness.state()
    first = randomness.dropout(x, 0.5, True, split=True)
    randomness.begin(2)
    randomness.set_state(kept)
    return first, randomness.dropout(x, 0.5, True, split=True)


def test_state_can_be_kept(pool2: RankPool) -> None:
    for first, second in pool2.run(run_continued, config=ref.config(2)):
        assert torch.equal(first, second)


def run_attention() -> list[Tensor]:
    torch.manual_seed(3 + context.world().rank)
    layer = DistributedTransformerLayer(4, 4, 16, 32, 0.5, 0.5, causal_mask_size=8)
    assert layer.attention.recompute == context.world().config.checkpoint_attentions
    torch.manual_seed(9)
    randomness.begin(4)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    (layer((x, None))[0].cumsum(0).sin()).sum().backward()
    return [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_checkpoint_attentions_changes_no_gradient(pool2: RankPool, optimize: str) -> None:
    config = ref.config(2, optimize)
    kept = pool2.run(run_attention, config=config)
    recomputed = pool2.run(run_attention, config={**config, "checkpoint_attentions": True})
    for grads, again in zip(kept, recomputed, strict=True):
        assert len(grads) == 16
        assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


def run_half() -> set[torch.dtype]:
    model = _model()
    return {parameter.dtype for parameter in model.parameters()}


@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_fp16_params(pool2: RankPool, optimize: str) -> None:
    found = pool2.run(run_half, config={**ref.config(2, optimize), "fp16_params": True})
    assert found == [{torch.float16}, {torch.float16}]
