"""The contract of a format for kd-export, kd-serve and kd-verify. Imports nothing
heavy: kd-serve has no torch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kd.core.facts import Network
from kd.core.host import installed, package_versions

Engine = Callable[
    [np.ndarray], np.ndarray
]  # uint8 [B, 3, S, S] to logits [B, C] or vectors [B, D]; thread-safe


class Exporter:
    """A format. A part overrides `write` and `load`, and other methods where it
    differs.
    """

    runtime = ""  # the package that runs it
    oldest: tuple[tuple[int, int, str], ...] = ()
    """Newest IR and opset that each version of the runtime reads, all tested."""

    def missing(self, file: str, write: bool) -> str:
        """Return why this machine cannot run (or `write`) a graph, with the remedy
        after a colon; "": it can.
        """
        return (
            ""
            if installed(self.runtime)
            else f"{self.runtime} is not installed: pip install {self.runtime}"
        )

    def write(self, path: Path, network: Network) -> None:
        """Write a graph; after any error its file is removed."""
        raise NotImplementedError

    def load(
        self, file: str, content: bytes, weights: bytes, threads: int, slots: int
    ) -> Engine:
        """Load a graph for `slots` parallel calls on `threads` each. A runtime's own
        error means that it is damaged.
        """
        raise NotImplementedError

    def written_for(self, path: Path) -> tuple[int, int]:
        """Return the IR and opset versions of a graph; 0: not applicable."""
        return 0, 0

    def least(self, path: Path) -> dict[str, Any]:
        """Return `ir` and `opset` of a graph, and as `least` the oldest version that
        reads it.
        """
        ir, opset = self.written_for(path)
        return {"ir": ir, "opset": opset, "least": self.reader(ir, opset)}

    def reader(self, ir: int, opset: int) -> str:
        """Return the oldest version that reads a graph; beyond the table, the installed
        version.
        """
        found = (
            name
            for newest_ir, newest, name in self.oldest
            if ir <= newest_ir and opset <= newest
        )
        return next(found, package_versions(self.runtime)[self.runtime])

    def metadata(self, path: Path) -> dict[str, str]:
        """Return the texts in a graph's file that kd does not write, such as a licence,
        by name.
        """
        return {}

    def precision(self, path: Path, claimed: str) -> str:
        """Return the type of a graph's weights in its file; the claimed type if the
        file cannot be read.
        """
        return claimed
