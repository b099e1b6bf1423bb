"""Bring an export elsewhere: to SageMaker's archives, to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from kd import pixels
from kd.artifacts.hub import push
from kd.artifacts.sagemaker import archives

__all__ = ["push", "sagemaker_archives"]

REQUIREMENTS = "timm>=1.0.20\nsafetensors>=0.4\npillow>=10\n"


def sagemaker_archives(export: Path) -> list[Path]:
    """Write both `model.tar.gz` into the folder `<export>-sagemaker` and return their paths.

    Raises:
        RunError: the disk is full or not writable.
    """
    from kd.models import inference  # it imports timm, which no other command needs at its start

    code = {
        "inference.py": Path(inference.__file__).read_bytes(),
        "pixels.py": Path(pixels.__file__).read_bytes(),
        "requirements.txt": REQUIREMENTS.encode(),
    }
    return archives(export, export.parent / f"{export.name}-sagemaker", code)
