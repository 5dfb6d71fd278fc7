"""What tells attention where tokens are: rotary embedding, ALiBi, T5's bias, windows, the causal triangle. Local
mathematics without communication; heads are this rank's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def rotary_tables(
    frequencies: Sequence[float], scale: float, length: int, position_ids: Tensor | None, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each position and pair: [S, pairs], or [B, 1, S, pairs] with position_ids [B, S]."""
    inverse = torch.tensor(frequencies, dtype=torch.float32, device=like.device)
    if position_ids is None:
        angles = torch.outer(torch.arange(length, dtype=torch.float32, device=like.device), inverse)
    else:
        angles = (position_ids.float().unsqueeze(-1) * inverse).unsqueeze(1)
    return (angles.cos() * scale).to(like.dtype), (angles.sin() * scale).to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Turn pairs of the first 2 * pairs dims of each head; the rest stays.

    x: [B, heads, S, head].   interleaved: pairs are (0, 1), (2, 3), ...; else (0, pairs), (1, pairs + 1), ...
    Source: Su et al. 2021, arXiv:2104.09864.
    """
    pairs = cos.shape[-1]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    else:
        first, second = turned[..., :pairs], turned[..., pairs:]
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def alibi_slopes(num_heads: int, bias_max: int) -> Tensor:
    """Return 1/2^(i * bias_max / heads) for i from 1 to heads.

    Source: Press et al. 2021, arXiv:2108.12409.
    """
    steps = torch.arange(1, num_heads + 1, dtype=torch.float32)
    return torch.pow(2.0, -steps * bias_max / num_heads)


def alibi_bias(slopes: Tensor, length: int) -> Tensor:
    """Return [1, heads, 1, S]: the slope times 1 - S..0. Softmax takes no note of what is constant in a row, so
    this is the distance to the query's own position."""
    positions = torch.arange(1 - length, 1, dtype=slopes.dtype, device=slopes.device)
    return slopes.view(1, -1, 1, 1) * positions


def visible(length: int, *, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """Return [S, S]: whether a query (row) sees a key (column)."""
    positions = torch.arange(length, device=device)
    ahead = positions.unsqueeze(0) - positions.unsqueeze(1)
    seen = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    if window is not None:
        seen = seen & (ahead > -window)
    return seen


def relative_buckets(
    num_queries: int, num_keys: int, num_buckets: int, max_distance: int, bidirectional: bool, device: torch.device
) -> Tensor:
    """Return [queries, keys]: the bucket of key position - query position.

    Half of the buckets are single distances, the others grow logarithmically up to max_distance.
    Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1, and its published code.
    """
    distance = torch.arange(num_keys, device=device).unsqueeze(0) - torch.arange(num_queries, device=device).unsqueeze(
        1
    )
    buckets = torch.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        buckets = buckets + (distance > 0) * num_buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    num_exact = num_buckets // 2
    growth = torch.log(distance.float().clamp(min=1) / num_exact) / math.log(max_distance / num_exact)
    far = (num_exact + (growth * (num_buckets - num_exact)).long()).clamp(max=num_buckets - 1)
    return buckets + torch.where(distance < num_exact, distance, far)
