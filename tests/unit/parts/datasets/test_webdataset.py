"""Shards as WebDataset writes them, read by position; shards cut short, mislabelled,
remote.
"""

import gzip
import json
import os
import tarfile
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from pieces import labels, png, write_tar

from kd.core.errors import CorruptImage, DataError, KdError
from kd.files import storage
from kd.files.shards import _expand_braces
from kd.parts.datasets.webdataset import Options, build, facts


def samples(labels: list, ending: str = "cls") -> dict[str, bytes]:
    return {
        f"{id:04d}.{kind}": data
        for id, label in enumerate(labels)
        for kind, data in (("png", png(id)), (ending, str(label).encode()))
    }


def options(tmp_path: Path, **changes) -> Options:
    return Options(
        **{
            "train": str(tmp_path / "train.tar"),
            "val": str(tmp_path / "val.tar"),
            **changes,
        }
    )


def test_the_stamp_is_made_of_the_times_of_the_write_tar(tmp_path):
    for number in range(2):
        write_tar(tmp_path / f"train-{number}.tar", samples([0, 1]))
    both = options(tmp_path, train=str(tmp_path / "train-*.tar"))
    before = build(both, "train", None)
    os.utime(tmp_path / "train-1.tar", ns=(1, 1))
    after = build(both, "train", None)
    assert after.fingerprint == before.fingerprint
    assert [after.stamp(id) != before.stamp(id) for id in range(4)] == [
        False,
        False,
        True,
        True,
    ]


def test_test_shards_are_a_split_of_their_own(tmp_path):
    for name, numbers in {
        "train": ["pear", "apple"],
        "val": ["pear"],
        "exam": ["apple", "pear", "apple"],
    }.items():
        write_tar(tmp_path / f"{name}.tar", samples(numbers))
    chosen = options(tmp_path, test=str(tmp_path / "exam.tar"))
    assert labels(build(chosen, "test", ("apple", "pear"))) == [0, 1, 0]
    assert (facts(chosen).test, facts(options(tmp_path)).test) == ("test", "")


@pytest.mark.parametrize("value", [1, "1", "pear"])
def test_a_field_of_json_may_be_the_label(tmp_path, value):
    (tmp_path / "names.txt").write_text("apple\npear\n")
    write_tar(
        tmp_path / "train.tar", samples([json.dumps({"label": value, "id": 7})], "json")
    )
    chosen = options(
        tmp_path,
        label_key="json",
        label_field="label",
        class_names=str(tmp_path / "names.txt"),
    )
    source = build(chosen, "train", None)
    assert (source.classes, labels(source)) == (("apple", "pear"), [1])


@pytest.mark.parametrize(
    "text", ["pear\r\napple\r\n", '["pear", "apple"]', "\ufeffpear\napple"]
)
def test_class_names_order_the_classes(tmp_path, text):
    (tmp_path / "names").write_text(text, encoding="utf-8")
    write_tar(tmp_path / "train.tar", samples([1, "pear"]))
    source = build(
        options(tmp_path, class_names=str(tmp_path / "names")), "train", None
    )
    assert (source.classes, labels(source)) == (("pear", "apple"), [1, 0])


def named(tmp_path: Path, names: str, texts: list[str], sets: bool) -> list[str]:
    """Return the class of each image of a shard with these labels and class names;
    `sets`: labels in JSON lists.
    """
    (tmp_path / "names").write_text(names)
    write_tar(
        tmp_path / "train.tar",
        samples([json.dumps([text]) for text in texts] if sets else texts, "cls"),
    )
    source = build(
        options(tmp_path, class_names=str(tmp_path / "names"), label_sets=sets),
        "train",
        None,
    )
    assert source.classes == tuple(unicodedata.normalize("NFC", names).split())
    places = [
        np.flatnonzero(label).item() if sets else label
        for label in map(source.label, range(len(texts)))
    ]
    return [source.classes[place] for place in places]


