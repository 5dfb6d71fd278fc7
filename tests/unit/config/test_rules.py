"""Rules between keys, with the world and with arguments: each error says key, value, rule and remedy."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from shardwright.config.notes import Note, log_notes
from shardwright.config.parse import check_world, resolve
from shardwright.config.rules import check_batch, check_tracing
from shardwright.config.schema import Config
from shardwright.errors import ConfigError


def config(**given: Any) -> Config:
    return resolve(given, {}).config


def refusal(**given: Any) -> str:
    with pytest.raises(ConfigError) as failure:
        config(**given)
    return str(failure.value)


def world_refusal(world_size: int, **given: Any) -> str:
    with pytest.raises(ConfigError) as failure:
        check_world(config(**given), world_size)
    return str(failure.value)


def notes(**given: Any) -> list[Note]:
    return list(resolve(given, {}).notes)


# -- between keys ------------------------------------------------------------------------------------------


def test_tensor_parallelism_needs_ddp() -> None:
    message = refusal(tensor_parallel_degree=2)
    assert "'tensor_parallel_degree' is 2" in message
    assert "'ddp' is False" in message
    assert "try: set 'ddp' to true" in message
    config(tensor_parallel_degree=2, ddp=True)


def test_sharded_data_parallelism_needs_ddp_and_one_stage() -> None:
    message = refusal(sharded_data_parallel_degree=2)
    assert "'sharded_data_parallel_degree' is 2" in message
    assert "try: set 'ddp' to true" in message
    message = refusal(sharded_data_parallel_degree=2, ddp=True, partitions=3)
    assert "'pipeline_parallel_degree' is 3" in message
    assert "needs a pipeline degree of 1" in message
    assert "try: set one of the two to 1" in message
    message = refusal(sharded_data_parallel_degree=2, ddp=True, _fp32_grad_accumulation=True)
    assert "keeps the gradients of shards in the dtype of the parameters" in message


def test_sharding_keys_without_effect_are_said_to_be() -> None:
    sharded = {"sharded_data_parallel_degree": 2, "ddp": True}
    given = {"sdp_param_persistence_threshold": 0, "sdp_hierarchical_allgather": False, "sdp_reduce_bucket_size": 10}
    assert not notes(**sharded)
    assert not notes(**given)
    told = [note.message for note in notes(**sharded, **given)]
    assert [message.split(" has no effect: ")[0] for message in told] == [
        "'sdp_param_persistence_threshold'",
        "'sdp_hierarchical_allgather'",
    ]


def test_sharded_twice_warns_and_ignores() -> None:
    given = {"sharded_data_parallel_degree": 2, "shard_optimizer_state": True, "ddp": True}
    assert config(**given).shard_optimizer_state is False
    (note,) = notes(**given)
    assert note.level == logging.WARNING
    assert "'shard_optimizer_state' is ignored" in note.message


def test_one_half_precision() -> None:
    message = refusal(fp16=True, bf16=True)
    assert "'fp16' is True and 'bf16' is True" in message
    assert "try: choose one" in message


def test_default_partition_is_a_stage() -> None:
    message = refusal(auto_partition=False, partitions=2, default_partition=2)
    assert "'default_partition' is 2, expected 0 to 1" in message
    assert "try: set 'default_partition' to 0..1" in message
    assert config(auto_partition=False, partitions=2, default_partition=1).default_partition == 1
    assert config(default_partition=2).default_partition == 2  # not used when partitioning is automatic
    assert "'default_partition' is -1" in refusal(default_partition=-1)


def test_placement_lists_what_is_accepted() -> None:
    message = refusal(placement_strategy="DDP")
    for word in ("cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"):
        assert f"'{word}'" in message


def test_too_many_active_microbatches_are_clamped_silently() -> None:
    assert config(microbatches=2, active_microbatches=5).active_microbatches == 2
    assert notes(microbatches=2, active_microbatches=5) == []


def test_simple_schedule_raises_the_cap_and_says_so() -> None:
    given = {"microbatches": 6, "active_microbatches": 2, "pipeline": "simple"}
    assert config(**given).active_microbatches == 6
    (note,) = notes(**given)
    assert "'active_microbatches' 2 is raised to 6" in note.message
    assert notes(microbatches=6, pipeline="simple") == []


def test_offloading_without_pipelining_warns() -> None:
    (note,) = notes(offload_activations=True)
    assert note.level == logging.WARNING
    assert "'offload_activations'" in note.message
    assert notes(offload_activations=True, microbatches=2) == []


def test_settings_without_effect_are_said() -> None:
    assert "nccl is used" in notes(ddp_dist_backend="smddp")[0].message
    assert "hvd_average_grads" in notes(horovod=True)[0].message


# -- with the world ----------------------------------------------------------------------------------------


def test_degrees_divide_the_world() -> None:
    message = world_refusal(6, partitions=2, tensor_parallel_degree=2, ddp=True)
    assert "world size 6" in message
    assert "'pipeline_parallel_degree' (2)" in message
    assert "'tensor_parallel_degree' (2)" in message
    assert "must divide the number of processes" in message
    assert "try: start a multiple of 4 processes" in message
    assert "world size 3" in world_refusal(3, partitions=2)
    assert "world size 1" in world_refusal(1, partitions=2)


@pytest.mark.parametrize(("world", "pp"), [(4, 2), (2, 1), (8, 4)])
def test_more_processes_than_partitions_need_ddp(world: int, pp: int) -> None:
    message = world_refusal(world, partitions=pp)
    assert f"{world} processes" in message
    assert f"'pipeline_parallel_degree' {pp}" in message
    assert "data parallelism" in message
    assert "try: set 'ddp' to true" in message
    check_world(config(partitions=pp, ddp=True), world)
    check_world(config(partitions=pp, horovod=True), world)


@pytest.mark.parametrize(("world", "tp", "sdp", "fits"), [(8, 1, 8, True), (8, 2, 4, True), (8, 2, 8, False)])
def test_sharding_divides_the_replicas(world: int, tp: int, sdp: int, fits: bool) -> None:
    given = {"tensor_parallel_degree": tp, "sharded_data_parallel_degree": sdp, "ddp": True}
    if fits:
        check_world(config(**given), world)
        return
    message = world_refusal(world, **given)
    assert f"'sharded_data_parallel_degree' is {sdp}" in message
    assert f"divisor of {world // tp}" in message
    assert "try: choose a divisor" in message


def test_world_of_one() -> None:
    check_world(config(), 1)


# -- arguments ---------------------------------------------------------------------------------------------


def test_tracing_arguments() -> None:
    check_tracing("gpu", True)
    check_tracing("cpu", False)
    with pytest.raises(ConfigError, match=r"'trace_execution_times' is True.*must be false") as failure:
        check_tracing("cpu", True)
    assert "try: set trace_execution_times=False" in str(failure.value)
    with pytest.raises(ConfigError, match="'trace_device' is 'tpu'"):
        check_tracing("tpu", False)


def test_batch_divides_into_microbatches() -> None:
    check_batch("input_ids", 0, 8, 4)
    with pytest.raises(ValueError) as failure:
        check_batch("input_ids", 1, 8, 3)
    message = str(failure.value)
    assert "'input_ids' has size 8 on axis 1" in message
    assert "'microbatches' (3)" in message
    assert "drop_last" in message


def test_notes_are_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    logger = logging.getLogger("shardwright")
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: heard.append(record.getMessage()))
    monkeypatch.setattr(logger, "handlers", [handler])
    remark = Note.warning("a remark with 100% of its text")
    log_notes([remark, remark])
    assert heard == [remark.message]
