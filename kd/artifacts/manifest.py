"""What a number depends on: versions, machine, command."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def environment() -> dict[str, Any]:
    """Return versions, machine and command of this process."""
    return {
        "packages": versions("kd", "torch", "timm", "torchvision", "pillow", "numpy", "safetensors", "omegaconf"),
        "python": platform.python_version(),
        "machine": {"system": platform.platform(), "processor": processor(), "cores": os.cpu_count()},
        "command": " ".join(sys.argv),
    }


def versions(*names: str) -> dict[str, str]:
    """Return the versions of installed packages."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def processor() -> str:
    """Return the processor's name as the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        return names[0] if names else platform.processor()
    except OSError:
        return platform.processor()
