"""What `shardwright plan` says about memory: tables and JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from shardwright.cli.sizes import format_size

if TYPE_CHECKING:
    from shardwright.engine.planning.fit import Outcome, Proposal
    from shardwright.engine.planning.layout import Layout


def ranks(layout: Layout, base_bytes: int, note: str) -> str:
    """The memory of a rank of each stage. Parts that are nowhere are left out."""
    from shardwright.partition.table import render_table

    parts = [part for part in layout.ranks[0].parts() if any(rank.parts()[part] for rank in layout.ranks)]
    head = ("stage", *parts, "in flight", "peak", "when")
    rows = [
        (
            str(stage),
            *(format_size(rank.parts()[part]) for part in parts),
            str(layout.in_flight[stage]),
            format_size(rank.peak_bytes),
            rank.moment,
        )
        for stage, rank in enumerate(layout.ranks)
    ]
    lines = [
        f"memory of a rank, on {layout.world_size} in all ({_settings(layout)})",
        render_table(head, rows, wrap_column=len(head) - 1),
        f"interpreter and libraries come on top: {format_size(base_bytes)}",
    ]
    return "\n".join([*lines, note] if note else lines)


def proposals(outcome: Outcome, base_bytes: int) -> str:
    """What fits, the cheapest first, with the keys of the first to paste; or what comes closest."""
    from shardwright.partition.table import render_table

    refused = [f"left out: {reason}" for reason in outcome.refused]
    if not outcome.proposals:
        if outcome.closest is None:
            return "\n".join(["nothing could be tried: no degrees divide the ranks and the samples of a step", *refused])
        found = outcome.closest
        return "\n".join(
            [
                f"nothing fits. Closest, {format_size(-found.headroom_bytes)} too large: {_paste(found)}",
                *refused,
                "try: more ranks (--gpus), shorter samples (--seq), another optimizer, or --precision bf16",
            ]
        )
    cheapest = outcome.proposals[0].candidate.cost.total
    head = ("pp", "tp", "rdp", "switches", "microbatches", "per rank", "headroom", "cost")
    rows = [
        (
            *_degrees(found),
            ", ".join(_switches(found)) or "none",
            f"{found.candidate.config.microbatches} of {found.samples}",
            format_size(found.layout.peak_bytes + base_bytes),
            format_size(found.headroom_bytes),
            f"{found.candidate.cost.total / cheapest:.2f}",
        )
        for found in outcome.proposals
    ]
    first = outcome.proposals[0]
    lines = [
        render_table(head, rows, wrap_column=3),
        f"per rank: the stage that needs most, with {format_size(base_bytes)} for interpreter and libraries",
        f"cost: expected time of a step, of the first's; {outcome.num_candidates} configurations were compared",
        f"first: {_paste(first)}",
    ]
    return "\n".join([*lines, *refused])


def plan_json(layout: Layout, base_bytes: int) -> str:
    """The partition as `PartitionPlan.from_json` reads it, with a further key "memory"."""
    plan = json.loads(layout.plan.to_json())
    return json.dumps({**plan, "memory": {"base_bytes": base_bytes, "ranks": _ranks_json(layout)}}, indent=1)


def proposals_json(outcome: Outcome, limit: int, base_bytes: int) -> str:
    """All that was proposed; "fits" says whether the list is of what fits or of the closest."""
    shown = outcome.proposals or ([] if outcome.closest is None else [outcome.closest])
    return json.dumps(
        {
            "version": 1,
            "limit_bytes": limit,
            "base_bytes": base_bytes,
            "fits": bool(outcome.proposals),
            "proposals": [_proposal_json(found) for found in shown],
            "refused": list(outcome.refused),
        },
        indent=1,
    )


def _proposal_json(found: Proposal) -> dict[str, Any]:
    cost = found.candidate.cost
    pp, tp, rdp = map(int, _degrees(found))
    return {
        "pp": pp,
        "tp": tp,
        "rdp": rdp,
        "config": dict(found.candidate.keys),
        "activation_checkpointing": found.candidate.checkpointing,
        "samples_per_microbatch": found.samples,
        "peak_bytes": found.layout.peak_bytes,
        "headroom_bytes": found.headroom_bytes,
        "cost": {"work": cost.work, "recompute": cost.recompute, "traffic": cost.traffic},
        "ranks": _ranks_json(found.layout),
    }


def _ranks_json(layout: Layout) -> list[dict[str, Any]]:
    return [
        {"stage": stage, **rank.parts(), "in_flight": layout.in_flight[stage], "peak": rank.peak_bytes, "when": rank.moment}
        for stage, rank in enumerate(layout.ranks)
    ]


def _degrees(found: Proposal) -> tuple[str, str, str]:
    config, size = found.candidate.config, found.layout.world_size
    pp, tp = config.pipeline_parallel_degree, config.tensor_parallel_degree
    return str(pp), str(tp), str(size // (pp * tp))


def _switches(found: Proposal) -> list[str]:
    c = found.candidate.config
    named = {
        "activation checkpointing": found.candidate.checkpointing,
        "offload_activations": c.offload_activations,
        "shard_optimizer_state": c.shard_optimizer_state,
        f"sharded_data_parallel_degree {c.sharded_data_parallel_degree}": c.sharded_data_parallel_degree > 1,
        "fp16": c.fp16,
        "bf16": c.bf16,
        "optimize speed": c.optimize == "speed",
    }
    return [name for name, on in named.items() if on]


def _paste(found: Proposal) -> str:
    calls = []
    if found.candidate.config.tensor_parallel_degree > 1:
        calls.append("smp.set_tensor_parallelism(model)")
    if found.candidate.checkpointing:
        calls.append(f"smp.set_activation_checkpointing on {_lists(found)}")
    more = f" with {' and '.join(calls)}" if calls else ""
    return f"smp.init({json.dumps(dict(found.candidate.keys))}){more}, {found.samples} samples in a microbatch"


def _lists(found: Proposal) -> str:
    lists = dict.fromkeys(block.rpartition(".")[0] or "the model" for block in found.layout.checkpointed)
    return ", ".join(lists) or "its blocks"


def _settings(layout: Layout) -> str:
    c = layout.config
    degrees = f"pp {c.pipeline_parallel_degree}, tp {c.tensor_parallel_degree}, "
    degrees += f"rdp {layout.world_size // (c.pipeline_parallel_degree * c.tensor_parallel_degree)}"
    return f"{degrees}, {c.microbatches} microbatches"