@pytest.mark.parametrize("sets", [False, True])
def test_labels_are_names_or_positions(tmp_path, sets):
    """5 is no position, and 2 no name; where both readings are possible, neither is
    taken.
    """
    assert named(tmp_path, "5\n0\nfig\n", ["0", "5", "fig"], sets) == ["0", "5", "fig"]
    assert named(tmp_path, "5\n0\nfig\n", ["2", "1", "0", "fig"], sets) == [
        "fig",
        "0",
        "5",
        "fig",
    ]
    assert named(tmp_path, "0\n1\n2\n", ["2", "1"], sets) == ["2", "1"]
    for texts in (["0"], ["2", "5"]):
        with pytest.raises(
            DataError,
            match=r"^data\.class_names: the label [02] is the position of '(5|fig)'",
        ):
            named(tmp_path, "5\n0\nfig\n", texts, sets)
    with pytest.raises(DataError, match=r"(label|class) '3'"):
        named(tmp_path, "pear\nfig\n", ["3", "1"], sets)


@pytest.mark.parametrize("sets", [False, True])
def test_a_class_name_may_be_decomposed(tmp_path, sets):
    assert named(tmp_path, "fig\ncre\u0300me\n", ["cr\u00e8me"], sets) == ["cr\u00e8me"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nb\na\n", "'a' twice"),
        ("", "is empty"),
        ('{"0": "a"}', "is no list of names"),
        ("[1, 2]", "is no list of names"),
        ("[1", "cannot be read"),
    ],
)
def test_class_names_that_cannot_be_used_are_refused(tmp_path, text, message):
    (tmp_path / "names").write_text(text)
    write_tar(tmp_path / "train.tar", samples([0, 1]))
    with pytest.raises(DataError, match=rf"data\.class_names: .*{message}"):
        build(options(tmp_path, class_names=str(tmp_path / "names")), "train", None)


def test_keys_end_at_the_first_dot_and_the_first_image_key_wins(tmp_path):
    members = {
        "./a/x.seg.png": png(9),
        "./a/x.JPG": png(1, "JPEG"),
        "./a/x.png": png(2),
        "./a/x.cls": "0",
        "./b/x.png": png(3),
        "./b/x.cls": "1",
        "README": "no ending",
        "manifest.yaml": "no sample",
        ".hidden.png": png(0),
    }
    write_tar(tmp_path / "train.tar", members)
    source = build(options(tmp_path, image_keys="png;jpg"), "train", None)
    assert [
        source.decode(id).image.getpixel((0, 0))[0] for id in range(len(source))
    ] == [2, 3]
    source = build(options(tmp_path), "train", None)
    assert source.decode(0).image.getpixel((0, 0))[0] == pytest.approx(
        1, abs=2
    )  # JPEG loses a little


@pytest.mark.parametrize(
    "kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
)
def test_every_tar_dialect_may_have_long_names(tmp_path, kind):
    long = "d" * 90 + "/" + "x" * 90
    members = {f"{long}.png": png(5), f"{long}.cls": "0", "y.png": png(6), "y.cls": "1"}
    write_tar(tmp_path / "train.tar", members, format=kind)
    source = build(options(tmp_path), "train", None)
    assert source.name(0) == f"train.tar/{long}"
    assert source.decode(1).image.getpixel((0, 0))[0] == 6


