"""Glue that can't be exact and is refused by name, alike on all ranks and before anything is sent.

Each takes (model, h, x): h is a placed activation that requires grad, x an ordinary tensor.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from glue_cases import GlueModel

Refused = Callable[[GlueModel, Tensor, Tensor], Any]


def _run(code: str) -> Refused:
    def body(m: GlueModel, h: Tensor, x: Tensor) -> None:
        exec(code, {"torch": torch, "F": F, "np": np, "copy": copy, "pickle": pickle, "m": m, "h": h, "x": x})

    return body


# what is run: a word of the message
REFUSALS: dict[str, str] = {
    "h.sum().backward()": "'backward'",
    "torch.autograd.backward(h.sum())": "autograd.backward",
    "torch.autograd.grad(h.sum(), m.scale)": "'grad'",
    "torch.func.grad(lambda t: (t * h).sum())(x)": "'mul'",
    "torch.func.grad(lambda t: (t * t).sum())(h.detach())": "torch.func",
    "torch.vmap(lambda t: t * 2)(h)": "torch.func",
    "torch.vmap(lambda t: t * h[0])(x)": "'getitem'",
    "torch.func.jvp(torch.sin, (h,), (h,))": "torch.func",
    "copy.deepcopy(h)": "deepcopy",
    "copy.copy(h)": "pickling",
    "pickle.dumps(h)": "pickling",
    "h.register_hook(lambda g: g)": "register_hook",
    "h.retain_grad()": "retain_grad",
    "h.data_ptr()": "data_ptr",
    "h.untyped_storage()": "untyped_storage",
    "h.requires_grad_(False)": "requires_grad_",
    "h.share_memory_()": "share_memory_",
    "h.resize_(3)": "resize_",
    "h.set_(x)": "set_",
    "h.apply_(lambda v: v)": "apply_",
    "np.from_dlpack(h.detach())": "dlpack",
    "h.to_sparse()": "to_sparse",
    "torch.bernoulli(h.sigmoid(), generator=torch.Generator().manual_seed(0))": "generator",
    "torch._foreach_mul_([h * 1], 2.0)": "_foreach_mul_",
    "k = h * 1; b = torch.broadcast_tensors(k[:1], h)[0]; k.mul_(2)": "broadcast_tensors",
    "k = h * 1; b = torch.broadcast_tensors(k[:1], h)[0]; b.mul_(2)": "broadcast_tensors",
    "m.scale.mul_(2)": "scale",
    "m.scale.data.mul_(2)": "scale",
    "m.table[1:].mul_(2)": "table",
    "m.table.add_(h.mean(0))": "table",
    "m.table.detach().zero_()": "table",
    "k = x * 1; v = k[0]; k.add_(h)": "has views",
    "k = (x * 1)[:2]; k.add_(h[:2])": "view",
    "k = x.clone().requires_grad_(); torch.no_grad().__enter__(); k.add_(h)": "requires grad",
    "d = (h * 1).detach(); d.add_(h)": "detached view",
    "k = h * 1; v = k[1:]; k.data = k * 2": "has views",
    "F.batch_norm(h, h.mean(0).detach(), h.var(0).detach(), training=True)": "running statistics",
}


def attempt(m: GlueModel, h: Tensor, x: Tensor) -> dict[str, str]:
    """Try everything in REFUSALS; says what came of each."""
    found: dict[str, str] = {}
    for code in REFUSALS:
        grad = torch.is_grad_enabled()
        try:
            _run(code)(m, h, x)
            found[code] = "ran"
        except Exception as error:
            found[code] = re.sub("pipeline rank .", "pipeline rank", f"{type(error).__name__}: {error}")
        finally:
            torch.set_grad_enabled(grad)
    return found
