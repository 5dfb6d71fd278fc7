"""`shardwright.torch` has every name of the contract, and the ones not built yet say so when used."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import shardwright.topology
import shardwright.torch as smp
from shardwright.config.schema import Config
from shardwright.engine.optimizer import WrappedOptimizer
from shardwright.engine.signals import SaveOnSignal

RANKS = ["rank", "local_rank", "mp_rank", "dp_rank", "pp_rank", "tp_rank", "rdp_rank"]
SIZES = ["size", "local_size", "mp_size", "dp_size", "pp_size", "tp_size", "rdp_size"]
AXES = ["mp", "dp", "pp", "tp", "rdp"]

CONTRACT: dict[str, list[str]] = {
    "start": ["init", "is_initialized", "shutdown", "state", "num_microbatches"],
    "ranks": [*RANKS, *SIZES, "CommGroup", "RankType"],
    "groups": [
        "WORLD",
        *(f"{axis.upper()}_GROUP" for axis in AXES),
        *(f"get_{axis}_group" for axis in AXES),
        *(f"get_{axis}_process_group" for axis in ["world", *AXES]),
    ],
    "messages": [
        "broadcast",
        "send",
        "recv_from",
        "allgather",
        "barrier",
        *(f"{axis}_barrier" for axis in AXES),
    ],
    "step": ["step", "StepOutput", "dynamic_shapes"],
    "wrappers": ["DistributedModel", "DistributedOptimizer", "clip_grad_norm", "hvd_average_grads"],
    "partition": ["partition", "set_partition", "get_partition", "is_tracing"],
    "tensor parallelism": [
        "tensor_parallelism",
        "set_tensor_parallelism",
        "model_creation",
        "tp_register",
        "tp_register_with_module",
    ],
    "memory": [
        "set_activation_checkpointing",
        "delay_param_initialization",
        "delayed_parameter_initialization",
        "delayed_param_initialization",
        "register_parameter",
    ],
    "checkpoints": ["save", "load", "save_checkpoint", "resume_from_checkpoint", "save_on_signal", "prepare_background_save"],
    "submodules": [
        "amp",
        "model",
        "nn",
        "optimizers",
        "patches",
        "sharded_data_parallel_checkpoint",
        "state_mod",
        "utils",
    ],
}

def test_every_name_of_the_contract_is_there() -> None:
    names = {name for group in CONTRACT.values() for name in group}
    assert {name for name in names if not hasattr(smp, name)} == set()


def test_face_lists_what_it_has() -> None:
    assert len(set(smp.__all__)) == len(smp.__all__)
    assert all(hasattr(smp, name) for name in smp.__all__)
    public = {name for name in vars(smp) if not name.startswith("_")} - {"annotations"}
    unlisted = {name for name in public if not isinstance(getattr(smp, name), ModuleType)} - set(smp.__all__)
    assert unlisted == set()


def test_other_spellings_are_the_same_object() -> None:
    assert smp.optimizers.FusedLAMB is smp.optimizers.FusedLamb
    assert smp.delayed_param_initialization is smp.delay_param_initialization
    assert smp.delayed_parameter_initialization is smp.delay_param_initialization
    gptj = smp.nn.huggingface.gptj
    one = gptj.translate_hf_state_dict_to_smdistributed_gptj
    assert gptj.translate_hf_gptj_state_dict_to_smdistributed is one
    assert gptj.translate_hf_gptj_state_dict_to_smdistributed_gptj is one


def test_fused_layer_norm_is_a_layer_norm() -> None:
    norm = smp.nn.FusedLayerNorm(6, eps=1e-3)
    assert isinstance(norm, torch.nn.LayerNorm)
    x = torch.randn(3, 6)
    expected = torch.nn.functional.layer_norm(x, (6,), norm.weight, norm.bias, 1e-3)
    assert torch.equal(norm(x), expected)


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A process context at world rank 5, in place of the real one."""
    world = SimpleNamespace(
        config=Config(pipeline_parallel_degree=2, microbatches=4),
        coordinates=SimpleNamespace(rank=5, pp=1, tp=0, rdp=2),
        groups=object(),
    )
    fake = SimpleNamespace(is_initialized=lambda: True, world=lambda: world)
    monkeypatch.setattr(shardwright.topology, "context", fake, raising=False)
    monkeypatch.setitem(sys.modules, "shardwright.topology.context", fake)
    monkeypatch.setattr("shardwright.engine.state.context", fake)
    return fake


def test_message_with_rank(context: SimpleNamespace) -> None:
    assert smp.utils.rmsg("hello") == "[rank 5 (pp 1, tp 0, rdp 2)] hello"
    context.is_initialized = lambda: False
    assert smp.utils.rmsg("hello") == "hello"


@pytest.mark.usefixtures("context")
def test_state_shows_the_configuration() -> None:
    assert smp.state.cfg.partitions == smp.state.cfg.pipeline_parallel_degree == 2
    assert smp.state.cfg.prescaled_batch is False
    assert not hasattr(smp.state.cfg, "no_such_key")
    assert smp.state.module_manager.translate_functions == []
    assert smp.state is smp.state_mod.state


def test_collective_calls_say_who_makes_them() -> None:
    """FF-24: in the call's own documentation, and for scripts in docs/checkpoints.md."""
    optimizer = WrappedOptimizer
    calls = [smp.DistributedModel.state_dict, optimizer.state_dict, optimizer.local_state_dict, SaveOnSignal.should_stop]
    for call in (smp.save_checkpoint, smp.resume_from_checkpoint, smp.export_huggingface, *calls):
        told = " ".join(str(call.__doc__).split())
        assert "Called by: " in told or "collective over the world" in told, call
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    rows = [line for line in text.splitlines() if "(collective)" in line]
    for name in ("save_checkpoint", "resume_from_checkpoint", "export_huggingface", "should_stop", ".state_dict()", ".local_state_dict()"):
        assert any(name in row for row in rows), name
