"""The GPT-2-like decoder that all rows train: the same weights and data in every process."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Sizes:
    """Sizes of model and batch; each is a command line option."""

    layers: int = 8
    d: int = 512
    heads: int = 8
    seq: int = 128
    vocab: int = 8192
    batch: int = 16
    micro: int = 8

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        for field in fields(Sizes):
            parser.add_argument(f"--{field.name}", type=int, default=field.default)

    @staticmethod
    def of(args: argparse.Namespace) -> Sizes:
        return Sizes(**{field.name: getattr(args, field.name) for field in fields(Sizes)})


class Attention(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.head_size = d // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (w(x).view(batch, seq, -1, self.head_size).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, seq, -1))


class Mlp(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn, self.mlp = Attention(d, heads), Mlp(d)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Embed(nn.Module):
    def __init__(self, vocab: int, seq: int, d: int) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(seq, d)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tok(ids) + self.pos(torch.arange(ids.shape[1]))


class Head(nn.Module):
    def __init__(self, d: int, vocab: int) -> None:
        super().__init__()
        self.ln, self.out = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.ln(x))


def layers(sizes: Sizes) -> list[nn.Module]:
    """The embedding, the blocks and the head, in order."""
    torch.manual_seed(0)
    found: list[nn.Module] = [Embed(sizes.vocab, sizes.seq, sizes.d)]
    found += [Block(sizes.d, sizes.heads) for _ in range(sizes.layers)]
    found += [Head(sizes.d, sizes.vocab)]
    for layer in found:
        for module in layer.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
    return found


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy. logits: [batch, seq, vocab]. labels: [batch, seq]."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Token ids and labels, [batch, seq] each."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, sizes.vocab, (sizes.batch, sizes.seq + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)
