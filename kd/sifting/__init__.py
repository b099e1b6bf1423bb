"""These names replace those of SageMaker's `smart_sifting`, in any PyTorch loop.

Parameters, defaults, errors and metric names are as documented there; docs/sagemaker.md
lists where each name stood.

The method is Selective-Backprop (arXiv:1910.00762), written without access to the
closed original. It scores each sample with an extra forward pass, so it saves time only
where that is cheap compared with a training step. The loader measures this and logs it.
For distillation, `kd.parts.sifters` decide before the forward pass.

transformers and Lightning are not imported here.
"""

from kd.sifting.batch import ListBatch, SiftingBatch, SiftingBatchTransform, TensorBatch
from kd.sifting.config import (
    LossConfig,
    LossImplementationNotProvidedException,
    RelativeProbabilisticSiftConfig,
    SiftConfigValidationException,
    SiftingBaseConfig,
    UnsupportedDataFormatException,
)
from kd.sifting.dataloader import SiftingDataloader
from kd.sifting.frameworks import (
    TrainingMetricsRecorder,
    enable_sifting,
    install_as_smart_sifting,
)
from kd.sifting.loss import Loss

__all__ = [
    "ListBatch",
    "Loss",
    "LossConfig",
    "LossImplementationNotProvidedException",
    "RelativeProbabilisticSiftConfig",
    "SiftConfigValidationException",
    "SiftingBaseConfig",
    "SiftingBatch",
    "SiftingBatchTransform",
    "SiftingDataloader",
    "TensorBatch",
    "TrainingMetricsRecorder",
    "UnsupportedDataFormatException",
    "enable_sifting",
    "install_as_smart_sifting",
]
