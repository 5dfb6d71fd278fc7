"""Train, evaluate, predict, save and resume with the unmodified Trainer of transformers. Started by tests.

    trainer_script.py FOLDER NAME=VALUE...

The values are arguments of `TrainingArguments`; results are written to FOLDER/results.json by rank 0.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)


class Samples(torch.utils.data.Dataset):
    def __init__(self, num, seed, kind):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, 64, (num, 12), generator=generator)
        self.labels = self.ids.clone() if kind == "gpt2" else self.ids.sum(1) % 3
        if kind == "gpt2":
            self.labels[:, 0] = -100  # has no prediction; the plain Trainer would count it
        self.asked = []  # indices in the order in which they were read

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        self.asked.append(index)
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def build(kind, dropout):
    torch.manual_seed(0)
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(n_layer=4, n_embd=32, n_head=4, vocab_size=64, n_positions=16, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
        )
    return BertForSequenceClassification(
        BertConfig(
            num_hidden_layers=4,
            hidden_size=32,
            num_attention_heads=4,
            intermediate_size=64,
            vocab_size=64,
            max_position_embeddings=16,
            num_labels=3,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )


def main():
    folder = Path(sys.argv[1])
    options = {name: json.loads(value) for name, _, value in (word.partition("=") for word in sys.argv[2:])}
    kind, marked = options.pop("kind", "gpt2"), options.pop("marked", False)
    resume = options.pop("resume", None)
    dropout = options.pop("dropout", 0.0)
    arguments = TrainingArguments(
        output_dir=str(folder),
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        save_strategy=options.pop("save_strategy", "no"),
        **options,
    )
    model = build(kind, dropout)
    if marked:
        import smdistributed.modelparallel.torch as smp

        smp.set_tensor_parallelism(model)
    samples = Samples(48, 1, kind)
    trainer = Trainer(model, arguments, train_dataset=samples, eval_dataset=Samples(21, 2, kind))
    trainer.train(resume_from_checkpoint=None if resume is None else str(folder / resume))
    evaluated = trainer.evaluate()
    predicted = trainer.predict(Samples(13, 3, kind))
    trainer.save_model(str(folder / "final"))
    if trainer.is_world_process_zero():
        results = {
            "log": [{k: entry[k] for k in ("step", "loss", "grad_norm", "learning_rate") if k in entry}
                    for entry in trainer.state.log_history if "loss" in entry],
            "eval_loss": evaluated["eval_loss"],
            "eval_log": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
            "predictions": predicted.predictions.tolist(),
            "best": trainer.state.best_model_checkpoint,
            "asked": samples.asked,
        }  # fmt: skip
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
