"""Memory of ranks and proposals, in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.config import rules
from shardwright.config.parse import resolve
from shardwright.config.schema import Config
from shardwright.engine.planning import fit as fitting
from shardwright.engine.planning.fit import Wish, fit
from shardwright.engine.planning.layout import Layout, work_out
from shardwright.engine.planning.memory import Habits, Held, RankMemory, rank_memory
from shardwright.engine.planning.model import Subject, look, scaled_up
from shardwright.engine.planning.optimizer import OptimizerNeeds, optimizer_class, probe
from shardwright.errors import UsageError
from shardwright.partition.footprint import Peaks
from shardwright.topology import context

ADAM = OptimizerNeeds("Adam", 8.0, 0.0, 12.0)
WIDTH = 32


# ------------------------------------------------------------------ optimizers


@pytest.mark.parametrize(
    ("name", "options", "state"),
    [
        ("SGD", {}, 0.0),
        ("sgd", {"momentum": 0.9}, 4.0),
        ("AdamW", {}, 8.0),
        ("adamw", {"amsgrad": True}, 12.0),
        ("Adagrad", {}, 4.0),
        ("FusedLamb", {}, 8.0),
    ],
)
def test_state_of_optimizers(name: str, options: dict[str, Any], state: float) -> None:
    for at_once in (False, True):
        assert probe(optimizer_class(name), options, at_once=at_once).state_bytes == state


def test_an_update_of_all_at_once_takes_more() -> None:
    one_by_one, at_once = (probe(torch.optim.AdamW, at_once=at_once) for at_once in (False, True))
    assert (one_by_one.update_bytes, at_once.largest_bytes) == (0.0, 0.0)
    assert one_by_one.largest_bytes > 0
    assert at_once.update_bytes >= 4.0


def test_unknown_optimizers_are_named() -> None:
    with pytest.raises(UsageError, match=r"'adamx', expected one of .*AdamW.*SGD"):
        optimizer_class("adamx")


# ------------------------------------------------------------------ one rank


def rank(
    config: dict[str, Any], *, world_size: int = 1, in_flight: int = 1, device: str = "cpu", **habits: Any
) -> RankMemory:
    """One trained parameter of 1000 elements and a frozen one of 10; a microbatch keeps 500 bytes."""

    def play(share: float, transit: int) -> Peaks:
        calls.append((share, transit))
        return Peaks(500, 400, 600, 900, 800, checkpoint_bytes=300, block_bytes=100)

    calls: list[tuple[float, int]] = []
    chosen = resolve(config, {}).config
    half = chosen.fp16 or chosen.bf16
    return rank_memory(
        [Held("w", 1000, 2000 if half else 4000), Held("f", 10, 40, trainable=False)],
        buffers=7,
        inputs=5,
        largest_block=4000,
        play=play,
        in_flight=in_flight,
        config=chosen,
        world_size=world_size,
        habits=Habits(ADAM, device=device, **habits),  # type: ignore[arg-type]
    )


def test_plain() -> None:
    found = rank({})
    assert (found.parameters, found.gradients, found.optimizer, found.buffers) == (4040, 4000, 8000, 7)
    assert (found.peak_bytes, found.moment) == (4040 + 8000 + 7 + 5 + 4000 + 12000, "update")


def test_in_flight_and_accumulated() -> None:
    few = replace(ADAM, largest_bytes=0.0)
    chosen = {"microbatches": 4}
    found = rank(chosen, in_flight=3)
    assert found.activations == 2 * 400 + 800
    assert rank({**chosen, "pipeline": "simple"}, in_flight=4).activations == 3 * 500 + 800
    assert few.state_bytes == 8.0


def test_replicas_hold_buckets() -> None:
    assert rank({"ddp": True}, world_size=2).communication == 4000
    assert rank({"ddp": True}, world_size=1).communication == 0


def test_owners_hold_a_share() -> None:
    found = rank({"ddp": True, "shard_optimizer_state": True}, world_size=4)
    assert (found.optimizer, found.gradients, found.parameters) == (2000, 1000, 4040)
    assert rank({"ddp": True, "shard_optimizer_state": True, "microbatches": 2}, world_size=4).gradients == 4000


@pytest.mark.parametrize("key", ["fp16", "bf16"])
def test_half_precision_is_twenty_bytes_for_a_parameter(key: str) -> None:
    found = rank({key: True})
    trained = found.parameters - 40 + found.gradients + found.optimizer + found.masters
    assert trained == 20 * 1000


def test_sharded_data_parallelism_divides_all_but_small_parameters() -> None:
    config = {"ddp": True, "sharded_data_parallel_degree": 4, "sdp_param_persistence_threshold": 100}
    found = rank(config, world_size=8)
    assert (found.parameters, found.gradients, found.optimizer) == (1040, 1000, 2000)


def test_offloading_moves_what_is_kept_on_gpus_only() -> None:
    config = {"offload_activations": True, "activation_loading_horizon": 1, "microbatches": 4}
    on_gpu = rank(config, in_flight=3, device="cuda", checkpointing=True)
    assert on_gpu.host == 3 * 300 - 2 * 100
    assert rank(config, in_flight=3, checkpointing=True).host == 0


# ------------------------------------------------------------------ a model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def subject(blocks: int = 8, samples: int = 2) -> Subject:
    with torch.device("meta"):
        module = nn.Sequential(*(Block() for _ in range(blocks)), nn.Linear(WIDTH, 3))
    return Subject(module, (torch.zeros(samples, WIDTH),))


def layout(keys: dict[str, Any], world_size: int, **habits: Any) -> Layout:
    config = resolve(keys, {}).config
    return work_out(look(subject(), config, world_size), config, world_size, Habits(ADAM, device="cpu", **habits))


def test_stages_share_the_model() -> None:
    whole = layout({}, 1)
    cut = layout({"pipeline_parallel_degree": 2, "microbatches": 4}, 2)
    assert sum(found.parameters for found in cut.ranks) == whole.ranks[0].parameters
    assert cut.in_flight[0] > cut.in_flight[1] >= 1
    assert all(found.peak_bytes < whole.peak_bytes for found in cut.ranks)


def test_tensor_parallel_ranks_hold_slices() -> None:
    whole, cut = layout({}, 1), layout({"tensor_parallel_degree": 2, "ddp": True}, 2)
    assert whole.ranks[0].parameters / 2 < cut.ranks[0].parameters < whole.ranks[0].parameters * 0.55
    assert not context.is_initialized()  # the world on paper is gone


def test_recomputation_needs_less() -> None:
    plain, again = layout({}, 1), layout({}, 1, checkpointing=True)
    assert again.checkpointed == tuple(str(n) for n in range(8))
    assert again.ranks[0].activations < plain.ranks[0].activations


def test_half_precision_halves_activations() -> None:
    assert layout({"bf16": True}, 1).ranks[0].activations < 0.6 * layout({}, 1).ranks[0].activations


def test_larger_microbatches() -> None:
    config = Config()
    estimated = work_out(scaled_up(look(subject(), config, 1), 3), config, 1, Habits(ADAM, device="cpu"))
    exact = work_out(look(subject(samples=6), config, 1), config, 1, Habits(ADAM, device="cpu"))
    assert estimated.ranks[0].activations == pytest.approx(exact.ranks[0].activations, rel=0.15)
    assert estimated.plan.stages[0].flops == exact.plan.stages[0].flops


def test_model_that_fake_tensors_cant_run_goes_without_activations() -> None:
    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float(x.sum())

    view = look(Subject(Reads(4, 4), (torch.zeros(2, 4),)), Config(), 1)
    assert view.footprint is None
    assert "fake" in view.note or "DataDependent" in view.note
    assert work_out(view, Config(), 1, Habits(ADAM)).ranks[0].activations == 0


def test_attention_of_gpus_drops_without_holding_a_matrix() -> None:
    class Attention(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = super().forward(x).view(1, 512, 2, 16).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(q, q, q, None, 0.1)

    model = Subject(Attention(WIDTH, WIDTH), (torch.zeros(1, 512, WIDTH),))
    matrix = 2 * 512 * 512 * 4
    on_cpu, on_gpu = (
        work_out(look(model, Config(), 1, device=device), Config(), 1, Habits(ADAM)).ranks[0].activations
        for device in ("cpu", "cuda")
    )
    assert on_gpu < matrix < on_cpu


# ------------------------------------------------------------------ proposals


def wish(limit_bytes: int, num_ranks: int = 4, **more: Any) -> Wish:
    given: dict[str, Any] = {"precisions": ("fp32", "bf16"), "habits": Habits(ADAM, device="cuda"), **more}
    return Wish(limit_bytes, num_ranks, 16 * num_ranks, 2, **given)


def test_everything_fits_into_much() -> None:
    found = fit(subject(), wish(1 << 40))
    assert found.closest is None
    costs = [p.candidate.cost.total for p in found.proposals]
    assert costs == sorted(costs)
    assert all(p.headroom_bytes > 0 for p in found.proposals)
    assert found.proposals[0].candidate.cost.recompute == 0


def test_what_fits_really_fits_and_is_allowed() -> None:
    tight = int(0.6 * layout({}, 1).peak_bytes)
    found = fit(subject(), wish(tight))
    assert found.proposals
    for proposal in found.proposals:
        config = resolve(dict(proposal.candidate.keys), {}).config
        rules.check_world(config, 4)
        view = look(subject(), replace(config, microbatches=1), 4, device="cuda")
        view = scaled_up(view, proposal.candidate.size)
        again = work_out(
            view, config, 4, Habits(ADAM, checkpointing=proposal.candidate.checkpointing, device="cuda")
        )
        assert again.peak_bytes == proposal.layout.peak_bytes <= tight


def test_nothing_fits() -> None:
    found = fit(subject(), wish(1000))
    assert found.proposals == ()
    assert found.closest is not None
    assert found.closest.headroom_bytes < 0
    assert found.closest.candidate.checkpointing


def test_fixed_keys_are_kept() -> None:
    found = fit(subject(), wish(1 << 40, given={"pipeline_parallel_degree": 2, "timeout_s": 5.0}))
    assert found.proposals
    assert {p.candidate.config.pipeline_parallel_degree for p in found.proposals} == {2}
    assert all(p.candidate.keys["timeout_s"] == 5.0 for p in found.proposals)


def test_refused_combinations_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []
    real: Callable[..., Layout] = work_out

    def watched(view: Any, config: Config, *args: Any, **kwargs: Any) -> Layout:
        seen.append(config)
        return real(view, config, *args, **kwargs)

    monkeypatch.setattr(fitting, "work_out", watched)
    assert fit(subject(), wish(1 << 40)).proposals
    assert seen
    for config in seen:
        assert config.sharded_data_parallel_degree == 1 or config.pipeline_parallel_degree == 1
