"""`DistributedTransformerLayer` and `DistributedTransformer`: containers, with only glue in their forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, nn
from typing_extensions import Unpack

from shardwright.errors import ConfigError, UsageError
from shardwright.tensor_parallel import batch
from shardwright.tensor_parallel.module import DistributedModule, keeps_hidden_sliced
from shardwright.tensor_parallel.nn.attention import DistributedAttentionLayer
from shardwright.tensor_parallel.nn.mixture import DistributedMixtureOutputLayer
from shardwright.tensor_parallel.nn.mlp import DistributedTransformerOutputLayer
from shardwright.tensor_parallel.nn.norm import make_norm
from shardwright.tensor_parallel.nn.options import (
    ATTENTION,
    MIXTURE,
    OUTPUT,
    LayerOptions,
    StackOptions,
    check_known,
    chosen,
    spelled_out,
)
from shardwright.tensor_parallel.nn.residual import check_norms


class DistributedTransformerLayer(DistributedModule):
    """Attention, cross attention if asked for, and the output layer.

    (hidden, mask) -> (hidden, mask); with cross attention (hidden, cross_states, mask, cross_mask) -> same.
    Children: attention, cross_attention, output.
    """

    @spelled_out(LayerOptions)
    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        use_alibi: bool = False,
        alibi_bias_max: int = 8,
        *,
        nested: bool = False,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        check_known(options, LayerOptions, type(self).__name__)
        check_norms(pre_layernorm, post_layernorm)
        self.parallel_residual = options.get("parallel_residual")
        plain = not (post_layernorm or add_cross_attention or options.get("relative_attention_buckets"))
        if self.parallel_residual is not None and not (plain and pre_layernorm):
            raise ConfigError(
                f"'parallel_residual' is {self.parallel_residual!r}, expected None with 'post_layernorm', with "
                "'add_cross_attention', with a relative bias, or without 'pre_layernorm'"
            )
        shared_norm = self.parallel_residual == "shared_norm"
        given: dict[str, Any] = {"use_alibi": use_alibi, "alibi_bias_max": alibi_bias_max, **options}
        common: dict[str, Any] = {
            "hidden_size": hidden_size,
            "hidden_dropout_prob": hidden_dropout_prob,
            "layernorm_epsilon": layernorm_epsilon,
            "initializer_range": initializer_range,
            "use_normal_initialization": use_normal_initialization,
            "post_layernorm": post_layernorm,
            "residual": self.parallel_residual is None,
            "nested": True,
        }

        def attention(cross: bool) -> DistributedAttentionLayer:
            chosen_here = chosen(given, ATTENTION | {"use_alibi", "alibi_bias_max"})
            if cross:  # what tells the positions of queries and keys is for self attention
                for name in ("rotary_frequencies", "window_size", "use_alibi", "relative_attention_buckets"):
                    chosen_here.pop(name, None)
            return DistributedAttentionLayer(
                num_attention_heads,
                attention_head_size,
                attention_dropout_prob=attention_dropout_prob,
                cross_attention=cross,
                causal_mask_size=causal_mask_size,
                pre_layernorm=pre_layernorm,
                return_normed=shared_norm,
                **common,
                **chosen_here,
            )

        self.nested = nested
        if not nested:
            self.enter = batch.EnterScaledBatch()
            self.leave = batch.LeaveScaledBatch()
        self.attention = attention(cross=False)
        self.cross_attention = attention(cross=True) if add_cross_attention else None
        common |= {
            "intermediate_size": intermediate_size,
            "activation": activation,
            "pre_layernorm": pre_layernorm and not shared_norm,
        }
        self.output: DistributedTransformerOutputLayer | DistributedMixtureOutputLayer
        if options.get("num_experts") is None:
            self.output = DistributedTransformerOutputLayer(**common, **chosen(given, OUTPUT))
        else:
            mixture = {name: value for name, value in chosen(given, MIXTURE).items() if value is not None}
            if "split_experts" in given:
                mixture["split_experts"] = given["split_experts"]
            self.output = DistributedMixtureOutputLayer(**common, **mixture)

    def forward(
        self,
        inputs: Tensor | tuple[Any, ...],
        position_ids: Tensor | None = None,
        position_bias: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Returns: what came in, with new hidden states (and with a relative bias, the mask with it).

        position_bias: in place of the mask, the one that a layer with a relative bias returned: for the scaled
            batch and this rank's heads. For layers that aren't nested, whose own mask would be exchanged. It is
            returned as the mask again.
        Called by: every rank of the tp group. Collectives: those of its children.
        """
        hidden, states, mask, cross_mask = unpack(inputs, self.cross_attention is not None)
        given = (states, mask, cross_mask)
        if not self.nested:
            hidden, mask, cross_mask, position_ids = self.enter(hidden, mask, cross_mask, position_ids)
            if states is not None:
                (states,) = self.enter(states)
        if position_bias is not None:
            mask = position_bias
            given = (states, mask, cross_mask)
        attended = self.attention((hidden, mask), position_ids)
        if self.parallel_residual is not None:
            attended, normed = attended if isinstance(attended, tuple) else (attended, hidden)
            hidden = hidden + attended + self.output(normed)
        else:
            if isinstance(attended, tuple):
                hidden, mask = attended
                given = (states, mask, cross_mask)
            else:
                hidden = attended
            if self.cross_attention is not None:
                hidden = self.cross_attention((hidden, states, cross_mask))
            hidden = self.output(hidden)
        if not self.nested:
            hidden = self.leave(hidden)
        states, mask, cross_mask = given
        return (hidden, mask) if self.cross_attention is None else (hidden, states, mask, cross_mask)


