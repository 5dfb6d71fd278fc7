"""A model cut by a plan of its own: which of its modules are replaced by what, and when it is refused.

An adapter says what the plan names (`registry.register_planner`); here it is checked against the model. In a
model cut so, everything that stays whole sees equal activations on all tp ranks, that is the scaled batch, so its
parameters count as acting on it. Parameters between a column and a row linear see a rank's own features only: the
plan must name them as "summed".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from shardwright.errors import ConfigError
from shardwright.tensor_parallel.module import check_divisible, prescaled_batch, tp_size
from shardwright.tensor_parallel.nn.embedding import DistributedEmbedding
from shardwright.tensor_parallel.nn.planned import ColumnLinear, RowLinear, TensorParallelDropout
from shardwright.tensor_parallel.registry import NotReplaced, Recipe

Cut = Literal["column", "column_whole", "row", "row_whole", "vocabulary", "embedding", "summed"]
"""What happens to one module. column, row: a linear layer whose output (input) each rank has its own features of;
..._whole: one whose output (input) is whole on all ranks; vocabulary, embedding: a lookup table cut along dim 0 or 1;
summed: whole parameters whose gradients are summed over the ranks."""

_DIMS: dict[Cut, int] = {"column": 0, "column_whole": 0, "vocabulary": 0, "row": 1, "row_whole": 1, "embedding": 1}
_BETWEEN = ("column", "row", "summed")
# Names of dropouts of attention probabilities. Every other dropout may act on whole activations: one mask for all ranks.
_ON_SPLIT_HEADS = ("attention_dropout", "attn_dropout")


@dataclass
class Resolved:
    """What is to be done. Paths are relative to the model.

    recipes: by path.   ties: paths that hold one weight; the first is a key of each.
    summed: paths of modules whose gradients are to be summed.   kept: paths that stay whole, and why.
    """

    recipes: dict[str, Recipe] = field(default_factory=dict)
    ties: list[tuple[str, ...]] = field(default_factory=list)
    summed: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)


def resolve(model: nn.Module, plan: Mapping[str, Cut], outside: Mapping[int, str]) -> Resolved:
    """Check a plan against the model. Nothing is changed, nothing is sent.

    plan: by path of modules of the model.   outside: names of modules outside of it that hold one of its
        parameters too, by the parameter's id.
    Raises: NotReplaced with the reason; ConfigError with both numbers if the degree doesn't divide heads.
    """
    if tp_size() > 1 and not prescaled_batch():
        raise NotReplaced(
            "its tensor parallel plan needs 'prescaled_batch' to be True, but it is False: set it, and give all tp"
            " ranks the same samples"
        )
    cuts = dict(plan)
    config = getattr(model, "config", None)
    result = Resolved()
    _settle_ties(model, cuts, outside, result)
    for path, cut in cuts.items():
        _check_kind(path, model.get_submodule(path), cut)
    regions = _regions(model, cuts)
    _check_heads(model, cuts, config)
    for path, cut in cuts.items():
        module = model.get_submodule(path)
        if cut == "summed":
            inside = [(f"{path}.{n}" if n else n or path, m) for n, m in module.named_modules()]
            result.summed += [name for name, found in inside if any(p is not None for p in found._parameters.values())]
        else:
            result.recipes[path] = _recipe(module, cut, config)
    for path, module in model.named_modules():
        if type(module) is nn.Dropout and module.p > 0:
            parent, _, name = path.rpartition(".")
            split = parent in regions and name in _ON_SPLIT_HEADS
            result.recipes[path] = Recipe(TensorParallelDropout, (module.p,), {"split": split})
        else:
            _check_randomness(path, module)
    return result


def _settle_ties(model: nn.Module, cuts: dict[str, Cut], outside: Mapping[int, str], result: Resolved) -> None:
    """Weights that several modules hold are cut alike in all of them; where that can't be they stay whole."""
    holders: dict[int, list[tuple[str, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((path, name))
    for parameter_id, places in holders.items():
        paths = [path for path, _ in places]
        named = [path for path in paths if path in cuts]
        strange = outside.get(parameter_id)
        if (len(places) == 1 and strange is None) or not named or all(cuts[path] == "summed" for path in named):
            continue
        dims = {_DIMS.get(cuts[path]) for path in named}
        for path in paths:
            if path not in cuts and type(model.get_submodule(path)) is nn.Embedding and len(dims) == 1:
                cuts[path] = "vocabulary" if dims == {0} else "embedding"
        exact = strange is None and all(type(model.get_submodule(path)) in (nn.Linear, nn.Embedding) for path in paths)
        if exact and len(dims) == 1 and all(path in cuts and name == "weight" for path, name in places):
            result.ties.append(tuple(paths))
            continue
        for path in named:
            other = strange or next(found for found in paths if found != path)
            reason = f"its weight is shared with '{other}'"
            if cuts[path] in _BETWEEN:
                raise NotReplaced(f"its tensor parallel plan names '{path}', but {reason}")
            result.kept[path] = reason
        for path in paths:
            cuts.pop(path, None)


def _check_kind(path: str, module: nn.Module, cut: Cut) -> None:
    wanted = {"vocabulary": nn.Embedding, "embedding": nn.Embedding, "summed": type(module)}.get(cut, nn.Linear)
    if type(module) is not wanted:
        raise NotReplaced(f"its tensor parallel plan names '{path}', a {type(module).__name__}, as {cut!r}")


def _regions(model: nn.Module, cuts: Mapping[str, Cut]) -> list[str]:
    """Paths of the modules that hold column and row linears: in them are features of a rank's own.

    Raises: NotReplaced naming what would see such features but isn't named by the plan.
    """
    kinds: dict[str, set[Cut]] = {}
    for path, cut in cuts.items():
        kinds.setdefault(path.rpartition(".")[0], set()).add(cut)
    regions = [path for path, found in kinds.items() if found & {"column", "row"}]
    for region in regions:
        if not kinds[region] >= {"column", "row"}:
            missing = "row" if "column" in kinds[region] else "column"
            raise NotReplaced(f"its tensor parallel plan splits features in '{region}' without a {missing} linear")
        for path, name in _parameters_in(model, region):
            if not any(cuts.get(above) in _BETWEEN for above in _above(path)):
                whole = f"{path}.{name}" if path else name
                raise NotReplaced(f"its tensor parallel plan doesn't say how '{whole}' acts on split features")
    for path, cut in cuts.items():
        if cut == "summed" and path.rpartition(".")[0] not in regions:
            raise NotReplaced(f"its tensor parallel plan names '{path}', where features aren't split, as {cut!r}")
    return regions


def _parameters_in(model: nn.Module, region: str) -> Iterator[tuple[str, str]]:
    for path, module in model.get_submodule(region).named_modules():
        whole = f"{region}.{path}" if path and region else path or region
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield whole, name


def _above(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]


def _check_heads(model: nn.Module, cuts: Mapping[str, Cut], config: Any) -> None:
    """Raise ConfigError if the ranks can't share the heads of an attention equally."""
    for path, cut in cuts.items():
        module, parent = model.get_submodule(path), model.get_submodule(path.rpartition(".")[0])
        if not isinstance(module, nn.Linear) or cut not in ("column", "row_whole"):
            continue
        if cut == "row_whole":
            check_divisible(f"{path}.in_features", module.in_features)
            continue
        size = getattr(parent, "head_dim", None)
        if isinstance(size, int) and size > 0 and module.out_features % size == 0:
            _check_number(f"'{path}' has {module.out_features // size} heads", module.out_features // size)
        elif "Attention" in type(parent).__name__:
            for key in ("num_attention_heads", "num_key_value_heads"):
                number = getattr(config, key, None)
                if isinstance(number, int):
                    _check_number(f"'{key}' is {number}", number)


def _check_number(what: str, number: int) -> None:
    if number % tp_size():
        raise ConfigError(
            f"{what}, expected a multiple of 'tensor_parallel_degree' ({tp_size()})",
            remedy=f"choose a degree that divides {number}",
        )


def _check_randomness(path: str, module: nn.Module) -> None:
    """Raise NotReplaced if a module drops whole activations by itself: every tp rank would draw another mask."""
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        raise NotReplaced(f"'{path}', a {type(module).__name__}, would draw another mask on every tp rank")
    for name, value in vars(module).items():
        if "drop" in name and isinstance(value, float) and value > 0 and name not in _ON_SPLIT_HEADS:
            raise NotReplaced(f"'{name}' of '{path}' is {value}: it would draw another mask on every tp rank")


def _recipe(module: nn.Module, cut: Cut, config: Any) -> Recipe:
    """What to build. Fresh weights, where the original has none, begin as the configuration says."""
    std = getattr(config, "initializer_range", None)
    kwargs: dict[str, Any] = {"initializer_range": std} if isinstance(std, float) else {}
    if isinstance(module, nn.Linear):
        sizes = (module.in_features, module.out_features, module.bias is not None)
        if cut in ("column", "column_whole"):
            return Recipe(ColumnLinear, sizes, {**kwargs, "gather": cut == "column_whole"})
        return Recipe(RowLinear, sizes, {**kwargs, "split": cut == "row_whole"})
    assert isinstance(module, nn.Embedding)
    names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    kwargs.update((name, getattr(module, name)) for name in names)
    return Recipe(DistributedEmbedding, (module.num_embeddings, module.embedding_dim), {**kwargs, "split": cut})
