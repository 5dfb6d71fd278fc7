"""The one-process reference itself: against the definition of the mean gradient, and for buffers."""

from __future__ import annotations

import pytest
import torch

import models
from reference import adamw, named_parameters, run_reference


@pytest.mark.parametrize("name", ["mlp", "mlp_reuse", "gpt2", "long_residual"])
def test_gradient_is_that_of_the_whole_batch(name):
    model, make_batch, loss_of = models.make(name)
    batch = make_batch(0, 8)
    halves = [{key: value.chunk(2)[i] for key, value in batch.items()} for i in range(2)]
    run = run_reference(model, loss_of, [halves], num_microbatches=2)

    whole = models.make(name).model
    loss = loss_of(whole, batch)
    loss.backward()
    assert torch.stack(run.losses[0]).mean() == pytest.approx(loss.item(), rel=1e-6)
    for key, parameter in named_parameters(whole).items():
        torch.testing.assert_close(run.gradients[0][key], parameter.grad, rtol=1e-4, atol=1e-7)
    optimizer = adamw(list(whole.parameters()))
    optimizer.step()
    for key, parameter in named_parameters(whole).items():
        torch.testing.assert_close(run.weights[key], parameter.detach(), rtol=1e-4, atol=1e-6)


def test_replicas_start_each_step_with_the_buffers_of_replica_zero():
    def buffers(data):
        model, _, loss_of = models.make("resnet")
        return run_reference(model, loss_of, data).buffers

    _, make_batch, _ = models.make("resnet")
    one, other = make_batch(0, 8), make_batch(1, 8)
    alone, shared = buffers([[one]]), buffers([[one, other]])
    assert alone.keys() == shared.keys()
    assert all(torch.equal(alone[name], shared[name]) for name in alone)


def test_a_parameter_without_gradient_stays_without():
    model, make_batch, loss_of = models.make("branching")
    run = run_reference(model, loss_of, [[make_batch(seed, 8)] for seed in range(3)])
    missing = [{name for name, g in step.items() if g is None} for step in run.gradients]
    assert any(missing)
