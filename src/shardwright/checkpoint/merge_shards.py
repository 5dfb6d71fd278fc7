"""A full model from a checkpoint of sharded data parallelism: ours, or one that the original wrote. No process group."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint import inspection, layout, safe_loading
from shardwright.checkpoint.state import MASTER
from shardwright.errors import CheckpointError, CheckpointNotFoundError

_PREFIX = "module."


def get_full_state_dict_from_sharded_data_parallel_checkpoint(
    checkpoint_dir: str | Path,
    dtype: torch.dtype = torch.float32,
    tag: str | None = None,
    remove_smp_prefix: bool = True,
) -> dict[str, Tensor]:
    """The model's whole state dict on the CPU, parameters in `dtype`, from their fp32 masters where there are any.

    checkpoint_dir: the folder that was passed to `save_checkpoint`.   tag: with or without "_partial"; without one, what
    `newest` names.   remove_smp_prefix: drop a leading "module." from names, which the original's files have.
    Called by: any one process. Raises: CheckpointError if shards are missing; CheckpointNotFoundError.
    """
    root = Path(checkpoint_dir)
    place = _folder(root, tag)
    content, parameters = _ours(root, place.name) if (place / layout.MANIFEST).is_file() else _of_original(place)
    result: dict[str, Tensor] = OrderedDict()
    for name, tensor in content.items():
        cast = name in parameters and tensor.is_floating_point()
        plain = name.removeprefix(_PREFIX) if remove_smp_prefix else name
        result[plain] = tensor.to(dtype) if cast else tensor
    return result


def _folder(root: Path, tag: str | None) -> Path:
    name = tag
    if name is None and (root / layout.NEWEST).is_file():
        name = (root / layout.NEWEST).read_text(errors="replace").strip()
    if name is None:
        raise CheckpointNotFoundError(f"no tag is given and there is no file {root / layout.NEWEST}", remedy="pass a tag")
    for folder in (root / name, root / f"{name}{layout.PARTIAL_SUFFIX}"):
        if folder.is_dir():
            return folder
    raise CheckpointNotFoundError(f"no checkpoint {name!r} in {root}", remedy="pass the tag of a partial checkpoint")


def _ours(root: Path, name: str) -> tuple[dict[str, Tensor], Collection[str]]:
    """Tensors of the model, and the names of those that are trained."""
    checkpoint = inspection.find(root, name)
    manifest = inspection.usable_manifest(checkpoint)
    content: dict[str, Tensor] = OrderedDict()
    masters: dict[str, Tensor] = {}
    for entry, tensor in inspection.whole_tensors(checkpoint, wanted=lambda e: e.role == "model" or e.state == MASTER):
        (content if entry.role == "model" else masters)[entry.name] = tensor
    groups = [set(names) for names in manifest.ties]
    for name, master in masters.items():
        tied = next((names for names in groups if name in names), {name})
        content.update(dict.fromkeys(tied & content.keys(), master))
    trained = {name for group in manifest.param_groups for name in group}
    trained |= {name for names in groups if names & trained for name in names}
    return content, trained


def _of_original(place: Path) -> tuple[dict[str, Tensor], Collection[str]]:
    """From flat fp32 groups: each rank's blocks of the parameters back to back, block by block ceil(elements / ranks) long."""
    files = sorted(place.glob("optimizer_*.pt"), key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)])
    ranks = [_read(path) for path in files]
    if not ranks or "fp32_flat_groups" not in ranks[0]:
        raise CheckpointError(
            "there are no shards of sharded data parallelism here: no optimizer_*.pt with 'fp32_flat_groups', and no manifest",
            where=str(place),
        )
    count = ranks[0]["partition_count"]
    count = max(count) if isinstance(count, Sequence) else int(count)
    if len(ranks) != count:
        raise CheckpointError(f"{len(ranks)} files optimizer_*.pt, but 'partition_count' is {count}", where=str(place))
    told = _read(place / "user_content.pt")
    content: dict[str, Tensor] = OrderedDict()
    for number, shapes in enumerate(told["param_shapes"]):
        flat = [rank["fp32_flat_groups"][number] for rank in ranks]
        content.update(_unflattened(shapes, flat, place))
    parameters = set(content)
    module = _read(place / "model_0.pt")["module"]
    content.update((name, module[name]) for name in told["buffer_names"])
    return content, parameters


def _unflattened(shapes: Mapping[str, torch.Size], flat: Sequence[Tensor], place: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    offset = 0
    for name, size in shapes.items():
        shape = torch.Size(size)
        block = -(-shape.numel() // len(flat))
        if any(offset + block > len(group) for group in flat):
            raise CheckpointError(f"the flat groups end before {name!r} {list(shape)}", where=str(place))
        found[name] = torch.cat([group[offset : offset + block] for group in flat])[: shape.numel()].view(shape)
        offset += block
    return found


def _read(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(f"there is no {path.name}", where=str(path.parent))
    return safe_loading.read_file(path, trust=safe_loading.trusted(None))
