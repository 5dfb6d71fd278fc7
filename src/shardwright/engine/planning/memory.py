"""The bytes of one rank, added up. Pure.

Every number is for the moment when all is there: after the first optimizer step, in the steps that follow.

Note [Moments]: memory is highest at one of three moments, and `RankMemory.peak_bytes` is the highest of them.

    forward    what is always there, gradients so far, what is kept of other microbatches, one microbatch's forward
    backward   the same with one microbatch's backward. With a single microbatch its gradients grow while its
               activations go, so that this is less than the sum of both.
    update     what is always there, gradients, the optimizer's own temporary tensors

Always there: parameters, buffers, optimizer state, fp32 masters, gradient buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from shardwright.config.schema import Config
from shardwright.engine.planning.optimizer import OptimizerNeeds
from shardwright.partition.footprint import Peaks

MIB = 1024 * 1024
_MASTER_BYTES = 4
_LIVE_UNITS = 2
"""Blocks whose parameters sharded data parallelism has gathered at one time: the one that runs and the next."""
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Held:
    """A parameter as one rank holds it. scaled: it is reduced over rdp, not dp.   nbytes: as the model runs."""

    name: str
    numel: int
    nbytes: int
    trainable: bool = True
    scaled: bool = False


@dataclass(frozen=True)
class Habits:
    """What a script chooses beside the configuration.

    checkpointing: its blocks are marked with `set_activation_checkpointing`.   as_view: `gradient_as_bucket_view`.
    """

    optimizer: OptimizerNeeds
    checkpointing: bool = False
    as_view: bool = False
    bucket_cap_mb: float = 25
    device: Device = "cuda"


@dataclass(frozen=True)
class RankMemory:
    """One rank in bytes.

    gradients, activations: the most of each; with one microbatch they are not there at the same moment.
    optimizer: its state.   masters: fp32 copies of half precision parameters, and their gradients during the update.
    communication: gradient buckets, and parameters gathered for the moment.   inputs: of a step.
    host: activations in host memory, not in the peak.   moment: when the peak is.
    """

    parameters: int
    gradients: int
    optimizer: int
    masters: int
    activations: int
    buffers: int
    communication: int
    inputs: int
    host: int
    peak_bytes: int
    moment: Literal["forward", "backward", "update"]

    def parts(self) -> dict[str, int]:
        """The parts by name, without the peak."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("peak_bytes", "moment")}


def rank_memory(
    held: Sequence[Held],
    *,
    buffers: int,
    inputs: int,
    largest_block: int,
    play: Callable[[float, int], Peaks],
    in_flight: int,
    config: Config,
    world_size: int,
    habits: Habits,
) -> RankMemory:
    """Add up one rank.

    held: its parameters.   largest_block: bytes of the parameters of the largest block here.
    play: one microbatch through its stage, for a share of gradients that stays and what their reduction holds meanwhile
        (`footprint.peaks`).
    in_flight: microbatches whose activations it keeps at once.
    """
    dp = world_size // config.pipeline_parallel_degree
    rdp = dp // config.tensor_parallel_degree
    sdp = config.sharded_data_parallel_degree
    half = config.fp16 or config.bf16
    trained = [p for p in held if p.trainable]
    reduces = config.ddp and dp > 1

    def owners(parameter: Held) -> int:
        if sdp > 1:
            return 1 if parameter.numel < config.sdp_param_persistence_threshold else sdp
        return (rdp if parameter.scaled else dp) if config.shard_optimizer_state and reduces else 1

    def shared(values: Sequence[tuple[Held, float]]) -> int:
        return round(sum(value / owners(p) for p, value in values))

    gradients = sum(p.nbytes for p in trained)
    own_gradients = shared([(p, p.nbytes) for p in trained])
    state = shared([(p, p.numel * habits.optimizer.state_bytes) for p in trained])
    masters = shared([(p, p.numel * _MASTER_BYTES) for p in trained]) if half else 0
    parameters = sum(p.nbytes for p in held)
    communication = gathered = 0
    if sdp > 1:  # what is sharded are the fp32 parameters themselves; the model runs on roundings of what is gathered
        size = _MASTER_BYTES if half else 0
        parameters = shared([(p, max(p.nbytes, p.numel * size)) for p in held])
        own_gradients = shared([(p, max(p.nbytes, p.numel * size)) for p in trained])
        masters = 0
        gathered = _LIVE_UNITS * largest_block
    largest = max((p.nbytes for p in trained), default=0)
    bucket = min(gradients, max(largest, round(habits.bucket_cap_mb * MIB)))
    sharded = own_gradients < gradients
    keeps_shares = sharded and sdp == 1  # the memory of the shares stays from step to step
    if keeps_shares:  # one bucket is on its way at a time, in a buffer that stays
        communication = bucket
    elif sharded:
        bucket = gathered  # whole gradients of as many blocks
    elif reduces:  # alone in its group and with nothing to divide by, a rank has no buckets
        communication = sum(p.nbytes for p in trained if not p.scaled or rdp > 1 or not config.prescaled_batch)

    many = config.microbatches > 1
    views = habits.as_view and reduces and not sharded  # then a packed gradient lives in its bucket alone
    sums = own_gradients if sharded and sdp > 1 else gradients
    stay = 0.0 if views or keeps_shares else own_gradients / gradients if sharded else 1.0
    transit = bucket if sharded or views else 0
    if keeps_shares and dp > 2:
        transit *= 2  # what the others send
    peaks = play(stay - 1 if many and sums == gradients else stay, transit)
    host, kept_here = 0, 0
    if config.offload_activations and habits.device != "cpu":
        total = in_flight * peaks.checkpoint_bytes
        kept_here = min(total, (config.activation_loading_horizon + 1) * peaks.block_bytes)
        host = total - kept_here
    fixed = parameters + buffers + state + masters + inputs + gathered + communication
    fixed += own_gradients if keeps_shares else 0
    waiting = peaks.kept_bytes if config.pipeline == "simple" else peaks.waiting_bytes
    others = (in_flight - 1) * waiting - host
    update_share = shared([(p, p.numel * habits.optimizer.update_bytes) for p in trained])
    update_largest = max((p.numel / owners(p) * habits.optimizer.largest_bytes for p in trained), default=0)
    moments: dict[Literal["forward", "backward", "update"], int] = {
        "forward": fixed + others + peaks.forward_bytes + (sums if many else 0),
        "backward": fixed
        + others
        + (sums + max(peaks.first_backward_bytes, peaks.backward_bytes) if many else peaks.first_backward_bytes),
        "update": fixed + (0 if views or keeps_shares else own_gradients) + masters + update_share + round(update_largest),
    }
    moment = max(moments, key=lambda key: moments[key])
    return RankMemory(
        parameters=parameters,
        gradients=sums if many else max(own_gradients, 0),
        optimizer=state,
        masters=2 * masters,
        activations=max(0, others + max(peaks.forward_bytes, peaks.backward_bytes)),
        buffers=buffers,
        communication=communication + gathered,
        inputs=inputs,
        host=host,
        peak_bytes=moments[moment],
        moment=moment,
    )
