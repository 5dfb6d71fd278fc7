"""The model parallel library under its original name.

`__version__` answers scripts and frameworks that ask which generation of the original they talk to;
`shardwright_version` is the release that answers.
"""

from __future__ import annotations

from shardwright import __version__ as shardwright_version

__version__ = "1.15.0"

__all__ = ["__version__", "shardwright_version"]
