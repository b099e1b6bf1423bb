"""The cache against the live teacher: the same bits, whoever filled it, torn or not;
and what it refuses.
"""

import fcntl
import logging
import math
import multiprocessing
import resource
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from kd.core.errors import ModelError, RunError
from kd.core.types import Batch
from kd.files import storage
from kd.files.records import record_bytes
from kd.models import cache
from kd.models.cache import CachedTeacher, Codec, claim_writer, open_store
from kd.models.classifier import LogitsModel
from kd.models.live_teacher import LiveTeacher

IMAGES = 40
CLASSES = 5


@pytest.fixture
def live() -> LiveTeacher:
    torch.manual_seed(0)
    return LiveTeacher(
        LogitsModel(nn.Sequential(nn.Flatten(), nn.Linear(12, CLASSES))),
        torch.device("cpu"),
    )


def image(id: int, view: int) -> torch.Tensor:
    return torch.randn(
        3, 2, 2, generator=torch.Generator().manual_seed(1000 * view + id)
    )


def batch(ids: list[int], view: int = 0) -> Batch:
    plain = Batch.of(
        torch.stack([image(id, view) for id in ids]),
        torch.zeros(len(ids), dtype=torch.int64),
    )
    return Batch(
        torch.tensor(ids),
        plain.image,
        plain.label,
        plain.label,
        plain.lam,
        plain.weight,
        view,
    )


def opened(
    folder, dtype: str = "fp32", topk: int = 0, writable: bool = True, **changes
):
    identity = {"teacher": "abc", "seed": 0, "classes": ["a", "b"], **changes}
    return open_store(folder, identity, Codec(CLASSES, dtype, topk), IMAGES, writable)


def ask(teacher: CachedTeacher, *batches: Batch) -> list[torch.Tensor]:
    return [teacher(looked_up).logits for looked_up in teacher.lookup(batches)]


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_the_cache_equals_the_live_teacher_and_queries_it_once(tmp_path, live, dtype):
    stored = CachedTeacher(live, opened(tmp_path, dtype))
    batches = [batch(list(range(8))), batch(list(range(8, 16)))]
    expected = [live(item).logits for item in batches]
    if dtype == "fp16":
        expected = [logits.half().float() for logits in expected]
    before = live.images
    first = ask(stored, *batches)
    stored.flush()
    assert live.images - before == 16
    again = ask(stored, *batches)
    reopened = ask(
        CachedTeacher(live, opened(tmp_path, dtype, writable=False)), *batches
    )
    assert live.images - before == 16
    for answers in (first, again, reopened):
        assert all(
            torch.equal(item, reference)
            for item, reference in zip(answers, expected, strict=True)
        )


def test_outputs_wait_on_the_device_until_they_have_so_many_bytes(
    tmp_path, live, monkeypatch
):
    # three batches of four images in float32
    monkeypatch.setattr(cache, "WAITING_BYTES", 3 * 4 * CLASSES * 4)
    stored = CachedTeacher(live, opened(tmp_path, "fp32"))
    for start, written in ((0, False), (4, False), (8, True)):
        ask(stored, batch([*range(start, start + 4)]))
        assert any(tmp_path.glob("*.logits")) == written


@pytest.mark.parametrize("fixed_shape", [False, True])
def test_only_what_is_missing_is_computed(tmp_path, live, fixed_shape):
    stored = CachedTeacher(live, opened(tmp_path), fixed_shape)
    ask(stored, batch([1, 3, 5, 7]))
    stored.flush()
    before = live.images
    mixed = batch([0, 1, 2, 3])
    torch.testing.assert_close(ask(stored, mixed)[0], live(mixed).logits)
    assert live.images - before == (4 if fixed_shape else 2) + 4
    stored.flush()
    assert stored.store.missing(0).tolist() == [4, 6, *range(8, IMAGES)]


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("topk", [0, 2])
def test_logits_beyond_float16_are_an_error_that_names_the_key_and_are_not_stored(
    tmp_path, live, writable, topk
):
    opened(tmp_path, "fp16", topk)
    next(iter(live.model.parameters())).data *= 1e6
    stored = CachedTeacher(live, opened(tmp_path, "fp16", topk, writable))
    ask(stored, batch([0, 1]))
    with pytest.raises(
        ModelError,
        match=r"^teacher\.cache\.dtype: .*'logits'.*float16.*65504.*dtype=fp32",
    ):
        stored.flush()
    assert not list(tmp_path.glob("*.logits"))


