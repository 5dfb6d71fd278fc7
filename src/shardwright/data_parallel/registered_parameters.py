"""Parameters that are used outside of the modules that hold them: `smp.register_parameter`."""

from __future__ import annotations

from torch import nn

from shardwright.errors import UsageError

_MARK = "_sw_used_by"


def register_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say that `module` uses a parameter of another module in its forward.

    With sharded data parallelism the parameter is then gathered when `module` is, too. Without it nothing changes.
    Called by: every rank alike, before `smp.DistributedModel`.
    Raises: UsageError for anything but a parameter, or one that is sharded already.
    """
    if not isinstance(parameter, nn.Parameter):
        raise UsageError(
            f"smp.register_parameter() takes a module and a parameter, not {type(parameter).__name__}",
            remedy="pass the nn.Parameter that the other module holds",
        )
    if hasattr(parameter, "placements"):
        raise UsageError(
            "smp.register_parameter() came after the model was sharded",
            remedy="call it before smp.DistributedModel",
        )
    users: list[nn.Module] = parameter.__dict__.setdefault(_MARK, [])
    users.append(module)


def users_of(parameter: nn.Parameter) -> list[nn.Module]:
    """The modules that a parameter was registered with."""
    found: list[nn.Module] = parameter.__dict__.get(_MARK, [])
    return found
