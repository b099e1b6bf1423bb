"""`kd-predict`: the endpoint's answers for every image that is given in any form, once each, whatever kills it."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pyarrow.parquet
import pytest
from PIL import Image

from kd.errors import DataError
from kd.predict.images import find
from kd.predict.run import Settings, predict
from kd.serve.answers import predictions
from kd.serve.images import prepare
from kd.serve.limits import Limits
from kd.serve.model import describe, load

ROOT = Path(__file__).parents[3]
ALONE = """
import sys
from kd.cli.serving import predict as main
code = main()
assert not {"torch", "timm"} & set(sys.modules)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def pictures(photos, tmp_path_factory) -> Path:
    """Six good images, in folders and with odd names, and four that cannot be used."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "b" / ".hidden").mkdir(parents=True)
    for number, path in enumerate(sorted(photos.rglob("*.jpg"))[:6]):
        name = ["0.jpg", "b/1.JPG", 'b/t,w"o.jpeg', "b/3\n.jpg", "z/ä.jpg", "b/5.png"][number]
        (folder / name).parent.mkdir(exist_ok=True)
        Image.open(path).save(folder / name)
    good = (folder / "0.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(good[: len(good) // 2])
    (folder / "empty.png").touch()
    Image.new("RGB", (8, 8)).save(folder / "old.bmp")
    (folder / "gone.webp").symlink_to("nowhere")
    shutil.copy(folder / "0.jpg", folder / "b" / ".hidden")
    (folder / "notes.txt").write_text("not an image")
    return folder


@pytest.fixture(scope="module")
def expected(exported, pictures) -> dict[str, dict]:
    """What the endpoint's own code answers for the good images."""
    model = load(describe(exported), 1, 1)
    good = [p for p in sorted(pictures.rglob("*")) if p.is_file() and ".hidden" not in str(p)]
    found = {}
    for path in good:
        if path.name not in ("cut.jpg", "empty.png", "old.bmp", "notes.txt"):
            pixels = prepare(path.read_bytes(), model.size, model.crop, Limits()).pixels
            found[path.relative_to(pictures).as_posix()] = predictions(model.engine(pixels[None]), model.labels, 2)[0]
    assert len(found) == 6
    return found


def test_drafts_of_a_killed_process_go(exported, pictures, command, tmp_path):
    for name in (".all.csv.0123456789ab.tmp", ".all.csv.ba9876543210.tmp", ".other.csv.0123456789ab.tmp"):
        (tmp_path / name).write_text("image,label")
    assert command("predict", exported, pictures, "--to", tmp_path / "all.csv").code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.csv.0123456789ab.tmp", "all.csv"]


def test_a_folder_becomes_csv(exported, pictures, expected, command, tmp_path):
    target = tmp_path / "out" / "all.csv"
    answer = command("predict", exported, pictures, "--to", target, "--top", "2")
    assert answer.code == 0, answer
    rows = {row["image"]: row for row in csv.DictReader(io.StringIO(target.read_text(), newline=""))}
    assert rows.keys() - expected.keys() == {"cut.jpg", "empty.png", "old.bmp", "gone.webp"}
    for name, one in expected.items():
        best, second = one["top"]
        found = rows.pop(name)
        assert (found["label"], float(found["score"])) == (best["label"], best["score"])
        assert (found["label_2"], float(found["score_2"])) == (second["label"], second["score"])
        assert not found["error"]
    wanted = {"cut.jpg": "damaged", "empty.png": "empty", "old.bmp": "JPEG, PNG, WEBP", "gone.webp": "No such file"}
    for name, word in wanted.items():
        assert word in rows[name]["error"]
        assert f"{name}: " in answer.err
        assert not rows[name]["label"]
    assert "4 images are unreadable" in answer.err
    assert [path.name for path in target.parent.iterdir()] == ["all.csv"]


def jsonl(path: Path) -> dict[str, dict]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = {row.pop("image"): row for row in rows}
    assert len(found) == len(rows)
    return found


def run(exported: Path, given: object, target: Path, **more) -> Path:
    predict(Settings(export=exported, images=str(given), to=target, top=2, cores=2, **more))
    return target


