"""Helpers for checkpoint tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from shardwright.checkpoint import manifest as manifest_module
from shardwright.checkpoint.manifest import Manifest


@pytest.fixture
def resealed() -> Callable[..., bytes]:
    """Return a function that changes fields of a manifest and renews its checksum."""

    def change(manifest: Manifest, without: str | None = None, **fields: Any) -> bytes:
        body = json.loads(manifest.to_bytes())
        del body["checksum"]
        body.update(fields)
        if without is not None:
            del body[without]
        return json.dumps({**body, "checksum": manifest_module._checksum(body)}).encode()

    return change
