"""Files and folders are whole or absent, and a record is whole or not there."""

import errno
import fcntl
import json
import os
import tracemalloc
from pathlib import Path

import pytest

from kd.core.errors import RunError
from kd.files import storage
from kd.files.records import Records, Stop
from kd.files.storage import (
    append_rows,
    atomic_folder,
    hashed_folder,
    keep_rows,
    lock,
    open_folder,
    read_rows,
    recover,
    write_text,
)


def everything(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


class Trouble(Exception):
    pass


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize(
    "error",
    [Trouble(), KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")],
)
def test_a_folder_that_fails_leaves_the_old_one(tmp_path, existing, error):
    path = tmp_path / "folder"
    if existing:
        path.mkdir()
        (path / "old").write_text("old")
    expected = RunError if isinstance(error, OSError) else type(error)

    def stopped() -> None:
        with atomic_folder(path) as draft:
            (draft / "new").write_text("new")
            raise error

    with pytest.raises(expected):
        stopped()
    assert everything(tmp_path) == (["folder", "folder/old"] if existing else [])


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    for name in ("old", "new"):
        with atomic_folder(tmp_path / "folder") as draft:
            (draft / name).write_text(name)
    assert everything(tmp_path) == ["folder", "folder/new"]


def test_two_writers_with_one_process_id_do_not_meet(tmp_path):
    """In two containers that share a disk, both may be process 1."""
    with atomic_folder(tmp_path / "folder") as draft:
        (draft / "a").write_text("one")
        with atomic_folder(tmp_path / "folder") as second_draft:
            (second_draft / "a").write_text("other")
        assert (draft / "a").read_text() == "one"
    assert (tmp_path / "folder" / "a").read_text() == "one"
    assert everything(tmp_path) == ["folder", "folder/a"]


@pytest.mark.parametrize(
    "name", [".folder.123.tmp", ".folder.123.old", ".folder.0123456789ab.tmp"]
)
def test_leftovers_of_a_killed_process_are_removed(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / name).mkdir()
    (tmp_path / name / "half").write_text("half")
    (tmp_path / ".other.name.0123456789ab.tmp").mkdir()
    with atomic_folder(tmp_path / "folder") as draft:
        (draft / "new").write_text("new")
    assert everything(tmp_path) == [
        ".other.name.0123456789ab.tmp",
        "folder",
        "folder/new",
    ]


def test_a_folder_that_was_being_replaced_is_put_back(tmp_path):
    (tmp_path / ".folder.0123456789ab.old").mkdir()
    (tmp_path / ".folder.0123456789ab.old" / "file").write_text("old")
    (tmp_path / ".folder.0123456789ab.tmp").mkdir()
    recover(tmp_path)
    assert everything(tmp_path) == ["folder", "folder/file"]


def test_what_a_living_writer_is_replacing_is_left_to_it(tmp_path):
    old = tmp_path / ".folder.0123456789ab.old"
    draft = tmp_path / ".folder.0123456789ab.tmp"
    for folder in (old, draft):
        folder.mkdir()
    descriptor = os.open(draft, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # as the writer holds its draft
        recover(tmp_path)
        assert not (tmp_path / "folder").exists()
        assert (old.is_dir(), draft.is_dir()) == (True, True)
    finally:
        os.close(descriptor)
    recover(tmp_path)
    assert everything(tmp_path) == ["folder"]


def test_a_draft_in_use_is_left_alone(tmp_path):
    with atomic_folder(tmp_path / "folder") as draft:
        (draft / "file").write_text("new")
        recover(tmp_path)
    assert everything(tmp_path) == ["folder", "folder/file"]
    young = tmp_path / ".a.json.0123456789ab.tmp"
    old = tmp_path / ".b.json.0123456789ab.tmp"
    for file in (young, old):
        file.write_text("half")
    os.utime(old, (0, 0))
    recover(tmp_path)
    assert (young.exists(), old.exists()) == (True, False)
    recover(tmp_path, alone=True)
    assert not young.exists()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RunError,
        match=(
            r"^run\.folder: cannot write '.*' \((Not a directory|File exists)\)\."
            r" Choose a folder"
        ),
    ):
        write_text(tmp_path / "file" / "a.txt", "text")
    with (
        pytest.raises(RunError, match="cannot write"),
        atomic_folder(tmp_path / "file" / "folder"),
    ):
        pass


def test_a_text_on_a_full_disk_leaves_the_old_one(small_disk):
    write_text(small_disk / "a.txt", "old")
    with pytest.raises(RunError, match="the disk is full"):
        write_text(small_disk / "a.txt", "x" * 1_000_000)
    assert everything(small_disk) == ["a.txt"]
    assert (small_disk / "a.txt").read_text() == "old"


def records(folder: Path, label: str = "", size: int = 100, align: int = 1) -> Records:
    file = os.open(folder / "records", os.O_RDWR | os.O_CREAT)
    return Records(file, size, Stop("here", "The rest is left out."), label, align)


def test_rows_that_are_not_whole_are_left_out(tmp_path):
    """A full disk cut a row short within a nested value, and the resumed run wrote
    behind it.
    """
    path = tmp_path / "rows.jsonl"
    assert read_rows(path) == []
    rows = [{"step": step, "ms": {"data": 0.5}} for step in range(4)]
    lines = [json.dumps(row).encode() for row in rows]
    torn = [
        lines[1][:20] + lines[1],
        b"\0" * 9,
        b"\xff{}",
        b"3",
        b"[" * 100_000,
        lines[2][:-1],
    ]
    path.write_bytes(b"\n".join([lines[0], *torn, lines[3]]) + b"\n" + lines[1][:-2])
    assert read_rows(path) == [rows[0], rows[3]]
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert read_rows(path, len(lines[3]) + 5) == [rows[3]]


def test_a_long_line_is_left_out_and_takes_no_memory(tmp_path):
    """A line of 1 GB took 3.5 GB."""
    path = tmp_path / "rows.jsonl"
    row = json.dumps({"step": 1}).encode() + b"\n"
    long = b'{"step": "' + bytes(2**26).replace(b"\0", b"x") + b'"}'
    fits = long[: 2**20 - 1]
    is_too_long = long[: 2**20]
    for lines in ([row, long, row], [row, row, long], [fits, row, is_too_long, row]):
        path.write_bytes(b"".join(line.rstrip() + b"\n" for line in lines))
        tracemalloc.start()
        rows = read_rows(path, last=None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert rows == [{"step": 1}] * 2
        assert peak < 2**23


@pytest.mark.parametrize("align", [1, 64, 4096])
def test_a_record_comes_back_and_others_are_not_there(tmp_path, align):
    written = records(tmp_path, align=align)
    for id, content in ((0, b"a"), (5, bytes(100)), (2, b"c" * 50)):
        written.write(id, content)
    again = records(tmp_path, align=align)
    assert [again.read(id) for id in range(7)] == [
        b"a",
        None,
        b"c" * 50,
        None,
        None,
        bytes(100),
        None,
    ]
    again.write(2, b"shorter")
    assert written.read(2) == b"shorter"
    written.write(3, bytes(101))  # longer than a record may be
    assert written.read(3) is None


def test_a_record_belongs_to_its_place(tmp_path):
    written = records(tmp_path, "view 0")
    written.write(0, b"a" * 100)
    content = (tmp_path / "records").read_bytes()
    (tmp_path / "records").write_bytes(content + content)
    assert written.read(0) == b"a" * 100
    assert written.read(1) is None
    assert records(tmp_path, "view 1").read(0) is None


def test_a_record_with_one_wrong_bit_is_not_whole(tmp_path):
    written = records(tmp_path)
    written.write(0, b"a" * 100)
    content = (tmp_path / "records").read_bytes()
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 1
        (tmp_path / "records").write_bytes(damaged)
        assert written.read(0) is None
    (tmp_path / "records").write_bytes(content)
    assert written.read(0) == b"a" * 100


def test_a_file_that_is_cut_short_while_it_is_open_ends_nothing(tmp_path):
    """A mapped file would end the process with SIGBUS."""
    written = records(tmp_path, align=4096)
    for id in range(3):
        written.write(id, bytes([id + 1]) * 100)
    for length, readable in ((2 * 4096 + 50, 2), (4096 + 4, 1), (0, 0)):
        os.truncate(tmp_path / "records", length)
        assert [written.read(id) is not None for id in range(3)] == [
            id < readable for id in range(3)
        ]
    written.write(2, b"again")
    assert written.read(2) == b"again"


def test_a_full_disk_is_reported_once_for_all_processes(small_disk, caplog):
    """Records that were written stay good. A process forked from this one stops too."""
    written = records(small_disk, size=50_000)
    for id in range(10):
        written.write(id, bytes([id + 1]) * 50_000)
    written_ids = [written.read(id) is not None for id in range(10)]
    assert written_ids == sorted(written_ids, reverse=True)
    assert 1 < sum(written_ids) < 10
    assert [record.message for record in caplog.records] == [
        f"here cannot be written ({written.stop.reason}). The rest is left out."
    ]
    child = os.fork()
    if not child:
        os._exit(0 if written.stop.reason else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_lock_has_one_owner_and_ends_with_it(tmp_path):
    first = lock(tmp_path / ".lock", "run.name")
    assert first is not None
    assert (tmp_path / ".lock").read_text() == str(os.getpid())
    assert lock(tmp_path / ".lock", "run.name") is None
    first.close()
    assert lock(tmp_path / ".lock", "run.name") is not None


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP])
def test_a_file_system_without_locks_is_not_another_owner(
    tmp_path, monkeypatch, number
):
    def without(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", without)
    with pytest.raises(
        RunError,
        match=r"^teacher\.cache\.path: '.*' lies on a file system without locks",
    ):
        lock(tmp_path / ".lock", "teacher.cache.path")


def test_a_folder_is_named_by_what_it_is_made_from(tmp_path):
    identity = {"data": "abc", "sizes": [1, 2]}
    folder = hashed_folder(tmp_path, "train", identity)
    assert folder.parent == tmp_path
    assert folder == hashed_folder(tmp_path, "train", {"sizes": [1, 2], "data": "abc"})
    variants = [
        {**identity, "data": "abd"},
        {**identity, "sizes": [2, 1]},
        {**identity, "more": None},
    ]
    assert (
        len(
            {
                folder,
                *(hashed_folder(tmp_path, "train", variant) for variant in variants),
            }
        )
        == 4
    )
    for _ in range(2):
        open_folder(folder, identity, "data.store")
        open_folder(folder, identity, "data.store", writable=False)
    with pytest.raises(
        RunError,
        match=(
            r"^data\.store: '.*train-.*' was made with another sizes \(\[1, 2\];"
            r" this run"
        ),
    ):
        open_folder(folder, {**identity, "sizes": [3]}, "data.store")


def test_rows_that_are_kept_are_kept_of_the_whole_file(tmp_path):
    """A reader of a page takes the end of a long file; who writes it anew must not lose
    the beginning.
    """
    file = tmp_path / "metrics.jsonl"
    append_rows(
        file,
        *({"step": step, "text": "x" * (storage.LAST // 90)} for step in range(100)),
    )
    assert 0 < len(read_rows(file)) < 100
    keep_rows(file, lambda row: row["step"] <= 90)
    assert [row["step"] for row in read_rows(file, last=None)] == [*range(91)]
