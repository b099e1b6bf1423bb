"""The report of a sifted run, from rows with known numbers."""

from __future__ import annotations

import torch
from PIL import Image

from kd.core.errors import DataError
from kd.study.report.sifting import describe, describe_images, extremes, report, sheet

EPOCHS = [
    {"trained": 96.0, "candidates": 96.0, "effective": 96.0, "seconds": 10.0},
    {"trained": 48.0, "candidates": 48.0, "effective": 36.0, "seconds": 15.0},
    {"trained": 48.0, "candidates": 96.0, "effective": 96.0, "seconds": 22.0},
]


def test_the_saving_is_wall_clock_against_the_runs_own_full_epochs():
    text = describe(EPOCHS, num_images=100, batch_size=8)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert rows[2:] == [
        ["0", "100", "96", "96.0 %", "96", "10.0"],
        ["1", "100", "48", "48.0 %", "36", "5.0"],
        ["2", "100", "48", "48.0 %", "48", "7.0"],
    ]
    assert all(words in text for words in ("40.0 % less time", "(6.0 against 10.0 s)"))
    assert all(words in text for words in ("as much as 2.2 full ones", "sifter.kind=none and run.epochs=2"))


def test_a_run_without_full_epochs_reports_no_saving():
    assert "less time" not in describe([{**EPOCHS[1]}], num_images=100, batch_size=8)
    assert describe([], num_images=100, batch_size=8) == ""


def test_the_extremes_are_ordered_by_visits_and_then_by_loss():
    visits = torch.tensor([5, 5, 1, 1, 3])
    loss = torch.tensor([0.2, 0.9, 0.3, 0.1, float("nan")])
    always, seldom = extremes(visits, loss)
    assert always == [1, 0, 4, 2, 3]
    assert seldom == [3, 2, 4, 0, 1]


def test_classes_are_sorted_by_their_visits():
    visits, labels = torch.tensor([4, 4, 1, 1]), torch.tensor([0, 0, 1, 1])
    text = describe_images(visits, torch.tensor([1.0, 2.0, 0.1, 0.3]), labels, ["fig", "pear"], lambda id: f"{id}.jpg")
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert [row.split("|")[1].strip() for row in rows] == ["pear", "fig"]
    assert "25.0 %" in rows[0]
    assert "0.200" in rows[0]
    assert "100.0 %" in rows[1]
    assert ": 1.jpg, 0.jpg" in text
    assert ": 2.jpg, 3.jpg" in text


class Gone:
    """Four images of a disk that is no longer there."""

    classes = ("fig",)

    def __len__(self) -> int:
        return 4

    def name(self, id: int) -> str:
        return f"{id}.jpg"

    def decode(self, id: int):
        raise DataError("data", f"'{self.name(id)}' cannot be read")


def test_images_that_cannot_be_read_any_more_leave_the_text(tmp_path):
    state = {"visits": torch.ones(4), "mean": torch.zeros(4)}
    text = report(EPOCHS, state, Gone(), lambda: torch.zeros(4, dtype=torch.int64), 8, tmp_path / "sheet.jpg")
    assert "Left out most: 3.jpg" in text
    assert not (tmp_path / "sheet.jpg").exists()


def test_the_sheet_shows_one_group_above_the_other():
    red, blue = (Image.new("RGB", (9, 5), color) for color in ("red", "blue"))
    made = sheet([[red] * 3, [blue]], side=10, columns=2)
    assert made.size == (20, 2 * 10 + 6 + 10)
    assert made.getpixel((5, 5)) == made.getpixel((15, 5)) == made.getpixel((5, 15)) == (255, 0, 0)
    assert made.getpixel((15, 15)) == (255, 255, 255)
    assert made.getpixel((5, 30)) == (0, 0, 255)
