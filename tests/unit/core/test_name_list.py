"""Any name can be said in a list, and is read as it was written."""

import pytest

from kd.core.text import list_line, names_in_list

NAMES = [
    "a/1.jpg",
    "two words.jpg",
    "a\nb.jpg",
    "a\u2028b.jpg",
    "a\x85b.jpg",
    "end.jpg ",
    " begin.jpg",
    "tab\t.jpg",
]
NAMES += ["# no remark.jpg", '"quoted".jpg', '"', "a\r.jpg", "ä.jpg", "\\udcff.jpg"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_read_as_it_was_written(name):
    assert "\n" not in list_line(name)
    assert names_in_list(f"# a remark\n\n{list_line(name)}\n") == [name]


def test_a_list_written_by_hand_is_read():
    assert names_in_list("a.jpg\r\n  b.jpg\n#c.jpg\n \nval:d e.jpg") == [
        "a.jpg",
        "b.jpg",
        "val:d e.jpg",
    ]
    assert names_in_list('"begins so.jpg') == ['"begins so.jpg']
