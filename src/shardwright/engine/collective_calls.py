"""Public calls that every rank of a group has to make: when a rank doesn't come, the error names the call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.errors import CommunicationTimeout, LostRankError, RemoteRankError


@contextmanager
def collective_call(call: str, callers: str) -> Iterator[None]:
    """While open, errors of communication say which call waited, and who has to make it.

    call: as the script writes it, such as "model.state_dict()".   callers: "every rank of ...".
    """
    try:
        yield
    except (CommunicationTimeout, LostRankError, RemoteRankError) as error:
        what = f"{call} ({callers} must call it): {error.what}"
        raise type(error)(what, where=error.where, remedy=error.remedy) from error
