"""Cases of glue that looks at values, indexes by them, makes and moves tensors, or returns odd results (rule 6)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from glue_cases import GlueModel, case, finish

# ------------------------------------------------------------------ what Python sees


@case
def numbers_seen(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x))
    s = h.sum().detach()
    seen = {
        "item": h.sum().item(),
        "float": float(s),
        "int": int(s * 100),
        "complex": complex(s),
        "bool": bool(s > 0),
        "list": str(h.tolist()),
        "repr": repr(h.detach()),
        "str": str(h[0].detach()),
        "f": f"{s:.3f} {s.item():.2f} {h.argmax()}",
        "format": format(h[0, 0].detach(), ".2f"),
        "len": len(h),
        "round": round(s.item(), 3),
        "in": 2.0 in torch.ceil(h.detach() * 2),
        "index": [10, 20, 30, 40, 50, 60][h[0].argmax()],
        "range": len(range(h.argmax() + 1)),
        "nonzero": (h > 10).sum().is_nonzero(),
        "equal": torch.equal(h, h + 0),
        "close": torch.allclose(h, h + 1e-9),
        "isclose": h.isclose(h).all().item(),
        "any": bool((h > 0).any()) and not (h > 2).all(),
    }
    return finish(m, h, y), seen


@case
def control_flow(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x))
    if h.mean() > 0:
        h = h * 2
    while h.abs().max() > 0.5:
        h = h * 0.5
    if not torch.isfinite(h).all():
        h = h * 0
    for row in h:
        if row.sum() > 0:
            h = h + row
    k = max(h[:, 0].detach().tolist())
    best = max([h[0].sum(), h[1].sum()])
    return finish(m, h * k + best, y), {"h": h}


@case
def errors_caught(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x))
    caught = []
    for attempt in (
        lambda: h.view(7, -1),
        lambda: h[100],
        lambda: h + torch.ones(5),
        lambda: h.t().view(-1),
        lambda: h.sum(7),
        lambda: h.item(),
        lambda: h.no_such_thing,
        lambda: h[:, 9].sum(),
        lambda: h.mul_(torch.ones(9, 9)),
        lambda: bool(h),
    ):
        try:
            attempt()
        except (RuntimeError, IndexError, AttributeError) as error:
            caught.append(f"{type(error).__name__} {str(error)[:30]}".replace("PlacedT", "T")[:24])
    return finish(m, h * len(caught), y), {"caught": str(caught)}


@case
def iterated_and_unpacked(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x))
    first, *others = h
    rows = list(h)
    pairs = [r * c for r, c in zip(h, m.a(x), strict=True)]
    reverse = list(reversed(h))
    total = sum(others) + rows[0] + first
    return finish(m, torch.stack(pairs) + total + torch.stack(reverse), y)


@case
def numpy_array(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x))
    a = h.detach().numpy()
    b = np.asarray(h.detach())
    c = np.array(h.detach().cpu().numpy())
    mean = float(np.mean(h.detach().cpu().numpy()))
    back = torch.from_numpy(a * 2)
    tensor = torch.tensor(h.tolist()) + torch.as_tensor(b)
    return finish(m, h + back + tensor + mean, y), {"sum": float(a.sum() + b.sum() + c.sum())}


@case
def new_tensor_of_placed(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x)).detach()
    t = torch.tensor([h.sum(), 2.0])
    u = torch.as_tensor(h)
    w = h.new_tensor([1.0, 2.0])
    return finish(m, m.b(m.a(x)) + t.sum() + u + w[1], y), {"t": t}


# ------------------------------------------------------------------ indices and masks


@case
def ordinary_mask(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x))
    picked = h[x[:, 0] > 0]
    elements = h[x > 0]
    half = h[(x > 0)[:, 0], 1:]
    chosen = h.masked_select(x > 0.5)
    kept = torch.where(x > 0, h, m.scale)
    loss = finish(m, kept, y) + picked.sum() + elements.pow(2).mean() + half.sum()
    return loss + chosen.sum(), {"n": len(picked), "m": len(elements), "k": chosen.shape[0]}


@case
def placed_mask(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x))
    picked = h[h > 0]
    rows = h[h[:, 0] > 0]
    masked = torch.masked_select(h, h > 0.1)
    where = torch.where(h > 0, h, h * 0.1)
    i, j = torch.where(h > 0.3)
    loss = finish(m, where, y) + picked.sum() + rows.sum() + masked.mean() + h[i, j].sum()
    return loss, {"n": picked.numel(), "rows": len(rows), "i": i}


@case
def indices_from_values(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x))
    top = h.topk(2, dim=1)
    order = h.argsort(dim=1)
    gathered = h.gather(1, top.indices) + top.values
    taken = torch.take_along_dim(m.a(x), order, 1)
    rows = m.a(x)[h[:, 0].argmax()]
    looked_up = m.emb(h.argmax(1) % 5)
    nonzero = (h > 0).nonzero()
    uniques, counts = torch.unique(h.argmax(1), return_counts=True)
    parts = x[top.indices[:, 0] % 4] * h[:, :1]
    loss = finish(m, taken + rows + looked_up + parts, y) + gathered.mean()
    return loss, {"nonzero": nonzero, "uniques": uniques, "counts": counts}


@case
def sizes_from_ordinary_numbers(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x))
    n = 1 + (y[0] % 3)
    start = y.max() % 2
    head = h[:, :n]
    tail = h[:, start:]
    narrow = h.narrow(1, start, 2)
    repeated = h.repeat_interleave(y % 2 + 1, dim=0)
    split = h.split([int(n), 6 - int(n)], dim=1)[0]
    shaped = h.reshape(-1, n if 24 % int(n) == 0 else 1)
    column = h.select(1, n)
    zeros = h.new_zeros(n, 2)
    rolled = h.roll(int(n), 1)
    padded = F.pad(h, (0, int(n)))
    expanded = h.unsqueeze(0).expand(n, -1, -1)
    grown = torch.linspace(0, 1, int(n)) + h[0, 0]
    loss = finish(m, rolled, y)
    for t in (head, tail, narrow, repeated, split, shaped, column, padded, expanded, grown):
        loss = loss + t.pow(2).mean()
    shapes = [tuple(t.shape) for t in (head, tail, narrow, repeated, split, shaped, zeros, padded, expanded, grown)]
    return loss, {"shapes": str(shapes)}


@case(reordered="a value used on several stages sums its gradients by stage")
def sizes_from_placed_numbers(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x))
    n = (h > 0).sum().clamp(1, 5)
    head = h[:, :n]
    repeated = h.repeat_interleave((h[:, 0] > 0).long() + 1, dim=0)
    hot = F.one_hot(h.argmax(1) % 3)
    bins = torch.bincount(h.argmax(1))
    zeros = torch.zeros(int(n), 6)
    ones = h.new_ones(n, 6)
    loss = finish(m, h, y) + head.sum() + repeated.mean()
    return loss, {"hot": hot, "bins": bins, "zeros": zeros, "ones": ones}


# ------------------------------------------------------------------ creation and moves


@case
def moved_and_made(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x)).to(x.device).cpu()
    h = h.to("cpu").to(device=h.device, dtype=torch.float32).to(x)
    like = x.to(h) + x.type_as(h) + x.view_as(h) + m.scale.expand_as(h) + h.reshape_as(x) + x.to(h, copy=True)
    z = torch.zeros(h.shape, device=h.device, dtype=h.dtype) + torch.ones_like(h)
    f = torch.full_like(h, 0.5) + h.new_full(h.shape, 2.0) + h.new_empty(h.shape).fill_(1) + h.new_ones(())
    half = h.half().float() + h.double().float() + h.type_as(x) + h.type(torch.float32)
    arange = torch.arange(h.size(1), device=h.device)
    eye = torch.eye(h.size(-1), device=h.device, dtype=h.dtype)
    names = {
        "device": str(h.device), "type": h.type(), "dtype": str(h.dtype), "cuda": h.is_cuda, "dim": h.dim(),
        "floating": torch.is_floating_point(h), "tensor": torch.is_tensor(h), "isinstance": isinstance(h, Tensor),
        "contiguous": h.t().is_contiguous(), "stride": h.t().stride(), "bytes": h.nbytes, "size": h.element_size(),
        "layout": str(h.layout), "leaf": h.is_leaf, "fn": h.grad_fn is not None, "ndim": h.ndim,
        "offset": h.storage_offset(),
        "hash": hash(h) == hash(h), "dict": {h: 1}[h], "finfo": torch.finfo(h.dtype).max, "size(0)": h.size(0),
        "T": tuple(h.T.shape), "numel": h.numel(), "promote": str(torch.result_type(h, 1.0)),
    }  # fmt: skip
    return finish(m, h @ eye + z + f + half + arange + like, y), names


@case
def odd_dtypes(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x))
    q = (h * 300).to(torch.int8)
    wrapped = (h * 100).to(torch.uint8) + 200
    big = (h * 2.0**62).long() * 4
    z = torch.fft.fft(h)
    back = torch.fft.ifft(z).real
    b = (h > 0).to(torch.bfloat16)
    division = (h * 10).int() / 3
    floor = (h * 10).int() // 3
    shifted = (h * 10).int().abs() << 2
    return finish(m, back + b.float() + division, y), {
        "q": q, "wrapped": wrapped, "big": big, "z": z, "floor": floor, "shifted": shifted,
    }  # fmt: skip


@case(reordered="a value used on several stages sums its gradients by stage")
def operators(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h, g = m.b(m.a(x)), m.a(x)
    comparisons = (h < g) & (h <= 1) | (h == g) ^ (h != 0) & ~(g > h) & (g >= -1)
    reflected = (
        1 - h + 2 * g + 1 / (3 + h) + 2**h - (x - h) @ g.t() @ g + (5 // (h.detach() + 3)) + (3 % (h.detach() + 4))
    )
    powers = h**2 + abs(g) + (-h) + (+g) + (h % 0.3) + (x / (2 + g)) + divmod(3.0, 2)[1]
    return finish(m, reflected + powers + comparisons, y), {"c": comparisons}


@case
def several_results(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x))
    best = h.max(dim=1)
    values, indices = h.min(1)
    (std, mean) = torch.std_mean(h, dim=0)
    _, s, _ = torch.linalg.svd(h.double() + torch.eye(4, 6) * 3, full_matrices=False)
    sorted_ = h.sort(dim=1)
    unbound = h.unbind(1)
    split = h.split(2, dim=1)
    parts = torch.tensor_split(h, 3, dim=1)
    kth = h.kthvalue(2)
    mean_abs = torch.aminmax(h)
    meshed = torch.meshgrid(h[0], x[0], indexing="ij")
    loss = finish(m, sorted_.values + torch.stack(unbound, 1), y) + best.values.sum() + values.mean() + kth.values.sum()
    loss = (
        loss + s.sum().float() + (split[0] * parts[1]).sum() + std.sum() + mean.sum() + mean_abs.max + meshed[0].sum()
    )
    return loss, {"type": type(best).__name__, "i": best.indices, "j": indices}


@case(reordered="a value used on several stages sums its gradients by stage")
def lists_of_operands(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h, g = m.b(m.a(x)), m.a(x)
    cat = torch.cat([h, x, g], dim=1)[:, :6]
    stacked = torch.stack((h, g, x)).mean(0)
    e = torch.einsum("bi,bj,j->bi", h, g, m.scale)
    chained = torch.linalg.multi_dot([h, g.t(), x])
    hs = torch.hstack([h, g])[:, 3:9]
    blocks = torch.block_diag(h, g)[:4, :6]
    broadcast = torch.broadcast_tensors(h, m.scale)[1]
    scattered = torch.zeros(4, 6).scatter_add(1, y[:, None].expand(-1, 6), h) + torch.zeros(5, 6).index_add(0, y, h)[:4]
    products = torch.cartesian_prod(h[0], g[0])[:24].reshape(4, -1)[:, :6]
    at_least = torch.atleast_2d(h, g)[1]
    total = cat + stacked + e + chained + hs + blocks + broadcast + scattered + products + at_least
    return finish(m, torch.tanh(total), y)


@case
def losses(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x))
    logits = m.head(m.c(h))
    logp = F.log_softmax(logits, -1)
    loss = F.nll_loss(logp, y) + F.cross_entropy(logits, y, reduction="none").sum() / y.numel()
    loss = loss + F.mse_loss(h, x) + F.smooth_l1_loss(h, x) + torch.nn.CrossEntropyLoss(label_smoothing=0.1)(logits, y)
    loss = (
        loss
        + F.binary_cross_entropy_with_logits(logits, F.one_hot(y, 5).float())
        + F.kl_div(logp, logp.detach().exp(), reduction="batchmean")
    )
    loss = (
        loss
        + F.cosine_similarity(h, x).mean()
        + (logits.argmax(-1) == y).float().mean()
        + torch.logsumexp(logits, 1).mean()
    )
    return loss, {"accuracy": (logits.argmax(-1) == y).sum().item() / len(y)}


@case
def attention_in_glue(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x))
    q, k, v = (t.view(1, 2, 4, 3) for t in (h, m.a(x), h + 1))
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    scores = (q @ k.transpose(-1, -2)).masked_fill(~mask, torch.finfo(h.dtype).min).softmax(-1) @ v
    return finish(m, (out + scores).reshape(4, 6), y)
