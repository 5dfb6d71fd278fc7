"""Train a small convolutional network with BatchNorm on generated images, and evaluate it.

    python examples/image_classifier.py
    shardwright run --pp 2 examples/image_classifier.py
    shardwright run --nproc 2 --ddp examples/image_classifier.py

Shows an optimizer that is built before the model is wrapped, a step that returns a tuple of tensors and one that returns
numbers, autocast inside the step with `smp.amp.GradScaler` (`--amp`), a data set split by `smp.dp_rank()`, evaluation
through the pipeline, and a partial checkpoint (`--save model.pt`): one file for each part of the model.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp

CLASSES = 4
SIZE = 16
BATCH = 32


def images(seed: int, num_images: int) -> tuple[Tensor, Tensor]:
    """Noisy pictures of stripes; the class is their direction. Returns [n, 1, size, size] and [n]."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (num_images,), generator=generator)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    directions = torch.stack([rows, columns, rows + columns, rows - columns])[labels]
    phase = torch.rand(num_images, 1, 1, generator=generator) * 6.3
    noise = torch.randn(num_images, SIZE, SIZE, generator=generator)
    return (torch.sin(directions * 1.2 + phase) + 2 * noise).unsqueeze(1), labels


def build_model() -> nn.Module:
    """Three convolutions with BatchNorm and a linear head."""
    torch.manual_seed(0)

    def block(channels_in: int, channels: int) -> nn.Sequential:
        convolution = nn.Conv2d(channels_in, channels, 3, stride=2, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.ReLU(inplace=True))

    body = [block(1, 16), block(16, 32), block(32, 32)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))


@smp.step
def train_step(
    model: smp.DistributedModel, scaler: smp.amp.GradScaler, x: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """One microbatch. Returns its loss and its predictions: two tensors, so the caller gets two `StepOutput`s."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=scaler.is_enabled()):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), labels)
    model.backward(scaler.scale(loss))
    return loss, logits.argmax(dim=1)


@smp.step
def test_step(model: smp.DistributedModel, x: Tensor, labels: Tensor) -> tuple[float, int]:
    """One microbatch without gradients. Returns two numbers, so the caller gets two lists."""
    logits = model(x)
    loss = F.cross_entropy(logits, labels, reduction="sum").item()
    return loss, int((logits.argmax(dim=1) == labels).sum())


def evaluate(model: smp.DistributedModel, num_batches: int) -> tuple[float, float]:
    """Mean loss and accuracy over images that training doesn't see."""
    model.eval()
    total_loss, correct = 0.0, 0
    for seed in range(num_batches):
        with torch.no_grad():
            losses, hits = test_step(model, *images(10_000 + seed, BATCH))
        total_loss += sum(losses)
        correct += sum(hits)
    model.train()
    return total_loss / (num_batches * BATCH), correct / (num_batches * BATCH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--amp", action="store_true", help="compute in bfloat16 where autocast does, with a loss scale")
    parser.add_argument("--save", metavar="FILE", help="write the trained model, one file for each of its parts")
    args = parser.parse_args()
    smp.init({"microbatches": 4})
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(optimizer)
    scaler = smp.amp.GradScaler(enabled=args.amp)
    for step in range(args.steps):
        x, labels = images(step * smp.dp_size() + smp.dp_rank(), BATCH)
        optimizer.zero_grad()
        loss, predicted = train_step(model, scaler, x, labels)
        scaler.step(optimizer)
        scaler.update()
        accuracy = (predicted.concat().cpu() == labels).float().mean()
        if smp.rank() == 0 and (step + 1) % 10 == 0:
            mean = loss.reduce_mean().item()
            print(f"step {step + 1}: loss {mean:.6f}, accuracy {accuracy:.2f}", flush=True)
    loss, accuracy = evaluate(model, num_batches=4)
    if smp.rank() == 0:
        print(f"test: loss {loss:.6f}, accuracy {accuracy:.2f}", flush=True)
    if args.save and smp.dp_rank() == 0:
        content = {"model_state_dict": model.local_state_dict(), "optimizer_state_dict": optimizer.local_state_dict()}
        smp.save(content, args.save, partial=True)
    smp.barrier()


if __name__ == "__main__":
    main()
