"""One label an image in a list: tables, text files of paths, and what is said of lists
that do not fit.
"""

import shutil
from pathlib import Path

import pytest
from pieces import WITHOUT_HEIF
from PIL import Image

from kd.core.errors import DataError
from kd.files.tables import parse_table
from kd.parts.datasets.csv import Options, build, facts

IMAGES = (
    "apple_pie/1.jpg",
    "apple_pie/2.jpg",
    "apple_pie/3.jpg",
    "baklava/1.jpg",
    "baklava/2.jpg",
    "baklava/3.jpg",
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for color, name in enumerate(IMAGES):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (color, 0, 0)).save(tmp_path / "images" / name)
    return tmp_path / "images"


def open_list(
    root: Path,
    content: str | bytes,
    name: str = "a.csv",
    labels: str = "all",
    **changes,
):
    (root / name).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )
    values = {
        "root": str(root),
        "train_list": name,
        "val_list": f"v{Path(name).suffix}",
        **changes,
    }
    return build(Options(**values), "train", None, labels)


def pairs(source) -> dict[str, str]:
    """Return the class of each image by its path."""
    label = {id: source.label(id) for id in range(len(source))}
    return {
        source.name(id): source.classes[label[id]] if label[id] >= 0 else ""
        for id in label
    }


PIE = {"apple_pie/1.jpg": "pie", "baklava/1.jpg": "cake"}
CAKE = {
    "apple_pie/1.jpg": "3",
    "baklava/1.jpg": "12",
}
LINE = "apple_pie/1.jpg,pie\nbaklava/1.jpg,cake\n"


@pytest.mark.parametrize(
    ("name", "content", "options", "expected"),
    [
        ("a.csv", f"path,label\n{LINE}", {}, PIE),
        ("a.CSV", f"path,label\n{LINE}", {}, PIE),
        ("a.tsv", f"path,label\n{LINE}".replace(",", "\t"), {}, PIE),
        ("a.csv", f"\ufeffpath,label\r\n{LINE}".replace("\n", "\r\n"), {}, PIE),
        ("a.csv", f" path , label \n{LINE}", {}, PIE),
        ("a.csv", f"path,label\n\n{LINE}\n\n", {}, PIE),
        (
            "a.csv",
            "n,label,path\n1,pie,apple_pie/1.jpg\n2,cake,baklava/1.jpg\n",
            {},
            PIE,
        ),
        (
            "a.csv",
            f"file,dish\n{LINE}",
            {"image_key": "file", "label_key": "dish"},
            PIE,
        ),
        (
            "a.csv",
            "path,label\n./apple_pie/1.jpg, pie \napple_pie/../baklava/1,cake\n",
            {},
            PIE,
        ),
        (
            "a.csv",
            'path,label\n"apple_pie/1.jpg","pie"\n"baklava/1.jpg",cake\n',
            {},
            PIE,
        ),
        ("a.csv", "path,label\napple_pie/1,3\nbaklava/1,12\n", {}, CAKE),
        ("a.csv", f"path,label\n{LINE}".replace(",", ";"), {}, PIE),
        ("a.csv", f"path,label\n{LINE}".replace(",", "\t"), {}, PIE),
        ("a.csv", f"sep=;\r\npath,label\n{LINE}".replace(",", ";"), {}, PIE),
        ("a.csv", f"path,label\n{LINE},\n , \n", {}, PIE),
        ("a.csv", f"path,label\n{LINE}".replace("/", "\\"), {}, PIE),
        ("a.csv", f"path,label\n{LINE}".encode("utf-16"), {}, PIE),
        ("a.csv", "path,label\napple_pie/1,3.0\nbaklava/1,12\n", {}, CAKE),
        ("a.txt", "baklava/3\napple_pie/1\n\nbaklava/1.jpg\r\n", {}, None),
    ],
)
def test_every_form_of_a_list_is_read(root, name, content, options, expected):
    source = open_list(root, content, name, **options)
    folders = {
        "apple_pie/1.jpg": "apple_pie",
        "baklava/1.jpg": "baklava",
        "baklava/3.jpg": "baklava",
    }
    assert pairs(source) == (expected or folders)
    assert source.decode(0).image.getpixel((0, 0)) == (0, 0, 0)
    assert list(source.classes) == {"pie": ["cake", "pie"], "3": ["3", "12"]}.get(
        next(iter(pairs(source).values())), ["apple_pie", "baklava"]
    )


def test_paths_may_be_absolute_below_the_root_or_a_link_to_it(root):
    (root.parent / "link").symlink_to(root)
    for path in (root, root.parent / "link"):
        content = f"path,label\n{root}/apple_pie/1.jpg,pie\n{root}/./baklava/1,cake\n"
        assert pairs(open_list(path, content)) == PIE


