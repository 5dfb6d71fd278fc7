"""`smp.save` and `smp.load`: any object into one file, or into one file per rank.

Neither communicates, so that a script may call them on whichever ranks it likes. What files belong together is
written into them: each carries a stamp that names the job, how often that job has saved to this name, and the layout.
Loading one file of a set looks at the stamps of all of them, and refuses a set of several saves. A set of another layout is
read whole and joined, see `rank_merge`. Every rank decides that by the file of the first place, so that all do the same.

The stamp, and what partial state dicts are parts of, are entries of their own in the zip file that torch writes; torch.load
does not look at them.

Source: api.md 9.2 and 9.3, design.md section 6.
"""

from __future__ import annotations

import collections
import errno
import itertools
import json
import os
import pickle
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from shardwright.checkpoint import layout, rank_merge, safe_loading, storage
from shardwright.checkpoint.state import SPANS
from shardwright.checkpoint.storage import Place, RemotePath
from shardwright.checkpoint.storage.attempts import StorageError
from shardwright.errors import CheckpointError, CheckpointNotFoundError
from shardwright.log import get_logger
from shardwright.topology.context import World, world

_log = get_logger(__name__)

_STAMP = "shardwright.json"
_PARTS = "shardwright_parts.json"
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_Told = TypeVar("_Told")
_saves: collections.Counter[tuple[str, str]] = collections.Counter()


@dataclass(frozen=True)
class _Stamp:
    """Which save a file comes from.

    number: of this job's saves to this name.   pp, tp, rdp: degrees.   pieces: the setting by which replicas hold different
    parts of what is in the set; "" if they hold the same.
    """

    job: str
    number: int
    pp: int
    tp: int
    rdp: int
    pieces: str = ""

    @property
    def save(self) -> tuple[str, int]:
        return self.job, self.number

    def degrees(self) -> str:
        return f"pp={self.pp} tp={self.tp} rdp={self.rdp} {self.pieces}".rstrip()


