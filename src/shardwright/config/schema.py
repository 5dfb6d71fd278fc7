"""Every setting of the library: one frozen record, each field explained.

`Config` always holds resolved values: what depends on another key is filled in when it is built. Values are
checked in `parse`, which is the only way user input becomes a `Config`. `SETTINGS` describes every key, and
the configuration reference is generated from it.
Source: the keys of the original library v1.15 and, with `since="ours"`, our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from shardwright.config.legacy import ALIASES, PLACEMENTS
from shardwright.config.setting import Setting, choice, flag, real, settings_of, whole

ACTIVE_BEYOND_STAGES: Final = 2
"""How many more microbatches than stages are in flight when `active_microbatches` is not given."""

MEMORY_WEIGHT: Final[Mapping[str, float]] = {"speed": 0.2, "memory": 0.8}
"""Default of `memory_weight` for each value of `optimize`."""


@dataclass(frozen=True)
class Config:
    """The resolved settings of one process; equal on all ranks.

    Every key is an attribute, aliases included (`config.partitions`); any other name is an AttributeError,
    because clients ask with `hasattr` which generation of the library they talk to.
    """

    # fmt: off
    # -- pipeline ----------------------------------------------------------------------------------------
    pipeline_parallel_degree: int = whole(
        1, at_least=1, topology=True, since="1.6 (alias 1.0)",
        doc="Number of stages the model is cut into; the size of a pipeline group.",
    )
    microbatches: int = whole(
        1, at_least=1, since="1.0",
        doc="Slices that the inputs of one step call are cut into. 1 means no pipelining.",
    )
    active_microbatches: int = whole(
        None, at_least=1, since="1.3", default_rule="pipeline_parallel_degree + 2",
        doc="Most microbatches in flight at one time; bounds activation memory. More than `microbatches` "
        "means all of them; the simple schedule always keeps all of them in flight.",
    )
    pipeline: Literal["interleaved", "simple"] = choice(
        "interleaved", ("interleaved", "simple"), since="1.0",
        doc="Schedule. `interleaved` starts the backward of a microbatch as soon as it can; `simple` runs "
        "all forwards, then all backwards.",
    )
    placement_strategy: str = choice(
        "cluster", PLACEMENTS, topology=True, since="1.0 (letters 1.6)",
        doc="How ranks map to data (D), pipeline (P) and tensor (T) coordinates. In the letters the "
        "right-most varies fastest with the rank; `cluster` is DPT, `spread` is TPD.",
    )
    deterministic_server: bool = flag(
        False, since="1.3",
        doc="Same order of pipeline work on every data parallel replica. Our order is always the same.",
    )

    # -- partition ---------------------------------------------------------------------------------------
    auto_partition: bool = flag(
        True, since="1.0",
        doc="Assign modules to stages automatically. When false, `smp.partition` and `smp.set_partition` do.",
    )
    default_partition: int = whole(
        0, at_least=0, since="1.0",
        doc="Stage of modules without an assignment of their own when `auto_partition` is false.",
    )
    memory_weight: float = real(
        None, at_least=0.0, at_most=1.0, since="1.0", default_rule="0.2 if optimize is speed, else 0.8",
        doc="Weight of memory against compute balance in automatic partitioning.",
    )
    optimize: Literal["memory", "speed"] = choice(
        "memory", ("memory", "speed"), since="1.0 / 1.6",
        doc="Strategy of distributed transformer layers and, through `memory_weight`, of partitioning.",
    )
    skip_tracing: bool = flag(
        False, since="1.6",
        doc="No tracing step: partitioning uses parameter sizes and module order only.",
    )
    use_times: bool = flag(
        False, since="client scripts",
        doc="Let partitioning use execution times measured while tracing.",
    )
    tied_weights: Literal["colocate", "replicate"] = choice(
        "colocate", ("colocate", "replicate"), since="ours",
        doc="Modules that share a parameter: put them on one stage, or keep a copy on each stage and sum the "
        "gradients.",
    )

    # -- data parallelism --------------------------------------------------------------------------------
    ddp: bool = flag(
        False, topology=True, since="1.0",
        doc="Synchronise gradients over data parallel ranks.",
    )
    ddp_dist_backend: Literal["auto", "nccl", "gloo", "smddp"] = choice(
        "auto", ("auto", "nccl", "gloo", "smddp"), acts_at_start=True, since="client scripts",
        doc="Backend of data parallel traffic. `smddp` is not there and falls back to `nccl`.",
    )
    ddp_port: int | None = whole(
        None, at_least=1, at_most=65535, acts_at_start=True, since="old launch configurations",
        doc="Rendezvous port, used only if the launcher gives none.",
    )
    horovod: bool = flag(
        False, since="1.0 (TensorFlow)",
        doc="Data parallelism by Horovod: gradients are averaged only by `smp.hvd_average_grads()`.",
    )
    overlapping_allreduce: bool = flag(
        True, since="client scripts",
        doc="Reduce gradients during backward. The argument of `smp.DistributedModel` wins.",
    )

    # -- tensor parallelism ------------------------------------------------------------------------------
    tensor_parallel_degree: int = whole(
        1, at_least=1, topology=True, since="1.6",
        doc="Ranks over which distributed modules are sliced.",
    )
    prescaled_batch: bool = flag(
        False, since="1.6",
        doc="Tensor parallel peers are fed identical batches.",
    )
    _match_weights: bool = flag(
        False, since="client scripts",
        doc="Distributed modules take over the weights of the module they replace. They always do so here.",
    )

    # -- sharded state -----------------------------------------------------------------------------------
    shard_optimizer_state: bool = flag(
        False, since="1.6",
        doc="Divide optimizer state among the ranks that hold the same parameters.",
    )
    sharded_data_parallel_degree: int = whole(
        1, at_least=1, topology=True, since="1.11",
        doc="Ranks over which parameters, gradients and optimizer state are sharded; more than 1 turns "
        "sharded data parallelism on.",
    )
    sdp_reduce_bucket_size: int = whole(
        500_000_000, at_least=1, since="1.11",
        doc="Size of the gradient buckets of sharded data parallelism, in elements.",
    )
    sdp_param_persistence_threshold: int = whole(
        1_000_000, at_least=0, since="1.11",
        doc="Parameters with fewer elements stay whole on every rank.",
    )
    sdp_max_live_parameters: int = whole(
        1_000_000_000, at_least=1, since="1.11",
        doc="Most parameter elements gathered at one time.",
    )
    sdp_hierarchical_allgather: bool = flag(
        True, since="1.11",
        doc="Gather inside a host first, then between hosts.",
    )
    sdp_gradient_clipping: float = real(
        1.0, at_least=0.0, since="1.11",
        doc="Global gradient norm above which sharded data parallelism clips; 0 turns clipping off.",
    )

    # -- precision ---------------------------------------------------------------------------------------
    fp16: bool = flag(
        False, since="1.10",
        doc="Run the model in float16, with float32 master weights and loss scaling.",
    )
    bf16: bool = flag(
        False, since="client scripts",
        doc="Run the model in bfloat16, with float32 master weights; the loss scale stays 1.",
    )
    fp16_params: bool = flag(
        False, since="1.6",
        doc="Create the parameters of distributed modules in float16, for scripts with their own wrapper.",
    )
    _fp32_grad_accumulation: bool = flag(
        False, since="client scripts",
        doc="Accumulate half precision gradients in float32.",
    )

    # -- memory ------------------------------------------------------------------------------------------
    checkpoint_attentions: bool = flag(
        False, since="client scripts",
        doc="Recompute the attention core of distributed attention layers in backward.",
    )
    offload_activations: bool = flag(
        False, since="1.6",
        doc="Keep what checkpointed modules save in host memory until backward needs it.",
    )
    activation_loading_horizon: int = whole(
        4, at_least=1, since="1.6",
        doc="How many pipeline tasks ahead offloaded activations are brought back.",
    )
    delayed_parameter_initialization: bool = flag(
        False, since="client scripts (1.10)",
        doc="Parameters created inside `smp.model_creation` get storage only on the rank that owns them.",
    )

    # -- hints and settings without effect ---------------------------------------------------------------
    static_mode: bool = flag(
        False, since="client scripts",
        doc="Hint that shapes are the same at every step. Never changes results.",
    )
    fast_mode: bool = flag(
        False, since="client scripts",
        doc="Hint to leave out checks between ranks. Never changes results.",
    )
    contiguous: bool = flag(
        True, since="1.0 (TensorFlow)",
        doc="Accepted, without effect in PyTorch.",
    )

    # -- ours --------------------------------------------------------------------------------------------
    timeout_s: float = real(
        600.0, above=0.0, since="ours",
        doc="Bound of every wait of the library, in seconds. `SHARDWRIGHT_TIMEOUT_S` wins over all sources.",
    )
    startup_timeout_s: float = real(
        1800.0, above=0.0, acts_at_start=True, since="ours",
        doc="Bound of the waits until every rank has reached its first collective, in seconds.",
    )
    log_level: Literal["debug", "info", "warning", "error", "off"] = choice(
        "info", ("debug", "info", "warning", "error", "off"), since="ours",
        doc="What the library logs; `off` also turns the summary tables off.",
    )
    seed: int = whole(
        0, at_least=0, since="ours",
        doc="Base of the random streams the library derives for itself.",
    )
    # fmt: on

    def __post_init__(self) -> None:
        """Fill in what is derived from other keys."""
        if self.memory_weight is None:
            self._set("memory_weight", MEMORY_WEIGHT[self.optimize])
        if self.active_microbatches is None:
            self._set("active_microbatches", self.pipeline_parallel_degree + ACTIVE_BEYOND_STAGES)
        if self.pipeline == "simple" or self.active_microbatches > self.microbatches:
            self._set("active_microbatches", self.microbatches)

    def _set(self, key: str, value: object) -> None:
        object.__setattr__(self, key, value)

    if not TYPE_CHECKING:  # a type checker knows the fields; aliases are for scripts

        def __getattr__(self, name: str) -> Any:
            canonical = ALIASES.get(name)
            if canonical is None:
                raise AttributeError(f"'{name}' is not a configuration key")
            return getattr(self, canonical)


SETTINGS: Final[Mapping[str, Setting]] = settings_of(Config)
"""Canonical key -> its description, in the order of the reference."""

TOPOLOGY_KEYS: Final = frozenset(key for key, setting in SETTINGS.items() if setting.topology)
"""Keys that shape the process groups: degrees, placement and ddp."""


@dataclass(frozen=True)
class ReferenceRow:
    """One line of the configuration reference."""

    key: str
    aliases: tuple[str, ...]
    values: str
    default: str
    since: str
    doc: str


def reference() -> tuple[ReferenceRow, ...]:
    """The configuration reference as data; the documentation renders it as a table."""
    return tuple(
        ReferenceRow(
            key=key,
            aliases=tuple(alias for alias, target in ALIASES.items() if target == key),
            values=setting.rule,
            default=setting.default_text.removeprefix("default: "),
            since=setting.since,
            doc=setting.doc,
        )
        for key, setting in SETTINGS.items()
    )
