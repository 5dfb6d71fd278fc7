"""Which settings go together: the rules that involve more than one key, the world, or an argument.

Each rule raises ConfigError with the key, the value, the rule and a remedy, or leaves a note where the
contract only wants a warning. Called by: `parse` (rules between keys), `topology` once the number of
processes is known, `engine` and `pipeline` for arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from shardwright.config.notes import Note
from shardwright.config.schema import Config
from shardwright.config.setting import Value
from shardwright.errors import ConfigError

_WITHOUT_EFFECT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "sdp_param_persistence_threshold": "all tensors of a block are gathered in one message, so keeping small ones whole "
        "would save none",
        "sdp_hierarchical_allgather": "the communication library chooses the way inside and between hosts",
    }
)
"""Keys of sharded data parallelism that are accepted, and why nothing follows from them."""


def check_keys(config: Config, given: Mapping[str, Value]) -> tuple[Config, tuple[Note, ...]]:
    """Apply the rules between keys; return the configuration to use and what rank 0 should log.

    given: the keys that some source has set, so that only what a user wrote is remarked on.
    """
    _check_degrees(config)
    if config.fp16 and config.bf16:
        raise ConfigError(
            "'fp16' is True and 'bf16' is True, but a model runs in one of the two",
            remedy="choose one and set the other to false",
        )
    stages = config.pipeline_parallel_degree
    if not config.auto_partition and config.default_partition >= stages:
        raise ConfigError(
            f"'default_partition' is {config.default_partition}, expected 0 to {stages - 1} "
            f"(pipeline_parallel_degree is {stages})",
            remedy=f"set 'default_partition' to 0..{stages - 1}, or raise 'pipeline_parallel_degree'",
        )
    notes = _notes(config, given)
    if config.sharded_data_parallel_degree > 1 and config.shard_optimizer_state:
        notes.append(
            Note.warning(
                "'shard_optimizer_state' is ignored: sharded data parallelism shards optimizer state already"
            )
        )
        config = replace(config, shard_optimizer_state=False)
    return config, tuple(notes)


def _check_degrees(config: Config) -> None:
    tp, sdp = config.tensor_parallel_degree, config.sharded_data_parallel_degree
    if tp > 1 and not config.ddp:
        raise ConfigError(
            f"'tensor_parallel_degree' is {tp} and 'ddp' is False, but tensor parallelism needs 'ddp'",
            remedy="set 'ddp' to true",
        )
    if sdp > 1 and not config.ddp:
        raise ConfigError(
            f"'sharded_data_parallel_degree' is {sdp} and 'ddp' is False, but sharding needs 'ddp'",
            remedy="set 'ddp' to true",
        )
    if sdp > 1 and config.pipeline_parallel_degree > 1:
        raise ConfigError(
            f"'sharded_data_parallel_degree' is {sdp} and 'pipeline_parallel_degree' is "
            f"{config.pipeline_parallel_degree}, but sharded data parallelism needs a pipeline degree of 1: a stage has several "
            "microbatches in flight, and every one of them would gather its blocks anew",
            remedy="set one of the two to 1",
        )
    if sdp > 1 and config._fp32_grad_accumulation:
        raise ConfigError(
            f"'sharded_data_parallel_degree' is {sdp} and '_fp32_grad_accumulation' is True, but fully_shard keeps the "
            "gradients of shards in the dtype of the parameters",
            remedy="leave out '_fp32_grad_accumulation'",
        )


def _notes(config: Config, given: Mapping[str, Value]) -> list[Note]:
    notes = []
    if config.ddp_dist_backend == "smddp":
        notes.append(Note.info("'ddp_dist_backend' smddp is not available; nccl is used"))
    if config.horovod:
        notes.append(Note.info("'horovod' is ignored unless the script calls smp.hvd_average_grads()"))
    if config.offload_activations and config.microbatches == 1 and config.active_microbatches == 1:
        notes.append(
            Note.warning("'offload_activations' helps little when one microbatch is in flight at a time")
        )
    if config.sharded_data_parallel_degree > 1:
        notes += [Note.info(f"'{key}' has no effect: {reason}") for key, reason in _WITHOUT_EFFECT.items() if key in given]
    wanted = given.get("active_microbatches")
    if config.pipeline == "simple" and isinstance(wanted, int) and wanted < config.microbatches:
        notes.append(
            Note.info(
                f"'active_microbatches' {wanted} is raised to {config.microbatches}: the simple schedule "
                "holds every microbatch until all forwards are done"
            )
        )
    return notes


def check_world(config: Config, world_size: int) -> None:
    """Check the degrees against the number of processes.

    Called by: every rank, before any group is made, so that all ranks fail alike and nothing waits.
    """
    pp, tp, sdp = (
        config.pipeline_parallel_degree,
        config.tensor_parallel_degree,
        config.sharded_data_parallel_degree,
    )
    if world_size % (pp * tp):
        raise ConfigError(
            f"the world size {world_size} is not divisible by 'pipeline_parallel_degree' ({pp}) x "
            f"'tensor_parallel_degree' ({tp}) = {pp * tp}; the product must divide the number of processes",
            remedy=f"start a multiple of {pp * tp} processes, or lower a degree",
        )
    if world_size // pp > 1 and not config.ddp and not config.horovod:
        raise ConfigError(
            f"'ddp' is False with {world_size} processes and 'pipeline_parallel_degree' {pp}, but more "
            "processes than partitions means data parallelism",
            remedy=f"set 'ddp' to true, or start {pp * tp} processes",
        )
    replicas = world_size // (pp * tp)
    if replicas % sdp:
        raise ConfigError(
            f"'sharded_data_parallel_degree' is {sdp}, expected a divisor of {replicas}, the number of ranks "
            f"that hold the same parameters (world size {world_size} / (pp {pp} x tp {tp}))",
            remedy=f"choose a divisor of {replicas}, or start more processes",
        )


def check_tracing(trace_device: str, trace_execution_times: bool) -> None:
    """Check the tracing arguments of `smp.DistributedModel`."""
    if trace_device not in ("cpu", "gpu"):
        raise ConfigError(
            f"'trace_device' is {trace_device!r}, expected 'cpu' or 'gpu'", remedy="pass 'gpu', the default"
        )
    if trace_device == "cpu" and trace_execution_times:
        raise ConfigError(
            "'trace_execution_times' is True and 'trace_device' is 'cpu', but it must be false when tracing "
            "on CPU",
            remedy="set trace_execution_times=False, or trace_device='gpu'",
        )


def check_batch(argument: str, dim: int, size: int, microbatches: int) -> None:
    """Check that an argument of a step can be cut into equal microbatches."""
    if size % microbatches:
        raise ConfigError(
            f"argument '{argument}' has size {size} on axis {dim}, expected a multiple of 'microbatches' "
            f"({microbatches})",
            remedy="drop the last incomplete batch (drop_last=True), change 'microbatches', or name the "
            "argument in non_split_inputs",
        )
