"""Units of transformers models: caches, recorded outputs, the models' own checkpointing - against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
import step_cases
from step_cases import Case, Verdict

TIED = "a tied weight, or a value that several stages read"


def gpt2(**changes: Any) -> nn.Module:
    return models._gpt2(0.0, tie_word_embeddings=False, **changes)


def llama() -> nn.Module:
    return models._llama(0.0)


def mixtral() -> nn.Module:
    return models._mixtral(0.0)


GPT2 = {f"transformer.h.{i}": 1 for i in (2, 3)} | {"transformer.ln_f": 1, "lm_head": 1}
LLAMA = {f"model.layers.{i}": 1 for i in (2, 3)} | {"model.norm": 1, "lm_head": 1}


def ids(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (models.causal_batch(step, 4)["input_ids"],), {}


def lengths(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Shorter sequences after the schedule is settled."""
    (x,), _ = ids(step)
    return (x[:, : (16 if step < 3 else 12)].contiguous(),), {}


def plain(model: Any, x: Tensor) -> Any:
    out = model(input_ids=x, labels=x)
    model.backward(out.loss)
    return out.loss, out.logits


def two_calls(model: Any, x: Tensor) -> Any:
    """The second call goes on from the cache of the first; both count."""
    first = model(input_ids=x[:, :10], use_cache=True)
    cache = first.past_key_values
    assert cache.get_seq_length() == 10
    second = model(input_ids=x[:, 10:], past_key_values=cache, use_cache=True)
    assert second.past_key_values is cache
    assert cache.get_seq_length() == x.shape[1]
    logits = torch.cat([first.logits, second.logits], dim=1)
    loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), x[:, 1:].reshape(-1))
    model.backward(loss)
    return loss, logits, cache.layers[0].keys, cache.layers[3].values


def hidden_states(model: Any, x: Tensor) -> Any:
    """Hidden states and attention weights of all layers count in the loss."""
    out = model(input_ids=x, labels=x, output_hidden_states=True, output_attentions=True)
    assert len(out.hidden_states) == 5
    assert len(out.attentions) == 4
    loss = out.loss + sum(h.square().mean() for h in out.hidden_states) + sum(a.square().mean() for a in out.attentions)
    model.backward(loss)
    return loss, out.hidden_states, out.attentions


def router_logits(model: Any, x: Tensor) -> Any:
    out = model(input_ids=x, labels=x, output_router_logits=True)
    assert len(out.router_logits) == 4
    model.backward(out.loss)
    return out.loss, out.aux_loss, out.router_logits


def recompute(reentrant: bool, needs_inputs: bool) -> Any:
    def prepare(model: Any) -> None:
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if needs_inputs:
            model.enable_input_require_grads()

    return prepare


def evaluate(model: Any, step: int) -> None:
    model.eval()


def eager(build: Any) -> Any:
    def made() -> nn.Module:
        model = build()
        model.set_attn_implementation("eager")
        return model

    return made


CASES = [
    Case("gpt2_default_cache", lambda: gpt2(use_cache=True), plain, ids, GPT2, steps=3),
    Case("gpt2_two_calls", lambda: gpt2(use_cache=True), two_calls, ids, GPT2, steps=3, reordered=TIED),
    Case("llama_two_calls", llama, two_calls, ids, LLAMA, steps=3, reordered=TIED),
    Case("gpt2_lengths", gpt2, plain, lengths, GPT2, steps=6, microbatches=4),
    Case("gpt2_hidden_states", eager(gpt2), hidden_states, ids, GPT2, reordered=TIED),
    Case("llama_hidden_states", eager(llama), hidden_states, ids, LLAMA, reordered=TIED),
    Case("mixtral_router_logits", mixtral, router_logits, ids, LLAMA, reordered=TIED),
    Case("gpt2_recompute", gpt2, plain, ids, GPT2, prepare=recompute(False, False)),
    Case("gpt2_recompute_reentrant", gpt2, plain, ids, GPT2, prepare=recompute(True, True)),
    Case("llama_recompute", llama, plain, ids, LLAMA, prepare=recompute(False, True)),
    Case("llama_recompute_reentrant", llama, plain, ids, LLAMA, prepare=recompute(True, True)),
    Case(
        "gpt2_eval",
        lambda: gpt2(use_cache=True),
        lambda model, x: model(input_ids=x).logits,
        ids,
        GPT2,
        grad=False,
        before_step=evaluate,
    ),
]


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[str, list[Verdict]]:
    return step_cases.run_on_pools(request, CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_transformers(case: Case, verdicts: dict[str, list[Verdict]]) -> None:
    step_cases.check(case, verdicts[case.name])
