"""How many views should a cache keep? Students of CIFAR-10 after short and long runs on answers to few and many views.

    python benchmarks/views.py [key=value ...] --data FOLDER [--work runs/views] [--jobs 2] [--members 1]

Teacher, data and student are those of `proof.py`. A view costs one pass of the teacher over all images, whatever comes
after it, so that with accuracies by views and epochs the best split of any time can be read off, for a teacher of any
cost. A seed's cache holds as many views as the largest arm, which takes V / that of its `cache_cpu_minutes`.
"""

from __future__ import annotations

import sys

import proof
import yaml

GRID = {4: (1, 2, 4), 8: (1, 2, 4, 8)}
"""Views that are tried, by epochs: with one view an epoch, each is seen once."""


def main() -> None:
    """Let `proof.py` train the arms."""
    whole = yaml.safe_load(proof.CONFIG.read_text())["run"]["epochs"]
    proof.CACHE = (f"teacher.cache.views={max(max(views) for views in GRID.values())}",)
    proof.ARMS.clear()
    for epochs, tried in GRID.items():
        for views in tried:
            name = f"{epochs} epochs, {views} views"
            proof.ARMS[name] = (proof.kl(2.0), (f"teacher.cache.views={views}",), epochs / whole)
    proof.main(sys.argv[1:], "views")


if __name__ == "__main__":
    main()
