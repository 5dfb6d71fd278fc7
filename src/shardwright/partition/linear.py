"""Cut a row of costs into consecutive segments: the linear partition problem, by dynamic programming."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

SLACK = 0.005
"""The costliest segment may cost this much more than it must, for cheaper cuts or more even segments."""
EVENNESS = 0.1
"""Weight of the squared segment costs beside the entry costs."""
_NOISE = 1e-12

Row = npt.NDArray[np.float64]


def cut(
    costs: list[float],
    entry_costs: list[float],
    num_segments: int,
    *,
    shares: Sequence[float] | None = None,
    max_places: int = 1024,
) -> list[int]:
    """Return where each segment begins (the first is 0), so that the costliest segment is as cheap as can be.

    A cut costs the entry cost of the item after it, on both sides: a segment costs the sum of its items and
    of the cuts at its ends. shares: what each segment should get, 1 on average; costs are compared relative to it.
    Among cuts within SLACK of the optimum, the one with the least sum of entry costs
    and of squared segment costs wins; then the one with the later cuts. Exactly `num_segments` segments, none
    empty; fewer only if there are fewer items. More than `max_places` places to cut are thinned out to the
    cheapest of each neighbourhood.
    """
    num_segments = min(num_segments, len(costs))
    if num_segments <= 1:
        return [0]
    places = _places(costs, entry_costs, max(max_places, 4 * num_segments))
    before = np.concatenate(([0.0], np.cumsum(costs)))[[*places, len(costs)]]
    entry = np.array([0.0, *(entry_costs[place] for place in places[1:])])
    count = len(places)
    # sums[i, j]: items from place i up to place j (exclusive); impossible where j <= i
    sums = before[None, :] - before[:-1, None]
    sums[np.tril_indices(count, m=count + 1)] = np.inf
    segment = sums + entry[:, None] + np.append(entry, 0.0)[None, :]
    parts = [1.0] * num_segments if shares is None else [float(share) for share in shares[:num_segments]]
    limit = _bottleneck(segment, parts) * (1 + SLACK) + _NOISE

    def price(part: float) -> Row:
        squares = EVENNESS * num_segments * np.square(sums / part)
        return np.where(segment / part <= limit, entry[:, None] + squares, np.inf)

    return [places[index] for index in _cheapest(price, parts)]


def _bottleneck(segment: Row, parts: list[float]) -> float:
    """The least possible maximum of consecutive segments, each relative to its part."""
    best = segment[0] / parts[0]
    for part in parts[1:]:
        best = np.minimum.reduce(np.maximum(best[:-1, None], segment / part), axis=0)
    return float(best[-1])


def _cheapest(price_of: Callable[[float], Row], parts: list[float]) -> list[int]:
    """Starts of the segments with the least sum of prices; of equals, the later start."""
    best = price_of(parts[0])[0].copy()
    choices: list[npt.NDArray[np.intp]] = []
    for part in parts[1:]:
        price = price_of(part)
        with_last = best[:-1, None] + price
        best = with_last.min(axis=0)
        near = with_last <= best[None, :] + _NOISE
        choices.append(len(price) - 1 - np.argmax(near[::-1], axis=0))
    starts: list[int] = []
    end = len(best) - 1
    for choice in reversed(choices):
        end = int(choice[end])
        starts.append(end)
    return [0, *reversed(starts)]


def _places(costs: list[float], entry_costs: list[float], limit: int) -> list[int]:
    """Places where a segment may begin: all, or the cheapest of each neighbourhood, about `limit` in all.

    A neighbourhood is an equal part of the cost and of the number of items.
    """
    if len(costs) <= limit:
        return list(range(len(costs)))
    step = 2 * sum(costs) / limit
    by_part: dict[tuple[int, int], int] = {}
    reached = 0.0
    for place, cost in enumerate(costs):
        part = (int(reached / step) if step else 0, place * limit // (2 * len(costs)))
        known = by_part.get(part)
        if place and (known is None or entry_costs[place] < entry_costs[known]):
            by_part[part] = place
        reached += cost
    return [0, *sorted(by_part.values())]