def test_views_are_kept_apart(tmp_path, live):
    stored = CachedTeacher(live, opened(tmp_path))
    for view in (0, 1):
        ask(stored, batch([2, 3], view))
    stored.flush()
    before = live.images
    for view in (0, 1):
        assert torch.equal(
            ask(stored, batch([3, 2], view))[0], live(batch([3, 2], view)).logits
        )
    assert live.images - before == 4  # the expectations only


def test_padding_is_neither_predicted_nor_written(tmp_path, live):
    padded = batch([4, 5, 0, 0])
    padded.weight[2:] = 0
    stored = CachedTeacher(live, opened(tmp_path))
    ask(stored, padded)
    stored.flush()
    assert stored.store.missing(0).tolist() == [
        id for id in range(IMAGES) if id not in (4, 5)
    ]


def test_a_torn_record_is_computed_again(tmp_path, live):
    """One wrong bit; zeros, a record of another image and a file cut short:
    test_storage.py.
    """
    stored = CachedTeacher(live, opened(tmp_path))
    ask(stored, batch(list(range(10))))
    stored.flush()
    size = record_bytes(stored.store.codec.record.itemsize)
    file = tmp_path / "view_0000.logits"
    raw = bytearray(file.read_bytes())
    raw[4 * size] ^= 1
    file.write_bytes(raw)
    reopened = CachedTeacher(live, opened(tmp_path))
    assert 4 in reopened.store.missing(0)
    before = live.images
    assert torch.equal(
        ask(reopened, batch(list(range(10))))[0][4], live(batch([4])).logits[0]
    )
    assert live.images - before == 2
    reopened.flush()
    assert 4 not in reopened.store.missing(0)


def test_top_k_keeps_the_probabilities_of_the_highest_and_the_mass_of_the_rest():
    torch.manual_seed(0)
    logits_BC = 3 * torch.randn(6, 50)
    codec = Codec(50, "fp32", 8)
    rebuilt = codec.expand(codec.compress(logits_BC))
    highest = logits_BC.topk(8)
    exact = logits_BC.double().softmax(1)
    approximate = rebuilt.double().softmax(1)
    torch.testing.assert_close(
        approximate.gather(1, highest.indices),
        exact.gather(1, highest.indices),
        rtol=1e-5,
        atol=0,
    )
    remaining = torch.ones(6, 50, dtype=torch.bool).scatter(1, highest.indices, False)
    torch.testing.assert_close(
        (approximate * remaining).sum(1), (exact * remaining).sum(1), rtol=1e-5, atol=0
    )
    assert math.isclose(approximate.sum().item(), 6.0, rel_tol=1e-9)


def test_top_k_logits_come_back_through_the_files(tmp_path, live):
    stored = CachedTeacher(live, opened(tmp_path, "fp32", topk=2))
    first = ask(stored, batch([0, 1, 2]))[0]
    stored.flush()
    before = live.images
    assert torch.equal(ask(stored, batch([0, 1, 2]))[0], first)
    assert live.images == before
    assert torch.equal(
        first.topk(2).indices, live(batch([0, 1, 2])).logits.topk(2).indices
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("teacher", "xyz"), ("seed", 1), ("classes", ["b", "a"]), ("more", 1)],
)
def test_a_cache_of_something_else_is_refused_by_name(tmp_path, field, value):
    opened(tmp_path)
    with pytest.raises(
        RunError, match=rf"^teacher\.cache\.path: .* made with another {field} \("
    ):
        opened(tmp_path, **{field: value})


def test_a_reader_computes_and_does_not_write(tmp_path, live):
    opened(tmp_path)
    reader = CachedTeacher(live, opened(tmp_path, writable=False))
    assert torch.equal(ask(reader, batch([1, 2]))[0], live(batch([1, 2])).logits)
    reader.flush()
    assert not list(tmp_path.glob("*.logits"))


def test_a_reader_waits_for_the_manifest_of_a_writer_that_has_just_begun(tmp_path):
    def begin() -> None:
        time.sleep(0.3)
        opened(tmp_path)

    writer = threading.Thread(target=begin)
    writer.start()
    assert not opened(tmp_path, writable=False).writable
    writer.join()


