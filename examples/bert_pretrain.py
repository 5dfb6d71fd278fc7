"""Pre-train a small BERT on generated sentences, with one checkpoint file for each part of the model.

    python examples/bert_pretrain.py
    shardwright run --pp 2 examples/bert_pretrain.py
    shardwright run --nproc 4 --pp 2 --ddp examples/bert_pretrain.py

Stop it, and go on with `--resume`: the losses are those that it would have had. `smp.save(..., partial=True)` writes on the
ranks that call it, without talking to the others; here these are those with `dp_rank` 0, one for each stage. Each of
them deletes its old files. At the end the whole model comes together in one file, which plain torch loads.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import BertConfig, BertForPreTraining
from transformers.utils import logging as transformers_logging

import smdistributed.modelparallel.torch as smp

WORDS = 64  # the first three mean: separator, mask, nothing
LENGTH = 16
MASKED = 3  # words of each sentence that have to be guessed
GLOBAL_BATCH = 16
MICROBATCHES = 2


def sentences(step: int) -> dict[str, Tensor]:
    """This data-parallel rank's share of a step's batch: rows of words that count on, in two parts."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(3, WORDS, (GLOBAL_BATCH, 1), generator=generator)
    follows = torch.randint(0, 2, (GLOBAL_BATCH,), generator=generator)
    words = 3 + (start - 3 + torch.arange(LENGTH)) % (WORDS - 3)
    words[follows == 0, LENGTH // 2 :] = words[follows == 0, LENGTH // 2 :].flip(1)
    hidden = torch.rand(GLOBAL_BATCH, LENGTH, generator=generator).argsort(1)[:, :MASKED]
    labels = torch.full_like(words, -100).scatter(1, hidden, words.gather(1, hidden))
    batch = {
        "input_ids": words.scatter(1, hidden, 1),
        "attention_mask": torch.ones_like(words),
        "token_type_ids": (torch.arange(LENGTH) >= LENGTH // 2).long().expand_as(words),
        "labels": labels,
        "next_sentence_label": 1 - follows,
    }
    return {name: values[smp.dp_rank() :: smp.dp_size()].contiguous() for name, values in batch.items()}


@smp.step
def train_step(model: smp.DistributedModel, batch: dict[str, Tensor]) -> Tensor:
    loss = model(**batch).loss
    model.backward(loss)
    return loss


def prepare(args: argparse.Namespace, device: torch.device) -> tuple[Any, Any, Any, int]:
    """Model, optimizer, schedule and number of finished steps, from a checkpoint if asked for."""
    torch.manual_seed(args.seed)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=48, num_hidden_layers=4, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = smp.DistributedModel(BertForPreTraining(config))
    model.to(device)
    undecayed = ("bias", "LayerNorm.weight")
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not n.endswith(undecayed)], "weight_decay": 0.01},
        {"params": [p for n, p in named if n.endswith(undecayed)], "weight_decay": 0.0},
    ]
    optimizer = smp.DistributedOptimizer(smp.optimizers.FusedLAMB(groups, lr=args.learning_rate))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    found = newest_step(args.output_dir) if args.resume else 0
    if found:
        checkpoint = smp.load(f"{args.output_dir}/ckpt_{found}.pt", partial=True)
        model.load_state_dict(checkpoint["model"], strict=False)  # both wait for the partition in the first step
        optimizer.load_state_dict(checkpoint["optimizer"])
        schedule.load_state_dict(checkpoint["schedule"])
    return model, optimizer, schedule, found


def newest_step(folder: str) -> int:
    """The highest number among the checkpoints, 0 if there are none."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return max((int(match[1]) for name in names if (match := re.match(r"ckpt_(\d+)\.pt_", name))), default=0)


def save(args: argparse.Namespace, step: int, model: Any, optimizer: Any, schedule: Any, kept: list[str]) -> None:
    """Write this rank's part, and delete it from the checkpoints that are too old."""
    if smp.dp_rank() != 0:
        return
    content = {
        "model": model.local_state_dict(),
        "optimizer": optimizer.local_state_dict(),
        "schedule": schedule.state_dict(),
        "args": vars(args),
    }
    name = f"{args.output_dir}/ckpt_{step}.pt"
    smp.save(content, name, partial=True)
    kept.append(name)
    if len(kept) > args.keep:
        old = kept.pop(0)
        os.remove(f"{old}_{smp.mp_rank()}")  # the name that library versions before 1.6 wrote: a link
        os.remove(f"{old}_{smp.pp_rank()}_{smp.tp_rank()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="stop after this step")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--keep", type=int, default=2, help="number of checkpoints to keep")
    parser.add_argument("--output-dir", default="bert_checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--mp_parameters", default="", help="launchers pass the library's settings here; not read")
    args = parser.parse_args()
    transformers_logging.set_verbosity_error()
    if not smp.is_initialized():
        smp.init({"microbatches": MICROBATCHES})
    device = torch.device("cuda", smp.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    model, optimizer, schedule, first = prepare(args, device)
    kept: list[str] = []
    for step in range(first, args.steps):
        batch = {name: values.to(device) for name, values in sentences(step).items()}
        loss = train_step(model, batch).reduce_mean()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        dist.all_reduce(loss, group=smp.get_dp_process_group())
        if smp.rank() == 0:
            print(f"step {step + 1}: loss {loss.item() / smp.dp_size():.6f}", flush=True)
        if (step + 1) % args.save_every == 0:
            save(args, step + 1, model, optimizer, schedule, kept)
    if smp.dp_rank() == 0:
        whole = model.state_dict()  # collective over the stages
        if smp.rank() == 0:
            smp.save({"model": whole}, f"{args.output_dir}/bert_full.pt", partial=False)
            print(f"wrote {sorted(path.name for path in Path(args.output_dir).iterdir())}", flush=True)
    smp.barrier()


if __name__ == "__main__":
    main()
