"""A model out of the files of sharded data parallelism with nothing but torch, as scripts of the original have it in their own code.

Written from api.md 9.5 and 9.8; nothing of the library is used.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def natural(path: Path) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]


def full_state_dict(root: Path, tag: str | None = None) -> dict[str, Tensor]:
    """Parameters in fp32, buffers as they are."""
    folder = root / (tag or (root / "newest").read_text().strip())
    optimizers = [torch.load(path, map_location="cpu") for path in sorted(folder.glob("optimizer_*.pt"), key=natural)]
    content = torch.load(folder / "user_content.pt", map_location="cpu")
    module = torch.load(folder / "model_0.pt", map_location="cpu")["module"]
    degree = optimizers[0]["partition_count"]
    degree = max(degree) if isinstance(degree, list) else degree
    assert len(optimizers) == degree
    found = {name: module[name] for name in content["buffer_names"]}
    for number, shapes in enumerate(content["param_shapes"]):
        flat = [optimizer["fp32_flat_groups"][number] for optimizer in optimizers]
        assert {(group.dtype, group.dim()) for group in flat} == {(torch.float32, 1)}
        offset = 0
        for name, shape in shapes.items():
            assert isinstance(shape, torch.Size)
            numel = shape.numel()
            block = math.ceil(numel / degree)
            joined = torch.cat([group.narrow(0, offset, block) for group in flat])
            assert not joined[numel:].any(), "padding"
            found[name.removeprefix("module.")] = joined.narrow(0, 0, numel).view(shape)
            offset += block
        assert all(group.numel() == offset for group in flat)
    return found
