"""Dumping what ranks hold, and comparing with a dump."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import engine_ranks as ranks
import shardwright.torch as smp
from harness import RankPool
from smdistributed.modelparallel.test.torch.utils import dump_model, verify


def dumped_and_changed(f: str) -> Any:
    model = smp.DistributedModel(ranks.net(3))
    ranks.cut(model)
    optimizer = smp.DistributedOptimizer(ranks.adam(model))
    ranks.train(model, optimizer, 1)
    dump_model(model, f)
    verify(model, f)
    name, parameter = next(model.local_named_parameters())
    with torch.no_grad():
        parameter.view(-1)[-1] += 0.5
    with pytest.raises(RuntimeError, match="differ from the dump") as failure:
        verify(model, f)
    assert f"'{name}' differs by up to 0.5" in str(failure.value)
    verify(model, f, atol=0.51)
    return smp.pp_rank(), smp.rdp_rank()


def test_a_changed_weight_is_named(pool4: RankPool, tmp_path: Path) -> None:
    places = pool4.run(dumped_and_changed, str(tmp_path / "dump"), config=ranks.TWO_BY_TWO)
    assert {path.name for path in tmp_path.iterdir()} == {f"dump_{pp}_0_{rdp}" for pp, rdp in places}
