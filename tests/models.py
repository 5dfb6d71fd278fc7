"""The models that tests train: tiny, deterministic, built without network access.

    model, make_batch, loss_of = models.make("gpt2")
    loss = loss_of(model, make_batch(seed=0, batch_size=8))     # plain PyTorch, or inside a `smp.step` body

Equal arguments give equal weights and equal batches in every process. `MODELS` lists the names.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import hf_models
import plain_modules

VOCABULARY = 101
SEQUENCE = 16
IGNORED = -100

Batch = dict[str, Tensor]
MakeBatch = Callable[[int, int], Batch]
LossOf = Callable[[nn.Module, Batch], Tensor]


class Made(NamedTuple):
    """A model, `make_batch(seed, batch_size)` and `loss_of(model, batch)`."""

    model: nn.Module
    make_batch: MakeBatch
    loss_of: LossOf


@dataclass(frozen=True)
class ModelSpec:
    """How to build one test model.

    build: called with the dropout probability.
    tied: two modules hold the same parameter.
    reordered: why a pipeline may add up some gradient in another order than one process; "" means that
        results must be equal bit for bit.
    tail: modules that a partition by hand puts on the last stage.
    """

    build: Callable[[float], nn.Module]
    make_batch: MakeBatch
    loss_of: LossOf
    tied: bool = False
    reordered: str = ""
    tail: tuple[str, ...] = ()


# ------------------------------------------------------------------ batches


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + seed)


def _tokens(generator: torch.Generator, batch_size: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch_size, SEQUENCE), generator=generator)


def causal_batch(seed: int, batch_size: int) -> Batch:
    """Token ids that are their own labels."""
    ids = _tokens(_generator(seed), batch_size)
    return {"input_ids": ids, "labels": ids.clone()}


def padded_causal_batch(seed: int, batch_size: int) -> Batch:
    """Sequences of different length with an attention mask; padding carries no label."""
    generator = _generator(seed)
    ids = _tokens(generator, batch_size)
    lengths = torch.randint(SEQUENCE // 2, SEQUENCE + 1, (batch_size, 1), generator=generator)
    mask = (torch.arange(SEQUENCE) < lengths).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


def masked_batch(seed: int, batch_size: int) -> Batch:
    """Masked language modelling: every third token is hidden and is the only one with a label."""
    batch = padded_causal_batch(seed, batch_size)
    hidden = torch.arange(SEQUENCE) % 3 == seed % 3
    labels = batch["labels"].masked_fill(~hidden, IGNORED)
    batch["input_ids"] = batch["input_ids"].masked_fill(hidden, 1)
    batch["token_type_ids"] = (torch.arange(SEQUENCE) >= SEQUENCE // 2).long().expand(batch_size, -1).contiguous()
    return {**batch, "labels": labels}


def translation_batch(seed: int, batch_size: int) -> Batch:
    """Source sequences with a mask, and shorter target sequences."""
    batch = padded_causal_batch(seed, batch_size)
    return {**batch, "labels": _tokens(_generator(seed + 500), batch_size)[:, : SEQUENCE - 5].contiguous()}


def image_batch(seed: int, batch_size: int) -> Batch:
    """Images of 3 x 8 x 8 with a class each."""
    generator = _generator(seed)
    images = torch.randn(batch_size, 3, 8, 8, generator=generator)
    return {
        "x": images,
        "labels": torch.randint(0, plain_modules.CLASSES, (batch_size,), generator=generator),
    }


def pixel_batch(seed: int, batch_size: int) -> Batch:
    """The images of `image_batch` under the name that transformers uses."""
    batch = image_batch(seed, batch_size)
    return {"pixel_values": batch["x"], "labels": batch["labels"]}


def vector_batch(seed: int, batch_size: int) -> Batch:
    """Vectors with a class each."""
    generator = _generator(seed)
    x = torch.randn(batch_size, plain_modules.WIDTH, generator=generator)
    return {"x": x, "labels": torch.randint(0, plain_modules.CLASSES, (batch_size,), generator=generator)}


def vector_sequence_batch(seed: int, batch_size: int) -> Batch:
    """Sequences of three vectors with a class each."""
    batch = vector_batch(seed, batch_size * 3)
    return {"x": batch["x"].view(batch_size, 3, -1), "labels": batch["labels"][:batch_size]}


# ------------------------------------------------------------------ losses


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that a transformers model computes itself."""
    return model(**batch).loss


def classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of a plain model's output, computed outside of the model."""
    return nn.functional.cross_entropy(model(batch["x"]), batch["labels"])


# ------------------------------------------------------------------ transformers models

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": SEQUENCE,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _gpt2(dropout: float, **changes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY, "n_positions": SEQUENCE, "n_embd": 32, "n_layer": 4, "n_head": 4,
        "resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout, "use_cache": False,
        "bos_token_id": 0, "eos_token_id": 2,
    }  # fmt: skip
    return GPT2LMHeadModel(GPT2Config(**{**settings, **changes}))


def _llama(dropout: float) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **_SIZES, num_hidden_layers=4, num_key_value_heads=2, attention_dropout=dropout, use_cache=False,
        tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _qwen3(dropout: float) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **_SIZES, num_hidden_layers=4, num_key_value_heads=2, head_dim=8, attention_dropout=dropout,
        use_cache=False, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def _mixtral(dropout: float) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **_SIZES, num_hidden_layers=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        attention_dropout=dropout, use_cache=False, output_router_logits=True, router_aux_loss_coef=0.05,
        tie_word_embeddings=False,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def _bert(dropout: float) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        **_SIZES, num_hidden_layers=4, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )
    return BertForMaskedLM(config)


