"""Scripts that import Amazon's module names run on `kd.sifting`."""

import importlib.machinery
import runpy
import sys

import pytest

from kd import sifting
from kd.core.errors import KdError

SENTENCES = """
from typing import Any
import torch
from torch.utils.data import DataLoader, TensorDataset
from smart_sifting.data_model.data_model_interface import SiftingBatch
from smart_sifting.dataloader.sift_dataloader import SiftingDataloader
from smart_sifting.loss.abstract_sift_loss_module import Loss
from smart_sifting.metrics.lightning import TrainingMetricsRecorder
from smart_sifting.sift_config.sift_configs import (
    RelativeProbabilisticSiftConfig,
    LossConfig,
    SiftingBaseConfig,
)

class SentenceLoss(Loss):
    def __init__(self):
        self.celoss = torch.nn.CrossEntropyLoss(reduction="none")

    def loss(self, model: torch.nn.Module, transformed_batch: SiftingBatch, original_batch: Any = None) -> torch.Tensor:
        ids, mask, labels = [t.to(model.weight.device) for t in original_batch]
        return self.celoss(model(ids * mask), labels)

torch.manual_seed(0)
model = torch.nn.Linear(6, 2)
data = TensorDataset(torch.randn(160, 6), torch.ones(160, 6), torch.arange(160) % 2)
config = RelativeProbabilisticSiftConfig(
    beta_value=1,
    loss_history_length=500,
    loss_based_sift_config=LossConfig(sift_config=SiftingBaseConfig(sift_delay=0)),
)
loader = SiftingDataloader(
    sift_config=config, orig_dataloader=DataLoader(data, 8, shuffle=True), loss_impl=SentenceLoss(), model=model
)
seen = sum(len(labels) for ids, mask, labels in loader)
"""


@pytest.fixture
def installed():
    """The names, taken away again."""
    sifting.install_as_smart_sifting()
    sifting.install_as_smart_sifting()  # twice does no harm
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "smart_sifting"]:
        del sys.modules[name]


def test_a_script_with_amazons_imports_runs_unchanged(tmp_path, installed):
    (tmp_path / "train.py").write_text(SENTENCES)
    names = runpy.run_path(str(tmp_path / "train.py"), run_name="__main__")
    assert names["seen"] == pytest.approx(80, abs=8)  # 1 / (1 + beta), in whole batches
    assert names["SiftingDataloader"] is sifting.SiftingDataloader


def test_every_public_name_has_a_module(installed):
    names = {
        name
        for module in sys.modules
        if module.startswith("smart_sifting.")
        for name in vars(sys.modules[module])
    }
    missing = set(sifting.__all__) - names
    assert all(
        name.endswith("Exception") or name == "install_as_smart_sifting"
        for name in missing
    )


def test_amazons_own_package_is_not_replaced(monkeypatch):
    spec = importlib.machinery.ModuleSpec("smart_sifting", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    with pytest.raises(KdError, match="smart_sifting is installed"):
        sifting.install_as_smart_sifting()
    assert "smart_sifting" not in sys.modules
