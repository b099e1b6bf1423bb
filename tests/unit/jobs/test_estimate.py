"""What `--check` makes of its measurements, and of a price."""

from kd.config import instances
from kd.jobs.estimate import line_through


def test_the_line_through_two_sizes():
    assert line_through(4, 3.0, 16, 9.0) == (1.0, 0.5)
    assert line_through(4, 1.0, 16, 9.0) == (0.0, 9 / 16)  # it would begin below 0
    assert line_through(4, 9.0, 16, 9.0) == (0.0, 9 / 16)
    assert line_through(1, 9.0, 1, 9.0) == (0.0, 9.0)


def test_a_price_is_found_with_and_without_prefix():
    for name, price in instances.TABLE.items():
        assert instances.price_per_hour(name.removeprefix("ml.")) == instances.price_per_hour(name) == price > 0
    assert instances.price_per_hour("ml.p4d") == 0.0
