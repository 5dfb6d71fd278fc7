"""Cases of glue that changes tensors in place, makes views, or moves between a tensor and its data (design rule 1)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from glue_cases import GlueModel, case, finish


@case
def loss_divided_in_place(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    loss = finish(m, m.b(m.a(x)), y)
    loss /= 3
    return loss


@case
def activation_scaled_in_place(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.norm(m.b(m.a(x)))
    h *= 2
    return finish(m, h, y)


@case
def value_before_and_after_a_change(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.norm(m.a(x)) + 1
    before = h + x
    h.add_(0.5)
    return finish(m, m.b(before) + m.b(h), y), {"before": before, "h": h}


@case
def change_through_a_flat_view(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x)) + 0
    v = h.view(-1)
    v.mul_(2)
    return finish(m, h, y), {"h": h, "v": v}


@case
def change_seen_through_a_view(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x)) + 0
    v = h.view(-1)
    h.mul_(2)
    return finish(m, v.view(h.shape), y), {"v": v}


@case
def view_of_a_view(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x)) * 1
    outer = h[:, 1:]
    inner = outer[1:].t()
    inner.mul_(3)
    outer += 1
    return finish(m, h, y), {"h": h, "outer": outer, "inner": inner}


@case
def two_overlapping_views(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x)) * 1
    left, right = h[:, :4], h[:, 2:]
    left.mul_(2)
    right.add_(left[:, 1:2])
    return finish(m, h, y), {"left": left, "right": right}


@case
def column_zeroed(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x)) * 1
    h[:, 0] = 0
    return finish(m, h, y), {"h": h}


@case
def items_assigned(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x)) * 1
    g = m.a(x)
    h[0] = g[1]
    h[:, 1] = g[:, 2] * m.scale[0]
    h[x > 1] = 0.25
    h[h > 0.5] = 0.5
    h[..., -1:] += 1
    h[y % 2 == 0] = g[y % 2 == 0]
    return finish(m, h, y), {"h": h}


@case
def items_changed_by_index(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x)) * 1
    h[torch.tensor([0, 2])] *= 3
    h[:, 2:4].mul_(-1)
    h.select(0, 1).zero_()
    h.narrow(1, 4, 2).fill_(0.1)
    h.diagonal().add_(1)
    return finish(m, h, y), {"h": h}


@case
def masked_and_scattered(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x)) * 1
    g = m.a(x)
    h.masked_scatter_(x > 0, g)
    h.masked_fill_(x < -1, 0.5)
    h.scatter_add_(1, y[:, None].expand(-1, 6), g)
    h.index_add_(0, torch.tensor([1, 1]), g[:2])
    h.index_fill_(1, torch.tensor([5]), 0.3)
    return finish(m, h, y), {"h": h}


@case
def in_place_chain(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x)) * 1
    same = h.mul_(2).add_(m.scale).clamp_(-1, 2)
    return finish(m, same, y), {"same": same is h, "h": h}


@case
def swap_columns(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x)) * 1
    h[:, [0, 1]] = h[:, [1, 0]]
    return finish(m, h, y), {"h": h}


@case
def chunks_changed(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x)) * 1
    first, second = h.chunk(2, dim=1)
    with torch.no_grad():
        total = first.sum()
    return finish(m, torch.cat([second * 2, first], 1), y), {"total": total}


@case
def shape_changed_in_place(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x)) * 1
    h.unsqueeze_(1)
    shape = tuple(h.shape)
    h.squeeze_(1)
    h.transpose_(0, 1)
    h.t_()
    return finish(m, h, y), {"shape": shape, "h": h}


@case
def relu_in_place(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x)) * 1
    g = F.relu(h, inplace=True)
    k = F.relu_(m.a(x) + 0)
    z = F.dropout(m.a(x) * 1, 0.0, True, True)
    z = F.leaky_relu(z, 0.1, True)
    return finish(m, h + k + z, y), {"same": g is h, "h": h}


@case
def written_with_out(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x))
    with torch.no_grad():
        target = torch.empty_like(h)
        returned = torch.mul(h, 2, out=target)
        ordinary = torch.empty(h.shape)
        torch.add(h, 1, out=ordinary)
        values, indices = torch.empty(0), torch.empty(0, dtype=torch.long)
        torch.max(h, 1, out=(values, indices))
    rest = {"target": target, "same": returned is target, "ordinary": ordinary, "v": values, "i": indices}
    return finish(m, h + target, y), rest


@case
def data_read(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x))
    return finish(m, h + h.data * 2, y), {"wants": h.data.requires_grad}


@case
def data_written(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x)) * 1
    h.data = h.data * 2
    return finish(m, h, y), {"h": h}


@case
def data_changed(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x)) * 1
    h.data.mul_(2)
    h.data[0] = 0
    return finish(m, h, y), {"h": h}


@case
def detached_view_changed(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x)) * 1
    d = h.detach()
    d.add_(1)
    return finish(m, h, y), {"h": h, "d": d}


@case
def detached_in_place(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x)) * 1
    h.detach_()
    return finish(m, h, y), {"wants": h.requires_grad}


@case
def change_without_grad(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x)) * 1
    with torch.no_grad():
        h.mul_(2)
        h[0] = 1
    return finish(m, h, y), {"h": h}


@case
def change_of_a_view_without_grad(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x)) * 1
    v = h[1:]
    with torch.no_grad():
        v.mul_(2)
    return finish(m, h, y), {"h": h}


@case
def activation_made_to_require_grad(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.a(x)
    h.requires_grad_(True)
    d = m.emb(y)
    d.requires_grad_()
    with torch.no_grad():
        frozen = m.a(x)
    frozen.requires_grad = True
    return finish(m, m.b(h + d + frozen), y), {"wants": frozen.requires_grad}


@case
def total_over_microbatches(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    loss = finish(m, m.b(m.a(x)), y)
    notes = m.notes.setdefault("total", {"sum": torch.zeros(())})
    notes["sum"] += loss.detach()
    return loss, {"sum": notes["sum"].clone()}


@case
def ordinary_tensor_filled(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x))
    buffer = torch.zeros(len(x), 3, x.shape[1])
    buffer[:, 0] = h
    buffer[:, 1] = m.a(x)
    buffer[:, 2].copy_(h * 2)
    flat = torch.zeros(len(x) * x.shape[1])
    flat.copy_(h.reshape(-1))
    return finish(m, buffer.sum(1) + flat.view(len(x), -1), y), {"buffer": buffer}


@case
def step_input_changed(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    x = x.clone()
    x += m.a(x).detach()
    x.mul_(0.5)
    return finish(m, m.b(x), y), {"x": x}


@case
def copy_and_fill(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x))
    g = torch.empty_like(h).copy_(h)
    k = h.new_zeros(h.shape)
    k.copy_(x)
    k += h
    z = torch.zeros_like(h)
    z[1] = h[2]
    return finish(m, g + k + z, y), {"z": z}


@case
def augmented_attribute(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    box = SimpleNamespace(h=m.b(m.a(x)) * 1, list=[m.emb(y) * 1])
    box.h += 1
    box.h[0] /= 2
    box.list[0] *= 3
    box.list[0][1] += box.h[0]
    return finish(m, box.h + box.list[0], y), {"h": box.h}


@case
def expanded_then_changed(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x)) * 1
    wide = h.unsqueeze(1).expand(-1, 2, -1)
    h.add_(1)
    return finish(m, wide.mean(1), y), {"wide": wide}


@case
def reshape_that_views(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x)) * 1
    flat = h.reshape(-1)
    flat[0] = 7
    copied = h.t().reshape(-1)
    copied[1] = 9
    same = h.contiguous()
    same[1] = 3
    to = h.to(torch.float32)
    to[2] = 4
    return finish(m, h, y), {"h": h, "copied": copied}


@case
def view_outlives_base(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    v = (m.b(m.a(x)) * 1)[:, 1:]
    w = v[:, 1:]
    v.mul_(2)
    return finish(m, F.pad(w, (1, 1)), y), {"w": w}


@case
def change_by_lerp_addcmul(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    h = m.b(m.a(x)) * 1
    h.lerp_(m.a(x), 0.3).addcmul_(m.scale, x, value=0.1)
    h.add_(h)
    h.sub_(h.mean(0))
    return finish(m, h, y), {"h": h}


@case
def real_and_imaginary_parts(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    z = torch.complex(m.b(m.a(x)), m.a(x))
    z = z * torch.exp(1j * m.scale)
    z.real.mul_(2)
    parts = torch.view_as_real(z)
    return finish(m, z.real + z.imag + parts[..., 1] + z.abs(), y), {"z": z}


@case
def list_of_tensors_changed(m: GlueModel, x: Tensor, y: Tensor) -> Any:
    hs = [m.b(m.a(x)) * 1, m.a(x) * 1]
    with torch.no_grad():
        norm = torch.nn.utils.get_total_norm([h.detach() for h in hs])
        scaled = torch._foreach_mul(hs, 2.0)
    return finish(m, hs[0] + hs[1] + scaled[0], y), {"norm": norm}
