"""A script written for GPUs runs under `shardwright run --emulate-cuda`, with the losses of one process on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from launched import Launched

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc")

SCRIPT = Path(__file__).parents[1] / "emulated_script.py"


def _plain_losses(batch: int) -> list[float]:
    """The same training by plain torch, without any device."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(64, 16, generator=generator), torch.randint(0, 4, (64,), generator=generator)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return h + self.b(torch.relu(self.a(h))) * 0.5

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), *[Block() for _ in range(4)], nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for begin in range(0, 64, batch):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[begin : begin + batch]), y[begin : begin + batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _run(folder: Path, *options: str) -> list[float]:
    with Launched(folder, "--emulate-cuda", *options, str(SCRIPT)) as job:
        assert job.finish(60) == 0, job.stderr
    assert job.stderr.count("CUDA is emulated on the CPU") == 1
    return [float(line.split()[3]) for line in job.stdout.splitlines() if line.startswith("step ")]


@pytest.mark.parametrize(
    ("options", "replicas"),
    [
        (("--pp", "2", "--nproc", "4"), 2),
        (("--tp", "2"), 2),
        pytest.param(("--pp", "2"), 1, marks=pytest.mark.heavy),
        pytest.param(("--nproc", "2"), 2, marks=pytest.mark.heavy),
        pytest.param(("--pp", "2", "--tp", "2"), 2, marks=pytest.mark.heavy),
    ],
    ids=lambda value: "".join(value).replace("--", "") if isinstance(value, tuple) else "",
)
def test_losses_are_those_of_the_cpu(tmp_path: Path, options: tuple[str, ...], replicas: int) -> None:
    expected = _plain_losses(8 * replicas)
    # Rounding: sums over microbatches, replicas and slices are taken in another order.
    assert _run(tmp_path, *options) == pytest.approx(expected, rel=2e-6)
    assert expected[-1] != pytest.approx(expected[0], rel=1e-2)