def test_a_reader_does_not_begin_a_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "MANIFEST_WAIT", 0.1)
    with pytest.raises(RunError, match=r"^teacher\.cache\.path: "):
        opened(tmp_path, writable=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", '{"teacher": "ab', "[1]", "null"])
def test_a_damaged_manifest_is_one_line_with_its_remedy(tmp_path, text):
    opened(tmp_path)
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(
        RunError,
        match=r"^teacher\.cache\.path: '.*' is damaged \(.*\)\. Remove the folder '",
    ):
        opened(tmp_path)


def test_one_process_writes_and_who_may_only_read_does_not(tmp_path):
    with (tmp_path / ".lock").open("a") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        assert not claim_writer(tmp_path)
    assert claim_writer(tmp_path)
    assert claim_writer(tmp_path)
    unwritable = tmp_path / "unwritable"
    # the superuser may write anything, but not this
    (unwritable / ".lock").mkdir(parents=True)
    with pytest.raises(RunError, match=r"cannot write '.*' \(Is a directory\)"):
        claim_writer(unwritable)
    opened(unwritable)
    assert not claim_writer(unwritable)


def _write_until_full(folder: str, answers) -> None:
    """Fill a cache that may take no more than ten records: the system's own limit
    stands in for a full disk.
    """
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weights = nn.Sequential(nn.Flatten(), nn.Linear(12, CLASSES))
    stored = CachedTeacher(
        LiveTeacher(LogitsModel(weights), torch.device("cpu")), opened(Path(folder))
    )
    limit = 10 * record_bytes(stored.store.codec.record.itemsize)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    logging.getLogger("kd").addHandler(logging.FileHandler(Path(folder) / "told"))
    for ids in (range(0, 8), range(8, 16), range(16, 24)):
        ask(stored, batch(list(ids)))
        stored.flush()
    answers.put(
        (
            IMAGES - len(stored.store.missing(0)),
            stored.live.images,
            stored.store.stopped,
        )
    )


def test_a_full_disk_is_reported_once_and_the_teacher_runs_on(tmp_path):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    run = context.Process(target=_write_until_full, args=(str(tmp_path), answers))
    run.start()
    assert answers.get(timeout=30) == (10, 24, "File too large")
    run.join(30)
    lines = (tmp_path / "told").read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("teacher.cache: '")
    assert lines[0].endswith(
        "cannot be written (File too large). Existing entries are used; the rest are"
        " computed live."
    )


def read(ids: list[int], crc: list[int], view: int = 0) -> Batch:
    """A batch as a loader makes it, which knows what the images were decoded from."""
    return replace(batch(ids, view), crc=tuple(crc))


def test_a_record_of_an_image_that_has_changed_is_computed_again_and_counted(
    tmp_path, live, caplog
):
    stored = CachedTeacher(live, opened(tmp_path))
    ask(stored, read([0, 1, 2, 3], [10, 11, 12, 13]))
    stored.flush()
    before = live.images
    # equal, or unknown
    ask(
        stored,
        read([0, 1, 2, 3], [10, 11, 12, 13]),
        read([0, 1], [0, 0]),
        batch([2, 3]),
    )
    assert live.images == before
    assert not caplog.messages
    changed = read([0, 1, 2, 3], [10, 99, 12, 98])
    changed.image[1] = image(30, 0)
    changed.image[3] = image(31, 0)
    answer = ask(stored, changed)[0]
    assert live.images - before == 2
    torch.testing.assert_close(answer, live(changed).logits)
    assert caplog.messages == [
        "teacher.cache: view 0: 2 records are of images that have changed; they are"
        " computed again"
    ]
    stored.flush()
    before = live.images
    assert torch.equal(ask(CachedTeacher(live, opened(tmp_path)), changed)[0], answer)
    assert live.images == before
    assert len(caplog.messages) == 1


def test_a_record_whose_bytes_are_unknown_is_taken(tmp_path, live):
    stored = CachedTeacher(live, opened(tmp_path))
    ask(stored, batch([0, 1]))
    stored.flush()
    before = live.images
    ask(stored, read([0, 1], [5, 6]))
    assert live.images == before


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RunError,
        match=r"^teacher\.cache\.path: cannot write '.*' \(Not a directory\)\. Choose",
    ):
        claim_writer(tmp_path / "file" / "cache")
    with pytest.raises(RunError, match=r"cannot write '.*' \(Not a directory\)"):
        opened(tmp_path / "file" / "cache")
    opened(tmp_path / "view").folder.joinpath("view_0000.logits").mkdir()
    with pytest.raises(
        RunError, match=r"cannot write '.*view_0000\.logits' \(Is a directory\)"
    ):
        opened(tmp_path / "view").missing(0)