def test_every_cut_is_noticed(tmp_path):
    path = write_tar(tmp_path / "train.tar", samples([0, 1, 0]))
    shard_bytes = path.read_bytes()
    end = shard_bytes.rstrip(b"\0")
    content = -(-len(end) // 512) * 512
    for length in [*range(100, content, 100), *range(512, content + 1, 512)]:
        path.write_bytes(shard_bytes[:length])
        with pytest.raises(
            DataError,
            match=(
                r"^data\.train: the shard '.*train\.tar' (is cut short|cannot be read)"
            ),
        ):
            build(options(tmp_path), "train", None)


def test_a_damaged_header_in_the_middle_is_noticed(tmp_path):
    path = write_tar(tmp_path / "train.tar", samples([0, 1, 0]))
    data = bytearray(path.read_bytes())
    data[2048 : 2048 + 100] = b"\xff" * 100
    path.write_bytes(data)
    with pytest.raises(
        DataError, match=r"is cut short or damaged at byte 2048. Whole .tar files"
    ):
        build(options(tmp_path), "train", None)


def bomb(
    path: Path, name: str, size: int, kind: bytes = tarfile.REGTYPE, **members: bytes
) -> Path:
    """A shard with a member of `size` zeros, which take no space on the disk."""
    write_tar(path, members)
    info = tarfile.TarInfo(name)
    info.size = size
    info.type = kind
    with path.open("r+b") as file:
        end = sum(512 + -(-len(data) // 512) * 512 for data in members.values())
        file.seek(end)
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        file.truncate(end + 512 + -(-size // 512) * 512 + 10240)
    return path


@pytest.mark.parametrize("kind", ["image", "label", "header"])
def test_a_member_of_many_gigabytes_is_not_read(tmp_path, kind):
    """It was read whole."""
    members = {"a.png": png(1), "a.cls": b"0"}
    members |= {"image": {"x.cls": b"1"}, "label": {"x.png": png(1)}, "header": {}}[
        kind
    ]
    name = {"image": "x.png", "label": "x.cls", "header": "x.pax"}[kind]
    header = tarfile.XHDTYPE if kind == "header" else tarfile.REGTYPE
    words = {
        "image": "image 'train.tar/x'",
        "label": "label of '.*x'",
        "header": "header",
    }[kind]
    bomb(tmp_path / "train.tar", name, 40 * 10**9, header, **members)
    with pytest.raises(
        DataError, match=rf"^data\.train: .*{words}.* 40000000\d+ bytes"
    ) as caught:
        build(options(tmp_path), "train", None).decode(1)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, CorruptImage) == (
        kind == "image"
    )  # `data.on_corrupt` decides


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("train.tar", b"", "Copy or write it again"),
        ("train.tar", b"hello" * 200, "Copy or write it again"),
        (
            "train.tar.gz",
            gzip.compress(bytes(10240), mtime=0),
            "uncompressed .tar files. Unpack it first",
        ),
    ],
    ids=["empty", "text", "gzip"],
)
def test_a_shard_that_is_no_tar_is_refused(tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(
        DataError, match=rf"the shard '.*{name}' cannot be read .*{words}"
    ):
        build(options(tmp_path, train=str(tmp_path / name)), "train", None)


def test_a_shard_that_shrinks_after_the_index_is_no_corrupt_image(
    tmp_path, monkeypatch
):
    """It was not read whole, so it is not a corrupt image that `on_corrupt`
    may skip.
    """
    monkeypatch.setattr(storage, "PAUSES", (0.0,))
    path = write_tar(tmp_path / "train.tar", samples([0, 1]))
    source = build(options(tmp_path), "train", None)
    path.write_bytes(path.read_bytes()[:530])
    with pytest.raises(
        DataError,
        match=r"image 'train\.tar/0000': it cannot be read .*has become shorter",
    ) as short:
        source.decode(0)
    path.unlink()
    with pytest.raises(
        DataError, match=r"image 'train\.tar/0001': it cannot be read \(No such file"
    ) as caught:
        source.decode(1)
    assert not isinstance(short.value, CorruptImage)
    assert not isinstance(caught.value, CorruptImage)


def test_shards_of_an_object_store_are_copied_once(tmp_path, aws):
    """They are copied once, and are then the same data as local shards; one that has
    changed is copied anew.
    """
    for number in range(3):
        write_tar(tmp_path / f"train-{number:03d}.tar", samples([f"{number}", "x"]))
        aws("s3").upload_file(
            str(tmp_path / f"train-{number:03d}.tar"),
            "bucket",
            f"food/train-{number:03d}.tar",
        )
    local = build(
        options(tmp_path, train=str(tmp_path / "train-{000..002}.tar")), "train", None
    )
    copies = tmp_path / "copies"
    times = {}
    for url in ("s3://bucket/food/train-{000..002}.tar", "s3://bucket/food/*.tar"):
        source = build(options(tmp_path, train=url, copies=str(copies)), "train", None)
        assert (source.fingerprint, source.classes) == (
            local.fingerprint,
            local.classes,
        )
        assert [source.name(id) for id in range(6)] == [
            local.name(id) for id in range(6)
        ]
        assert [source.decode(id).crc for id in range(6)] == [
            local.decode(id).crc for id in range(6)
        ]
        times[url] = {path: path.stat().st_mtime_ns for path in copies.rglob("*.tar")}
    assert len(times[url]) == 3
    assert (
        len({tuple(sorted(file_times.items())) for file_times in times.values()}) == 1
    )
    write_tar(tmp_path / "train-000.tar", samples(["3", "x"]))
    aws("s3").upload_file(
        str(tmp_path / "train-000.tar"), "bucket", "food/train-000.tar"
    )
    assert (
        "3"
        in build(
            options(tmp_path, train=url, copies=str(copies)), "train", None
        ).classes
    )


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://bucket/food/train-{8..9}.tar", "train-8.tar"),
        ("s3://bucket/food/*.tar", "no shard 's3://bucket/food/\\*.tar'"),
        ("s3://another-bucket/a.tar", "another-bucket.*Check the name, credentials"),
        ("nocloud://bucket/a.tar", "nocloud"),
        ("pipe:aws s3 cp s3://x -", "is a pipe"),
    ],
)
def test_remote_shards_that_are_not_there_are_named(tmp_path, aws, url, words):
    with pytest.raises(KdError, match=rf"^data\.train: .*{words}"):
        build(
            options(tmp_path, train=url, copies=str(tmp_path / "copies")), "train", None
        )


def test_missing_shards_are_counted_and_the_likely_one_is_named(tmp_path):
    write_tar(tmp_path / "train-000.tar", samples([0, 1]))
    with pytest.raises(
        DataError,
        match=(
            r"data\.train: no shard '.*train-001\.tar' and 1 more.*Did you mean"
            r" 'train-000.tar'"
        ),
    ):
        build(
            options(tmp_path, train=str(tmp_path / "train-{000..002}.tar")),
            "train",
            None,
        )
    with pytest.raises(DataError, match=r"no shard '.*nothing-\*\.tar'"):
        build(options(tmp_path, train=str(tmp_path / "nothing-*.tar")), "train", None)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            {"a.png": b"x"},
            (
                r"the sample 'a' of the shard '.*' has no label. It has: png.*Set"
                r" data\.label_key"
            ),
        ),
        (
            {"a.cls": "1", "a.ppm": b"x"},
            r"the sample 'a' .* has no image. It has: cls, ppm.*Set data\.image_keys",
        ),
        ({"a.txt": "1"}, "no images in 1 shards. Members ending in jpg"),
        (
            {"a.x.png": b"x", "a.x.cls": "1"},
            "no images in 1 shards; .*a key ends at the first dot of a name",
        ),
        ({"a.png": b"x", "a.cls": ""}, "the label of '.*a' is ''"),
        ({"a.png": b"x", "a.cls": b"\xff"}, r"the label of '.*a' is b'\\xff'"),
        (
            {"a.png": b"x", "a.cls": "-1", "b.png": b"x", "b.cls": "1"},
            "has the class '-1', which is not among the 2",
        ),
        ({"a.png": b"x", "a.cls": "0"}, "only one class, '0'"),
        (
            {"a.png": b"x", "a.cls": "20261123"},
            "^data.label_key: .* label 20261123. Numbers below 1000000",
        ),
    ],
)
def test_samples_that_cannot_be_used_are_refused(tmp_path, members, message):
    write_tar(tmp_path / "train.tar", members)
    with pytest.raises(DataError, match=message):
        build(options(tmp_path), "train", None)


