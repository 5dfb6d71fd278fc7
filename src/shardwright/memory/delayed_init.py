"""Parameters that hold no storage until it is known who keeps them.

Inside `delay_param_initialization` functions of torch that make floating-point tensors make them on the meta device, and
what is then done to those (by `reset_parameters`, by a model's own `_init_weights`, by arithmetic) is noted on a tape.
Parameters stay like that. Buffers are made at once, for they are small, and so is everything whose value Python asks
for. `value_of` finds a parameter's value on the rank that keeps it. Tensors that come from elsewhere (loaded weights,
`torch.tensor`, NumPy) are real from the start, and stay.

Source of the idea: deferred initialisation in torchdistx (2022).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode

from shardwright.errors import UsageError
from shardwright.memory.init_tape import Tape, replaced, tensors_in

_MAKERS: frozenset[Any] = frozenset({
    torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.empty_strided,
    torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like,
    Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty_strided,
})  # fmt: skip
# What tensors without storage say of themselves while a model is built: code that asks should take its usual path.
_ANSWERS: Mapping[Any, Any] = {
    Tensor.device.__get__: torch.device("cpu"),  # type: ignore[attr-defined]
    Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
}
_MOVES: Mapping[Any, str] = {Tensor.cpu: "cpu", Tensor.cuda: "cuda"}
_set_data: Any = Tensor.data.__set__  # type: ignore[attr-defined]

tape = Tape()
_depth = 0
# Parameters that were registered inside, and what they remember: their version when the context ended.
_registered: list[weakref.ref[Tensor]] = []
_NOTED = "_shardwright_noted_version"


@contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Parameters of modules that are built inside hold no storage until the model is partitioned.

    Then each rank makes those that it keeps, with the values that the module's own initialisation gives, from random
    streams that depend on torch's seed and on nothing else: the same values in every layout.
    Called by: every rank alike, with torch seeded alike, also before `smp.init`. Collectives: none.
    """
    if not enabled:
        yield
        return
    tape.bases.append(int(torch.randint(1 << 62, (), device="cpu").item()))
    with _recording():
        yield


@contextmanager
def go_on() -> Iterator[None]:
    """Note more of what is done to parameters of the last context. Called by: the wrap, when it replaces modules."""
    with _recording():
        yield


def is_delayed(parameter: Tensor) -> bool:
    """Has it no storage, and can it be filled?"""
    return tape.knows(parameter)


def has_delayed(model: nn.Module) -> bool:
    """Has any parameter no storage?"""
    return any(is_delayed(p) for p in model.parameters())


def settle_others(model: nn.Module) -> None:
    """Make buffers and other tensors of modules real, where they aren't.

    Called by: the wrap. Raises: UsageError naming a parameter without storage of which nothing is known, or that was
    changed in place outside of the context, where nobody noted how.
    """
    for name, module in model.named_modules():
        for table in (module._buffers, vars(module)):
            for key, value in list(table.items()):
                if isinstance(value, Tensor) and tape.knows(value):
                    table[key] = tape.value(value)
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                _check(f"{name}.{key}" if name else key, parameter)


def _check(name: str, parameter: nn.Parameter) -> None:
    """Raise UsageError if the tape doesn't know all about a parameter."""
    if not tape.knows(parameter):
        raise UsageError(
            f"parameter '{name}' is on the meta device, and nothing says what its values are",
            remedy="build the model inside smp.delay_param_initialization(), or load its weights before the wrap",
        )
    if vars(parameter).get(_NOTED, parameter._version) != parameter._version:
        raise UsageError(
            f"parameter '{name}' was changed outside of smp.delay_param_initialization(), where it has no values",
            remedy="initialise inside the context",
        )


def value_of(parameter: Tensor) -> Tensor:
    """What a parameter without storage is, on the CPU. Called by: the rank that keeps it."""
    return tape.value(parameter)


def fill(parameter: Tensor, value: Tensor) -> None:
    """Give a parameter without storage this value; it stays the same object."""
    made = nn.Parameter(value, requires_grad=parameter.requires_grad)
    # What `torch.utils.swap_tensors` does, but attributes stay, and so do weak references (an LSTM has some).
    torch._C._swap_tensor_impl(parameter, made)
    parameter.__dict__.pop(_NOTED, None)


