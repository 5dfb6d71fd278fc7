"""How many accelerators this host offers, found without loading PyTorch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path


def count_accelerators(environ: Mapping[str, str], device_folder: Path = Path("/dev")) -> int:
    """Return the number of CUDA devices that worker processes will see; 0 means they train on the CPU.

    CUDA_VISIBLE_DEVICES decides where it is set; otherwise the device files of the driver are counted. 0 as
    well when the installed PyTorch was built without CUDA.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    files = [path for path in device_folder.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    if not files or not _torch_has_cuda():
        return 0
    if visible is None:
        return len(files)
    count = 0
    for name in visible.split(","):
        if name.strip() in ("", "-1"):  # CUDA ignores what follows an invalid entry
            break
        count += 1
    return count


def _torch_has_cuda() -> bool:
    spec = importlib.util.find_spec("torch")  # locates the package, doesn't import it
    if spec is None or spec.origin is None:
        return False
    version_file = Path(spec.origin).with_name("version.py")
    if not version_file.is_file():
        return True
    text = version_file.read_text(encoding="utf-8")
    return re.search(r"^cuda\b[^=]*=\s*None", text, re.MULTILINE) is None
