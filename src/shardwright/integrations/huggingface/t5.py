"""T5: scores without scale but with a learned bias by distance, which the first layer of a stack makes for all.

Blocks are replaced, not stacks: a stack holds the embedding that encoder, decoder and head share.
"""

from __future__ import annotations

from typing import Any

from shardwright.integrations.huggingface import hooks
from shardwright.integrations.huggingface.adapter import Adapter
from shardwright.integrations.huggingface.renaming import Renaming, Rule, module, same
from shardwright.integrations.huggingface.settings import activation

_MODELING = "transformers.models.t5.modeling_t5"


def _attention(plain: str, norm: str, distributed: str) -> tuple[Rule, ...]:
    return (
        *module(norm, f"{distributed}.pre_layernorm"),
        *module(f"{plain}.q", f"{distributed}.query"),
        *module(f"{plain}.k", f"{distributed}.key"),
        *module(f"{plain}.v", f"{distributed}.value"),
        *module(f"{plain}.o", f"{distributed}.dense"),
    )


def _feed_forward(place: int) -> tuple[Rule, ...]:
    plain = f"layer.{place}"
    return (
        *module(f"{plain}.layer_norm", "output.pre_layernorm"),
        *module(f"{plain}.DenseReluDense.wi", "output.dense1"),
        *module(f"{plain}.DenseReluDense.wi_0", "output.dense1_gate"),
        *module(f"{plain}.DenseReluDense.wi_1", "output.dense1"),
        *module(f"{plain}.DenseReluDense.wo", "output.dense2"),
    )


def layer_table(*, decoder: bool, gated: bool) -> Renaming:
    """The correspondence of one block."""
    unused = "wi." if gated else "wi_"
    cross = _attention("layer.1.EncDecAttention", "layer.1.layer_norm", "cross_attention") if decoder else ()
    rules = (
        *_attention("layer.0.SelfAttention", "layer.0.layer_norm", "attention"),
        same("layer.0.SelfAttention.relative_attention_bias.weight", "attention.relative_bias.weight"),
        *cross,
        *(rule for rule in _feed_forward(2 if decoder else 1) if unused not in rule.plain[0]),
    )
    return Renaming(rules)


def layer_settings(config: Any, index: int | None) -> dict[str, Any]:
    """Arguments of the block at an index; the first one makes the position bias."""
    return {
        "num_attention_heads": config.num_heads,
        "attention_head_size": config.d_kv,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "attention_dropout_prob": config.dropout_rate,
        "hidden_dropout_prob": config.dropout_rate,
        "intermediate_dropout_prob": config.dropout_rate,
        "activation": activation(config.dense_act_fn),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "initializer_range": 0.02 * config.initializer_factor,
        "use_normal_initialization": True,
        # There is no longest sequence; any size makes the layer causal.
        "causal_mask_size": config.relative_attention_max_distance if config.is_decoder else None,
        "add_cross_attention": bool(config.is_decoder),
        "pre_layernorm": True,
        "post_layernorm": False,
        "norm": "rmsnorm",
        "qkv_bias": False,
        "dense_bias": False,
        "mlp_bias": False,
        "gated": bool(config.is_gated_act),
        "scale_attention_scores": False,
        "relative_attention_buckets": None if index else config.relative_attention_num_buckets,
        "relative_attention_max_distance": config.relative_attention_max_distance,
        "relative_attention_bidirectional": not config.is_decoder,
    }


class BlockAdapter(Adapter):
    """Blocks hand the position bias to each other through their stack."""

    def forward_hook(self, *args: Any, **kwargs: Any) -> hooks.Arguments:
        """A call of a block. A position bias that comes in has the mask in it already."""
        named = hooks.named_arguments(self.original_class().forward, args, kwargs)
        bias = named.pop("position_bias", None)
        named.pop("encoder_decoder_position_bias", None)  # always zero
        if bias is not None:
            named["attention_mask"] = None
        inputs, known = hooks.stack_call(self.original_class().forward, (), named)
        return inputs, known if bias is None else {**known, "position_bias": bias}

    def return_hook(self, module: Any = None) -> Any:
        """The function that turns a distributed layer's result into a block's."""
        return _block_output


def _block_output(output: Any) -> Any:
    hidden, mask = (output[0], output[1]) if len(output) == 2 else (output[0], output[2])
    return hidden, mask, None


ADAPTERS: tuple[Adapter, ...] = (
    BlockAdapter(
        "t5",
        _MODELING,
        "T5Block",
        "layer",
        layer_settings,
        lambda config: layer_table(decoder=bool(config.is_decoder), gated=bool(config.is_gated_act)),
        config_at=("layer.0.SelfAttention.config",),
        index_at="layer.0.SelfAttention.layer_idx",
    ),
)
