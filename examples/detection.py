"""Train a detector whose inputs are objects: batches of pictures of different sizes, and lists of boxes.

    python examples/detection.py
    shardwright run --pp 2 examples/detection.py
    shardwright run --nproc 2 --ddp examples/detection.py

What is no tensor or container is given to every microbatch whole, unless it has a method `smp_slice`: then that says
what a microbatch gets, also something of another type. The arguments come by position, so their names are free. The
network is cut by hand: what is made under `smp.partition(i)` lives on stage i. The training step returns a dict of losses,
the other one a list of objects.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp

KINDS = 3
GRID = 4
BATCH = 8


class BoxList:
    """The boxes of one picture, [boxes, 4] as x0, y0, x1, y1 in shares of its width and height, and their kinds [boxes]."""

    def __init__(self, boxes: Tensor, kinds: Tensor) -> None:
        self.boxes = boxes
        self.kinds = kinds


@dataclass
class ImageList:
    """Pictures padded to one size [batch, channels, height, width], and the height and width of each."""

    tensors: Tensor
    sizes: list[tuple[int, int]]

    def smp_slice(self, num_microbatches: int, microbatch: int, axis: int) -> ImageList:
        count = len(self.sizes) // num_microbatches
        start = microbatch * count
        return ImageList(self.tensors.narrow(axis, start, count), self.sizes[start : start + count])


class Targets:
    """The boxes of a batch. A microbatch gets a plain list of them."""

    def __init__(self, items: list[BoxList]) -> None:
        self.items = items

    def smp_slice(self, total: int, index: int, dim: int) -> list[BoxList]:
        count = len(self.items) // total
        return self.items[index * count : (index + 1) * count]


def pictures(seed: int) -> tuple[ImageList, Targets]:
    """Noise with one bright rectangle; its kind is the channel that it is bright in."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    tensors, sizes, targets = torch.zeros(BATCH, KINDS, 32, 32), [], []
    for i in range(BATCH):
        height, width, kind = number(24, 33), number(24, 33), number(0, KINDS)
        top, left, tall, wide = number(0, 12), number(0, 12), number(8, 13), number(8, 13)
        tensors[i, :, :height, :width] = torch.rand(KINDS, height, width, generator=generator) * 0.3
        tensors[i, kind, top : top + tall, left : left + wide] += 1
        box = torch.tensor([[left / width, top / height, (left + wide) / width, (top + tall) / height]])
        sizes.append((height, width))
        targets.append(BoxList(box, torch.tensor([kind])))
    return ImageList(tensors, sizes), Targets(targets)


def block(channels_in: int, channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels_in, channels, 3, stride, 1), nn.GroupNorm(4, channels), nn.ReLU(inplace=True))


class Detector(nn.Module):
    """One box for a picture. In training it returns losses, else the boxes that it finds."""

    def __init__(self) -> None:
        super().__init__()
        with smp.partition(0):
            self.stem = block(KINDS, 16, 2)
            self.layer1 = block(16, 16, 2)
        with smp.partition(smp.pp_size() - 1):
            self.layer2 = block(16, 32, 2)
            self.kind = nn.Linear(32 * GRID * GRID, KINDS)
            self.box = nn.Linear(32 * GRID * GRID, 4)

    def forward(self, images: ImageList, targets: list[BoxList] | None = None) -> dict[str, Tensor] | list[BoxList]:
        features = self.layer2(self.layer1(self.stem(images.tensors))).flatten(1)
        kinds, padded = self.kind(features), self.box(features).sigmoid()
        shares = torch.tensor([[32 / w, 32 / h, 32 / w, 32 / h] for h, w in images.sizes], device=padded.device)
        boxes = padded * shares
        if targets is None:
            return [BoxList(b[None], k.argmax()[None]) for b, k in zip(boxes, kinds, strict=True)]
        wanted_boxes = torch.cat([target.boxes for target in targets])
        wanted_kinds = torch.cat([target.kinds for target in targets])
        return {
            "loss_classifier": F.cross_entropy(kinds, wanted_kinds),
            "loss_box": F.smooth_l1_loss(boxes, wanted_boxes, beta=0.1),
        }


@smp.step
def train_step(model: smp.DistributedModel, images: ImageList, targets: Targets) -> dict[str, Tensor]:
    losses = model(images, targets)
    model.backward(sum(losses.values()))
    return losses


@smp.step
def find_step(model: smp.DistributedModel, images: ImageList) -> list[BoxList]:
    return model(images)


def overlap(one: Tensor, other: Tensor) -> float:
    """Area of the intersection of two boxes over that of their union."""
    corners = torch.maximum(one[:2], other[:2]), torch.minimum(one[2:], other[2:])
    inside = (corners[1] - corners[0]).clamp(min=0).prod()
    areas = [(box[2:] - box[:2]).clamp(min=0).prod() for box in (one, other)]
    return float(inside / (areas[0] + areas[1] - inside))


def evaluate(model: smp.DistributedModel) -> tuple[float, float]:
    """Mean overlap and share of right kinds; each data-parallel rank looks at its own pictures."""
    model.eval()
    images, targets = pictures(10_000 + smp.dp_rank())
    with torch.no_grad():
        found = find_step(model, images)  # one list for each place in a microbatch: its boxes in all microbatches
    in_order = [boxes for of_microbatch in zip(*found, strict=True) for boxes in of_microbatch]
    pairs = list(zip(in_order, targets.items, strict=True))
    mine = [(overlap(f.boxes[0].cpu(), t.boxes[0]), int(f.kinds[0]) == int(t.kinds[0])) for f, t in pairs]
    everything = [result for results in smp.allgather(mine, smp.DP_GROUP) for result in results]
    return tuple(sum(column) / len(everything) for column in zip(*everything, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    smp.init({"microbatches": 2, "auto_partition": False, "default_partition": 0})
    torch.manual_seed(0)
    model = smp.DistributedModel(Detector())
    optimizer = smp.optimizers.FusedNovoGrad(model.parameters(), lr=0.01, betas=(0.9, 0.5), weight_decay=1e-4)
    optimizer = smp.DistributedOptimizer(optimizer)
    for step in range(args.steps):
        images, targets = pictures(step * smp.dp_size() + smp.dp_rank())
        optimizer.zero_grad()
        losses = {name: values.reduce_mean() for name, values in train_step(model, images, targets).items()}
        optimizer.step()
        if smp.rank() == 0 and (step + 1) % 5 == 0:
            print(f"step {step + 1}: " + ", ".join(f"{n} {v.item():.6f}" for n, v in losses.items()), flush=True)
    mean_overlap, right = evaluate(model)
    if smp.rank() == 0:
        print(f"test: overlap {mean_overlap:.4f}, right kinds {right:.2f}", flush=True)


if __name__ == "__main__":
    main()
