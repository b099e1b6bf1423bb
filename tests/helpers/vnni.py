"""Whether this processor multiplies bytes exactly."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest

CPUINFO = Path("/proc/cpuinfo")
EXACT = platform.machine() != "x86_64" or bool(
    CPUINFO.is_file() and re.search("avx512_vnni|avx_vnni", CPUINFO.read_text())
)
needs_vnni = pytest.mark.skipif(
    not EXACT, reason="int8 sums overflow on processors without VNNI"
)
"""For tests of int8 graphs whose small numbers leave no room for such errors."""
