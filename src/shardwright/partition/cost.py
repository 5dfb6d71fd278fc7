"""Memory and time of a module as one number.

With w = `memory_weight`, a module costs

    w * memory / memory of the model  +  (1 - w) * compute / compute of the model

so that the whole model costs 1.

memory   16 bytes per trainable parameter (weight, gradient and two moments in fp32; the same for 16-bit
         weights with an fp32 master), its plain bytes if frozen, its buffers, and what autograd saves for the
         backward times the microbatches in flight.
compute  per operation max(FLOPs, FLOPS_PER_BYTE * bytes touched): a roofline, so that norms, activations and
         embeddings are not free. Times 3 for forward and backward (2 where the parameters are frozen), plus
         the bytes of each trainable parameter's gradient, once per microbatch.

Without a trace, compute is the number of parameters a module multiplies with; looking up costs LOOKUP of
that.

FLOPS_PER_BYTE: a CPU core runs a matrix product at the pace of 6-7 FLOPs for each byte that a GELU or a norm
touches (measured), a GPU at 50 and more. Blocks are alike, so an error moves the cut by a part of a block at
most. On one CPU core (8 blocks of width 512, 256 tokens) the embedding takes 0.045, attention 0.36, head and
loss 1.32 of a block's time; these rules say 0.047, 0.36 and 1.31.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.partition.tree import ModuleNode, ModuleTree

FLOPS_PER_BYTE = 10.0
TRAINED_BYTES_PER_PARAMETER = 16
LOOKUP = 0.05
LOSS_PASSES = 2
"""Forward reads and writes of the model's output by a loss that the script applies itself."""
CROSSING_FLOPS_PER_BYTE = 200.0
"""What a byte that crosses costs, there and its gradient back: a core computes about 100 FLOPs while one byte
moves between processes."""


def operation_work(flops: float, nbytes: float) -> float:
    """Forward work of one operation in FLOP equivalents."""
    return max(flops, FLOPS_PER_BYTE * nbytes)


@dataclass(frozen=True)
class Prices:
    """What each module costs by itself, without its descendants; all values add up to 1.

    crossing: cost of starting a stage at this module, in the same unit.
    memory_bytes, work, flops: the unweighted parts, forward and backward for work, forward for flops.
    """

    own: dict[str, float]
    crossing: dict[str, float]
    memory_bytes: dict[str, float]
    work: dict[str, float]
    flops: dict[str, int]


def price(
    tree: ModuleTree, memory_weight: float, *, in_flight: int = 1, count_copies: bool = False
) -> Prices:
    """Price every module of the tree.

    in_flight: microbatches whose activations a stage keeps at once. count_copies: a tied parameter costs
    memory at each of its holders (they keep copies), not only at the first.
    """
    records = tree.trace.records
    memory: dict[str, float] = {}
    work: dict[str, float] = {}
    flops: dict[str, int] = {}
    tails = _tails(tree)
    for name, node in tree.nodes.items():
        memory[name] = _parameter_memory(tree, node, count_copies) + node.buffer_bytes
        work[name] = _untraced_work(tree, node) if not records else _gradient_work(tree, node)
        flops[name] = 0
    for name, record in records.items():
        node, tail = tree.nodes[name], tails[name]
        memory[name] += in_flight * record.saved_bytes
        memory[tail] += in_flight * record.trailing_saved_bytes
        work[name] += _passes(tree, node) * record.work
        work[tail] += 3 * record.trailing_work
        flops[name] += record.flops
        flops[tail] += record.trailing_flops
    total_memory, total_work = sum(memory.values()), sum(work.values())
    own = {
        name: memory_weight * _part(memory[name], total_memory)
        + (1 - memory_weight) * _part(work[name], total_work)
        for name in tree.nodes
    }
    crossing = {
        name: _part(CROSSING_FLOPS_PER_BYTE * record.entry_bytes, total_work)
        for name, record in records.items()
    }
    return Prices(own=own, crossing=crossing, memory_bytes=memory, work=work, flops=flops)


def execution_key(tree: ModuleTree) -> dict[str, tuple[int, int]]:
    """Sort key of each module that holds parameters and runs: (first call of it or below, place in the tree).

    Modules that never run (themselves and all below) are left out if there is a trace; without one all count
    as run.
    """
    records = tree.trace.records
    keys: dict[str, tuple[int, int]] = {}
    places = {name: place for place, name in enumerate(tree.nodes)}
    bearing = tree.bearing()
    for name, node in reversed(tree.nodes.items()):
        if name not in bearing:
            continue
        if not records:
            keys[name] = (places[name], places[name])
            continue
        record = records.get(name)
        below = [keys[child][0] for child in node.children if child in keys]
        first = record.first_call if record is not None and record.num_calls else min(below, default=None)
        if first is not None:
            keys[name] = (first, places[name])
    return keys


def _tails(tree: ModuleTree) -> dict[str, str]:
    """For each module that ran: where code that follows it runs, its last descendant in execution order."""
    keys = execution_key(tree)
    tails: dict[str, str] = {}
    for name, node in reversed(tree.nodes.items()):
        ran = [child for child in node.children if child in keys]
        tails[name] = tails[max(ran, key=keys.__getitem__)] if ran else name
    return tails


def _parameter_memory(tree: ModuleTree, node: ModuleNode, count_copies: bool) -> float:
    total = 0.0
    for index in node.parameters:
        parameter = tree.parameters[index]
        if count_copies or parameter.holders[0] == node.name:
            total += (
                TRAINED_BYTES_PER_PARAMETER * parameter.numel if parameter.trainable else parameter.nbytes
            )
    return total


def _gradient_work(tree: ModuleTree, node: ModuleNode) -> float:
    nbytes = sum(tree.parameters[i].nbytes for i in node.parameters if tree.parameters[i].trainable)
    return FLOPS_PER_BYTE * nbytes


def _untraced_work(tree: ModuleTree, node: ModuleNode) -> float:
    numel = sum(tree.parameters[i].numel for i in node.parameters)
    return numel * (LOOKUP if node.lookup else 1.0)


def _passes(tree: ModuleTree, node: ModuleNode) -> int:
    frozen = node.parameters and not any(tree.parameters[i].trainable for i in node.parameters)
    return 2 if frozen else 3


def _part(value: float, total: float) -> float:
    return value / total if total else 0.0
