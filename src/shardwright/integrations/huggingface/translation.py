"""Whole state dicts from transformers' names to ours and back: what the public translate functions run.

All of them empty the state dict they are given, so that never more than one weight exists twice.
"""

from __future__ import annotations

import importlib.metadata

from packaging import version
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.integrations.huggingface import bert, gpt2, gptj, gptneo, gptneox
from shardwright.integrations.huggingface.adapter import last_config
from shardwright.integrations.huggingface.renaming import Renaming, State

# The first version of transformers whose models have no causal-mask buffers in their state dict.
_WITHOUT_MASKS = version.parse("4.30")


def to_huggingface(table: Renaming, state: State, max_seq_len: int | None, positions: str = "") -> dict[str, Tensor]:
    """Weights of our modules under transformers' names.

    max_seq_len: length of the causal-mask buffers, which only transformers before 4.30 have; by default as many as
        there are rows in the weight called `positions`.
    """
    if _expects_masks() and table.masks:
        if max_seq_len is None and positions in state:
            max_seq_len = state[positions].shape[0]
        if max_seq_len is None:
            raise UsageError(
                "this version of transformers keeps causal masks in its state dicts, and their length is unknown",
                remedy="pass max_seq_len",
            )
        table = table.making_masks(max_seq_len)
    return table.to_huggingface(state)


def bare_or_lm(state: State, lm: Renaming, bare: Renaming, mark: str) -> Renaming:
    """The table for a state dict in transformers' names: that of the bare model if no name starts with `mark`."""
    return lm if any(name.startswith(mark) for name in state) else bare


def gpt2_in(state: State) -> dict[str, Tensor]:
    """A language model, or the bare model that published files hold."""
    table = bare_or_lm(state, gpt2.lm_table(tied=None), gpt2.MODEL_TABLE, "transformer.")
    return table.to_distributed(state)


def gpt2_out(state: State, max_seq_len: int | None) -> dict[str, Tensor]:
    """The inverse of `gpt2_in` for language models."""
    return to_huggingface(gpt2.lm_table(tied=None), state, max_seq_len, "position_embedding.weight")


def gpt2_blocks_in(state: State) -> dict[str, Tensor]:
    """A model, or one block, of which only the blocks are replaced."""
    return _blocks(state).to_distributed(state)


def gpt2_blocks_out(state: State, max_seq_len: int | None) -> dict[str, Tensor]:
    """The inverse of `gpt2_blocks_in`."""
    return to_huggingface(_blocks(state), state, max_seq_len, "transformer.wpe.weight")


def gptj_in(state: State) -> dict[str, Tensor]:
    """A language model or a bare model."""
    return bare_or_lm(state, gptj.lm_table(tied=None), gptj.MODEL_TABLE, "transformer.").to_distributed(state)


def gptj_out(state: State, max_seq_len: int | None) -> dict[str, Tensor]:
    """The inverse of `gptj_in` for language models."""
    return to_huggingface(gptj.lm_table(tied=None), state, max_seq_len)


def gptneo_in(state: State) -> dict[str, Tensor]:
    """A language model or a bare model."""
    return bare_or_lm(state, gptneo.lm_table(tied=None), gptneo.MODEL_TABLE, "transformer.").to_distributed(state)


def gptneo_out(state: State, max_seq_len: int | None) -> dict[str, Tensor]:
    """The inverse of `gptneo_in` for language models."""
    return to_huggingface(gptneo.lm_table(tied=None), state, max_seq_len, "position_embedding.weight")


def gptneox_in(state: State, heads: int | None) -> dict[str, Tensor]:
    """A language model or a bare model."""
    heads = heads or _heads("gptneox")
    lm = gptneox.lm_table(heads, tied=None)
    return bare_or_lm(state, lm, gptneox.model_table(heads), "gpt_neox.").to_distributed(state)


def gptneox_out(state: State, max_seq_len: int | None, heads: int | None) -> dict[str, Tensor]:
    """The inverse of `gptneox_in` for language models."""
    return to_huggingface(gptneox.lm_table(heads or _heads("gptneox"), tied=None), state, max_seq_len)


def encoder_in(state: State) -> dict[str, Tensor]:
    """Any model of BERT's or RoBERTa's with its encoder replaced; names beside the encoder's stay."""
    return bert.MODEL_WITH_ENCODER.to_distributed(state)


def encoder_out(state: State, max_seq_len: int | None) -> dict[str, Tensor]:
    """The inverse of `encoder_in`."""
    return to_huggingface(bert.MODEL_WITH_ENCODER, state, max_seq_len)


def _blocks(state: State) -> Renaming:
    alone = any(name.split(".")[0] in ("ln_1", "attn", "attention", "output", "mlp") for name in state)
    return gpt2.LAYER_TABLE if alone else gpt2.BLOCKS_TABLE


def _heads(family: str) -> int:
    config = last_config(family)
    if config is None:
        raise UsageError(
            "the fused projections can't be taken apart without the number of attention heads",
            remedy="pass num_attention_heads, or wrap the model first",
        )
    return int(config.num_attention_heads)


def _expects_masks() -> bool:
    try:
        return version.parse(importlib.metadata.version("transformers")) < _WITHOUT_MASKS
    except importlib.metadata.PackageNotFoundError:
        return False
