"""The line `plan` of `--check` without a comparable run: the range of all measured
gains, losses included.
"""

import importlib.util
import re
from pathlib import Path

import pytest

from kd import config
from kd.jobs.description import describe
from kd.setup.measured import FEW_LABELS, OTHERS
from kd.setup.recipe import resolve

ROOT = Path(__file__).parents[3]
SPEC = importlib.util.spec_from_file_location(
    "results_page", ROOT / "tools" / "results.py"
)
assert SPEC is not None
assert SPEC.loader is not None
results = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(results)


def committed(theme: str) -> list[dict[str, str]]:
    """Return the rows of a theme's newest CSV."""
    files = sorted((ROOT / "benchmarks" / "results").rglob(f"{theme}_*-*_[0-9]*.csv"))
    return results.read(files[-1])[1]


def gains(theme: str, arm: str, over: str, **config_path: str) -> list[float]:
    """Return the differences of the runs of each seed, points."""
    rows = [
        row
        for row in committed(theme)
        if all(row[key] == value for key, value in config_path.items())
    ]
    accuracies, baseline = (
        {row["seed"]: float(row["accuracy"]) for row in rows if row["arm"] == each}
        for each in (arm, over)
    )
    return [
        accuracies[seed] - baseline[seed]
        for seed in accuracies.keys() & baseline.keys()
    ]


def gains_of_curves(setup: str) -> list[float]:
    """Return the differences of what kd-init writes from the best on labels alone, of
    each seed, points.
    """
    rows = [row for row in committed("curves") if row["setup"] == setup]
    distilled = {
        row["seed"]: row
        for row in rows
        if (row["arm"], row["cell"]) == ("distilled", "as kd-init writes it")
    }
    return [
        100
        * (
            float(row["accuracy"])
            - max(
                float(baseline["accuracy"])
                for baseline in rows
                if alone(baseline, seed)
            )
        )
        for seed, row in distilled.items()
    ]


def alone(row: dict[str, str], seed: str) -> bool:
    return (row["arm"], row["seed"]) == ("labels", seed)


def test_the_ranges_are_those_of_the_csvs():
    labels = gains("make-run", "distilled", "strong augmentation")
    for number in ("25", "100", "400"):
        labels += gains(
            "proof_few_labels", "soft", "labels only, strong", labels=number
        )
    other_settings = gains(
        "proof_few_pictures", "soft and labels", "labels only", labels="50"
    )
    for number in ("10", "50", "200"):
        other_settings += gains(
            "proof_few_pictures", "soft", "labels only", labels=number
        )
    for kind in ("all labels", "scratch"):
        other_settings += gains("make-run", f"distilled, {kind}", f"smoothing, {kind}")
    for theme in ("proof_wrong_labels", "proof_grocery", "proof_grocery_half"):
        other_settings += gains(theme, "soft", "labels only")
    other_settings += gains("full_labels", "kl", "labels only") + gains(
        "proof_tiny_imagenet", "soft", "labels only"
    )
    setups = {row["setup"] for row in committed("curves")}
    for setup in setups:
        few = setup in (
            "tiny10",
            "tiny10_other",
            "tiny25",
            "cifar20",
            "cifar100",
            "dishes",
        )
        labels += gains_of_curves(setup) if few else []
        other_settings += [] if few else gains_of_curves(setup)
    for published, values in ((FEW_LABELS, labels), (OTHERS, other_settings)):
        assert published == pytest.approx((min(values), max(values)), abs=0.0501)


def test_check_tells_the_range_of_gains_and_losses_and_that_conditions_differ(settings):
    """One whose student lost 6.1 points was told +17.0 ± 7.9, which another student and
    teacher had gained.
    """
    text = describe(resolve(config.load(settings)))
    (line,) = [line for line in text.splitlines() if line.startswith("plan ")]
    assert "no comparable run" in line
    assert [float(number) for number in re.findall(r"[+-]\d+\.\d", line)] == [
        *FEW_LABELS,
        *OTHERS,
    ]
    assert all(word in line for word in ("students", "teachers", "steps"))


def test_a_run_without_a_teacher_expects_nothing(settings):
    assert "plan  " not in describe(
        resolve(config.load(settings, ["losses=[{kind: ce}]"]))
    )
