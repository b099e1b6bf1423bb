"""Parts that slow a run down on purpose, each in one way, for `benchmarks/rules.py`."""
