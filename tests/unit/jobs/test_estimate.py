"""What `--check` makes of its measurements, and of a price."""

from kd.config import instances


def test_a_price_is_found_with_and_without_prefix():
    for name, price in instances.TABLE.items():
        assert instances.price_per_hour(name.removeprefix("ml.")) == instances.price_per_hour(name) == price > 0
    assert instances.price_per_hour("ml.p4d") == 0.0
