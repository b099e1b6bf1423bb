"""Sifting works under Amazon's module names, with the Trainer and Lightning.

None of these packages is imported for it.
"""

import importlib.util
import sys
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from kd.core.errors import KdError, MissingExtra
from kd.sifting.config import (
    RelativeProbabilisticSiftConfig,
    SiftConfigValidationException,
)
from kd.sifting.dataloader import SiftingDataloader
from kd.sifting.timing import logger

RANDOM = "kd.sifting.random"  # key of torch's random state in a Lightning checkpoint
PACKAGES = ("lightning.pytorch", "pytorch_lightning")
NAME = "smart_sifting"
MODULES = {
    "sift_config.sift_configs": (
        "RelativeProbabilisticSiftConfig",
        "LossConfig",
        "SiftingBaseConfig",
    ),
    "dataloader.sift_dataloader": ("SiftingDataloader",),
    "data_model.data_model_interface": ("SiftingBatch", "SiftingBatchTransform"),
    "data_model.list_batch": ("ListBatch",),
    "data_model.tensor_batch": ("TensorBatch",),
    "loss.abstract_sift_loss_module": ("Loss",),
    "integrations.trainer": ("enable_sifting",),
    "metrics.lightning": ("TrainingMetricsRecorder",),
}
"""Where a script imports each name from, as Amazon's documentation and examples have
it.
"""


def enable_sifting(
    trainer: Any,
    sift_config: RelativeProbabilisticSiftConfig | Mapping[str, Any],
    loss: Any = None,
    set_epochs: bool = False,
    **options: Any,
) -> None:
    """Let a Hugging Face Trainer train on sifted batches.

    As in smart sifting, the loader has no length. Set `max_steps`, or `set_epochs=True`
    to train for `num_train_epochs`: then `max_steps` becomes the exact number of steps
    after sifting, so that the learning rate decays fully. Smart sifting sets it to the
    largest integer, with which the rate never decays.

    Not handled: `resume_from_checkpoint` restores weights and step count, but starts a
    new epoch with an empty window. Batches of a sifted loader cannot be skipped, so
    `ignore_data_skip` is set.

    Args:
        trainer: a `transformers.Trainer`. During training, `trainer.sifting_dataloader`
            is the loader.
        sift_config: see `SiftingDataloader`.
        loss: an object with `loss(model, transformed_batch, original_batch)`.
        set_epochs: train for `num_train_epochs`.
        options: further arguments of `SiftingDataloader`.

    Raises:
        SiftConfigValidationException: at the start of training, with `set_epochs`, if
            the loader's length is unknown.
    """
    original = trainer.get_train_dataloader

    def get_train_dataloader() -> SiftingDataloader:
        loader = SiftingDataloader(
            sift_config, original(), trainer.model, loss, **options
        )
        if set_epochs:
            trainer.args.max_steps = _steps(loader, trainer.args)
        # The Trainer would count epochs by the length of the first one, and stop early
        # after a delay.
        loader.sized = False
        trainer.sifting_dataloader = loader
        return loader

    trainer.args.ignore_data_skip = True
    trainer.get_train_dataloader = get_train_dataloader