def forget() -> None:
    """The wrapped model's parameters are filled: drop what was noted."""
    global tape
    tape = Tape()
    _registered.clear()


@contextmanager
def _recording() -> Iterator[None]:
    global _depth
    if _depth:
        yield
        return
    _depth += 1
    handles = [
        torch_module.register_module_buffer_registration_hook(_real_buffer),
        torch_module.register_module_parameter_registration_hook(_remember),
    ]
    truncated = nn.init._no_grad_trunc_normal_
    nn.init._no_grad_trunc_normal_ = _as_one_call(truncated)
    try:
        with _Recorder():
            yield
    finally:
        _depth -= 1
        for handle in handles:
            handle.remove()
        for reference in _registered:
            parameter = reference()
            if parameter is not None and parameter.is_meta:
                parameter.__dict__[_NOTED] = parameter._version
        nn.init._no_grad_trunc_normal_ = truncated


def _as_one_call(function: Any) -> Any:
    """An initialisation that looks at the values it draws, noted as a whole."""

    def initialise(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not tape.knows(tensor):
            return function(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        tape.note(function, (tensor, *args), kwargs, [None], [tensor])
        return tensor

    return initialise


def _real_buffer(module: nn.Module, name: str, buffer: Any) -> Any:
    return tape.value(buffer) if isinstance(buffer, Tensor) and tape.knows(buffer) else None


def _remember(module: nn.Module, name: str, parameter: Any) -> None:
    if isinstance(parameter, Tensor) and tape.knows(parameter):
        _registered.append(weakref.ref(parameter))


class _Recorder(TorchFunctionMode):
    """Sees every call of torch, also those on tensors that are real: these just run."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        known = [t for t in given if tape.knows(t)]
        if func in _MAKERS:
            return _make(func, args, kwargs, bool(known))
        if not known:
            return func(*args, **kwargs)
        if func in _ANSWERS:
            return _ANSWERS[func]
        if func == _set_data:
            return _assign(args[0], args[1])
        if func in _MOVES:
            return args[0]
        return _run(func, args, kwargs, given, known)


def _make(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], from_known: bool) -> Any:
    """A new tensor: without storage, if it is a floating-point one for a real device."""
    device = kwargs.get("device")
    source = next((t for t in args if isinstance(t, Tensor)), None)
    elsewhere = device is None and source is not None and source.device.type == "meta" and not from_known
    if elsewhere or (device is not None and torch.device(device).type == "meta") or kwargs.get("out") is not None:
        return func(*args, **kwargs)
    if device is None and source is None and torch.empty(0).device.type == "meta":
        return func(*args, **kwargs)
    others = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
    made = func(*args, **others, device="meta")
    if not made.is_floating_point():
        return func(*replaced(args, _forced), **kwargs)
    tape.note(func, args, {**others, "dtype": made.dtype, "device": "cpu"}, [made], ())
    return made


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], known: list[Tensor]) -> Any:
    """A call on tensors without storage: on the meta device, and noted if it made or changed any."""
    versions = [t._version for t in known]
    mixed = len(given) > len(known)
    on_meta: Callable[[Any], Any] = lambda v: _on_meta(v) if mixed or not isinstance(v, Tensor) else v  # noqa: E731
    try:
        result = func(*replaced(args, on_meta), **replaced(kwargs, on_meta))
    except Exception as error:
        written = getattr(func, "__name__", "").endswith("_") and not func.__name__.endswith("__")
        if written or "meta" not in str(error):
            raise
        return func(*replaced(args, _forced), **replaced(kwargs, _forced))  # Python asks for a value
    made = [t if t.is_meta and not tape.knows(t) else None for t in tensors_in(result)]
    changed = [t for t, version in zip(known, versions, strict=True) if t._version != version]
    if changed or any(t is not None for t in made):
        tape.note(func, args, kwargs, made, changed)
    return result


def _assign(target: Tensor, value: Tensor) -> None:
    """`target.data = value`, where one of them has no storage."""
    if target.is_meta and value.is_meta:
        _set_data(target, value)
    elif target.is_meta:
        fill(target, value)
    else:
        _set_data(target, tape.value(value))


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if value.is_meta or value.dim() == 0 else value.to("meta")
    return None if isinstance(value, torch.Generator) else torch.device("meta")


def _forced(value: Any) -> Any:
    return tape.value(value) if isinstance(value, Tensor) and tape.knows(value) else value
