"""Train a GPT-2 from transformers on the source text of Python's standard library.

One process, no launcher:

    python examples/train_gpt2.py

The same model cut over two pipeline stages; nothing in this file changes:

    shardwright run --pp 2 examples/train_gpt2.py

Or split inside its layers over two tensor-parallel ranks, or both at once:

    shardwright run --tp 2 --ddp examples/train_gpt2.py
    shardwright run --pp 2 --tp 2 --ddp examples/train_gpt2.py

The model works on bytes (vocabulary 256), has about 5M parameters and needs no download. With `--save-at`
it writes a checkpoint on the way, with `--resume` it goes on from one. `make demo` does both and compares.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging as transformers_logging

import shardwright.torch as smp

SEQUENCE = 128
BATCH = 4
MICROBATCHES = 4
CORPUS_BYTES = 4_000_000
PROMPT = b"def "


def corpus() -> Tensor:
    """Bytes of the standard library's modules, in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text[:CORPUS_BYTES]), dtype=torch.uint8)


def batch_of(text: Tensor, step: int) -> Tensor:
    """Token ids [batch, sequence] of one step. They depend on the step alone; a resumed run sees the same."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - SEQUENCE, (BATCH,), generator=generator)
    return torch.stack([text[start : start + SEQUENCE] for start in starts.tolist()]).long()


def build_model() -> GPT2LMHeadModel:
    """A plain transformers model, with the same weights in every process."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=SEQUENCE, n_embd=256, n_layer=6, n_head=8, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def learning_rate(step: int, num_steps: int) -> float:
    """Ten steps of warm-up, then a cosine down to a tenth."""
    warm = min(1.0, (step + 1) / 10)
    return 1e-3 * warm * (0.55 + 0.45 * math.cos(math.pi * step / num_steps))


@smp.step
def train_step(model: smp.DistributedModel, ids: Tensor) -> Tensor:
    """Forward and backward of one microbatch. The library calls it once for each."""
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


def train(args: argparse.Namespace) -> None:
    smp.init({"microbatches": MICROBATCHES, "prescaled_batch": True})  # every rank reads the same samples
    transformers_logging.set_verbosity_error()
    text = corpus()
    plain = build_model()
    smp.set_tensor_parallelism(plain, smp.tp_size() > 1)
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01))
    first_step = 0
    if args.resume:
        first_step = smp.resume_from_checkpoint(args.resume)["step"]
    report = Report(args, first_step)
    with report.progress:
        for step in range(first_step, args.steps):
            optimizer.zero_grad(set_to_none=True)
            loss = train_step(model, batch_of(text, step)).reduce_mean()
            for group in optimizer.param_groups:  # here, because a checkpoint is loaded in the first step
                group["lr"] = learning_rate(step, args.steps)
            optimizer.step()
            report.add(step, loss.item())
            if step + 1 == args.save_at:
                content = {"step": step + 1}
                smp.save_checkpoint(
                    args.checkpoint,
                    tag=f"step_{step + 1}",
                    model=model,
                    optimizer=optimizer,
                    user_content=content,
                )
                report.say(f"saved step {step + 1} to {args.checkpoint}")
    if args.sample:
        weights = model.state_dict()  # collective: every rank calls it
        for to_transformers, _ in smp.state.module_manager.translate_functions:
            weights = to_transformers(weights)
        if smp.rank() == 0:
            print(sample(weights, args.sample), flush=True)
    smp.barrier()


class Report:
    """Progress with loss and speed on rank 0, and a file of losses; nothing on the other ranks."""

    def __init__(self, args: argparse.Namespace, first_step: int) -> None:
        self._shown = smp.rank() == 0
        self._losses = Path(args.losses) if args.losses and self._shown else None
        if self._losses:
            self._losses.write_text("")
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"), disable=not self._shown, transient=True,
        )  # fmt: skip
        self._task = self.progress.add_task("training", total=args.steps, completed=first_step, state="")
        self._last = (first_step, time.perf_counter())
        self._speed = 0.0

    def add(self, step: int, loss: float) -> None:
        """Note one finished step."""
        if not self._shown:
            return
        if self._losses:
            with self._losses.open("a") as file:
                file.write(json.dumps({"step": step, "loss": loss}) + "\n")
        now = time.perf_counter()
        if (step + 1) % 20 == 0:
            self._speed = (step + 1 - self._last[0]) * BATCH * SEQUENCE / (now - self._last[1])
            self._last = (step + 1, now)
            self.say(f"step {step + 1:4d}  loss {loss:.4f}  {self._speed:6.0f} tokens/s")
        self.progress.update(self._task, advance=1, state=f"loss {loss:.3f}  {self._speed:.0f} tokens/s")

    def say(self, words: str) -> None:
        if self._shown:
            self.progress.console.print(words, highlight=False)


def sample(weights: dict[str, Tensor], num_bytes: int) -> str:
    """Let an ordinary model with the trained weights go on from the prompt."""
    model = build_model().eval()
    model.load_state_dict(weights)
    torch.manual_seed(0)
    prompt = torch.tensor([list(PROMPT)])
    out = model.generate(
        prompt, max_new_tokens=min(num_bytes, SEQUENCE - len(PROMPT)), do_sample=True, temperature=0.8,
        top_k=30, attention_mask=torch.ones_like(prompt), pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return bytes(out[0].tolist()).decode(errors="replace")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of the whole run")
    parser.add_argument("--save-at", type=int, help="save a checkpoint after this many steps")
    parser.add_argument("--checkpoint", default="checkpoints", help="folder of the checkpoints")
    parser.add_argument("--resume", metavar="FOLDER", help="go on from the newest checkpoint in this folder")
    parser.add_argument("--losses", metavar="FILE", help="write the loss of every step to this file")
    parser.add_argument("--sample", type=int, default=0, metavar="BYTES", help="at the end, write text this long")
    return parser.parse_args()


if __name__ == "__main__":
    train(arguments())
