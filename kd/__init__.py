"""kd trains a small vision model to match a large one.

It uses stored teacher outputs and sifted data.

    import kd
    run = kd.train("configs/vit_food.yaml", "run.epochs=5")
    print(run.metrics["accuracy"], run.folder)

`import kd` is light: torch and timm are imported when something is first used.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kd.config import Config
    from kd.config import load as load_config
    from kd.core.errors import BadImage, KdError
    from kd.deploy.serve.cascade import open_exports as load
    from kd.engine.monitor.timeline import region
    from kd.jobs.api import Distilled, distill, train
    from kd.jobs.api.distiller import Distiller
    from kd.study.sweeps.sweep import sweep

# Read by OpenMP when torch starts. Its threads otherwise spin for long while they wait:
# beside any busy neighbour, such as the loader's own worker, a step on two cores was
# measured to take fifty times as long. Where they sleep at once, a step of small models
# takes twice as long; a short spin covers the gaps between torch's operators.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Read by onnxruntime when it is imported: 1.32 sends events to its makers, and keeps an
# id in the home folder.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__version__ = "0.3.0"
__all__ = [
    "BadImage",
    "Config",
    "Distilled",
    "Distiller",
    "KdError",
    "__version__",
    "distill",
    "load",
    "load_config",
    "region",
    "sweep",
    "train",
]

_HOMES = {
    "BadImage": ("kd.core.errors", "BadImage"),
    "Config": ("kd.config", "Config"),
    "Distilled": ("kd.jobs.api", "Distilled"),
    "Distiller": ("kd.jobs.api.distiller", "Distiller"),
    "KdError": ("kd.core.errors", "KdError"),
    "distill": ("kd.jobs.api", "distill"),
    "load": ("kd.deploy.serve.cascade", "open_exports"),
    "load_config": ("kd.config", "load"),
    "region": ("kd.engine.monitor.timeline", "region"),
    "sweep": ("kd.study.sweeps.sweep", "sweep"),
    "train": ("kd.jobs.api", "train"),
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kd' has no attribute '{name}'")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
