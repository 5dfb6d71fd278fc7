"""Models cut by the tensor parallel plan that they carry compute what transformers computes in one process."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plan_models
import reference
import tp_parity
from harness import RankFailure, RankPool

STEPS = 3
MICROBATCHES = 2
REL = 2e-5
"""Sums over tp ranks are taken in another order than in one process."""
WEIGHT_REL = 1e-4
"""Three steps of Adam, which divides small gradients by small numbers, make more of a rounding."""

CASES = ["olmo", "gemma", "cohere", "exaone4"]
MORE_CASES = ["granite", "starcoder2", "olmo2", "phi", "phi3"]


@dataclass
class Seen:
    """What one rank saw; whole tensors in plain names. state: what `state_dict()` gave."""

    logits: Tensor | None
    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    distributed: list[str] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    unscaled: int = 0


def train(case: str) -> Seen:
    """Train for three steps on this rank. Called on every rank after `smp.init`."""
    import shardwright.torch as smp

    plain = plan_models.make(case)
    smp.set_tensor_parallelism(plain)
    model = smp.DistributedModel(plain)
    logits = None
    if smp.pp_size() == 1:
        batch = plan_models.batch_of(90 + smp.rdp_rank())
        with torch.no_grad():
            logits = model(**batch).logits[batch["attention_mask"].bool()]
    optimizer = smp.DistributedOptimizer(reference.adamw(list(model.parameters())))

    @smp.step
    def train_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = plan_models.loss_of(model, batch)
        model.backward(loss)
        return loss

    seen = Seen(logits)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        batch = plan_models.batch_of(10 * step + smp.rdp_rank())
        seen.losses.append(train_step(model, batch).stack())
        seen.gradients.append(tp_parity.whole_gradients(model))
        seen.norms.append(float(smp.clip_grad_norm(1e9)))
        optimizer.step()
    seen.state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mine = set(model.distributed_modules())
    seen.distributed = [name for name, module in model.get_module().named_modules() if module in mine]
    seen.unscaled = len(list(model.default_reducer_named_parameters()))
    return seen


@functools.cache
def expected(case: str, num_replicas: int) -> tuple[list[Tensor], reference.Run, dict[str, Tensor]]:
    """Logits of each replica's samples before training, the training, and the state dict after it."""
    model = plan_models.make(case)
    logits = []
    for replica in range(num_replicas):
        batch = plan_models.batch_of(90 + replica)
        with torch.no_grad():
            logits.append(model(**batch).logits[batch["attention_mask"].bool()])
    data = [[plan_models.batch_of(10 * step + i) for i in range(num_replicas)] for step in range(STEPS)]
    run = reference.run_reference(model, plan_models.loss_of, data, num_microbatches=MICROBATCHES)
    return logits, run, dict(model.state_dict())


def check(case: str, ranks: list[Seen], pp: int = 1, rdp: int = 1) -> None:
    """Compare every rank with one process. Ranks: rdp outermost or innermost, told by what they saw."""
    logits, truth, state = expected(case, rdp)
    faults: list[str] = []

    def compare(what: str, got: Tensor, want: Tensor, least: float = 0.0, rel: float = REL) -> None:
        assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, expected {tuple(want.shape)}"
        difference, size = float((got - want).abs().max()), max(float(want.abs().max()), least)
        if not difference <= rel * size:
            faults.append(f"{what}: differs by {difference:.3e} of {size:.3e}")

    for number, seen in enumerate(ranks):
        if pp == 1:
            assert seen.distributed, f"rank {number}"
            assert seen.unscaled == 0, f"rank {number}"
        replica = min(range(rdp), key=lambda i: float((truth.losses[0][i] - seen.losses[0]).abs().max()))
        if seen.logits is not None:
            compare(f"logits, rank {number}", seen.logits, logits[replica])
        for step in range(STEPS):
            where = f"step {step}, rank {number}"
            compare(f"loss, {where}", seen.losses[step], truth.losses[step][replica])
            wanted = {n: g for n, g in truth.gradients[step].items() if g is not None}
            once = [wanted[name] for name, _ in plan_models.make(case).named_parameters()]
            norm = torch.stack([gradient.norm() for gradient in once]).norm()
            compare(f"norm, {where}", torch.tensor(seen.norms[step]), norm)
            assert seen.gradients[step].keys() == wanted.keys()
            largest = max(float(g.abs().max()) for g in wanted.values())
            for name, want in wanted.items():
                compare(f"gradient of {name}, {where}", seen.gradients[step][name], want, 1e-3 * largest)
        assert seen.state.keys() == state.keys()
        for name, want in state.items():
            compare(f"weight {name}, rank {number}", seen.state[name], want, 1e-1, WEIGHT_REL)
    assert not faults, f"{len(faults)} differences:\n" + "\n".join(faults[:20])


def config(**changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "tensor_parallel_degree": 2,
        "prescaled_batch": True,
        "microbatches": MICROBATCHES,
        "ddp": True,
        "log_level": "warning",
    }
    return {**settings, **changes}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.heavy) for case in MORE_CASES)])
def test_training_equals_one_process(pool2: RankPool, case: str) -> None:
    plan_models.skip_unless_served(case)
    check(case, pool2.run(train, case, config=config(), timeout_s=120))


def test_hidden_states_are_whole_in_memory_mode_too(pool2: RankPool) -> None:
    check("cohere", pool2.run(train, "cohere", config=config(optimize="memory"), timeout_s=120))


@pytest.mark.parametrize("case", ["cohere", "olmo"])
def test_training_over_stages_equals_one_process(pool4: RankPool, case: str) -> None:
    check(case, pool4.run(train, case, config=config(pipeline_parallel_degree=2), timeout_s=120), pp=2)


