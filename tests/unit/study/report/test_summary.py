"""Whether distillation paid, in one line."""

import numpy as np
import pytest

from kd.core.intervals import Samples, paired
from kd.parts.tasks.single_label import SCORES
from kd.study.report.summary import verdict


@pytest.mark.parametrize(
    ("distilled", "alone", "expected"),
    [(80, 60, "Distillation paid"), (60, 80, "Distillation did not pay"), (61, 60, "Not shown to have paid")],
)
def test_a_verdict_is_cautious_where_the_interval_holds_0(distilled, alone, expected):
    def of(right):
        return Samples(right / 100, right=np.arange(100) < right)

    line = verdict(SCORES.own[0], of(distilled), of(alone))
    low, high = paired(max(0, distilled - alone), max(0, alone - distilled), 100)
    assert line.startswith(
        f"{expected}: accuracy {distilled - alone:+}.0 points ({100 * low:+.1f} to {100 * high:+.1f})"
    )
    assert verdict(SCORES.own[0], of(80), None) == ""
