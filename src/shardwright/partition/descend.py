"""Stages handed down the module tree: the algorithm of the original library.

Breadth first, each module holds a range of stages and runs on the first. Its children, in execution order,
are cut into consecutive segments; the stages of the range go to segments by the D'Hondt method; a segment
with several stages is divided again. A segment never gets more stages than it has pieces, so that a large
embedding can't hold stages it can't use.

Source: Karakus et al. 2021, arXiv:2111.05972, as restated in semantics 1.3.
"""

from __future__ import annotations

from collections import deque

from shardwright.partition.linear import cut
from shardwright.partition.outline import Outline


def descend(out: Outline, num_stages: int) -> dict[str, int]:
    """Assign every module of the outline to a stage."""
    capacity = {name: int(name in out.holders) for name in out.order}
    for name in reversed(out.order):
        capacity[name] += sum(capacity[child] for child in out.children[name])
    stage_of: dict[str, int] = {}
    queue: deque[tuple[str, range]] = deque([("", range(num_stages))])
    while queue:
        name, stages = queue.popleft()
        stage_of[name] = stages[0]
        for child, given in _share(list(out.children[name]), stages, out.total, capacity):
            queue.append((child, given))
    return stage_of


def _share(
    nodes: list[str], stages: range, total: dict[str, float], capacity: dict[str, int]
) -> list[tuple[str, range]]:
    """Each of the consecutive nodes with its stages. Those of the parent's own stage come with just that."""
    if len(stages) == 1 or not nodes:
        return [(node, stages[:1]) for node in nodes]
    if len(nodes) == 1:
        return [(nodes[0], stages)]
    starts = cut([total[node] for node in nodes], [0.0] * len(nodes), len(stages))
    segments = [nodes[a:b] for a, b in zip(starts, [*starts[1:], len(nodes)], strict=True)]
    seats = _dhondt(
        [sum(total[node] for node in segment) for segment in segments],
        [sum(capacity[node] for node in segment) for segment in segments],
        len(stages),
    )
    result: list[tuple[str, range]] = []
    taken = 0
    for segment, count in zip(segments, seats, strict=True):
        given = stages[taken : taken + count] if count else stages[:1]
        taken += count
        result += _share(segment, given, total, capacity)
    return result


def _dhondt(votes: list[float], caps: list[int], num_seats: int) -> list[int]:
    """Give seats one by one to the largest votes / (seats + 1) below its cap; of equals, the earlier."""
    seats = [0] * len(votes)
    for _ in range(min(num_seats, sum(caps))):
        open_to = [index for index in range(len(votes)) if seats[index] < caps[index]]
        seats[max(open_to, key=lambda index: (votes[index] / (seats[index] + 1), -index))] += 1
    return seats
