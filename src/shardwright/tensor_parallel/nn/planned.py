"""What a model's own tensor parallel plan puts in place of its linear layers, dropouts and some norms.

The model around them stays as it is: hidden states are whole and equal on all tp ranks, in both modes, and between a
column and a row linear each rank has its own features. So all tp ranks must bring the same samples.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from shardwright.sharding.spec import ShardSpec
from shardwright.tensor_parallel import randomness
from shardwright.tensor_parallel.module import DistributedModule, check_divisible, tp_size
from shardwright.tensor_parallel.nn.functional import column_linear, row_linear
from shardwright.tensor_parallel.nn.linear import linear_init
from shardwright.transport import differentiable as comm


class ColumnLinear(DistributedModule):
    """`nn.Linear` of which each rank has some output features; parts may be uneven.

    weight: [out_features / tp, in_features].   bias: [out_features / tp].
    gather: the output is whole on all ranks; otherwise each rank has its own features of it.
    Called by: every rank of the tp group, with equal inputs. Collectives: with `gather` an all-gather of the output;
    in backward an all-reduce of the input's gradient.
    """

    indivisible: ClassVar[bool] = True
    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather: bool = False,
        initializer_range: float | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.gather = gather
        init, init_bias = linear_init(in_features, initializer_range or 0.0, initializer_range is not None)
        self.add_parameter("weight", (out_features, in_features), init, 0)
        if bias:
            self.add_parameter("bias", (out_features,), init_bias, 0)
        else:
            self.register_parameter("bias", None)
        ranges = ShardSpec.even((out_features,), 0, tp_size()).ranges
        self.lengths = [stop - start for start, stop in ranges]

    def forward(self, input: Tensor) -> Tensor:
        (output,) = column_linear(input, [self.weight], [self.bias], sliced=False)
        return comm.gather_pieces(output, self.lengths) if self.gather else output

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class RowLinear(DistributedModule):
    """`nn.Linear` of which each rank has some input features; parts may be uneven. The output is whole on all ranks.

    weight: [out_features, in_features / tp].   bias: [out_features], replicated, added once after the sum.
    split: the input is whole, and this rank's features are taken from it; otherwise it is this rank's features.
    Called by: every rank of the tp group. Collectives: an all-reduce of the output; in backward none, with `split` an
    all-gather of the input's gradient.
    Raises: ConfigError with `split`, if the tp degree doesn't divide `in_features`.
    """

    indivisible: ClassVar[bool] = True
    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        split: bool = False,
        initializer_range: float | None = None,
    ) -> None:
        super().__init__()
        if split:
            check_divisible("in_features", in_features)
        self.in_features = in_features
        self.out_features = out_features
        self.split = split
        init, init_bias = linear_init(in_features, initializer_range or 0.0, initializer_range is not None)
        self.add_parameter("weight", (out_features, in_features), init, 1)
        if bias:
            self.add_parameter("bias", (out_features,), init_bias)
        else:
            self.register_parameter("bias", None)

    def forward(self, input: Tensor) -> Tensor:
        own = comm.own_hidden(input) if self.split else input
        return row_linear(own, self.weight, self.bias, leave="whole")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class TensorParallelDropout(DistributedModule):
    """`nn.Dropout` with one mask on all tp ranks, or (`split`) a mask for each rank's own features.

    Called by: every rank of the tp group. Collectives: a broadcast of a seed, at the first block of the process.
    """

    indivisible: ClassVar[bool] = True

    def __init__(self, p: float, *, split: bool) -> None:
        super().__init__()
        self.p = p
        self.split = split

    def forward(self, input: Tensor) -> Tensor:
        return randomness.dropout(input, self.p, self.training, split=self.split)


class SummedGradients(DistributedModule):
    """Mixed into the class of a module that each rank uses on its own features only, with whole parameters.

    The gradients of its own parameters are the sums over the ranks.
    Called by: every rank of the tp group. Collectives: in backward one all-reduce for each parameter.
    """

    indivisible: ClassVar[bool] = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = {name: comm.copy_to_ranks(p) for name, p in self._parameters.items() if p is not None}
        self.__dict__.update(own)  # found before parameters are
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name in own:
                del self.__dict__[name]


def sum_gradients(module: nn.Module) -> None:
    """Let the module, in place, sum the gradients of its own parameters over the tp ranks."""
    module.__class__ = _summed(type(module))


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _summed(cls: type[nn.Module]) -> type[nn.Module]:
    if cls not in _classes:

        def reduce(self: nn.Module, protocol: Any) -> Any:
            return _rebuilt, (cls,), self.__dict__

        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        _classes[cls] = type(cls.__name__, (SummedGradients, cls), {**names, "__reduce_ex__": reduce})
    return _classes[cls]


def _rebuilt(cls: type[nn.Module]) -> nn.Module:
    """An empty instance, for copies and pickles."""
    made = _summed(cls)
    return made.__new__(made)
