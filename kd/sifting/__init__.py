"""Drop-in names for scripts that were written for SageMaker's `smart_sifting`, on any PyTorch loop.

One import replaces those of the original; parameters, defaults, errors and metric names are the documented ones:

    from kd.sifting import (                 # in smart_sifting:
        SiftingDataloader,                   #   .dataloader.sift_dataloader
        RelativeProbabilisticSiftConfig,     #   .sift_config.sift_configs
        LossConfig,                          #   .sift_config.sift_configs
        SiftingBaseConfig,                   #   .sift_config.sift_configs
        Loss,                                #   .loss.abstract_sift_loss_module
        SiftingBatch,                        #   .data_model.data_model_interface
        SiftingBatchTransform,               #   .data_model.data_model_interface
        ListBatch,                           #   .data_model.list_batch
        TensorBatch,                         #   .data_model.tensor_batch
        enable_sifting,                      #   .integrations.trainer
        TrainingMetricsRecorder,             #   .metrics.lightning
    )

The method is Selective-Backprop (arXiv 1910.00762); no line of the original, which is closed, was seen. It scores every
sample with an extra forward pass, so it pays only where that is cheap beside a training step; the loader measures it
and says so. Distillation with kd has sifters that decide before the forward pass (`kd.sifters`).

Hugging Face and Lightning are imported by their users, never here.
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
from kd.sifting.lightning import TrainingMetricsRecorder
from kd.sifting.loader import SiftingDataloader
from kd.sifting.loss import Loss
from kd.sifting.trainer import enable_sifting

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
]
