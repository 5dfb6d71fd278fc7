"""Tensor parallelism over two processes: ours beside DTensor, a hand-written split and one process.

    python benchmarks/tensor.py
    python benchmarks/tensor.py --rows "single|DTensor|shardwright, optimize speed" --rounds 2

All ranks train on the same whole batch. A step is forward and backward, AdamW, and clearing the gradients.
efficiency: tokens/s over twice those of the one-thread process of the same run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import model as gpt
import torch
import torch.distributed as dist
from common import RankResult, Rounds, Row, main, median_of, start, step_time, table
from measure import timed_steps
from model import Sizes
from torch import Tensor, nn
from torch.nn import functional as F

RANKS = 2
PEER = "DTensor"
SINGLE = "single"
TWO_SINGLES = "two independent processes"


def trained(args: argparse.Namespace, whole: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]) -> RankResult:
    """Time steps of plain PyTorch."""
    x, y = gpt.batch(Sizes.of(args))
    optimizer = gpt.adamw(whole)

    def step() -> float:
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return timed_steps(step, args.steps)


def single(args: argparse.Namespace) -> RankResult:
    """Plain PyTorch in one process."""
    start()
    whole = nn.Sequential(*gpt.layers(Sizes.of(args)))
    return trained(args, whole, lambda x, y: gpt.loss_of(whole(x), y))


def dtensor(*, sequence: bool) -> Callable[[argparse.Namespace], RankResult]:
    """`parallelize_module`: columns and rows, vocabulary split with `loss_parallel`. sequence: between them
    activations are sharded over the sequence."""

    def run(args: argparse.Namespace) -> RankResult:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            SequenceParallel,
            loss_parallel,
            parallelize_module,
        )

        start()
        mesh = init_device_mesh("cpu", (RANKS,))
        between = Shard(1) if sequence else Replicate()
        layers: list[Any] = gpt.layers(Sizes.of(args))
        embedding, *blocks, head = layers
        embedding.tok = parallelize_module(
            embedding.tok, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        )
        gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        for block in blocks:
            plan: dict[str, Any] = {
                "attn.wq": ColwiseParallel(),
                "attn.wk": ColwiseParallel(),
                "attn.wv": ColwiseParallel(),
                "attn.wo": RowwiseParallel(output_layouts=between),
                "mlp.fc1": ColwiseParallel(),
                "mlp.fc2": RowwiseParallel(output_layouts=between),
            }
            if sequence:
                plan |= {"ln1": SequenceParallel(), "ln2": SequenceParallel(), "attn": gathered, "mlp": gathered}
            parallelize_module(block, mesh, plan)
        split_logits = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(head, mesh, {"out": split_logits, **({"ln": SequenceParallel()} if sequence else {})})

        class OwnPositions(nn.Module):
            def forward(self, hidden: Tensor) -> Tensor:
                whole = DTensor.from_local(hidden, mesh, (Replicate(),), run_check=False)
                return whole.redistribute(mesh, (Shard(1),)).to_local()

        whole = nn.Sequential(embedding, *([OwnPositions()] if sequence else []), *blocks, head)

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            loss: Any = gpt.loss_of(whole(x), y)
            return loss.to_local() if isinstance(loss, DTensor) else loss

        with loss_parallel():
            return trained(args, whole, loss_of)

    return run


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        dist.all_reduce(hidden)
        return hidden

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _SplitVocabularyLoss(torch.autograd.Function):
    """Mean cross entropy of logits [tokens, vocab / ranks]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        most = logits.max(-1).values
        dist.all_reduce(most, dist.ReduceOp.MAX)
        exponentials = (logits - most[:, None]).exp_()
        local = labels - int(os.environ["RANK"]) * logits.shape[1]
        here = (local >= 0) & (local < logits.shape[1])
        local = local.clamp(0, logits.shape[1] - 1)
        sums = torch.stack([exponentials.sum(-1), logits.gather(1, local[:, None])[:, 0] * here])
        dist.all_reduce(sums)
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), local, here)
        return (sums[0].log() + most - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        probability, local, here = ctx.saved_tensors
        probability.scatter_add_(1, local[:, None], -here[:, None].to(probability.dtype))
        return probability.mul_(grad / len(probability)), None


def by_hand(args: argparse.Namespace) -> RankResult:
    """A Megatron split with plain all-reduces, and nothing else: what a library costs on top."""
    rank, sizes = start(), Sizes.of(args)
    whole = nn.Sequential(*gpt.layers(sizes))

    def keep_part(linear: Any, dim: int) -> None:
        linear.weight = nn.Parameter(linear.weight.detach().chunk(RANKS, dim)[rank].clone())
        if linear.bias is not None and dim == 0:
            linear.bias = nn.Parameter(linear.bias.detach().chunk(RANKS)[rank].clone())

    def attend(hidden: Tensor, attention: Any) -> Tensor:
        batch, seq, _ = hidden.shape
        q, k, v = (
            linear(hidden).view(batch, seq, -1, attention.head_size).transpose(1, 2)
            for linear in (attention.wq, attention.wk, attention.wv)
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, seq, -1)
        return _SumOverRanks.apply(F.linear(found, attention.wo.weight)) + attention.wo.bias

    def block_forward(block: Any) -> Callable[[Tensor], Tensor]:
        def forward(hidden: Tensor) -> Tensor:
            hidden = hidden + attend(_CopyToRanks.apply(block.ln1(hidden)), block.attn)
            inner = F.gelu(block.mlp.fc1(_CopyToRanks.apply(block.ln2(hidden))))
            return hidden + _SumOverRanks.apply(F.linear(inner, block.mlp.fc2.weight)) + block.mlp.fc2.bias

        return forward

    for layer in whole:
        part: Any = layer
        if isinstance(layer, gpt.Block):
            for linear in (part.attn.wq, part.attn.wk, part.attn.wv, part.mlp.fc1):
                keep_part(linear, 0)
            for linear in (part.attn.wo, part.mlp.fc2):
                keep_part(linear, 1)
            part.forward = block_forward(part)
        elif isinstance(layer, gpt.Head):
            keep_part(part.out, 0)
            part.forward = lambda hidden, head=part: head.out(_CopyToRanks.apply(head.ln(hidden)))
    return trained(args, whole, lambda x, y: _SplitVocabularyLoss.apply(whole(x).flatten(0, 1), y.flatten()))


_PLACES = {
    "ln1": "attention.pre_layernorm", "attn.wq": "attention.query", "attn.wk": "attention.key",
    "attn.wv": "attention.value", "attn.wo": "attention.dense", "ln2": "output.pre_layernorm",
    "mlp.fc1": "output.dense1", "mlp.fc2": "output.dense2",
}  # fmt: skip


def our_names(sizes: Sizes) -> dict[str, Tensor]:
    """The weights of the plain model by the names of `DistributedTransformerLMHead`."""
    layers: list[Any] = gpt.layers(sizes)
    embedding, *blocks, head = layers
    weights: dict[str, Tensor] = {
        "word_embedding.weight": embedding.tok.weight,
        "position_embedding.weight": embedding.pos.weight,
        "layernorm.weight": head.ln.weight,
        "layernorm.bias": head.ln.bias,
        "lm_head.weight": head.out.weight,
    }
    for index, block in enumerate(blocks):
        for name, weight in block.named_parameters():
            module, _, last = name.rpartition(".")
            weights[f"transformer.seq_layers.{index}.{_PLACES[module]}.{last}"] = weight
    return weights


def shardwright(optimize: str) -> Callable[[argparse.Namespace], RankResult]:
    """Ours: the distributed language model, wrapped, in a step function."""

    def run(args: argparse.Namespace) -> RankResult:
        import shardwright.torch as smp
        from shardwright.tensor_parallel.module import load_full

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        sizes = Sizes.of(args)
        smp.init({"tensor_parallel_degree": RANKS, "ddp": True, "prescaled_batch": True, "optimize": optimize})
        whole: nn.Module = smp.nn.DistributedTransformerLMHead(
            num_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            attention_head_size=sizes.d // sizes.heads,
            hidden_size=sizes.d,
            intermediate_size=4 * sizes.d,
            vocab_size=sizes.vocab,
            num_positions=sizes.seq,
            attention_dropout_prob=0.0,
            hidden_dropout_prob=0.0,
            causal_mask_size=sizes.seq,
            pre_layernorm=True,
            post_layernorm=False,
            tie_word_embeddings=False,
            distribute_embedding=True,
            gather_logits=False,
            shift_labels=False,
        )
        load_full(whole, our_names(sizes))
        wrapped = smp.DistributedModel(whole)
        optimizer = smp.DistributedOptimizer(gpt.adamw(wrapped))
        x, y = gpt.batch(sizes)

        @smp.step
        def train_step(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
            loss, _ = model((ids, None, None, None, labels))
            model.backward(loss)
            return loss

        def step() -> float:
            loss = train_step(wrapped, x, y).reduce_mean().item()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        return timed_steps(step, args.steps)

    return run


ROWS = {
    SINGLE: Row(1, 1, single),
    "single 2 threads": Row(1, 2, single),
    TWO_SINGLES: Row(2, 1, single),
    PEER: Row(RANKS, 1, dtensor(sequence=False)),
    "DTensor, sequence parallel": Row(RANKS, 1, dtensor(sequence=True)),
    "hand-written": Row(RANKS, 1, by_hand),
    "shardwright, optimize speed": Row(RANKS, 1, shardwright("speed")),
    "shardwright, optimize memory": Row(RANKS, 1, shardwright("memory")),
}


def report(results: dict[str, Rounds], args: argparse.Namespace) -> str:
    """The table of ratios."""
    sizes = Sizes.of(args)
    times = {name: time for name, rounds in results.items() if (time := step_time(rounds))}
    tokens = sizes.batch * sizes.seq
    speed = {name: tokens * (2 if name == TWO_SINGLES else 1) / time.seconds for name, time in times.items()}

    def ratio(name: str, other: str, factor: float = 1.0) -> float | None:
        return speed[name] / speed[other] / factor if other in speed else None

    lines = [
        [
            name, time.seconds, f"{speed[name]:.0f}", ratio(name, SINGLE, 2.0), ratio(name, PEER),
            ratio(name, "hand-written"),
            " / ".join(f"{(median_of(results[name], 'peak_bytes', r) or 0) / 1e6:.0f}" for r in range(ROWS[name].num_ranks)),
            time.cpu_s, f"{time.num_quiet}/{time.num_steps}", time.foreign_cores, time.spread,
            median_of(results[name], "loss"),
        ]
        for name, time in times.items()
    ]  # fmt: skip
    header = [
        "row", "step s", "tokens/s", "efficiency", f"vs {PEER}", "vs hand-written", "peak MB per rank", "CPU s per rank",
        "quiet steps", "foreign cores", "spread", "first loss",
    ]  # fmt: skip
    volume = sizes.batch * sizes.seq * sizes.d * 4 / 2**20
    per_step = f"(4 x {sizes.layers} + 1) all-reduces of {volume:.0f} MiB"
    return table(header, lines) + f"\n\nin a step of the hand-written split: {per_step}"


def parse() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a row in one round")
    Sizes.add_options(parser)
    return parser


if __name__ == "__main__":
    main(ROWS, report, parse())
