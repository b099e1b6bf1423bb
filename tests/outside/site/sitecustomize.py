"""Let processes that a test starts find the laboratory's exporters too."""

from pathlib import Path

import kd.parts.exporters

kd.parts.exporters.__path__.append(str(Path(__file__).parents[1] / "exporters"))