def unpack(inputs: Tensor | tuple[Any, ...], crossing: bool) -> tuple[Any, ...]:
    """Return (hidden, cross_states, mask, cross_mask); what isn't there is None."""
    values = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    form = "(hidden, cross_states, mask, cross_mask)" if crossing else "(hidden, mask)"
    if len(values) > (4 if crossing else 2) or (crossing and (len(values) < 2 or values[1] is None)):
        raise UsageError(f"got {len(values)} inputs, expected {form}")
    if not crossing:
        return values[0], None, values[1] if len(values) == 2 else None, None
    return (*values, *(None,) * (4 - len(values)))


class DistributedTransformer(DistributedModule):
    """A stack of layers, `seq_layers`; input and output as one layer's.

    attention_windows: for each layer its `window_size` or None.
    final_layernorm: a norm after the last layer (`layernorm`).
    """

    @spelled_out(StackOptions)
    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        attention_windows: Sequence[int | None] | None = None,
        final_layernorm: bool = False,
        nested: bool = False,
        **options: Unpack[StackOptions],
    ) -> None:
        super().__init__()
        check_known(options, StackOptions, type(self).__name__)
        check_norms(pre_layernorm, post_layernorm)
        norm = options.get("norm", "layernorm")
        sliced = keeps_hidden_sliced()
        if attention_windows is not None and len(attention_windows) != num_layers:
            raise ConfigError(
                f"'attention_windows' has {len(attention_windows)} entries, expected one for each of {num_layers} layers"
            )
        self.crossing = add_cross_attention
        self.nested = nested
        if not nested:
            self.enter = batch.EnterScaledBatch()
            self.leave = batch.LeaveScaledBatch()
        both = pre_layernorm and post_layernorm
        self.input_layernorm = make_norm(norm, hidden_size, layernorm_epsilon, sliced=sliced) if both else None

        def layer(index: int) -> DistributedTransformerLayer:
            given: dict[str, Any] = {"layer_idx": index, **options}
            if attention_windows is not None:
                given["window_size"] = attention_windows[index]
            if index > 0:  # further layers get the first one's bias with the mask
                given.pop("relative_attention_buckets", None)
            return DistributedTransformerLayer(
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
                nested=True,
                **given,
            )

        self.seq_layers = nn.Sequential(*(layer(index) for index in range(num_layers)))
        self.layernorm = (
            make_norm(norm, hidden_size, layernorm_epsilon, sliced=sliced) if both or final_layernorm else None
        )

    def forward(
        self, inputs: Tensor | tuple[Any, ...], position_ids: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """Returns: what came in, with new hidden states.

        Called by: every rank of the tp group. Collectives: those of its children.
        """
        hidden, states, mask, cross_mask = given = unpack(inputs, self.crossing)
        if not self.nested:
            hidden, mask, cross_mask, position_ids = self.enter(hidden, mask, cross_mask, position_ids)
            if states is not None:
                (states,) = self.enter(states)
        if self.input_layernorm is not None:
            hidden = self.input_layernorm(hidden)
        values: tuple[Any, ...] = (hidden, states, mask, cross_mask) if self.crossing else (hidden, mask)
        if position_ids is None:
            values = self.seq_layers(values)
        else:
            for layer in self.seq_layers:
                values = cast(DistributedTransformerLayer, layer)(values, position_ids)
        hidden = values[0]
        if self.layernorm is not None:
            hidden = self.layernorm(hidden)
        if not self.nested:
            hidden = self.leave(hidden)
        _, states, mask, cross_mask = given
        return (hidden, states, mask, cross_mask) if self.crossing else (hidden, mask)
