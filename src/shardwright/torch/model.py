"""`smp.model`: the wrapper of the user's model, where frameworks look for its class."""

from __future__ import annotations