def test_every_form_of_images_and_results_gives_the_same(exported, pictures, expected, tmp_path, aws, monkeypatch):
    names = [name for name in expected if "\n" not in name]
    wanted = {name: expected[name] for name in names}
    listed = tmp_path / "listed.txt"
    listed.write_text(
        "\n".join([str(pictures / name) for name in names[:2]] + ["missing.jpg", "s3://bucket/missing.jpg", ""])
    )
    rows = jsonl(run(exported, listed, tmp_path / "listed.jsonl"))
    assert "no such file" in rows.pop("s3://bucket/missing.jpg")["error"]
    assert rows.pop("missing.jpg") == {"error": "No such file or directory"}
    assert rows == {str(pictures / name): one for name, one in list(wanted.items())[:2]}

    shard = tmp_path / "few-000.tar"
    with tarfile.open(shard, "w") as tar:
        for name in names:
            tar.add(pictures / name, name)
            tar.add(pictures / "notes.txt", f"{name.rpartition('.')[0]}.cls")
    rows = jsonl(run(exported, tmp_path / "few-{000..000}.tar", tmp_path / "tar.jsonl"))
    assert rows == {
        f"few-000.tar/{name.rpartition('.')[0]}.{name.rpartition('.')[2].lower()}": wanted[name] for name in names
    }

    s3 = aws("s3")
    for name in names:
        s3.upload_file(str(pictures / name), "bucket", f"photos/{name}")
    s3.put_object(Bucket="bucket", Key="photos/notes.txt", Body=b"no image")
    assert jsonl(run(exported, "s3://bucket/photos", tmp_path / "s3.jsonl")) == {
        f"s3://bucket/photos/{name}": one for name, one in wanted.items()
    }
    s3.upload_file(str(shard), "bucket", "few-000.tar")
    run(exported, "s3://bucket/few-*.tar", tmp_path / "s3_tar.jsonl")
    assert (tmp_path / "s3_tar.jsonl").read_bytes() == (tmp_path / "tar.jsonl").read_bytes()
    assert not list(tmp_path.glob("*.shards"))

    monkeypatch.setattr("kd.predict.results.ROWS", 2)
    table = pyarrow.parquet.read_table(run(exported, shard, tmp_path / "tar.parquet")).to_pylist()
    assert {row["image"]: {"label": row["label"], "score": row["score"], "top": row["top"]} for row in table} == rows


def test_killed_and_resumed_without_a_duplicate_or_a_gap(exported, pictures, expected, tmp_path):
    """Stopped by SIGTERM, killed by SIGKILL, with a line cut off, then finished: the bytes of a run that was not."""
    listed = tmp_path / "listed.txt"
    listed.write_text("\n".join([str(pictures / "0.jpg"), str(pictures / "b" / "5.png"), "missing.jpg"] * 1500))
    whole = run(exported, listed, tmp_path / "whole.csv").read_bytes()
    target = tmp_path / "killed.csv"
    journal = tmp_path / "killed.csv.part"
    argv = [sys.executable, "-c", ALONE, str(exported), str(listed), "--to", str(target), "--top", "2"]
    begun = 0
    for number, code in ((signal.SIGTERM, 75), (signal.SIGKILL, -9)):
        process = subprocess.Popen(argv, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE)
        end = time.monotonic() + 60
        while not (journal.is_file() and journal.stat().st_size > begun + 20_000):
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < end
            time.sleep(0.005)
        process.send_signal(number)
        process.communicate(timeout=30)
        assert process.returncode == code
        begun = journal.stat().st_size
        assert not target.exists()
    rows = journal.read_bytes().splitlines()
    assert 100 < len(rows) < 4500
    with journal.open("ab") as file:
        file.write(b'{"image": "cut o')
    done = subprocess.run(argv, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert target.read_bytes() == whole
    assert "1500 images are unreadable" in done.stderr
    assert int(done.stdout.split(" images, ")[1].split()[0]) in range(len(rows) - 2, len(rows))


def test_links_to_folders_are_followed(pictures, tmp_path):
    """Their images were left out, and nothing was said; training follows them."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "linked").symlink_to(pictures)
    found = find(str(tmp_path / "photos"), tmp_path / "copies")
    plain = find(str(pictures), tmp_path / "copies")
    assert list(found.names) == [f"linked/{name}" for name in plain.names]
    (tmp_path / "photos" / "again").symlink_to(tmp_path / "photos")
    with pytest.raises(DataError, match="is a link to a folder above it"):
        find(str(tmp_path / "photos"), tmp_path / "copies")


def test_refusals(exported, pictures, refused, tmp_path):
    (tmp_path / "there.csv").touch()
    (tmp_path / "nothing").mkdir()
    for given, to, words in (
        (pictures, "there.csv", "exists"),
        (pictures, "all.txt", ".csv, .jsonl, .parquet"),
        (tmp_path / "nothing", "new.csv", "no images"),
        (tmp_path / "nowhere", "new.csv", "does not exist"),
        ("nocloud://bucket/photos", "new.csv", "nocloud"),
        (tmp_path / "missing-*.tar", "new.csv", "no shard"),
    ):
        assert words in refused("predict", exported, given, "--to", tmp_path / to)
    (tmp_path / "new.csv.part").write_text('{"model": "another"}\n')
    assert "version" in refused("predict", exported, pictures, "--to", tmp_path / "new.csv")
    assert "is not an export" in refused("predict", pictures, pictures, "--to", tmp_path / "other.csv")
