"""Small models that the partition tests share: transformers families, a ResNet, and hostile ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.partition.trace import is_tracing

Case = tuple[nn.Module, dict[str, Any]]
TOKENS = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def ids(vocab: int = 96) -> Tensor:
    return torch.randint(0, vocab, (2, 8), generator=torch.Generator().manual_seed(0))


def gpt2(**changes: Any) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = {"vocab_size": 96, "n_positions": 16, "n_embd": 32, "n_layer": 4, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**(config | changes))), {"input_ids": ids(), "labels": ids()}


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**TOKENS, num_key_value_heads=2)), {"input_ids": ids()}


def bert() -> Case:
    from transformers import BertConfig, BertForMaskedLM

    mask = torch.ones(2, 8, dtype=torch.long)
    return BertForMaskedLM(BertConfig(**TOKENS)), {
        "input_ids": ids(),
        "attention_mask": mask,
        "labels": ids(),
    }


def t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4)
    return T5ForConditionalGeneration(config), {"input_ids": ids(), "decoder_input_ids": ids()}


def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    shape = {key: value for key, value in TOKENS.items() if key != "vocab_size"}
    return ViTForImageClassification(ViTConfig(**shape, image_size=16, patch_size=4)), {
        "pixel_values": torch.zeros(2, 3, 16, 16)
    }


def mixtral() -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**TOKENS, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    return MixtralForCausalLM(config), {"input_ids": ids()}


def qwen3() -> Case:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**TOKENS, num_key_value_heads=2, head_dim=8)), {"input_ids": ids()}


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x + self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))


class ResNet(nn.Module):
    def __init__(self, width: int = 8, num_blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(*[Residual(width) for _ in range(num_blocks)])
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.blocks(self.stem(x))).flatten(1))


def resnet() -> Case:
    return ResNet(), {"x": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.Linear(width, 4 * width // 2)
        self.attn_out = nn.Linear(2 * width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn_out(self.attn(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


class LM(nn.Module):
    """Embedding, blocks, norm, head; `tied` shares the weight of embedding and head."""

    def __init__(self, num_layers: int, width: int = 16, vocab: int = 32, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def lm(num_layers: int, **options: Any) -> Case:
    return LM(num_layers, **options), {"tokens": ids(32)}


class Box:
    """An object that keeps tensors."""

    def __init__(self) -> None:
        self.parts: dict[str, list[Tensor]] = {"seen": []}


class Hostile(nn.Module):
    """Touches everything a forward can touch."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(4)
        self.lookup = nn.Embedding(4, 4, max_norm=0.1)
        self.register_buffer("steps", torch.zeros(()))
        self.cache: Any = None
        self.history: list[Any] = []
        self.table: dict[str, Any] = {"a": 1}
        self.box = Box()
        self.total = torch.zeros(4)
        self.seen_tracing = False

    def forward(self, x: Tensor) -> Tensor:
        self.seen_tracing_inside = is_tracing()
        self.steps += 1
        noise = torch.rand_like(x) + random.random() + float(np.random.rand())
        x.mul_(2)
        self.cache = x
        self.history.append(x)
        self.table["b"] = x
        self.box.parts["seen"].append(x)
        self.total.add_(1)
        self.lin.train(False)
        self.lin.weight.requires_grad_(False)
        return self.bn(self.lin(x + noise) + self.lookup(torch.arange(4)))


TRANSFORMERS: dict[str, Callable[[], Case]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "mixtral": mixtral,
    "qwen3": qwen3,
}
