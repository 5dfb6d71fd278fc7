"""The test models: deterministic, trainable, and with the traits that they stand for."""

from __future__ import annotations

import pytest
import torch

import models


@pytest.mark.parametrize("name", models.MODELS)
def test_equal_calls_give_equal_weights_batches_and_gradients(name):
    results = []
    for _ in range(2):
        model, make_batch, loss_of = models.make(name)
        loss = loss_of(model, make_batch(0, 4))
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", models.MODELS)
def test_ties_and_blocks_are_as_listed(name):
    model, spec = models.make(name).model, models.MODELS[name]
    shared = len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters()))
    assert shared == spec.tied
    blocks = models.block_names(model)
    assert set(models.even_stages(blocks, 4).values()) == {0, 1, 2, 3}
    for block in [*blocks, *spec.tail]:
        model.get_submodule(block)


def test_building_leaves_the_random_state_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    models.make("mlp")
    assert torch.equal(torch.get_rng_state(), before)


def test_other_seeds_give_other_batches():
    make_batch = models.make("gpt2").make_batch
    assert not torch.equal(make_batch(0, 4)["input_ids"], make_batch(1, 4)["input_ids"])