@pytest.mark.heavy
def test_training_of_replicas_equals_one_process(pool4: RankPool) -> None:
    plan_models.skip_unless_served("exaone4")
    check("exaone4", pool4.run(train, "exaone4", config=config(), timeout_s=120), rdp=2)


def in_and_out(case: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Load weights of another seed into a wrapped model, save it as transformers does, and show both state dicts."""
    import shardwright.torch as smp

    plain = plan_models.make(case)
    other = {name: tensor + 0.01 for name, tensor in plain.state_dict().items()}
    smp.set_tensor_parallelism(plain)
    model = smp.DistributedModel(plain)
    model.load_state_dict(other)
    model.save_pretrained(folder)
    return other, {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("case", ["cohere", "exaone4"])
def test_weights_travel_in_plain_names(pool2: RankPool, case: str, tmp_path: Path) -> None:
    plan_models.skip_unless_served(case)
    results = pool2.run(in_and_out, case, str(tmp_path), config=config(), timeout_s=120)
    for given, found in results:
        assert given.keys() == found.keys()
        assert [name for name in given if not torch.equal(given[name], found[name])] == []
    given, _ = results[0]
    loaded = type(plan_models.make(case)).from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert [name for name in given if not torch.equal(given[name], loaded[name])] == []


def dropped(case: str) -> tuple[Tensor, list[str]]:
    """Logits with dropout, and the classes of what was replaced."""
    import shardwright.torch as smp

    torch.manual_seed(7 + smp.tp_rank())
    plain = plan_models.make(case, resid_pdrop=0.3)
    smp.set_tensor_parallelism(plain)
    model = smp.DistributedModel(plain).train()
    with torch.no_grad():
        logits = model(**plan_models.batch_of(0)).logits
    return logits, [type(module).__name__ for module in model.distributed_modules()]


def test_dropout_between_blocks_has_one_mask(pool2: RankPool) -> None:
    (one, classes), (other, _) = pool2.run(dropped, "phi3", config=config(), timeout_s=120)
    assert "TensorParallelDropout" in classes
    assert torch.equal(one, other)


def refused(case: str, changes: dict[str, Any]) -> tuple[list[str], set[str], Tensor]:
    """What a wrap said, the classes of what was replaced all the same, and logits."""
    import shardwright.torch as smp

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shardwright.tensor_parallel.substitute")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    plain = plan_models.make(case, **changes)
    smp.set_tensor_parallelism(plain)
    try:
        model = smp.DistributedModel(plain)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    with torch.no_grad():
        logits = model(**plan_models.batch_of(0)).logits
    return lines, {type(module).__name__ for module in model.distributed_modules()}, logits


@pytest.mark.parametrize(
    ("case", "prescaled", "reason"),
    [
        ("olmo", False, "'prescaled_batch' to be True, but it is False: set it"),
        ("cohere_norms", True, "doesn't say how 'model.layers.0.self_attn.q_norm.weight' acts on split features"),
    ],
)
def test_refused_plans_are_named_in_one_line(pool2: RankPool, case: str, prescaled: bool, reason: str) -> None:
    settings = config(prescaled_batch=prescaled)
    (lines, classes, logits), (_, _, other) = pool2.run(refused, case, {}, config=settings, timeout_s=120)
    (line,) = [line for line in lines if "plan" in line]
    assert reason in line
    assert "ColumnLinear" not in classes
    with torch.no_grad():
        want = plan_models.make(case)(**plan_models.batch_of(0)).logits
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(other, want, rtol=1e-4, atol=1e-4)


def test_heads_that_cant_be_shared_are_an_error(pool2: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"k_proj' has 1 heads, expected a multiple .* \(2\)"):
        pool2.run(refused, "olmo", {"num_key_value_heads": 1}, config=config(), timeout_s=60)


PROMPT = torch.tensor([[5, 6, 7], [8, 9, 10]])


def generate(case: str) -> Tensor:
    """Tokens that a wrapped model generates; its caches hold the keys and values of this rank's heads."""
    import shardwright.torch as smp

    plain = plan_models.make(case, use_cache=True)
    smp.set_tensor_parallelism(plain)
    model = smp.DistributedModel(plain).eval()
    return model.get_module().generate(PROMPT, max_new_tokens=6, do_sample=False, eos_token_id=None)


@pytest.mark.heavy
@pytest.mark.parametrize("case", ["cohere", "gemma"])
def test_generation_equals_one_process(pool2: RankPool, case: str) -> None:
    plain = plan_models.make(case, use_cache=True).eval()
    want = plain.generate(PROMPT, max_new_tokens=6, do_sample=False, eos_token_id=None)
    for found in pool2.run(generate, case, config=config(), timeout_s=60):
        assert torch.equal(found, want)


def differing(case: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and weights after wrapping a model that was drawn differently on each rank."""
    import shardwright.torch as smp

    plain = plan_models.make(case)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.01 * smp.rank())
        plain.model.rotary_emb.inv_freq.add_(0.01 * smp.rank())  # a buffer
    smp.set_tensor_parallelism(plain)
    model = smp.DistributedModel(plain)
    with torch.no_grad():
        model(**plan_models.batch_of(1))  # replicas get equal buffers
        loss = float(plan_models.loss_of(model, plan_models.batch_of(0)))
    return loss, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_all_ranks_get_the_weights_of_the_first(pool2: RankPool) -> None:
    want = plan_models.make("cohere")
    with torch.no_grad():
        wanted_loss = float(plan_models.loss_of(want, plan_models.batch_of(0)))
    results = pool2.run(differing, "cohere", config=config(), timeout_s=60)
    for loss, found in results:
        assert [name for name, tensor in want.state_dict().items() if not torch.equal(tensor, found[name])] == []
        assert loss == pytest.approx(wanted_loss, rel=1e-5)
