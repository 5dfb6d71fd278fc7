"""Replace the modules of a small transformers model by their distributed versions, and compare with the original.

The replacement here is the plain form of what wrapping does: build, load, call through the hooks. It works for any
tp degree; everything compared is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import hf_models
from shardwright.integrations.huggingface import families
from shardwright.integrations.huggingface.adapter import Adapter
from shardwright.integrations.huggingface.renaming import Renaming
from shardwright.tensor_parallel.module import DistributedModule, gather_full, load_full, spec_of
from shardwright.topology import context
from shardwright.transport import collectives


class Called(nn.Module):
    """A distributed module that is called like the original."""

    def __init__(self, inner: nn.Module, adapter: Adapter, original: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.before = adapter.forward_hook
        self.after = adapter.return_hook(original)
        self.config = getattr(original, "config", None)
        if hasattr(original, "attention_type"):  # by which transformers 4 chooses a layer's mask
            self.attention_type = original.attention_type

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.before(*args, **kwargs)
        return self.after(self.inner(*args, **kwargs))


@dataclass
class Site:
    """One replaced module: where it was, what it is now, and how its weights are called."""

    path: str
    module: nn.Module
    renaming: Renaming

    def plain(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole values by parameter name of the distributed module, under names of the whole plain model."""
        prefix = f"{self.path}." if self.path else ""
        return {prefix + name: value for name, value in self.renaming.to_huggingface(values).items()}


@dataclass
class Distributed:
    """A model with replaced modules."""

    model: nn.Module
    sites: list[Site] = field(default_factory=list)

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients by plain names, summed over all samples; zeros where there is none.

        Collective over the tp group: what worked on each rank's own samples is summed here.
        """
        if not context.world().config.prescaled_batch:
            for name, parameter in self.model.named_parameters():
                if not _scaled(self.model, name):
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    collectives.all_reduce(parameter.grad, "tp")
        found: dict[str, Tensor] = {}
        for site in self.sites:
            found.update(site.plain(gather_full(_gradients(site.module), spec_of(site.module))))
        return {**self._beside(_gradients(self.model)), **found}

    def weights(self) -> dict[str, Tensor]:
        """Whole weights by plain names. Collective over the tp group."""
        found: dict[str, Tensor] = {}
        for site in self.sites:
            found.update(site.plain(gather_full(site.module)))
        return {**self._beside(dict(self.model.named_parameters(remove_duplicate=False))), **found}

    def _beside(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in values.items() if ".inner." not in f".{name}"}


def distribute(model: nn.Module, kinds: Iterable[str], options: dict[str, Any] | None = None) -> Distributed:
    """Replace the outermost modules that have an adapter of one of the kinds. The model itself is changed.

    options: further arguments of the distributed classes.
    """
    result = Distributed(model)

    def visit(module: nn.Module, path: str) -> nn.Module:
        adapter = families.find(module)
        if adapter is not None and adapter.kind in kinds:
            renaming = adapter.renaming(module)
            inner = adapter.dist_class()(**adapter.arguments(module), **(options or {}))
            load_full(inner, renaming.to_distributed(dict(module.state_dict())))
            result.sites.append(Site(path, inner, renaming))
            return Called(inner, adapter, module).train(module.training)
        for name, child in module.named_children():
            setattr(module, name, visit(child, f"{path}.{name}" if path else name))
        return module

    result.model = visit(model, "")
    assert result.sites, f"nothing of {type(model).__name__} was replaced"
    return result


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }


def _scaled(model: nn.Module, name: str) -> bool:
    """Whether a parameter works on the samples of the whole tp group: the innermost distributed module decides."""
    scaled, module = False, model
    for part in name.split(".")[:-1]:
        module = getattr(module, part)
        scaled = module.scaled_batch if isinstance(module, DistributedModule) else scaled
    return scaled


def batch_of(case: str, seed: int = 0, size: int = 3) -> dict[str, Tensor]:
    """Inputs for the model of a case: tokens padded on the right, with labels, or images, or a pair of sequences."""
    generator = torch.Generator().manual_seed(seed)
    if case.startswith("vit"):
        return {
            "pixel_values": torch.randn(size, 3, 8, 8, generator=generator),
            "labels": torch.randint(0, 3, (size,), generator=generator),
        }
    length = 9
    ids = torch.randint(3, hf_models.VOCABULARY, (size, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(size):
        mask[row, length - (row + seed) % 3 :] = 0
    ids = ids.masked_fill(mask == 0, 1)
    ids[0, 2] = 1  # the padding id where it counts
    batch = {"input_ids": ids, "attention_mask": mask}
    if case.endswith("_bare"):
        return batch
    if case.endswith("_classifier"):
        return {**batch, "labels": torch.randint(0, 3, (size,), generator=generator)}
    batch["labels"] = ids.masked_fill(mask == 0, -100)
    if case.startswith("t5"):
        batch["labels"] = torch.randint(3, hf_models.VOCABULARY, (size, 6), generator=generator)
    if case in ("bert_decoder", "gpt2_cross"):
        batch["encoder_hidden_states"] = torch.randn(size, 5, 32, generator=generator)
        batch["encoder_attention_mask"] = mask[:, :5]
    return batch


@dataclass(frozen=True)
class Outcome:
    """What one step of a model gives: loss, what it returned where tokens count, gradients by plain name."""

    loss: Tensor
    result: Tensor
    gradients: dict[str, Tensor]


def step(model: nn.Module, batch: dict[str, Tensor], gradients: Callable[[], dict[str, Tensor]]) -> Outcome:
    """Forward and backward. Bare models get the mean of squares of their hidden states as loss."""
    output = model(**batch)
    result = output.logits if "logits" in output else output.last_hidden_state
    counting = batch.get("attention_mask")
    if counting is not None and result.shape[:2] == counting.shape:
        result = result[counting.bool()]
    loss = output.loss if "labels" in batch else result.square().mean()
    loss.backward()
    return Outcome(loss.detach(), result.detach(), gradients())


def plain_step(model: nn.Module, batch: dict[str, Tensor]) -> Outcome:
    """`step` of a model as transformers built it."""
    return step(model, batch, lambda: _gradients(model))


def assert_close(found: Outcome, expected: Outcome, *, rel: float = 2e-5) -> None:
    """Compare two outcomes; every difference is named.

    rel: of a tensor's largest value, for sums are taken in another order. A gradient that is zero but for rounding
    is measured by the largest gradient of the model times 1e-2.
    """
    assert found.gradients.keys() == expected.gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    pairs = [("loss", found.loss, expected.loss, 0.0), ("result", found.result, expected.result, 0.0)]
    pairs += [(name, found.gradients[name], wanted, 1e-2 * largest) for name, wanted in expected.gradients.items()]
    faults = []
    for name, one, other, least in pairs:
        assert one.shape == other.shape, f"{name}: {tuple(one.shape)}, expected {tuple(other.shape)}"
        difference, size = float((one - other).abs().max()), max(float(other.abs().max()), least)
        if not difference <= rel * size:
            faults.append(f"{name}: differs by {difference:.3e} of {size:.3e}")
    assert not faults, "\n".join(faults)