def test_food101_is_read_as_distributed(root):
    (root.parent / "meta").mkdir()
    (root.parent / "meta/train.txt").write_text(
        "baklava/3\napple_pie/1\n\nbaklava/1.jpg\r\n"
    )
    (root.parent / "meta/test.txt").write_text("apple_pie/2\nbaklava/2\n")
    options = Options(
        root=str(root), train_list="../meta/train.txt", val_list="../meta/test.txt"
    )
    train = build(options, "train", None)
    val = build(options, "val", train.classes)
    assert [pairs(train), pairs(val)] == [
        {
            "apple_pie/1.jpg": "apple_pie",
            "baklava/1.jpg": "baklava",
            "baklava/3.jpg": "baklava",
        },
        {"apple_pie/2.jpg": "apple_pie", "baklava/2.jpg": "baklava"},
    ]
    assert (train.notes, val.notes) == (
        (),
        ("1 images beside the listed ones are in no list",),
    )
    (root.parent / "meta/test.txt").write_text("baklava/1\n")
    with pytest.raises(
        DataError,
        match=(
            r"data\.val_list: line 1: 'baklava/1' is also in data\.train_list, line 4"
        ),
    ):
        build(options, "val", train.classes)


def test_a_test_list_has_images_of_its_own(root):
    for name, images in {
        "a": IMAGES[::3],
        "v": IMAGES[1::3],
        "t": IMAGES[2::3],
    }.items():
        (root / f"{name}.txt").write_text("".join(f"{image}\n" for image in images))
    lists = {"root": str(root), "train_list": "a.txt", "test_list": "t.txt"}
    options = Options(**lists, val_list="v.txt")
    test = build(options, "test", ("apple_pie", "baklava"))
    assert (sorted(pairs(test)), test.notes, facts(options).test) == (
        [*IMAGES[2::3]],
        (),
        "test_list",
    )
    assert (
        build(options, "val", ("apple_pie", "baklava")).notes == ()
    )  # the test images are in a list too
    assert sorted(
        pairs(
            build(Options(**lists, val_fraction=0.5), "test", ("apple_pie", "baklava"))
        )
    ) == [*IMAGES[2::3]]
    (root / "t.txt").write_text("baklava/2\n")
    with pytest.raises(
        DataError,
        match=r"data\.test_list: line 1: 'baklava/2' is also in data\.val_list, line 2",
    ):
        build(options, "test", ("apple_pie", "baklava"))


def test_listed_images_may_have_any_ending_and_unlisted_files_are_not_looked_at(root):
    shutil.move(root / "baklava/1.jpg", root / "baklava/1.jfif")
    (root / "baklava/1.dat").write_bytes(b"x")
    content = "path,label\napple_pie/1.jpg,pie\napple_pie/2.jpg,pie\nbaklava/1.jfif,cake\nbaklava/2.jpg,cake\n"
    train = open_list(root, content, val_list="", val_fraction=0.5)
    assert train.notes == ("2 images beside the listed ones are in no list",)
    assert open_list(root, content).decode(2).image.size == (4, 4)