def _roberta(dropout: float) -> nn.Module:
    from transformers import RobertaConfig, RobertaForMaskedLM

    sizes = {**_SIZES, "max_position_embeddings": SEQUENCE + 1}  # positions begin after padding's
    config = RobertaConfig(
        **sizes, num_hidden_layers=4, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )
    return RobertaForMaskedLM(config)


def _t5(dropout: float) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_decoder_layers=3, num_heads=4,
        dropout_rate=dropout, use_cache=False, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
        relative_attention_num_buckets=8,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def _vit(dropout: float) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48, image_size=8,
        patch_size=2, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        num_labels=plain_modules.CLASSES,
    )  # fmt: skip
    return ViTForImageClassification(config)


def _of_family(case: str, **sizes: Any) -> Callable[[float], nn.Module]:
    """A model of `hf_models`, long enough for stages; without dropout at any argument."""
    return lambda dropout: hf_models.make(case, **sizes)


# ------------------------------------------------------------------ the list

_USES = "a value that several stages read receives its gradients in the order of its readers"
_ROUTER = "transformers 4 hands router logits out of the gate, where the auxiliary loss's gradient meets the experts' later"


def _transformers_4() -> bool:
    return importlib.metadata.version("transformers").startswith("4.")


MODELS: dict[str, ModelSpec] = {
    "gpt2": ModelSpec(_gpt2, causal_batch, own_loss, tied=True, tail=("transformer.ln_f", "lm_head")),
    "gpt2_untied": ModelSpec(
        lambda p: _gpt2(p, tie_word_embeddings=False),
        causal_batch,
        own_loss,
        tail=("transformer.ln_f", "lm_head"),
    ),
    "gpt2_cache": ModelSpec(lambda p: _gpt2(p, use_cache=True, tie_word_embeddings=False), causal_batch, own_loss),
    "llama": ModelSpec(_llama, padded_causal_batch, own_loss, tail=("lm_head",)),
    "qwen3": ModelSpec(_qwen3, causal_batch, own_loss, tied=True, tail=("model.norm", "lm_head")),
    "mixtral": ModelSpec(_mixtral, padded_causal_batch, own_loss, reordered=_ROUTER if _transformers_4() else ""),
    "gptj": ModelSpec(_of_family("gptj", n_layer=4), causal_batch, own_loss, tail=("lm_head",)),
    "gptneo": ModelSpec(
        _of_family("gptneo", num_layers=4, attention_types=[[["global", "local"], 2]]),
        causal_batch,
        own_loss,
        tied=True,
        tail=("lm_head",),
    ),
    "gptneox": ModelSpec(_of_family("gptneox", num_hidden_layers=4), causal_batch, own_loss),
    "mistral": ModelSpec(_of_family("mistral", num_hidden_layers=4), padded_causal_batch, own_loss, tail=("lm_head",)),
    "qwen2": ModelSpec(_of_family("qwen2", num_hidden_layers=4), padded_causal_batch, own_loss, tail=("lm_head",)),
    "roberta": ModelSpec(_roberta, masked_batch, own_loss, tied=True, tail=("lm_head",)),
    "bert": ModelSpec(_bert, masked_batch, own_loss, tied=True, tail=("cls",)),
    "t5": ModelSpec(_t5, translation_batch, own_loss, tied=True, reordered=_USES, tail=("lm_head",)),
    "vit": ModelSpec(_vit, pixel_batch, own_loss, tail=("classifier",)),
    "resnet": ModelSpec(lambda _: plain_modules.ResNet(), image_batch, classification_loss),
    "mlp": ModelSpec(lambda _: plain_modules.Mlp(), vector_batch, classification_loss, tail=("head",)),
    "mlp_reuse": ModelSpec(lambda _: plain_modules.ReusedBlockMlp(), vector_batch, classification_loss),
    "branching": ModelSpec(
        lambda _: plain_modules.BranchingMlp(),
        vector_batch,
        classification_loss,
        reordered="a microbatch that takes another branch than expected takes its turns last",
    ),
    "root_parameters": ModelSpec(lambda _: plain_modules.RootParameters(), vector_sequence_batch, classification_loss),
    "long_residual": ModelSpec(
        lambda _: plain_modules.LongResidual(), vector_batch, classification_loss, reordered=_USES
    ),
    "buffered": ModelSpec(lambda _: plain_modules.Buffered(), vector_batch, classification_loss),
}


def make(name: str, *, dropout: float = 0.0, seed: int = 0) -> Made:
    """Build the model called `name` with weights that depend on `seed` only.

    The caller's random state is left as it was.
    """
    spec = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = spec.build(dropout)
    return Made(model, spec.make_batch, spec.loss_of)


def block_names(model: nn.Module) -> list[str]:
    """Names of the repeated blocks in order: the elements of the outermost module lists and sequences."""
    found: list[str] = []

    def visit(module: nn.Module, name: str) -> None:
        for child_name, child in module.named_children():
            full = f"{name}.{child_name}" if name else child_name
            if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1:
                found.extend(f"{full}.{index}" for index in range(len(child)))
            else:
                visit(child, full)

    visit(model, "")
    return found


def even_stages(names: list[str], num_stages: int) -> dict[str, int]:
    """Deal names out over stages in runs whose lengths differ by one at most."""
    return {name: index * num_stages // len(names) for index, name in enumerate(names)}
