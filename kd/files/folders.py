"""List image files in folders, in order, and count what is left out.

Training, `kd init` and `kd-predict` list with these functions. Links are followed;
hidden names and the folders of storage systems are left out. One `scandir` per folder
gives the types of entries. An entry's status is one more request, which NFS serves from
the same listing.
"""

import os
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kd.core.errors import DataError
from kd.files import pixels
from kd.files.pixels import AVIF, HEIF

ENDINGS = tuple(
    f".{ending}".encode()
    for ending in (*pixels.ENDINGS, *["avif"] * AVIF, *["heic", "heif"] * HEIF)
)
"""Endings of image files that can be read here."""
PILLOW_HEIF = "pillow-heif reads them: pip install 'PATH/kd[heic]'"
READ_BY: dict[str, str] = {
    ".heic": PILLOW_HEIF,
    ".heif": PILLOW_HEIF,
    ".avif": "Pillow 11.3 or later reads them",
}
"""Remedies for endings that may be unreadable here."""
OTHER = re.compile(
    "txt|xml|jsonl?|[ct]sv|md|html?|pdf|ya?ml|toml|ini|log|docx?|xlsx?|py|ipynb|zip|tar|t?gz|bz2|xz|7z|rar|np[yz]|mat|"
    "pkl|pth?|safetensors|onnx|h5|hdf5|parquet|arrow|db|dcm|nii|mp[34]|avi|mov|mkv|wav|svg|e?ps|psd|ai|xcf|hei[cf]|avif|"
    "jp2|jxl|exr|hdr|dng|cr[23]|nef|arw|orf|rw2|ra[fw]|svs|ndpi|scn|lsm|stk|lif|czi"
)
"""Endings of files that are not tested for being images. Some begin like a TIFF: raw
photographs.
"""
SYSTEM = {
    b"@eaDir",
    b"@Recycle",
    b"#recycle",
    b"$RECYCLE.BIN",
    b"__MACOSX",
    b"lost+found",
    b"System Volume Information",
}
"""Folders made by storage systems; some hold thumbnails. They count as hidden."""
MOST_KINDS = 6  # endings named in a line
IsImage = Callable[[os.DirEntry[bytes]], bool]


def join_path(folder: bytes, name: bytes) -> bytes:
    """Return the path of a name in a folder; b"" is the root."""
    return folder + b"/" + name if folder else name


def printable(name: bytes) -> str:
    """Return a file's name for messages; one in another encoding is printable too."""
    return name.decode("utf-8", "backslashreplace")


def entries_of(
    path: bytes, config_path: str
) -> tuple[list[os.DirEntry[bytes]], os.stat_result]:
    """Return a folder's content without hidden names, and the folder's metadata.

    The metadata is read before listing.
    """
    try:
        status = os.stat(path)
        with os.scandir(path) as listing:
            # macOS ._* too
            entries = [
                e
                for e in listing
                if not e.name.startswith(b".") and e.name not in SYSTEM
            ]
    except OSError as error:
        raise DataError(
            config_path,
            f"the folder '{printable(path)}' cannot be listed ({error.strerror})",
        ) from error
    return entries, status


def is_folder(entry: os.DirEntry[bytes]) -> bool:
    """Return whether an entry is a folder, or a link to one."""
    try:
        return entry.is_dir()
    # a link to itself: listed if it is named like an image; decoding reports the error
    except OSError:
        return False


def is_image(entry: os.DirEntry[bytes]) -> bool:
    """Return whether a file is an image by its ending, else by its first bytes."""
    if entry.name.lower().endswith(ENDINGS):
        return True
    name, _, ending = entry.name.lower().rpartition(b".")
    if name and OTHER.fullmatch(printable(ending)):
        return False
    try:
        if not entry.is_file():
            return False
        with open(entry.path, "rb", buffering=0) as file:
            head = file.read(12)
    except OSError:
        return False
    # Texts may begin with "BM" too. A file with an unknown ending, such as 4.5, may be
    # a raw photograph.
    doubtful = ("BMP", "TIFF") if name else ("BMP",)
    return pixels.format_of(head) not in ("", "AVIF", "HEIC", *doubtful)


