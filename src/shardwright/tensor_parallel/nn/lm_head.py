"""`DistributedTransformerLMHead`: embeddings, transformer, and a language model head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from shardwright.errors import ConfigError, UsageError
from shardwright.sharding.spec import ShardSpec
from shardwright.tensor_parallel import batch, randomness
from shardwright.tensor_parallel.module import (
    DistributedModule,
    keeps_hidden_sliced,
    normal,
    prescaled_batch,
    tp_rank,
    tp_size,
)
from shardwright.tensor_parallel.nn import loss
from shardwright.tensor_parallel.nn.embedding import DistributedEmbedding, padding_index, table_init
from shardwright.tensor_parallel.nn.functional import column_linear
from shardwright.tensor_parallel.nn.norm import FusedLayerNorm, RMSNorm, make_norm
from shardwright.tensor_parallel.nn.options import StackOptions, check_known, spelled_out
from shardwright.tensor_parallel.nn.transformer import DistributedTransformer
from shardwright.transport import differentiable as comm


class DistributedTransformerLMHead(DistributedModule):
    """A transformer with embeddings and a language model head.

    inputs: (input_ids, attention_mask, token_type_ids, position_ids, labels); with cross attention
        (input_ids, attention_mask, token_type_ids, position_ids, cross_states, cross_mask, labels), or the same
        with cross_states once more before labels. All but input_ids may be None.
    attention_mask, cross_mask: [B, S], 1 = masked.
    Returns: logits [B, S, V], or (loss, logits) with labels; without the head (add_lm_head False) hidden states.
    labels: shifted by one inside with `shift_labels`.

    num_positions: 0 for no position embedding.   num_token_types: 0 for none.
    final_layernorm: default: pre_layernorm and not post_layernorm.
    distribute_embedding: word embedding and head are split over the vocabulary.
    gather_logits: False: with labels (loss, None) is returned; without them this rank's slice of the
        vocabulary.
    embedding_scale: factor on word embeddings.
    padding_idx: the token whose word embedding gets no gradient from being looked up.
    """

    @spelled_out(StackOptions)
    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        vocab_size: int = 30522,
        num_positions: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        num_token_types: int = 0,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        add_lm_head: bool = True,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        tie_word_embeddings: bool = True,
        lm_head_bias: bool = False,
        embedding_dropout_prob: float | None = None,
        final_layernorm: bool | None = None,
        embedding_layernorm: bool = False,
        distribute_embedding: bool = False,
        gather_logits: bool = True,
        embedding_scale: float | None = None,
        padding_idx: int | None = None,
        shift_labels: bool = True,
        attention_windows: Sequence[int | None] | None = None,
        nested: bool = False,
        **options: Unpack[StackOptions],
    ) -> None:
        super().__init__()
        check_known(options, StackOptions, type(self).__name__)
        if distribute_embedding and vocab_size < tp_size():
            raise ConfigError(
                f"'vocab_size' is {vocab_size}, expected at least 'tensor_parallel_degree' ({tp_size()}) with "
                "'distribute_embedding'"
            )
        norm = options.get("norm", "layernorm")
        self.crossing = add_cross_attention
        self.distribute_embedding = distribute_embedding
        self.embedding_scale = embedding_scale
        sliced = keeps_hidden_sliced()

        def table(num_rows: int, words: bool = False) -> nn.Module:
            padding = padding_idx if words else None
            if not distribute_embedding:
                return OwnEmbedding(num_rows, hidden_size, initializer_range, padding)
            split = "vocabulary" if words else "embedding" if sliced else None
            return DistributedEmbedding(
                num_rows,
                hidden_size,
                padding,
                initializer_range=initializer_range,
                split=split,  # type: ignore[arg-type]
                nested=True,
            )

        self.word_embedding = table(vocab_size, words=True)
        self.position_embedding = table(num_positions) if num_positions else None
        self.token_type_embedding = table(num_token_types) if num_token_types else None
        self.embedding_layernorm: nn.Module | None = None
        if embedding_layernorm:
            self.embedding_layernorm = make_norm(
                norm, hidden_size, layernorm_epsilon, sliced=sliced and distribute_embedding
            )
            if not distribute_embedding:
                _acts_on_own_samples(self.embedding_layernorm)
        if embedding_dropout_prob is None:
            embedding_dropout_prob = hidden_dropout_prob
        self.embedding_dropout = (
            HiddenDropout(embedding_dropout_prob, split=sliced if distribute_embedding else not prescaled_batch())
            if embedding_dropout_prob
            else None
        )
        self.enter = batch.EnterScaledBatch()
        self.transformer = DistributedTransformer(
            num_layers,
            num_attention_heads,
            attention_head_size,
            hidden_size,
            intermediate_size,
            attention_dropout_prob,
            hidden_dropout_prob,
            activation,
            layernorm_epsilon,
            initializer_range,
            use_normal_initialization,
            causal_mask_size,
            add_cross_attention,
            pre_layernorm,
            post_layernorm,
            attention_windows=attention_windows,
            nested=True,
            **options,
        )
        if final_layernorm is None:
            final_layernorm = pre_layernorm and not post_layernorm
        self.layernorm = make_norm(norm, hidden_size, layernorm_epsilon, sliced=sliced) if final_layernorm else None
        self.leave = batch.LeaveScaledBatch() if not (distribute_embedding and add_lm_head) else None
        self.lm_head = (
            LanguageModelHead(
                hidden_size,
                vocab_size,
                self.word_embedding.weight if tie_word_embeddings else None,  # type: ignore[arg-type]
                lm_head_bias,
                initializer_range=initializer_range,
                distributed=distribute_embedding,
                gather_logits=gather_logits,
                shift_labels=shift_labels,
            )
            if add_lm_head
            else None
        )

    def forward(self, inputs: Tensor | tuple[Any, ...]) -> Any:
        """Called by: every rank of the tp group. Collectives: those of its children."""
        ids, mask, token_types, position_ids, states, cross_mask, labels = self._unpack(inputs)
        hidden = self.word_embedding(ids)
        if self.embedding_scale is not None:
            hidden = hidden * self.embedding_scale
        if self.position_embedding is not None:
            default = torch.arange(ids.shape[1], device=ids.device) if position_ids is None else position_ids
            hidden = hidden + self.position_embedding(default)
        if self.token_type_embedding is not None:
            hidden = hidden + self.token_type_embedding(torch.zeros_like(ids) if token_types is None else token_types)
        if self.embedding_layernorm is not None:
            hidden = self.embedding_layernorm(hidden)
        if self.embedding_dropout is not None:
            hidden = self.embedding_dropout(hidden)
        entered, mask, cross_mask, position_ids = self.enter(
            None if self.distribute_embedding else hidden,
            _additive(mask),
            _additive(cross_mask),
            position_ids if self._turns_positions() else None,
            num_samples=ids.shape[0],
        )
        hidden = hidden if entered is None else entered
        if self.crossing:
            (states,) = self.enter(states)
            (hidden, *_) = self.transformer((hidden, states, mask, cross_mask), position_ids)
        else:
            (hidden, *_) = self.transformer((hidden, mask), position_ids)
        if self.layernorm is not None:
            hidden = self.layernorm(hidden)
        if self.leave is not None:
            hidden = self.leave(hidden)
        return hidden if self.lm_head is None else self.lm_head(hidden, labels)

    def _turns_positions(self) -> bool:
        """Whether position ids mean something beyond the embedding: to rotary layers only."""
        return any(getattr(layer.attention, "rotary_frequencies", None) for layer in self.transformer.seq_layers)

    def _unpack(self, inputs: Tensor | tuple[Any, ...]) -> tuple[Any, ...]:
        values = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        most = 8 if self.crossing else 5
        if not values or len(values) > most:
            raise UsageError(f"the language model got {len(values)} inputs, expected {most - self.crossing}")
        if not self.crossing:
            ids, mask, types, positions, labels = _padded(values, 5)
            return ids, mask, types, positions, None, None, labels
        if len(values) == 8:  # cross_states twice
            values = (*values[:6], values[7]) if values[6] is values[4] else (*values[:5], *values[6:])
        ids, mask, types, positions, states, cross_mask, labels = _padded(values, 7)
        if states is None:
            raise UsageError("the language model has cross attention, but 'cross_states' is None")
        return ids, mask, types, positions, states, cross_mask, labels


class LanguageModelHead(DistributedModule):
    """Hidden states to logits, and to the loss if there are labels.

    weight: the word embedding's own parameter if that is given (tied).
    distributed: the vocabulary is split over the tp ranks, hidden states are those of the scaled batch; else
        weight and bias are whole and work on this rank's own samples.
    Called by: every rank of the tp group. Collectives, if distributed: those of `column_linear`, an all-gather
        of the labels and one of two numbers per token; an exchange of the logits if they are returned.
    """

    indivisible: ClassVar[bool] = True
    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        weight: nn.Parameter | None,
        bias: bool,
        *,
        initializer_range: float,
        distributed: bool,
        gather_logits: bool,
        shift_labels: bool,
    ) -> None:
        super().__init__()
        self.scaled_batch = distributed
        self.distributed = distributed
        self.gather_logits = gather_logits
        self.shift_labels = shift_labels
        self.sliced = keeps_hidden_sliced()
        self.prescaled = prescaled_batch()
        shape = (vocab_size, hidden_size)
        self.vocabulary = ShardSpec.even((vocab_size,), 0, tp_size()).ranges
        if weight is None:
            self.add_parameter("weight", shape, normal(initializer_range), 0 if distributed else None)
        else:
            self.weight = weight
            self.describe(
                "weight", ShardSpec(shape, 0, self.vocabulary) if distributed else ShardSpec.replicated(shape)
            )
        if bias:
            self.add_parameter("bias", (vocab_size,), 0.0, 0 if distributed else None)
        else:
            self.register_parameter("bias", None)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Any:
        """Returns: logits [B, S, V]; with labels (loss, logits), or (loss, None) without `gather_logits`.

        hidden: [B, S, H], if distributed [tp * B, S, H] or [tp * B, S, H / tp].   labels: [B, S].
        """
        if labels is not None and self.shift_labels:
            labels = loss.next_tokens(labels)
        if not self.distributed:
            logits = nn.functional.linear(hidden, self.weight, self.bias)
            return logits if labels is None else (loss.cross_entropy(logits, labels), logits)
        (logits,) = column_linear(hidden, [self.weight], [self.bias], sliced=self.sliced)
        if labels is None:
            return self._gathered(logits) if self.gather_logits else logits
        found = self._loss(logits, labels)
        return found, self._gathered(logits) if self.gather_logits else None

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        everyones = labels if self.prescaled else comm.gather_batch(labels)
        start, _ = self.vocabulary[tp_rank()]
        losses = loss.token_losses(logits, everyones, start, reuse_logits=not self.gather_logits)
        return loss.mean_loss(losses if self.prescaled else comm.own_batch(losses), labels)

    def _gathered(self, logits: Tensor) -> Tensor:
        lengths = [stop - start for start, stop in self.vocabulary]
        return comm.gather_pieces(logits, lengths) if self.prescaled else comm.pieces_to_batch(logits, lengths)


class OwnEmbedding(DistributedModule, nn.Embedding):
    """A whole lookup table that works on this rank's own samples. Collectives: none."""

    scaled_batch = False

    def __init__(
        self, num_embeddings: int, embedding_dim: int, initializer_range: float, padding_idx: int | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_index(padding_idx, num_embeddings)
        self.max_norm = None
        self.norm_type = 2.0
        self.scale_grad_by_freq = False
        self.sparse = False
        self.add_parameter("weight", (num_embeddings, embedding_dim), table_init(initializer_range, self.padding_idx))


class HiddenDropout(nn.Module):
    """Dropout on hidden states. split: each tp rank has other ones (its own samples, or a slice)."""

    def __init__(self, probability: float, *, split: bool) -> None:
        super().__init__()
        self.probability = probability
        self.split = split

    def forward(self, hidden: Tensor) -> Tensor:
        return randomness.dropout(hidden, self.probability, self.training, split=self.split)


def _padded(values: tuple[Any, ...], num: int) -> list[Any]:
    return [*values, *[None] * (num - len(values))]


def _acts_on_own_samples(norm: nn.Module) -> None:
    assert isinstance(norm, (FusedLayerNorm, RMSNorm))
    norm.scaled_batch = False  # type: ignore[assignment]


def _additive(mask: Tensor | None) -> Tensor | None:
    """[B, S], 1 = masked, to what is added to scores: [B, 1, 1, S], the lowest number there is where masked."""
    if mask is None:
        return None
    return mask[:, None, None, :].to(torch.float32) * torch.finfo(torch.float32).min
