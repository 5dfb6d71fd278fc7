"""`smp.save` and `smp.load`: any object into one file, or into one file per rank.

Neither communicates, so that a script may call them on whichever ranks it likes. What files belong together is
written into them: each carries a stamp that names the job, how often that job has saved to this name, and the layout.
Loading one file of a set looks at the stamps of all of them, and refuses a set of several saves.

The stamp is an entry of its own in the zip file that torch writes; torch.load does not look at it.

Source: api.md 9.2 and 9.3, design.md section 6.
"""

from __future__ import annotations

import collections
import errno
import json
import os
import pickle
import re
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwright.checkpoint import layout, safe_loading, storage
from shardwright.checkpoint.storage import Place, RemotePath
from shardwright.checkpoint.storage.attempts import StorageError
from shardwright.errors import CheckpointError, CheckpointNotFoundError
from shardwright.log import get_logger
from shardwright.topology.context import World, world

_log = get_logger(__name__)

_STAMP = "shardwright.json"
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_saves: collections.Counter[tuple[str, str]] = collections.Counter()


@dataclass(frozen=True)
class _Stamp:
    """Which save a file comes from. number: of this job's saves to this name.   pp, tp, rdp: degrees."""

    job: str
    number: int
    pp: int
    tp: int
    rdp: int

    @property
    def save(self) -> tuple[str, int]:
        return self.job, self.number

    def degrees(self) -> str:
        return f"pp={self.pp} tp={self.tp} rdp={self.rdp}"


def save(
    obj: Any,
    f: str,
    partial: bool = True,
    pickle_module: ModuleType = pickle,
    pickle_protocol: int = 2,
    v3: bool = False,
    *,
    trust: bool | None = None,
) -> None:
    """Write an object to a file of this rank, in one step: readers see the old file or the new one.

    Called by: with `partial`, one rank of each (pp, tp) place, or with `v3` every rank; without, the one rank that has
        the object. Collectives: none.
    f: where to, a path or a URL; folders are made.   partial: the file is `f_{pp_rank}_{tp_rank}`, and without tensor
    parallelism there is a link `f_{mp_rank}` to it (at a URL only `f_{mp_rank}`).   v3: `f_{pp_rank}_{tp_rank}_{rdp_rank}`; with partial=False only world rank 0 writes.
    pickle_module, pickle_protocol: accepted; files are written in the form that safe loading reads.
    trust: also accept what `smp.load` refuses by default.
    Raises: TypeError if f is no string; CheckpointError naming the type that could not be loaded again, or the reason
        of the disk. A file of that name is intact then.
    """
    _check_name(f, "save")
    here = world()
    if not partial:
        if here.rank == 0 or not v3:
            _write(storage.place(f), obj, here, safe_loading.trusted(trust))
        return
    at = here.coordinates
    name = f"{f}_{at.pp}_{at.tp}_{at.rdp}" if v3 else f"{f}_{at.pp}_{at.tp}"
    by_mp_rank = not v3 and here.table.degrees.tp == 1
    path = storage.place(name)
    if isinstance(path, RemotePath):  # where there are no links
        _write(storage.place(f"{f}_{at.mp}") if by_mp_rank else path, obj, here, safe_loading.trusted(trust))
        return
    _remove_dangling_links(storage.place(f))
    _write(path, obj, here, safe_loading.trusted(trust))
    if by_mp_rank:
        _link(Path(storage.absolute(f"{f}_{at.mp}")), path)


def load(
    f: str,
    map_location: Any = None,
    pickle_module: ModuleType = pickle,
    partial: bool = True,
    back_compat: bool = False,
    *,
    trust: bool | None = None,
    **pickle_load_args: Any,
) -> Any:
    """Read what `save` wrote on the rank at this place, or any torch file.

    Called by: any rank, before or after partitioning. Collectives: none.
    f: the name that was given to `save`.   partial: False reads exactly `f`. True reads the first of
    `f_{pp_rank}_{tp_rank}_{rdp_rank}` (not with back_compat), `f_{pp_rank}_{tp_rank}`, `f_{mp_rank}`.
    map_location: as in torch.load.   pickle_module, pickle_load_args: accepted; without effect on safe loading.
    trust: load files that could run code.
    Raises: CheckpointNotFoundError (a FileNotFoundError) listing what there is; CheckpointError naming the type that safe
        loading refuses, or files of one set that come from different saves or another layout.
    """
    _check_name(f, "load")
    here = world()
    trusted = safe_loading.trusted(trust)
    path = _candidate(f, here, back_compat=back_compat) if partial else storage.place(f)
    if not path.is_file():
        raise CheckpointNotFoundError(f"no file {path}", remedy="check the name, or partial=True for files of ranks")
    if partial:
        _check_set(storage.place(f), path, here)
    return safe_loading.read_file(path, trust=trusted, map_location=map_location)


def _check_name(f: object, call: str) -> None:
    if not isinstance(f, str):
        raise TypeError(f"smp.{call}() got a {type(f).__name__} for 'f', expected a string: the name of a file")


# ------------------------------------------------------------------ writing


