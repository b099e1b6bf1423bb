"""Tar shards are found, copied to this machine, and indexed.

Their names have braces and wildcards.
"""

import errno
import glob
import os
import re
import tarfile
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from kd.core.errors import DataError, did_you_mean
from kd.files import object_store
from kd.files.storage import lock, log, on_disk, recover

BLOCK = 512  # bytes of a tar block; headers and contents begin at multiples of it
# largest extended header, bytes. tarfile would read any claimed size.
MAX_HEADER = 2**20
_NUMBER = re.compile(r"([0-9]+)\.")  # digits between the first two dots of a file name
AT_ONCE = 8  # shards copied at the same time


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard is a tar file on this machine."""

    path: str
    origin: str  # its path, or the URL that it was copied from


def find_shards(pattern: str, config_path: str, copies: str) -> list[Shard]:
    """Return the shards of a pattern in its order.

    New or changed remote shards are copied first.
    """
    names = origins(pattern, config_path)
    if not object_store.is_url(pattern):
        return [Shard(name, name) for name in names]
    return _copy_shards(names, Path(os.path.expanduser(copies)), config_path)


def origins(pattern: str, config_path: str) -> list[str]:
    """Return the paths or URLs of a pattern's shards in its order, without copying."""
    if pattern.startswith("pipe:"):
        wrong = f"'{pattern}' is a pipe"
        allowed = "Paths or URLs of .tar files"
        raise DataError(config_path, wrong, allowed, "Name the shards' URL")
    remote = object_store.is_url(pattern)
    names: dict[str, None] = {}
    missing: list[str] = []
    for path in _expand_braces(pattern if remote else os.path.expanduser(pattern)):
        matches = [path]
        if remote and glob.has_magic(path):
            matches = list(object_store.versions(path, config_path))
        elif not remote and glob.has_magic(path):
            matches = sorted(glob.glob(path))
        elif not remote and not os.path.isfile(path):
            matches = []
        names.update(dict.fromkeys(matches))
        if not matches:
            missing.append(path)
    if missing:
        raise _no_shard(missing, config_path, remote)
    return list(names)


def members(
    file: BinaryIO, shard: str, config_path: str, named: Collection[str] = ()
) -> dict[str, dict[str, tuple[int, int]]]:
    """Return offset and size of the members of an open shard, by key and ending.

    For example {"dir/0001": {"jpg": (512, 99)}}.

    A key ends at the first dot of the file name, as in WebDataset. Exception: if only
    digits stand between the first two dots, the key ends at the second, so
    `img_4.5.jpg` has the key `img_4.5`, unless `5.jpg` is in `named`.
    """
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    end = 0
    with tarfile.open(fileobj=cast(BinaryIO, _Headers(file)), mode="r:") as tar:
        for member in tar:
            size = member.size if member.isreg() else 0
            end = member.offset_data + -(-size // BLOCK) * BLOCK
            folder, _, base = member.name.rpartition("/")
            key, _, ending = base.partition(".")
            while ending.lower() not in named and (number := _NUMBER.match(ending)):
                key = f"{key}.{number[1]}"
                ending = ending[number.end() :]
            if not key or not ending or member.isdir():
                continue
            if folder:
                key = f"{folder}/{key}"
            ending = ending.lower()
            if not member.isreg() or member.sparse is not None:
                wrong = f"'{member.name}' in the shard '{shard}' is a link"
                raise DataError(config_path, wrong, "Plain files", "Write it anew")
            sample = samples.setdefault(key, {})
            if ending in sample:
                wrong = f"the shard '{shard}' has '{member.name}' twice"
                raise DataError(config_path, wrong, "", "Write it anew")
            sample[ending] = (member.offset_data, size)
    # tarfile treats a damaged or missing header as the end, and would lose the images
    # behind it without a message.
    if read_bytes(file, end, BLOCK) != bytes(BLOCK):
        wrong = f"the shard '{shard}' is cut short or damaged at byte {end}"
        allowed = "Whole .tar files, which end with empty blocks"
        raise DataError(config_path, wrong, allowed, "Copy or write it again")
    return samples


class _Headers:
    """tarfile reads only the headers of a shard."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek = file.seek
        self.tell = file.tell

    def read(self, size: int) -> bytes:
        if size > MAX_HEADER:
            raise tarfile.ReadError(
                f"a header of {size} bytes; at most {MAX_HEADER} are read"
            )
        return self._file.read(size)


def read_member(path: str, offset: int, size: int) -> bytes:
    """Return a member's bytes; opening the shard takes microseconds.

    OSError: it cannot be read, or the shard has become shorter.
    """
    with open(path, "rb", buffering=0) as file:
        data = read_bytes(file, offset, size)
    if len(data) < size:
        raise OSError(
            errno.EIO, f"the shard '{path}' has become shorter since it was indexed"
        )
    return data


def read_bytes(file: BinaryIO, offset: int, size: int) -> bytes:
    """Return `size` bytes of an unbuffered file, whose reads may be short."""
    file.seek(offset)
    blocks = []
    while size > 0 and (block := file.read(size)):
        blocks.append(block)
        size -= len(block)
    return b"".join(blocks)


def _no_shard(missing: Sequence[str], config_path: str, remote: bool) -> DataError:
    folder = os.path.dirname(missing[0]) or "."
    files = os.listdir(folder) if os.path.isdir(folder) and not remote else []
    wrong = f"no shard '{missing[0]}'"
    if len(missing) > 1:
        wrong += f" and {len(missing) - 1} more"
    remedy = (
        did_you_mean(os.path.basename(missing[0]), files)
        or "Check the path and the range in the braces"
    )
    return DataError(config_path, wrong, "A path with braces or wildcards", remedy)


def _copy_shards(urls: Sequence[str], folder: Path, config_path: str) -> list[Shard]:
    """Copy missing shards to this machine.

    One process copies; the others wait for its lock.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        versions = list(
            pool.map(lambda url: object_store.version(url, config_path), urls)
        )
        shards = [
            Shard(str(folder / version / url.rpartition("/")[2]), url)
            for version, url in zip(versions, urls, strict=True)
        ]
        with on_disk(folder, config_path):
            folder.mkdir(parents=True, exist_ok=True)
            while (locked := lock(folder / ".lock", config_path)) is None:
                time.sleep(0.5)
        with locked:
            missing = [shard for shard in shards if not os.path.isfile(shard.path)]
            if missing:
                log.info(
                    f"{config_path}: copying {len(missing)} of {len(shards)} shards to"
                    f" '{folder}'"
                )
            for shard in missing:
                recover(Path(shard.path).parent)
            list(
                pool.map(
                    lambda shard: object_store.copy_here(
                        shard.origin, Path(shard.path), config_path
                    ),
                    missing,
                )
            )
    return shards


def _expand_braces(pattern: str) -> list[str]:
    """Expand `{000..009}` and `{a,b}`; braces within braces are not handled."""
    match = re.search(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    if match[3] is not None:
        choices = match[3].split(",")
    else:
        first = int(match[1])
        last = int(match[2])
        padded = any(
            len(text) > 1 and text.startswith("0") for text in (match[1], match[2])
        )
        width = max(len(match[1]), len(match[2])) if padded else 0
        step = 1 if first <= last else -1
        choices = [f"{number:0{width}d}" for number in range(first, last + step, step)]
    head = pattern[: match.start()]
    tails = _expand_braces(pattern[match.end() :])
    return [head + choice + tail for choice in choices for tail in tails]
