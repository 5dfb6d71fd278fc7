"""Settings to command lines and environments."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from shardwright.errors import ConfigError
from shardwright.launch.command import (
    LaunchSettings,
    check_devices,
    merge_config,
    parse_override,
    settle,
    torchrun_equivalent,
    worker_command,
    worker_environment,
)
from shardwright.launch.process import _prefer_real_devices


def _settle(**options: object) -> LaunchSettings:
    return settle("train.py", ["--epochs", "3"], **options)  # type: ignore[arg-type]


def test_later_sources_win_under_any_spelling() -> None:
    merged = merge_config(
        {"partitions": 2, "microbatches": 8, "ddp": False},
        {"pipeline_parallel_degree": 4, "ddp": None},
        ["microbatches=2", "optimize=speed", "memory_weight=0.5"],
    )
    assert merged == {
        "pipeline_parallel_degree": 4,
        "microbatches": 2,
        "ddp": False,
        "optimize": "speed",
        "memory_weight": 0.5,
    }


def test_a_bad_key_or_value_is_refused_with_its_source() -> None:
    with pytest.raises(ConfigError, match=r"microbatchs.*microbatches[^\n]*\n.*-o"):
        merge_config({}, {}, ["microbatchs=2"])
    with pytest.raises(ConfigError, match="'microbatches' is 0"):
        merge_config({}, {"microbatches": 0}, [])


def test_rules_between_keys_are_left_to_the_workers() -> None:
    """The script may set ddp itself."""
    assert merge_config({}, {"tensor_parallel_degree": 2}, []) == {"tensor_parallel_degree": 2}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=1", ("a", 1)),
        ("a=true", ("a", True)),
        ("a=spread", ("a", "spread")),
        ('a="1"', ("a", "1")),
        ("a=b=c", ("a", "b=c")),
        ("a=", ("a", "")),
    ],
)
def test_overrides_are_json_or_text(text: str, expected: tuple[str, object]) -> None:
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["fp16", "=1"])
def test_an_override_without_key_or_value(text: str) -> None:
    with pytest.raises(ConfigError, match="key=value"):
        parse_override(text)


def test_as_many_processes_as_the_degrees_need() -> None:
    assert _settle().nproc == 1
    assert _settle(config={"pipeline_parallel_degree": 2, "tensor_parallel_degree": 3}).nproc == 6
    two_nodes = _settle(config={"pipeline_parallel_degree": 4}, nnodes=2, master_addr="node0")
    assert (two_nodes.nproc, two_nodes.world_size, two_nodes.master_port) == (2, 4, 29500)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"nproc": 3, "config": {"pipeline_parallel_degree": 2}},
            "3 processes.*pipeline_parallel_degree 2.* = 2",
        ),
        ({"nproc": 0}, "--nproc is 0"),
        ({"nnodes": 0}, "--nnodes is 0"),
        ({"nnodes": 2}, "--master-addr"),
        ({"node_rank": 1}, "--node-rank is 1, expected 0 to 0"),
        ({"master_port": 70000}, "--master-port is 70000"),
        ({"grace_s": -1.0}, "--grace-s is -1.0"),
        ({"nnodes": 2, "master_addr": "a", "config": {"pipeline_parallel_degree": 3}}, "--nnodes 2"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _settle(**options)


def test_command_line_of_a_worker() -> None:
    assert worker_command(_settle(), "python") == ["python", "train.py", "--epochs", "3"]
    assert worker_command(_settle(module=True), "python") == ["python", "-m", "train.py", "--epochs", "3"]


def test_environment_of_a_worker() -> None:
    settings = _settle(nproc=2, nnodes=2, node_rank=1, master_addr="node0", master_port=4000)
    environment = worker_environment(settings, {"HOME": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}, 1, 8)
    assert environment == {
        "HOME": "x",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "4",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "4000",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def test_given_keys_join_those_of_the_environment() -> None:
    inherited = {
        "SM_HP_MP_PARAMETERS": json.dumps(json.dumps({"pipeline_parallel_degree": 4, "microbatches": 8})),
        "SM_FRAMEWORK_PARAMS": '{"other": 1}',
        "OMP_NUM_THREADS": "7",
    }
    settings = _settle(config={"pipeline_parallel_degree": 2}, master_port=1)
    environment = worker_environment(settings, inherited, 0, 8)
    assert json.loads(environment["SM_HP_MP_PARAMETERS"]) == {"partitions": 2, "microbatches": 8}
    assert json.loads(environment["SM_FRAMEWORK_PARAMS"]) == {"other": 1, "sagemaker_mpi_enabled": True}
    assert environment["OMP_NUM_THREADS"] == "7"


def test_without_keys_the_environment_stays_as_it_is() -> None:
    inherited = {"SM_HP_MP_PARAMETERS": "anything"}
    environment = worker_environment(_settle(master_port=1), inherited, 0, 1)
    assert environment["SM_HP_MP_PARAMETERS"] == "anything"
    assert "SM_FRAMEWORK_PARAMS" not in environment


def test_more_workers_than_cores_get_one_thread_each() -> None:
    assert worker_environment(_settle(nproc=4, master_port=1), {}, 0, 2)["OMP_NUM_THREADS"] == "1"


def test_torchrun_command() -> None:
    settings = _settle(config={"pipeline_parallel_degree": 2}, master_port=4000)
    assert torchrun_equivalent(settings, {}, 4) == (
        "SM_HP_MP_PARAMETERS='{\"partitions\": 2}' SM_FRAMEWORK_PARAMS='{\"sagemaker_mpi_enabled\": true}' "
        "OMP_NUM_THREADS=2 torchrun --nproc-per-node=2 --master-port=4000 train.py --epochs 3"
    )
    assert torchrun_equivalent(_settle(module=True), {"OMP_NUM_THREADS": "1"}, 4) == (
        "torchrun --nproc-per-node=1 --standalone -m train.py --epochs 3"
    )
    nodes = _settle(nproc=2, nnodes=2, node_rank=1, master_addr="node0")
    assert torchrun_equivalent(nodes, {"OMP_NUM_THREADS": "1"}, 4) == (
        "torchrun --nproc-per-node=2 --nnodes=2 --node-rank=1 --master-addr=node0 --master-port=29500 "
        "train.py --epochs 3"
    )


def test_more_processes_than_devices() -> None:
    settings = _settle(nproc=8)
    with pytest.raises(ConfigError, match=r"--nproc is 8, but this host has 4 accelerators"):
        check_devices(settings, 4, {})
    check_devices(settings, 8, {})
    check_devices(settings, 0, {})
    check_devices(settings, 4, {"SHARDWRIGHT_SHARE_DEVICE": "1"})


def test_emulation_reaches_workers_and_the_printed_command(capfd: pytest.CaptureFixture[str]) -> None:
    settings = replace(_settle(emulate_cuda=True), master_port=5)
    inherited = {"PYTHONPATH": "/own", "OMP_NUM_THREADS": "1"}
    environment = worker_environment(settings, inherited, 0, 2)
    assert environment["SHARDWRIGHT_EMULATE_CUDA"] == "1"
    assert environment["PYTHONPATH"].endswith(":/own")
    assert torchrun_equivalent(settings, inherited, 2).startswith("SHARDWRIGHT_EMULATE_CUDA=1 PYTHONPATH=")
    assert "SHARDWRIGHT_EMULATE_CUDA" not in worker_environment(replace(_settle(), master_port=5), inherited, 0, 2)
    assert _prefer_real_devices(settings, 0) is settings
    assert capfd.readouterr().err == ""
    assert not _prefer_real_devices(settings, 2).emulate_cuda
    assert "--emulate-cuda is ignored, for this host has 2 real CUDA device(s)" in capfd.readouterr().err