def folders(path: str | os.PathLike[str]) -> list[str]:
    """Return the names of the folders in a folder, sorted, without hidden ones.

    The list is empty if the folder cannot be listed.
    """
    try:
        return sorted(
            entry.name
            for entry in os.scandir(path)
            if entry.is_dir()
            and not entry.name.startswith(".")
            and os.fsencode(entry.name) not in SYSTEM
        )
    except OSError:
        return []


class Folder(NamedTuple):
    """A folder of a walk has these entries."""

    path: bytes  # below the root
    above: frozenset[tuple[int, int]]  # its parents
    # names in order; folders end in "/", without entry
    content: Iterator[tuple[bytes, os.DirEntry[bytes] | None]]


class Walk:
    """A walk lists the image files below a folder of a root, in byte order of paths.

    The order is the same in every locale.
    """

    def __init__(
        self, root: str, folder: bytes, config_path: str, accept: IsImage = is_image
    ) -> None:
        self.root = os.fsencode(root)
        self.folder = folder
        self.config_path = config_path
        self.accept = accept
        self.folders = list[bytes]()  # all that were listed
        self.unread = Counter[str]()  # files that are no images, by ending

    def __iter__(self) -> Iterator[tuple[bytes, bytes, os.DirEntry[bytes]]]:
        """Yield the folder, the path and the entry of each image.

        One folder at a time is held as objects.
        """
        opened = [self._open(self.folder, frozenset())]
        while opened:
            path, above, content = opened[-1]
            name, entry = next(content, (b"", None))
            if entry is not None:
                yield path, join_path(path, name), entry
            elif name:
                opened.append(self._open(join_path(path, name[:-1]), above))
            else:
                opened.pop()

    def _open(self, relative: bytes, above: frozenset[tuple[int, int]]) -> Folder:
        path = os.path.join(self.root, relative) if relative else self.root
        entries, status = entries_of(path, self.config_path)
        self.folders.append(relative)
        identity = status.st_dev, status.st_ino
        if identity in above:
            wrong = f"the folder '{printable(path)}' is a link to a folder above it"
            raise DataError(self.config_path, wrong, "", "Remove the link")
        content: list[tuple[bytes, os.DirEntry[bytes] | None]] = []
        for entry in entries:
            if is_folder(entry):
                content.append((entry.name + b"/", None))
            elif self.accept(entry):
                content.append((entry.name, entry))
            else:
                self.unread[printable(posixpath.splitext(entry.name)[1])] += 1
        content.sort(key=lambda pair: pair[0])  # the "/" sorts a folder like its images
        return Folder(relative, above | {identity}, iter(content))


def count_unread(
    endings: Counter[str], noun: str = "file", remedy: str = ""
) -> list[str]:
    """Return a line that counts unread files or members by ending, or no line."""
    if not endings:
        return []
    counts = []
    for ending, count in endings.most_common(MOST_KINDS):
        reader = READ_BY.get(ending.lower(), "")
        hint = f" ({reader})" if reader else ""
        counts.append(f"{count} {ending or 'without an ending'}{hint}")
    listed = ", ".join(counts)
    if len(endings) > MOST_KINDS:
        listed += f" and {len(endings) - MOST_KINDS} kinds more"
    total = endings.total()
    files = f"{noun} is" if total == 1 else f"{noun}s are"
    return [f"{total} {files} not read: {listed}{remedy}"]


def folders_without_images(
    listed: Sequence[bytes], holding: Sequence[bytes]
) -> list[str]:
    """Return the listed folders without images.

    Of nested ones only the uppermost counts; `holding` are those with images.
    """
    above: set[bytes] = set()
    for folder in holding:
        while folder not in above:
            above.add(folder)
            folder = posixpath.dirname(folder)
    uppermost = sorted(
        folder
        for folder in listed[1:]
        if folder not in above and posixpath.dirname(folder) in above
    )
    return [printable(folder) for folder in uppermost]
