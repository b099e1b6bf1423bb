"""How many views should a cache keep? Students that cost the same, teacher included, on CIFAR-10.

    python benchmarks/views.py [key=value ...] --data FOLDER [--work runs/proof] [--jobs 2]

A cache of few views is soon filled, and leaves time for more epochs on the same views. Teacher, data and student are
those of `proof.py`. The lengths are such that filling and training together cost about as much in all arms. A seed's
cache holds five views, of which an arm of V takes the first V: its share of `cache_cpu_minutes` is V / 5.
"""

from __future__ import annotations

import sys

import proof
import yaml

ARMS = {1: 11, 2: 10, 4: 8, 5: 7}
"""Views, and the epochs that they leave time for: a view of all images costs as much as 1.08 epochs of the student."""


def main() -> None:
    """Let `proof.py` train the arms."""
    whole = yaml.safe_load(proof.CONFIG.read_text())["run"]["epochs"]
    proof.CACHE = (f"teacher.cache.views={max(ARMS)}",)
    proof.ARMS.clear()
    for views, epochs in ARMS.items():
        name = f"{views} views, {epochs} epochs"
        proof.ARMS[name] = (proof.kl(2.0), (f"teacher.cache.views={views}",), epochs / whole)
    proof.main(sys.argv[1:], "views")


if __name__ == "__main__":
    main()
