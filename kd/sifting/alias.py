"""The module names of Amazon's package, for scripts that import `smart_sifting`."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from kd.core.errors import KdError

NAME = "smart_sifting"
MODULES = {
    "sift_config.sift_configs": ("RelativeProbabilisticSiftConfig", "LossConfig", "SiftingBaseConfig"),
    "dataloader.sift_dataloader": ("SiftingDataloader",),
    "data_model.data_model_interface": ("SiftingBatch", "SiftingBatchTransform"),
    "data_model.list_batch": ("ListBatch",),
    "data_model.tensor_batch": ("TensorBatch",),
    "loss.abstract_sift_loss_module": ("Loss",),
    "integrations.trainer": ("enable_sifting",),
    "metrics.lightning": ("TrainingMetricsRecorder",),
}
"""Where a script imports each name from, as Amazon's documentation and examples have it."""


def install_as_smart_sifting() -> None:
    """Let `import smart_sifting...` find the names of `kd.sifting`. Call it before the script's imports.

    Or run a script unchanged: `python -c "import kd.sifting as s, runpy; s.install_as_smart_sifting();
    runpy.run_path('train.py', run_name='__main__')"`.

    Raises:
        KdError: Amazon's own package is installed; it is not replaced.
    """
    import kd.sifting

    if NAME in sys.modules and getattr(sys.modules[NAME], "__file__", None) == __file__:
        return
    if NAME in sys.modules or importlib.util.find_spec(NAME) is not None:
        wrong = f"the package {NAME} is installed"
        raise KdError(
            "install_as_smart_sifting", wrong, "It is not replaced", "Drop the call, or uninstall the package"
        )
    modules = {NAME: ModuleType(NAME)}
    for path, names in MODULES.items():
        folder, _, last = path.partition(".")
        package = modules.setdefault(f"{NAME}.{folder}", ModuleType(f"{NAME}.{folder}"))
        module = modules[f"{NAME}.{path}"] = ModuleType(f"{NAME}.{path}")
        setattr(modules[NAME], folder, package)
        setattr(package, last, module)
        for name in names:
            setattr(module, name, getattr(kd.sifting, name))
    for module in modules.values():
        module.__file__, module.__path__ = __file__, []
    sys.modules.update(modules)