def test_images_may_have_no_label_where_that_is_said(root):
    content = "path,label\napple_pie/1.jpg,pie\nbaklava/1.jpg,cake\nbaklava/2.jpg,\n"
    assert pairs(open_list(root, content, labels="some")) == {
        **PIE,
        "baklava/2.jpg": "",
    }
    assert open_list(root, "path,n\nbaklava/2.jpg,1\n", labels="none").label(0) == -1
    with pytest.raises(
        DataError, match=r"data\.train_list: line 4: 'baklava/2\.jpg' has no label"
    ):
        open_list(root, content)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            "path,label\napple_pie/1,a\napple_pye/2,b\n",
            r"line 3: 'apple_pye/2' is no image .* 1 of 2 names",
        ),
        (
            "a.csv",
            "path,label\napple_pie/11.jpg,a\n",
            r"line 2: 'apple_pie/11\.jpg' is no image .* Did you mean",
        ),
        (
            "a.csv",
            "path,label\nbaklava/1,a\nbaklava/1.jpg,b\n",
            r"line 3: 'baklava/1\.jpg' is the image of line 2",
        ),
        (
            "a.csv",
            "path,label\n../../etc/passwd,a\n",
            r"line 2: '\.\./\.\./etc/passwd' does not lie in '.*images/'",
        ),
        (
            "a.csv",
            "path,label\n/etc/passwd,a\n",
            r"line 2: '/etc/passwd' does not lie in '.*Paths in data\.root",
        ),
        (
            "a.csv",
            "path,label\nbaklava/9,a\n",
            r"line 2: 'baklava/9' is more than one image: baklava/9\.jpg, bak",
        ),
        ("a.csv", "path,label\nbaklava,a\n", r"line 2: 'baklava' is no image"),
        pytest.param(
            "a.csv",
            "path,label\nbaklava/7.heic,a\n",
            r"line 2: 'baklava/7\.heic' .* pillow-heif .*kd\[heic\]",
            marks=WITHOUT_HEIF,
        ),
        ("a.csv", "path,label\n", r"the split 'train' has no images"),
        ("a.csv", "", r"does not name two columns"),
        (
            "a.csv",
            "path|label\n",
            r"does not name two columns or more: it is 'path|label'",
        ),
        (
            "a.csv",
            "path,label\nbaklava/1,0.5\nbaklava/2,1.0\nbaklava/3,2.25\n",
            r"data\.label_key: 2 labels are num",
        ),
        (
            "a.csv",
            "path;label\nbaklava/1;0,5\nbaklava/2;1\n",
            r"1 labels are numbers with a fraction, such as 0,5",
        ),
        (
            "a.csv",
            LINE,
            r"its first line is an image, 'apple_pie/1\.jpg'; it must name the columns",
        ),
        (
            "a.csv",
            "file,label\n",
            r"data\.image_key: '.*' has no column 'path'\. Columns: file, label",
        ),
        (
            "a.csv",
            "path,labels\n",
            (
                r"data\.label_key: .* 'label'\. Columns: path, labels\. Did you mean"
                r" 'labels'"
            ),
        ),
        ("a.csv", "path,label,label\n", r"its first line names 'label' twice"),
        (
            "a.csv",
            "path,label\nbaklava/1.jpg\n",
            r"line 2 has 1 fields, the first line has 2",
        ),
        ("a.csv", "path,label\nbaklava/1.jpg,a\n", r"only one class, 'a'"),
        ("a.txt", "\n", r"the split 'train' has no images"),
        ("a.json", "[]", r"is '.*a\.json'\. A file that ends in \.csv, \.tsv, \.txt"),
        ("a.csv", None, r"cannot be read .* relative to data\.root"),
        (
            "a.csv",
            b"path,label\nbaklava/1.jpg,\xe9clair\n",
            r"line 2 is not UTF-8 \('baklava/1\.jpg,éclair' .*iconv -f",
        ),
        (
            "a.csv",
            "path,label\r\n".encode("utf-16"),
            r"the split 'train' has no images",
        ),
    ],
)
def test_a_list_that_does_not_fit_is_one_line(root, name, content, message):
    for file in ("baklava/9.jpg", "baklava/9.png", "baklava/7.heic"):
        (root / file).write_bytes(b"x")
    if content is not None:
        (root / name).write_bytes(
            content if isinstance(content, bytes) else content.encode()
        )
    with pytest.raises(DataError, match=message) as caught:
        build(
            Options(root=str(root), train_list=name, val_list=f"v{Path(name).suffix}"),
            "train",
            None,
        )
    assert str(caught.value).startswith("data.")
    assert len(str(caught.value).splitlines()) == 1


def test_a_repeated_line_counts_once_and_is_reported(root):
    source = open_list(root, f"path,label\n{LINE}{LINE}apple_pie/1,pie\n")
    assert pairs(source) == PIE
    assert (
        "3 lines of data.train_list repeat another with the same label, and count once"
        in source.notes
    )


def test_a_name_missing_in_the_root_is_searched_beside_its_list(root):
    (root / "baklava" / "_list.csv").write_text("path,label\n1.jpg,cake\n2.jpg,pie\n")
    options = Options(root=str(root), train_list="baklava/_list.csv", val_list="v.csv")
    assert pairs(build(options, "train", None)) == {
        "baklava/1.jpg": "cake",
        "baklava/2.jpg": "pie",
    }


def test_names_may_have_another_unicode_form(root):
    """macOS writes é as two characters into names of files, a spreadsheet as one."""
    composed = "caf\xe9"
    decomposed = "cafe\u0301"
    shutil.copytree(root / "baklava", root / decomposed)
    (root / decomposed / "1.jpg").rename(root / decomposed / f"{decomposed}.jpg")
    content = (
        f"path,label\n{composed}/{composed}.jpg,{composed}\n"
        f"{composed}/2,{decomposed}\nbaklava/1,cake\n"
    )
    source = open_list(root, content)
    assert pairs(source) == {
        f"{decomposed}/{decomposed}.jpg": composed,
        f"{decomposed}/2.jpg": composed,
        "baklava/1.jpg": "cake",
    }


def test_the_line_of_an_open_quote_is_that_of_an_editor():
    """Excel's first line, which names the separator, counts."""
    with pytest.raises(ValueError, match=r"^line 4: a quote is not closed"):
        list(parse_table('sep=;\nname;label\na;"b\nc;d\n', "list.csv")[1])
    with pytest.raises(ValueError, match=r"^line 3: a quote is not closed"):
        list(parse_table('name;label\na;"b\nc;d\n', "list.csv")[1])


@pytest.mark.parametrize("lists", [("a.txt", "v.csv", ""), ("a.csv", "v.tsv", "t.TXT")])
def test_lists_are_of_one_kind(lists):
    with pytest.raises(ValueError, match="differ in kind"):
        Options(
            root="images",
            **dict(zip(("train_list", "val_list", "test_list"), lists, strict=True)),
        )