def _write(path: Place, obj: Any, here: World, trust: bool) -> None:
    count_of = here.job_id, storage.absolute(str(path))
    _saves[count_of] += 1
    degrees = here.table.degrees
    stamp = _Stamp(here.job_id, _saves[count_of], degrees.pp, degrees.tp, degrees.rdp)
    unique = f"{here.rank}-{os.getpid()}"
    # The stamp is put into a file that is there already, so a file for a URL is made here first.
    beside = path.parent if isinstance(path, Path) else Path(tempfile.gettempdir())
    temporary = beside / f"{layout.WORK_PREFIX}{path.name}-{unique}"
    try:
        beside.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        if isinstance(path, Path):
            _remove_attempts(temporary)
        safe_loading.write_file(temporary, obj, trust=trust, name=path.name)
        _put_stamp(temporary, stamp)
        storage.of(path).upload(temporary, path)
    except OSError as error:
        remedy = error.remedy if isinstance(error, StorageError) else None
        what = f"{path} can't be written: {error.strerror or error}"
        raise CheckpointError(what, where=here.describe(), remedy=remedy) from error
    finally:
        temporary.unlink(missing_ok=True)


def _remove_attempts(temporary: Path) -> None:
    """Delete what processes of this rank left that were killed while they wrote this file."""
    start = temporary.name.rpartition("-")[0] + "-"
    for name in os.listdir(temporary.parent):
        if name.startswith(start) and name.removeprefix(start).isdecimal():
            with suppress(OSError):
                (temporary.parent / name).unlink()


def _put_stamp(path: Path, stamp: _Stamp) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        folder = archive.namelist()[0].split("/", 1)[0]
        archive.writestr(f"{folder}/{_STAMP}", json.dumps(asdict(stamp)))
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _link(link: Path, target: Path) -> None:
    """Make a relative link in place of what has that name; where there are no links, the file gets that name."""
    temporary = link.parent / f"{layout.WORK_PREFIX}{link.name}-link-{os.getpid()}"
    try:
        temporary.unlink(missing_ok=True)
        os.symlink(target.name, temporary)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise CheckpointError(f"{link} can't be written: {error.strerror or error}") from error
        os.replace(target, link)
    else:
        os.replace(temporary, link)


def _remove_dangling_links(f: Place) -> None:
    for path, _ in _files_of(f):
        if path.is_symlink() and not path.exists():
            path.unlink(missing_ok=True)


# ------------------------------------------------------------------ reading


def _candidate(f: str, here: World, *, back_compat: bool) -> Place:
    at = here.coordinates
    names = [f"{f}_{at.pp}_{at.tp}_{at.rdp}", f"{f}_{at.pp}_{at.tp}", f"{f}_{at.mp}"]
    places = (storage.place(name) for name in names[1 if back_compat else 0 :])
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        others = ", ".join(path.name for path, _ in _files_of(storage.place(f))) or "none"
        raise CheckpointNotFoundError(
            f"no file of '{f}' for this rank ({here.describe()}); files of that name: {others}",
            remedy="load with the degrees it was saved with, or with partial=False the whole file",
        )
    return found


def _files_of(f: Place) -> Iterator[tuple[Place, tuple[int, ...]]]:
    """The files of ranks under a name, with the numbers in theirs."""
    pattern = re.compile(re.escape(f.name) + r"((?:_\d+){1,3})")
    if not f.parent.is_dir():
        return
    for name in sorted(path.name for path in f.parent.iterdir()):
        if match := pattern.fullmatch(name):
            yield f.parent / name, tuple(map(int, match[1].split("_")[1:]))


def _check_set(f: Place, own: Place, here: World) -> None:
    """Refuse a set of another layout, or of several saves. Files of other libraries have no stamp and pass."""
    stamp = _stamp_of(own)
    if stamp is None:
        return
    numbers = dict(_files_of(f))[own]
    degrees = here.table.degrees
    present = (degrees.pp, degrees.tp, degrees.rdp)
    if (stamp.pp, stamp.tp) != present[:2] or (len(numbers) == 3 and stamp.rdp != degrees.rdp):
        now = f"pp={present[0]} tp={present[1]} rdp={present[2]}"
        raise CheckpointError(
            f"{own.name} was saved with {stamp.degrees()}, this job has {now}: a rank's part is another one now",
            where=str(own),
            remedy="load with the degrees of the save, or use smp.save_checkpoint and smp.resume_from_checkpoint",
        )
    limits = (stamp.pp, stamp.tp, stamp.rdp)[: len(numbers)]
    for path, place in _files_of(f):
        inside = len(place) == len(numbers) and all(n < limit for n, limit in zip(place, limits, strict=True))
        other = _stamp_of(path) if inside and path != own else None
        if other is not None and other.save != stamp.save:
            raise CheckpointError(
                f"{own.name} and {path.name} come from different saves, so together they are no checkpoint",
                where=str(own.parent),
                remedy="load an earlier set of files; each rank must save the same number of times to a name",
            )


def _stamp_of(path: Place) -> _Stamp | None:
    """The stamp of a file; None for a file of another library, or one that is no torch file."""
    try:
        with storage.of(path).open(path) as file, zipfile.ZipFile(file) as archive:
            folder = archive.namelist()[0].split("/", 1)[0]
            return _Stamp(**json.loads(archive.read(f"{folder}/{_STAMP}")))
    except StorageError:
        raise
    except (OSError, zipfile.BadZipFile, KeyError, IndexError, TypeError, ValueError):
        return None
