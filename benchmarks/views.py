"""How many views should a cache keep? Students of CIFAR-10 after short and long runs on
answers to few and many views.

    python benchmarks/views.py [key=value ...] --data FOLDER [--work runs/views] [--jobs 2] [--members 1]

Teacher, data and student are those of `full_labels.py`. A view costs a pass of the
teacher over all images, whatever comes after it, so that with accuracies by views and
epochs the best split of any time can be read off, for any teacher. A seed's cache holds
as many views as the largest arm, which takes V / that of its `cache_cpu_minutes`.
"""

from __future__ import annotations

import sys

import full_labels
import yaml

GRID = {4: (1, 2, 4), 8: (1, 2, 4, 8)}
"""Views that are tried, by epochs: with one view an epoch, each is seen once."""


def main() -> None:
    """Let `full_labels.py` train the arms."""
    epochs_of_recipe = yaml.safe_load(full_labels.CONFIG.read_text())["run"]["epochs"]
    full_labels.CACHE = (
        f"teacher.cache.views={max(max(views) for views in GRID.values())}",
    )
    full_labels.ARMS.clear()
    for epochs, tried in GRID.items():
        for views in tried:
            name = f"{epochs} epochs, {views} views"
            full_labels.ARMS[name] = (
                full_labels.kl(2.0),
                (f"teacher.cache.views={views}",),
                epochs / epochs_of_recipe,
            )
    full_labels.main(sys.argv[1:], "views")


if __name__ == "__main__":
    main()
