"""The report of a sifted run, from rows with known numbers."""

from kd.study.report.summary import sifted

COUNTS = {"images": 100, "batch_size": 8}
EPOCHS = [
    {"trained": 96.0, "candidates": 96.0, "effective": 96.0, "seconds": 10.0},
    {"trained": 48.0, "candidates": 48.0, "effective": 36.0, "seconds": 15.0},
    {"trained": 48.0, "candidates": 96.0, "effective": 96.0, "seconds": 22.0},
]


def test_the_saving_is_wall_clock_against_the_runs_own_full_epochs():
    text = sifted(EPOCHS, COUNTS)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert rows[2:] == [
        ["0", "100", "96", "96.0 %", "96", "10.0"],
        ["1", "100", "48", "48.0 %", "36", "5.0"],
        ["2", "100", "48", "48.0 %", "48", "7.0"],
    ]
    assert all(words in text for words in ("40.0 % less time", "(6.0 against 10.0 s)"))
    assert all(words in text for words in ("as much as 2.2 full ones", "sifter.kind=none and run.epochs=2"))


def test_a_run_without_full_epochs_reports_no_saving():
    assert "less time" not in sifted(EPOCHS[1:2], COUNTS)
    assert sifted(EPOCHS[:1], COUNTS) == sifted([], COUNTS) == ""
