"""Finding a document's commands and running them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from readme_commands import Block, find_blocks, run_document

DOCUMENT = """# Title

<!-- file: train.py -->
```python
print("trained")
```

Then:

<!-- runnable -->

```sh
python train.py > result
test "$(cat result)" = trained
```

```sh
exit 1   # not marked
```
"""


def test_only_marked_blocks_count() -> None:
    assert find_blocks(DOCUMENT) == [
        Block('print("trained")\n', "train.py"),
        Block('python train.py > result\ntest "$(cat result)" = trained\n', None),
    ]


def test_commands_run_with_their_files(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(DOCUMENT)
    run_document(path)


def test_a_failing_command_fails_the_document(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("<!-- runnable -->\n```sh\nfalse\ntrue\n```\n")
    with pytest.raises(subprocess.CalledProcessError):
        run_document(path)


def test_a_document_without_commands_is_no_success(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("```sh\ntrue\n```\n")
    with pytest.raises(SystemExit, match="no block marked"):
        run_document(path)
