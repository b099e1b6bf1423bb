"""A test split that is set aside: the same images in every run, whatever else
changes.
"""

import pickle
from dataclasses import dataclass

import pytest
from pieces import names

from kd.core.contracts import HasWarnings, Source, Stamped
from kd.core.errors import DataError
from kd.data.subset import decode_image, keep_labels, set_aside


@dataclass
class Listing:
    """A source of names."""

    names: list[str]
    classes = ("a", "b")
    fingerprint = "f"

    def __len__(self):
        return len(self.names)

    def label(self, id):
        return id % 2

    def name(self, id):
        return self.names[id]

    def prepare(self):
        pass

    def decode(self, id):
        return f"pixels of {self.names[id]}"


class Files(Listing):
    notes = ("3 files are not read",)

    def stamp(self, id):
        return 100 + id


def test_each_image_is_in_one_of_the_two():
    source = Listing([f"val/a/{i}.jpg" for i in range(1000)])
    val, test = set_aside(source, 0.3)
    assert 250 < len(test) < 350
    assert sorted(names(val) + names(test)) == sorted(source.names)
    assert val.fingerprint != test.fingerprint
    number = source.names.index(test.name(5))
    assert (test.label(5), test.decode(5)) == (number % 2, f"pixels of {test.name(5)}")


def test_a_name_alone_decides():
    """Images that are added, in whatever order, change the side of no other."""
    few = [f"{i}.jpg" for i in range(200)]
    grown = [f"new_{i}.jpg" for i in range(300)] + few[::-1]
    (_, from_few) = set_aside(Listing(few), 0.5)
    (_, from_grown) = set_aside(Listing(grown), 0.5)
    assert {*names(from_few)} == {*names(from_grown)} & {*few}


def test_it_is_what_its_source_is():
    plain = set_aside(Listing(list("abcdefgh")), 0.5)[0]
    files = set_aside(Files(list("abcdefgh")), 0.5)[1]
    assert isinstance(plain, Source)
    assert not isinstance(plain, Stamped)
    assert isinstance(files, Stamped)
    assert isinstance(files, HasWarnings)
    assert files.notes == Files.notes
    again = pickle.loads(pickle.dumps(files))  # data workers get a copy
    assert [again.stamp(id) for id in range(len(again))] == [
        100 + "abcdefgh".index(name) for name in names(files)
    ]


@pytest.mark.parametrize("fraction", [1e-9, 0.9])
def test_no_split_is_empty(fraction):
    with pytest.raises(
        DataError, match=r"data\.test_fraction: .* leaves one split of 1 validation"
    ):
        set_aside(Listing(["a"]), fraction)


@pytest.mark.parametrize(
    ("labelled", "split"),
    [("val", "test"), ("test", "validation"), ("", ""), ("both", "")],
)
def test_each_split_has_a_label_if_one_has(labelled, split):
    """A test split without a label was noticed after the whole training."""

    class Some(Listing):
        def label(self, id):
            split_of_image = "test" if self.names[id] in tested else "val"
            return 0 if labelled in ("both", split_of_image) else -1

    tested: list[str] = []
    source = Some([f"{i}.jpg" for i in range(40)])
    tested = names(set_aside(Listing(source.names), 0.2)[1])
    if not split:
        assert len(set_aside(source, 0.2)[1]) == len(tested)
        return
    with pytest.raises(
        DataError,
        match=rf"data\.test_fraction: .* images of the {split} split has a label",
    ):
        set_aside(source, 0.2)


def test_labels_are_kept_by_seed_and_name():
    source = Files([f"{i}.jpg" for i in range(400)])
    hidden = keep_labels(source, 20, 3, hide=True)
    alone = keep_labels(source, 20, 3, hide=False)
    label_of = {
        hidden.name(id): hidden.label(id) for id in range(400) if hidden.label(id) >= 0
    }
    assert len(hidden) == 400
    assert label_of == {alone.name(id): alone.label(id) for id in range(len(alone))}
    assert sorted(label_of.values()) == [0] * 20 + [1] * 20
    assert label_of.keys() < {*names(source)}
    assert hidden.decode(7) == source.decode(7)
    assert hidden.stamp(7) == 107
    again = pickle.loads(pickle.dumps(hidden))
    assert [again.label(id) for id in range(400)] == [
        hidden.label(id) for id in range(400)
    ]
    reseeded = keep_labels(source, 20, 4, hide=True)
    assert label_of != {
        reseeded.name(id): reseeded.label(id)
        for id in range(400)
        if reseeded.label(id) >= 0
    }
    assert (
        len(
            {
                source.fingerprint,
                hidden.fingerprint,
                alone.fingerprint,
                reseeded.fingerprint,
            }
        )
        == 4
    )
    with pytest.raises(
        DataError, match=r"data\.labels_per_class: is 201, but 'a' has 200 labelled"
    ):
        keep_labels(source, 201, 3, hide=True)


class Whole:
    """A source of files, reduced where its type says so."""

    def decode(self, id):
        return "whole"

    def decode_reduced(self, id, least):
        return "reduced"


class Watched(Whole):
    def decode(self, id):
        return "watched"


class Wrapped:
    def __init__(self, source):
        self.source = source

    def __getattr__(self, name):
        return getattr(self.source, name)

    def decode(self, id):
        return "wrapped"


@pytest.mark.parametrize(
    ("source", "expected"),
    [(Whole(), "reduced"), (Watched(), "watched"), (Wrapped(Whole()), "wrapped")],
)
def test_a_decode_of_ones_own_is_never_passed_by(source, expected):
    assert decode_image(source, 0, lambda width, height: 0.5) == expected
