"""The random state of one rank as plain values, so that its file loads safely anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from shardwright.topology.rng import RngState


def pack(state: RngState, position: Mapping[str, int]) -> dict[str, Any]:
    """Return the content of a rng file.

    position: the counters that derived streams depend on.
    """
    return {
        "python": state.python,
        "numpy": _arrays_to_tensors(state.numpy),
        "torch_cpu": state.torch_cpu,
        "torch_cuda": None if state.torch_cuda is None else state.torch_cuda.cpu(),
        "position": dict(position),
    }


def unpack(content: Mapping[str, Any]) -> tuple[RngState, dict[str, int]]:
    """Return what `pack` was given.

    Raises: KeyError if the content isn't that of a rng file.
    """
    state = RngState(
        python=content["python"],
        numpy=_tensors_to_arrays(content["numpy"]),
        torch_cpu=content["torch_cpu"].clone(),
        torch_cuda=None if content["torch_cuda"] is None else content["torch_cuda"].clone(),
    )
    return state, dict(content["position"])


def _arrays_to_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _arrays_to_tensors(item) for key, item in value.items()}
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value


def _tensors_to_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tensors_to_arrays(item) for key, item in value.items()}
    return value.numpy().copy() if isinstance(value, torch.Tensor) else value