def _steps(loader: SiftingDataloader, args: Any) -> int:
    """Return the optimizer steps of all epochs.

    An incomplete gradient accumulation at the end of an epoch is no step.
    """
    epochs = args.num_train_epochs
    accumulate = args.gradient_accumulation_steps
    num_full = int(epochs)
    try:
        lengths = loader.epoch_lengths(num_full + 1)
    except TypeError:
        wrong = "is True, but the number of batches of an epoch is not known"
        allowed = "It needs pick='fixed' and a dataset with a length"
        remedy = "Set max_steps in the TrainingArguments instead"
        raise SiftConfigValidationException(
            "enable_sifting.set_epochs", wrong, allowed, remedy
        ) from None
    last = int(lengths[num_full] * (epochs - num_full))
    return max(1, sum(length // accumulate for length in [*lengths[:num_full], last]))


def _callback_class() -> type[Any]:
    """Return the Callback class of a Lightning package.

    The one that is imported already is preferred.
    """
    for name in sorted(PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name).Callback
        except ModuleNotFoundError:
            continue
    raise MissingExtra(
        "TrainingMetricsRecorder",
        "Lightning is not installed",
        "",
        "pip install lightning (or pytorch-lightning)",
    )


class TrainingMetricsRecorder:
    """Log how long forward, backward and optimizer take.

    This is a Lightning callback.

    `latencies` holds the latest values in seconds under smart sifting's names, measured
    on the host. On a GPU they are accurate only where the loop synchronizes. The
    loader's own metrics are `loader.metrics`.

    With the `SiftingDataloader` that the Trainer reads, the bar has a length, and a
    resumed run equals one that was not interrupted, within an epoch and after it. Not
    handled: ranks whose shards differ in length.

    Args:
        loader: the `SiftingDataloader` that the Trainer reads; None: only times are
            logged.

    Raises:
        MissingExtra: Lightning is not installed.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        base = _callback_class()
        # derived here, so that importing kd.sifting does not import Lightning
        if not issubclass(cls, base):
            cls = type(
                cls.__name__,
                (cls, base),
                {"__doc__": cls.__doc__, "__module__": cls.__module__},
            )
        return object.__new__(cls)

    def __init__(self, loader: SiftingDataloader | None = None) -> None:
        self.loader = loader
        self._state: dict[str, Any] = {}
        self.train_step_count = 0
        self.latencies: dict[str, float] = {}
        self._begin = self._last = 0.0

    def setup(self, *args: Any, **kwargs: Any) -> None:
        if self.loader is not None:
            self.loader.counted = True

    def on_save_checkpoint(
        self, trainer: Any, module: Any, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[RANDOM] = torch.get_rng_state()

    def on_load_checkpoint(
        self, trainer: Any, module: Any, checkpoint: Mapping[str, Any]
    ) -> None:
        states = checkpoint["loops"]["fit_loop"]["state_dict"].get(
            "combined_loader", []
        )
        self._state = {}
        sifted = [state for state in states if "order.torch" in state]
        if sifted:
            self._state["loader"] = sifted[0]
        if RANDOM in checkpoint:
            self._state[RANDOM] = checkpoint[RANDOM]

    def on_train_start(self, *args: Any, **kwargs: Any) -> None:
        # Lightning restores loaders within an epoch only
        if self.loader is not None and "loader" in self._state:
            self.loader.load_state_dict(self._state["loader"])
        if RANDOM in self._state:  # it restores none
            torch.set_rng_state(self._state[RANDOM].cpu())

    def on_train_epoch_start(self, trainer: Any, *args: Any) -> None:
        # epochs differ in length, which Lightning reads once
        if self.loader is not None:
            trainer.fit_loop.max_batches = len(self.loader)

    def _lap(self, name: str) -> None:
        now = time.perf_counter()
        self.latencies[f"train {name} latency"] = now - self._last
        self._last = now

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._begin = self._last = time.perf_counter()

    def on_before_backward(self, *args: Any, **kwargs: Any) -> None:
        self._lap("forward pass")

    def on_after_backward(self, *args: Any, **kwargs: Any) -> None:
        self._lap("backprop")

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._lap("optimizer step")
        self.latencies["train total step latency"] = self._last - self._begin
        self.train_step_count += 1
        logger.info("train step count: %s", self.train_step_count)
        for name, seconds in self.latencies.items():
            logger.info("%s: %s", name, seconds)


def install_as_smart_sifting() -> None:
    """Let `import smart_sifting...` find the names of `kd.sifting`.

    Call it before the script's imports, or run a script unchanged: `python -c "import
    kd.sifting as s, runpy; s.install_as_smart_sifting(); runpy.run_path('train.py',
    run_name='__main__')"`.

    Raises:
        KdError: Amazon's own package is installed.
    """
    import kd.sifting

    if NAME in sys.modules and getattr(sys.modules[NAME], "__file__", None) == __file__:
        return
    if NAME in sys.modules or importlib.util.find_spec(NAME) is not None:
        wrong = f"the package {NAME} is installed"
        remedy = "Drop the call, or uninstall the package"
        raise KdError("install_as_smart_sifting", wrong, "It is not replaced", remedy)
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
        module.__file__ = __file__
        module.__path__ = []
    sys.modules.update(modules)
