"""Files of a checkpoint that would run code if they were unpickled without limits."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import torch
import xxhash

from shardwright.checkpoint import integrity, manifest


class MakesFolder:
    """Unpickled without limits, it makes a folder."""

    def __init__(self, marker: Path | str) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)


def plant(mark: Path, name: str, marker: Path) -> None:
    """Put a file that makes the folder `marker` in the place of one, and make the manifest `mark` fit it."""
    file = mark.parent / name
    torch.save({"x": MakesFolder(marker)}, file)
    body = json.loads(mark.read_bytes())
    record = body["files"][name]
    record["bytes"], record["xxh3_128"] = file.stat().st_size, integrity.file_digest(file)
    if record.get("blocks"):
        block_bytes, data = record["blocks"][0], file.read_bytes()
        sums = [xxhash.xxh3_64_digest(data[at : at + block_bytes]) for at in range(0, len(data), block_bytes)]
        record["blocks"][1] = base64.b64encode(b"".join(sums)).decode()
    del body["checksum"]
    body["checksum"] = manifest._checksum(body)
    mark.write_text(json.dumps(body))
