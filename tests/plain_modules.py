"""Small plain PyTorch models, each with one trait that makes a pipeline cut hard.

Used through `models.MODELS`; every class says which trait it stands for. Input is `x`, output a tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 16
CLASSES = 11


class Block(nn.Sequential):
    """Linear and ReLU, the building block of M6."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(nn.Linear(width, width), nn.ReLU())


class Mlp(nn.Module):
    """M6 of the field faults: six blocks and a head, nothing shared."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ReusedBlockMlp(nn.Module):
    """M6 whose block of depth 2 is called again at depth 5: a stage is revisited within a microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 1, 2, 3, 4, 2):
            x = self.blocks[index](x)
        return self.head(x)


class BranchingMlp(nn.Module):
    """Decides by a computed value which block runs, so that Python must see it on every stage.

    The first two choices differ between microbatches, so some blocks get no gradient from some of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        h = self.blocks[1](h) if h.mean() > 0 else self.blocks[2](h)
        h = torch.tanh(self.blocks[3](h))
        h = self.blocks[4](h) if h.mean() > 0 else self.blocks[5](h)
        return self.head(h)


class RootParameters(nn.Module):
    """Parameters owned by the root itself: a class token before the sequence and a scale after the blocks.

    x: [batch, seq, width].
    """

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.1)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks:
            h = h + block(h)
        return self.head((h * self.scale)[:, 0])


class LongResidual(nn.Module):
    """The first block's output is added again before the head, and every block reads a shared bias.

    As in T5, where the encoder's output and the position bias reach every later block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias(x)
        first = h = self.blocks[0](x)
        for block in self.blocks[1:]:
            h = block(h + bias)
        return self.head(torch.relu(h + first))


class RunningScale(nn.Module):
    """Divides by a running estimate of the input's size, kept in a buffer that changes in every forward."""

    size: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("size", torch.ones(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if self.training:
            with torch.no_grad():
                self.size.mul_(0.9).add_(h.detach().abs().mean(), alpha=0.1)
                self.calls += 1
        return torch.tanh(h / (self.size + 0.1))


class Buffered(nn.Module):
    """Buffers on every stage, a constant one read by the root's own code, one that isn't saved."""

    offset: Tensor
    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.linspace(-0.5, 0.5, WIDTH))
        self.register_buffer("positions", torch.arange(WIDTH) % 3, persistent=False)
        self.blocks = nn.ModuleList(RunningScale() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x) * self.positions
        return self.head(x + self.offset)


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm around a skip, as in ResNet's basic block."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != channels_in:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)), inplace=True)
        h = self.bn2(self.conv2(h))
        h += self.shortcut(x)
        return F.relu(h, inplace=True)


class ResNet(nn.Module):
    """Four residual blocks with BatchNorm: statistics per microbatch, buffers per stage.

    x: [batch, 3, 8, 8].
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(
            ResidualBlock(8, 8, 1),
            ResidualBlock(8, 16, 2),
            ResidualBlock(16, 16, 1),
            ResidualBlock(16, 16, 1),
        )
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers(self.stem(x))
        return self.head(h.mean(dim=(2, 3)))
