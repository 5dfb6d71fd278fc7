"""Fine-tune a small BERT with a trainer class whose steps are decorated in the class body.

    python examples/trainer_class.py
    shardwright run --pp 2 examples/trainer_class.py
    shardwright run --tp 2 --ddp examples/trainer_class.py

A step function is no method, wherever it is defined: it has no `self`, and `self.train_step(model, batch)` gives it just the
two. The steps return the output object of transformers; each tensor in it has become a `StepOutput`. The last batch of the
evaluation is smaller than the others and does not divide into microbatches. The model is built before `smp.init`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification
from transformers.modeling_outputs import ModelOutput
from transformers.utils import logging as transformers_logging

import smdistributed.modelparallel.torch as smp

CLASSES = 3
WORDS = 90
LENGTH = 12
BATCH = 16
EVALUATED = 43  # two batches of 16 and one of 11

Batch = dict[str, Tensor]


def sentences(seed: int, num_sentences: int) -> Batch:
    """Sentences of random words; the class is the third of the vocabulary that most of them come from."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (num_sentences,), generator=generator)
    shape = (num_sentences, LENGTH)
    topical = torch.randint(0, WORDS // CLASSES, shape, generator=generator) + labels[:, None] * (WORDS // CLASSES)
    anything = torch.randint(0, WORDS, shape, generator=generator)
    words = torch.where(torch.rand(shape, generator=generator) < 0.6, topical, anything)
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": labels}


class Trainer:
    """A loop over one process, as a project had it before its model outgrew the device."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.model = model
        self.optimizer: Any = torch.optim.AdamW(model.parameters(), lr=lr)

    def compute(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Forward and backward; returns the mean loss and the logits."""
        output = self.model(**batch)
        output.loss.backward()
        return output.loss.detach(), output.logits

    def predict(self, batch: Batch) -> Tensor:
        """Logits of a batch."""
        return self.model(**batch).logits

    def train(self, num_steps: int) -> None:
        self.model.train()
        for step in range(num_steps):
            loss, _ = self.compute(sentences(step, BATCH))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.log(f"step {step + 1}: loss {loss.item():.6f}")

    def evaluate(self) -> None:
        self.model.eval()
        data = sentences(10_000, EVALUATED)
        logits = []
        with torch.no_grad():
            for start in range(0, EVALUATED, BATCH):
                batch = {name: values[start : start + BATCH] for name, values in data.items()}
                logits.append(self.predict(batch).cpu())
        hits = (torch.cat(logits).argmax(dim=1) == data["labels"]).sum().item()
        self.log(f"evaluation: {hits} of {EVALUATED} right")

    def log(self, words: str) -> None:
        print(words, flush=True)


class SMPTrainer(Trainer):
    """The same loop with the model cut over processes: the wrap, and two steps in the class body."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        smp.set_tensor_parallelism(model, smp.tp_size() > 1)
        super().__init__(smp.DistributedModel(model, trace_device="cpu", gradient_as_bucket_view=True), lr)
        self.optimizer = smp.DistributedOptimizer(self.optimizer)

    @smp.step
    def train_step(model: smp.DistributedModel, batch: Batch) -> ModelOutput:
        output = model(**batch)
        model.backward(output["loss"])
        return output

    @smp.step
    def prediction_step(model: smp.DistributedModel, batch: Batch) -> ModelOutput:
        return model(**batch)

    def compute(self, batch: Batch) -> tuple[Tensor, Tensor]:
        output = self.train_step(self.model, batch)
        return output.loss.reduce_mean(), output["logits"].concat()

    def predict(self, batch: Batch) -> Tensor:
        return self.prediction_step(self.model, batch).logits.detach().concat()

    def log(self, words: str) -> None:
        if smp.rank() == 0:
            super().log(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    transformers_logging.set_verbosity_error()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=LENGTH, num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    smp.init({"microbatches": 2, "prescaled_batch": True})
    trainer = SMPTrainer(model, lr=2e-3)
    trainer.train(args.steps)
    trainer.evaluate()


if __name__ == "__main__":
    main()
