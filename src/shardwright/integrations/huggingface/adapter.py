"""How one class of transformers is replaced by a distributed module: arguments, calls, results, weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal

from torch import nn

from shardwright.integrations.huggingface import hooks
from shardwright.integrations.huggingface.renaming import Renaming
from shardwright.integrations.huggingface.settings import NotDistributableError, refuse_outputs
from shardwright.tensor_parallel import construction

Kind = Literal["lm_head", "model", "encoder", "layer"]
Hooks = tuple[Callable[..., Any], Callable[..., Any], Callable[[Any], Any]]

_NN = "shardwright.tensor_parallel.nn"
_DISTRIBUTED: dict[Kind, tuple[str, str]] = {
    "lm_head": (f"{_NN}.lm_head", "DistributedTransformerLMHead"),
    "model": (f"{_NN}.lm_head", "DistributedTransformerLMHead"),
    "encoder": (f"{_NN}.transformer", "DistributedTransformer"),
    "layer": (f"{_NN}.transformer", "DistributedTransformerLayer"),
}


@dataclass(frozen=True)
class Adapter:
    """One class of one model family.

    Read by the replacement of modules (through `families.find`) and by the public `get_hf_*_hooks`; nothing here
    communicates.

    name: of the family.   modeling: the module of transformers that defines `original`.
    kind: what it is: a causal language model, a bare model, a stack of layers, one layer.
    settings: from a configuration and the index of the layer (None for whole models) to the arguments of the
        distributed class; raises NotDistributableError with the reason when they can't be served.
    table: from a configuration to the renaming of weights.
    config_at, index_at: attribute paths from an instance to its configuration and its layer index.
    output: the output class of the original; unused for layers.
    layer_extra: how many values follow the hidden states in the tuple that a layer returns, if it returns one.
    positions: the layer needs to know positions (rotary embeddings).
    token_types: the model has embeddings for types of tokens.
    """

    name: str
    modeling: str
    original: str
    kind: Kind
    settings: Callable[[Any, int | None], dict[str, Any]]
    table: Callable[[Any], Renaming]
    config_at: tuple[str, ...] = ("config",)
    index_at: str | None = None
    output: str = ""
    layer_extra: int = 0
    positions: bool = False
    token_types: bool = False

    @property
    def target(self) -> str:
        """The dotted name of the class of transformers."""
        return f"{self.modeling}.{self.original}"

    def original_class(self) -> type[nn.Module]:
        """The class of transformers, imported now."""
        found: type[nn.Module] = getattr(importlib.import_module(self.modeling), self.original)
        return found

    def dist_class(self) -> type[nn.Module]:
        """The class of the replacement."""
        place, name = _DISTRIBUTED[self.kind]
        found: type[nn.Module] = getattr(importlib.import_module(place), name)
        return found

    def arguments(self, module: nn.Module) -> dict[str, Any]:
        """Arguments of the distributed class for a replacement of `module`.

        Raises: NotDistributableError (a NotImplementedError) with the reason when there can't be one.
        """
        return self.arguments_for(
            self.config(module), None if self.index_at is None else _follow(module, self.index_at)
        )

    def arguments_for(self, config: Any, index: int | None) -> dict[str, Any]:
        """Arguments of the distributed class for a configuration."""
        refuse_outputs(config)
        _last_config[self.name] = config
        arguments = self.settings(config, index)
        if self.kind == "model":
            arguments["add_lm_head"] = False
        return arguments

    def config(self, module: nn.Module) -> Any:
        """The configuration that a module was built from: what it holds, else what its constructor got."""
        for path in self.config_at:
            try:
                return _follow(module, path)
            except AttributeError:
                continue
        made = construction.construction_of(module)
        if made is None:
            raise NotDistributableError(f"the configuration of this {self.original} is not known")
        return self._constructed(*made.args, **made.kwargs)["config"]

    def _constructed(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return hooks.signature(self.original_class().__init__).bind(None, *args, **kwargs).arguments

    def init_hook(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The original's constructor arguments to those of the distributed class; None if it can't be served."""
        bound = self._constructed(*args, **kwargs)
        index = next((bound[name] for name in ("layer_idx", "layer_id") if name in bound), None)
        if bound.get("add_pooling_layer"):
            return None
        try:
            return (), self.arguments_for(bound["config"], index)
        except NotDistributableError:
            return None

    def forward_hook(self, *args: Any, **kwargs: Any) -> hooks.Arguments:
        """A call of the original's forward as a call of the distributed module's forward."""
        forward = self.original_class().forward
        if self.kind in ("lm_head", "model"):
            return hooks.lm_head_call(forward, args, kwargs, token_types=self.token_types)
        return hooks.stack_call(forward, args, kwargs, positions=self.positions)

    def return_hook(self, module: nn.Module | None = None) -> Callable[[Any], Any]:
        """The function that turns the distributed module's result into that of the original. `module` is not kept."""
        if self.kind == "lm_head":
            return partial(hooks.logits_output, self.output)
        if self.kind == "layer":
            return partial(hooks.layer_output, self._extra())
        return partial(hooks.hidden_output, self.output)

    def hooks(self) -> Hooks:
        """The three hooks, in the form that `smp.tp_register_with_module` takes."""
        return self.init_hook, self.forward_hook, self.return_hook()

    def renaming(self, module: nn.Module) -> Renaming:
        """The correspondence of the weights of `module` with those of its replacement."""
        return self.table(self.config(module))

    def _extra(self) -> int | None:
        # A layer that can return its attentions returns a tuple; later versions of transformers record them
        # with hooks, and their layers return a tensor.
        parameters = hooks.signature(self.original_class().forward).parameters
        return self.layer_extra if "output_attentions" in parameters else None


_last_config: dict[str, Any] = {}


def last_config(family: str) -> Any | None:
    """The configuration of the model of a family that was replaced last in this process, if any was.

    For translate functions, which get weights and nothing else.
    """
    return _last_config.get(family)


def _follow(module: Any, path: str) -> Any:
    return reduce(getattr, path.split("."), module)