def save(
    obj: Any,
    f: str,
    partial: bool = True,
    pickle_module: ModuleType = pickle,
    pickle_protocol: int = 2,
    v3: bool = False,
    *,
    trust: bool | None = None,
    describe: Callable[[], rank_merge.Parts | None] | None = None,
) -> None:
    """Write an object to a file of this rank, in one step: readers see the old file or the new one.

    Called by: with `partial`, one rank of each (pp, tp) place, or with `v3` every rank; without, the one rank that has
        the object. Collectives: none.
    f: where to, a path or a URL; folders are made.   partial: the file is `f_{pp_rank}_{tp_rank}`, and without tensor
    parallelism there is a link `f_{mp_rank}` to it (at a URL only `f_{mp_rank}`).   v3: `f_{pp_rank}_{tp_rank}_{rdp_rank}`; with partial=False only world rank 0 writes.
    pickle_module, pickle_protocol: accepted; files are written in the form that safe loading reads.
    trust: also accept what `smp.load` refuses by default.   describe: called if `obj` has partial state dicts: what they are
    parts of, without which the set can't be loaded with other degrees.
    Raises: TypeError if f is no string; CheckpointError naming the type that could not be loaded again, or the reason
        of the disk. A file of that name is intact then.
    """
    _check_name(f, "save")
    here = world()
    if not partial:
        if here.rank == 0 or not v3:
            _write(storage.place(f), obj, here, safe_loading.trusted(trust))
        return
    parts, pieces = _told(obj, describe, here)
    at = here.coordinates
    name = f"{f}_{at.pp}_{at.tp}_{at.rdp}" if v3 else f"{f}_{at.pp}_{at.tp}"
    by_mp_rank = not v3 and here.table.degrees.tp == 1
    path = storage.place(name)
    if isinstance(path, RemotePath):  # where there are no links
        path = storage.place(f"{f}_{at.mp}") if by_mp_rank else path
        _write(path, obj, here, safe_loading.trusted(trust), parts, pieces)
        return
    _remove_dangling_links(storage.place(f))
    _write(path, obj, here, safe_loading.trusted(trust), parts, pieces)
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
    A set that was saved with other degrees, or with other settings of sharding, is read whole: its partial state dicts come
    back whole (`_smp_is_partial` False), for `load_state_dict` of the model and the optimizer; everything else is that of
    the first place. Tensors are on the CPU then, without map_location.
    Raises: CheckpointNotFoundError (a FileNotFoundError) listing what there is; CheckpointError naming the type that safe
        loading refuses, files of one set that are missing or come from different saves, or a set of another layout without
        partial state dicts of the wrapped model.
    """
    _check_name(f, "load")
    here = world()
    trusted = safe_loading.trusted(trust)
    others = _set_of_another_layout(f, here, back_compat=back_compat) if partial else []
    if others:
        return _merged(others, trusted, map_location)
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


def _told(
    obj: Any, describe: Callable[[], rank_merge.Parts | None] | None, here: World
) -> tuple[rank_merge.Parts | None, str]:
    """What is said beside an object with partial state dicts: what of, and `_Stamp.pieces`."""
    found = [held for _, held in rank_merge.partial_dicts(obj)] if describe is not None else []
    if not found or describe is None:
        return None, ""
    cut = here.table.degrees.sdp > 1 or any(SPANS in held for held in found)
    return describe(), _sharding(here) if cut else ""


def _sharding(here: World) -> str:
    """How replicas share state now."""
    settings = ["shard_optimizer_state"] if here.config.shard_optimizer_state else []
    sdp = here.table.degrees.sdp
    return " ".join([*settings, *([f"sharded_data_parallel_degree={sdp}"] if sdp > 1 else [])])


def _write(
    path: Place, obj: Any, here: World, trust: bool, parts: rank_merge.Parts | None = None, pieces: str = ""
) -> None:
    count_of = here.job_id, storage.absolute(str(path))
    _saves[count_of] += 1
    degrees = here.table.degrees
    stamp = _Stamp(here.job_id, _saves[count_of], degrees.pp, degrees.tp, degrees.rdp, pieces)
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
        _put_stamp(temporary, stamp, parts)
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


def _put_stamp(path: Path, stamp: _Stamp, parts: rank_merge.Parts | None) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        folder = archive.namelist()[0].split("/", 1)[0]
        archive.writestr(f"{folder}/{_STAMP}", json.dumps(asdict(stamp)))
        if parts is not None:
            archive.writestr(f"{folder}/{_PARTS}", json.dumps(parts.to_json(), separators=(",", ":")))
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


def _names(f: str, here: World, *, back_compat: bool) -> list[str]:
    at = here.coordinates
    return [f"{f}_{at.pp}_{at.tp}_{at.rdp}", f"{f}_{at.pp}_{at.tp}", f"{f}_{at.mp}"][1 if back_compat else 0 :]


def _candidate(f: str, here: World, *, back_compat: bool) -> Place:
    places = map(storage.place, _names(f, here, back_compat=back_compat))
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


def _set_of_another_layout(f: str, here: World, *, back_compat: bool) -> list[tuple[Place, tuple[int, int]]]:
    """The files that make up a set which has to be joined to be of use here, each with its pp_rank and tp_rank.

    The same on all ranks. []: each rank has a file of its own; or there is no way, and looking for that file says so.
    Raises: CheckpointError if a file is missing, or they come from different saves.
    """
    kinds = ["_0_0_0", "_0_0", "_0"][1 if back_compat else 0 :]
    heads = [path for path in (storage.place(f + kind) for kind in kinds) if path.is_file()]
    stamp = _stamp_of(heads[0]) if heads else None
    if stamp is None:
        return []
    numbers = heads[0].name.removeprefix(storage.place(f).name).count("_")
    degrees = here.table.degrees
    same_replicas = stamp.rdp == degrees.rdp or (numbers < 3 and not stamp.pieces)
    # A whole parameter is a part for tensor slices and stages, but not where each replica holds rows of its own.
    same_pieces = stamp.pieces == _sharding(here) or not (stamp.pieces or degrees.sdp > 1)
    if (stamp.pp, stamp.tp) == (degrees.pp, degrees.tp) and same_replicas and same_pieces:
        return []
    if _parts_of(heads[0]) is None:
        return []
    if numbers == 3 and len(heads) > 1:
        raise CheckpointError(
            f"{heads[0].name} and {heads[1].name} are of two sets of files, and it isn't known which one is the newer",
            where=str(heads[0].parent),
            remedy="delete the files of the older one",
        )
    files = []
    for pp, tp in itertools.product(range(stamp.pp), range(stamp.tp)):
        # Without pieces replicas have written the same.
        for rdp in range(stamp.rdp if stamp.pieces and numbers == 3 else 1):
            path = storage.place("_".join(map(str, (f, pp, tp, rdp)[: numbers + 1])))
            if not path.is_file():
                raise CheckpointError(
                    f"{heads[0].name} was saved with {stamp.degrees()}, but of that set {path.name} is missing",
                    where=str(path.parent),
                    remedy="load an earlier set of files",
                )
            told = _stamp_of(path)
            if told is None or told.save != stamp.save:
                raise _different_saves(heads[0], path)
            files.append((path, (pp, tp)))
    return files


def _merged(files: Sequence[tuple[Place, tuple[int, int]]], trust: bool, map_location: Any) -> Any:
    where = "cpu" if map_location is None else map_location
    return rank_merge.merged(
        [
            rank_merge.RankFile(
                path.name, place, safe_loading.read_file(path, trust=trust, map_location=where), _parts_of(path)
            )
            for path, place in files
        ]
    )


def _different_saves(one: Place, other: Place) -> CheckpointError:
    return CheckpointError(
        f"{one.name} and {other.name} come from different saves, so together they are no checkpoint",
        where=str(one.parent),
        remedy="load an earlier set of files; each rank must save the same number of times to a name",
    )


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
            remedy="load with the degrees of the save; in others, save the dicts of model.local_state_dict() and"
            " optimizer.local_state_dict(), or use smp.save_checkpoint",
        )
    limits = (stamp.pp, stamp.tp, stamp.rdp)[: len(numbers)]
    for path, place in _files_of(f):
        inside = len(place) == len(numbers) and all(n < limit for n, limit in zip(place, limits, strict=True))
        other = _stamp_of(path) if inside and path != own else None
        if other is not None and other.save != stamp.save:
            raise _different_saves(own, path)


def _stamp_of(path: Place) -> _Stamp | None:
    """The stamp of a file; None for a file of another library, or one that is no torch file."""
    return _told_by(path, _STAMP, lambda told: _Stamp(**told))


def _parts_of(path: Place) -> rank_merge.Parts | None:
    """What the partial state dicts in a file are parts of; None if it has none, or an earlier release wrote it."""
    return _told_by(path, _PARTS, rank_merge.Parts.from_json)


def _told_by(path: Place, name: str, make: Callable[[Any], _Told]) -> _Told | None:
    try:
        with storage.of(path).open(path) as file, zipfile.ZipFile(file) as archive:
            folder = archive.namelist()[0].split("/", 1)[0]
            return make(json.loads(archive.read(f"{folder}/{name}")))
    except StorageError:
        raise
    except (OSError, zipfile.BadZipFile, KeyError, IndexError, TypeError, ValueError):
        return None