@pytest.mark.parametrize("text", ["[1]", "{", '{"id": 1}', "1"])
def test_json_without_the_field_is_refused(tmp_path, text):
    write_tar(tmp_path / "train.tar", samples([text], "json"))
    with pytest.raises(DataError, match=r"Allowed: JSON with the key 'label'"):
        build(options(tmp_path, label_key="json", label_field="label"), "train", None)


def test_members_that_come_twice_and_links_are_refused(tmp_path):
    path = tmp_path / "train.tar"
    with tarfile.open(path, "w") as tar:
        for _ in range(2):
            tar.addfile(tarfile.TarInfo("a.png"))
    with pytest.raises(DataError, match=r"has 'a.png' twice"):
        build(options(tmp_path), "train", None)
    with tarfile.open(path, "w") as tar:
        link = tarfile.TarInfo("a.png")
        link.type = tarfile.SYMTYPE
        link.linkname = "b.png"
        tar.addfile(link)
    with pytest.raises(DataError, match=r"'a.png' in the shard '.*' is a link"):
        build(options(tmp_path), "train", None)


def test_braces_expand_as_in_a_shell():
    assert _expand_braces("a-{008..011}.tar") == [
        "a-008.tar",
        "a-009.tar",
        "a-010.tar",
        "a-011.tar",
    ]
    assert _expand_braces("a-{8..11}") == ["a-8", "a-9", "a-10", "a-11"]
    assert _expand_braces("{b,a}/{1..2}{}") == ["b/1{}", "b/2{}", "a/1{}", "a/2{}"]
    assert _expand_braces("{2..0}") == ["2", "1", "0"]
    assert _expand_braces("a-{0..10}") == [
        f"a-{number}" for number in range(11)
    ]  # as bash does
    assert _expand_braces("{9..010}") == ["009", "010"]


