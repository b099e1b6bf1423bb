"""Whether distillation paid, in one line."""

import numpy as np
import pytest

from kd.core.intervals import Samples
from kd.parts.tasks.single_label import SCORES
from kd.study.report.summary import ALONE, verdict


@pytest.mark.parametrize(
    ("distilled", "alone", "expected"),
    [(80, 60, "Distillation paid: +20.0"), (60, 80, "Distillation did not pay: -20.0"), (61, 60, "Not shown to have")],
)
def test_a_verdict_is_cautious_where_the_interval_holds_0(distilled, alone, expected):
    def of(right):
        answers = np.arange(100) < right
        return {"accuracy": Samples(right / 100, right=answers)}

    (line, _) = verdict(SCORES, {"accuracy": distilled / 100}, {"student": of(distilled), ALONE: of(alone)}, "student")
    assert line.startswith(expected)
    assert verdict(SCORES, {"accuracy": 0.8}, {"student": of(80)}, "student") == []
