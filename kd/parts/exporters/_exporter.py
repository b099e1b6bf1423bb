"""Define the contract of a format for kd-export, kd-serve and kd-verify.

It imports nothing heavy: kd-serve has no torch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kd.core.facts import Network
from kd.core.host import installed, package_versions

# uint8 [B, 3, S, S] to logits [B, C] or vectors [B, D]; thread-safe
Engine = Callable[[np.ndarray], np.ndarray]


class Exporter:
    """Write and load one format of graphs.

    A part overrides `write` and `load`, and other methods where it differs.
    """

    runtime = ""  # the package that runs it
    oldest: tuple[tuple[int, int, str], ...] = ()
    """Newest IR and opset that each version of the runtime reads, all tested."""

    def missing(self, file: str, write: bool) -> str:
        """Return why this machine cannot run a graph, or "" if it can.

        Args:
            file: the graph's file name.
            write: whether the graph is to be written.

        Returns:
            The reason, with the remedy after a colon.
        """
        if installed(self.runtime):
            return ""
        return f"{self.runtime} is not installed: pip install {self.runtime}"

    def write(self, path: Path, network: Network) -> None:
        """Write a graph; after any error its file is removed.

        Args:
            path: the new file.
            network: the network with its normalization.
        """
        raise NotImplementedError

    def load(
        self, file: str, content: bytes, weights: bytes, threads: int, slots: int
    ) -> Engine:
        """Load a graph. A runtime's own error means that it is damaged.

        Args:
            file: the graph's file name.
            content: of that file.
            weights: content of its second file; empty if it has none.
            threads: threads of each call.
            slots: parallel calls.

        Returns:
            A thread-safe function from uint8 [B, 3, S, S] to logits [B, C] or vectors
            [B, D].
        """
        raise NotImplementedError

    def format_versions(self, path: Path) -> tuple[int, int]:
        """Return the IR and opset versions of a graph; 0: not applicable."""
        return 0, 0

    def least(self, path: Path) -> dict[str, Any]:
        """Return a graph's `ir` and `opset`, and as `least` its oldest reader."""
        ir, opset = self.format_versions(path)
        return {"ir": ir, "opset": opset, "least": self.reader(ir, opset)}

    def reader(self, ir: int, opset: int) -> str:
        """Return the oldest version that reads a graph, else the installed version."""
        for newest_ir, newest_opset, version in self.oldest:
            if ir <= newest_ir and opset <= newest_opset:
                return version
        return package_versions(self.runtime)[self.runtime]

    def metadata(self, path: Path) -> dict[str, str]:
        """Return by name the texts in a graph that kd does not write, as a licence."""
        return {}

    def precision(self, path: Path, claimed: str) -> str:
        """Return the type of a graph's weights, `claimed` if its file has none."""
        return claimed

    def weight_counts(self, path: Path) -> dict[str, int]:
        """Return how many weights a graph has of each type; {}: the file has none.

        Weights are constants of two axes or more. Types are named as in
        `GraphFile.precision`.
        """
        return {}

    def int8_share(self, path: Path) -> float:
        """Return the share of a graph's weights that are int8, 0 to 1."""
        counts = self.weight_counts(path)
        return counts.get("int8", 0) / max(1, sum(counts.values()))