def test_dots_in_names_and_members_that_are_not_read(tmp_path):
    """Of 36 samples named like `img_4.5.jpg` a quarter was once left out without a
    word.
    """
    dotted = {
        f"img_{n}.5.{kind}": data
        for n in range(9)
        for kind, data in (("png", png(n)), ("cls", b"1"))
    }
    write_tar(tmp_path / "train.tar", samples([0, 1] * 13) | dotted)
    source = build(options(tmp_path), "train", None)
    assert (len(source), source.notes) == (35, ())
    assert [source.name(id) for id in range(26, 35)] == [
        f"train.tar/img_{n}.5" for n in range(9)
    ]
    assert labels(source)[26:] == [1] * 9
    hidden = {
        "a.png": png(1),
        "a.cls": b"1",
        "a.final.png": png(2),
        "a.final.cls": b"0",
        "b.seg.png": png(3),
    }
    quiet = {
        "README.md": b"x",
        "0000.json": b"{}",
        "0001.seg.png": png(2),
    }  # beside an image a mask is a side file
    write_tar(tmp_path / "train.tar", samples([0, 1]) | hidden | quiet)
    source = build(options(tmp_path), "train", None)
    assert len(source) == 3
    (note,) = source.notes
    assert note.startswith("3 members are not read: ")
    assert all(
        f"1 .{ending}" in note for ending in ("final.png", "final.cls", "seg.png")
    )
    assert "first dot" in note
    renamed = {
        name.replace("a.final", "a-final"): data
        for name, data in hidden.items()
        if name != "b.seg.png"
    }
    write_tar(tmp_path / "train.tar", samples([0, 1]) | renamed)  # what the note says
    source = build(options(tmp_path), "train", None)
    assert (len(source), source.notes) == (4, ())
    write_tar(
        tmp_path / "train.tar",
        {
            "a.0.png": png(1),
            "a.1.png": png(2),
            "a.cls": b"1",
            "b.0.png": png(1),
            "b.cls": b"0",
        },
    )
    assert labels(build(options(tmp_path, image_keys="0.png"), "train", None)) == [1, 0]


def test_a_shard_is_in_one_split(tmp_path):
    for number in range(3):
        write_tar(tmp_path / f"food-{number}.tar", samples([0, 1]))
    first = str(tmp_path / "food-[01].tar")
    last = str(tmp_path / "food-2.tar")
    chosen = options(tmp_path, train=first, val=last, test=str(tmp_path / "food-1.tar"))
    assert labels(build(chosen, "val", ("0", "1"))) == [0, 1]
    for split, split_options in (
        ("test", chosen),
        ("val", options(tmp_path, train=first, val=first)),
    ):
        with pytest.raises(
            DataError,
            match=rf"^data\.{split}: .*food-[01]\.tar' is also a shard of data\.train",
        ):
            build(split_options, split, ("0", "1"))
