"""Sifting in a real Hugging Face Trainer and a real Lightning Trainer; skipped where
they are not installed.
"""

import importlib
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from kd.core.errors import MissingExtra
from kd.sifting import (
    Loss,
    SiftConfigValidationException,
    SiftingDataloader,
    TrainingMetricsRecorder,
    enable_sifting,
)

TAIL = 16
"""A trainer stops after its last step. Two batches of candidates, of which half is
kept, may be left unread.
"""
HELP = "is not installed: pip install transformers accelerate lightning"


def needs(name: str):
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        pytest.skip(f"{name} {HELP}")


def config(delay: int, beta: float = 1.0) -> dict:
    base = {"sift_config": {"sift_delay": delay}}
    return {
        "beta_value": beta,
        "loss_history_length": 100,
        "loss_based_sift_config": base,
    }


class Rows(Dataset):
    """Two classes of points, separated by the feature `x`."""

    def __init__(self, count: int = 80) -> None:
        draw = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, 4, generator=draw)
        self.labels = torch.arange(count) % 2
        self.x[:, 0] += 2.0 * self.labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[i], "labels": self.labels[i]}


class Model(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.drop = nn.Dropout(drop)
        self.trained = []

    def forward(self, x, labels=None):
        if self.training:
            self.trained.append(len(x))
        logits = self.head(self.drop(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class DictLoss(Loss):
    def loss(self, model, transformed_batch, original_batch=None):
        logits = model(**original_batch)["logits"]
        return nn.functional.cross_entropy(
            logits, original_batch["labels"], reduction="none"
        )


def trainer_of(folder, **arguments):
    transformers = needs("transformers")
    torch.manual_seed(0)
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=8,
        learning_rate=0.1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **arguments,
    )
    return transformers.Trainer(Model(), arguments, train_dataset=Rows())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("delay", [0, 13])
def test_the_hugging_face_trainer_trains_for_its_epochs(delay, tmp_path):
    trainer = trainer_of(tmp_path, num_train_epochs=4)
    enable_sifting(trainer, config(delay), loss=DictLoss(), set_epochs=True)
    trainer.train()
    loader = trainer.sifting_dataloader
    assert 0 <= 4 * 80 - loader.metrics["num_orig_samples_seen"] < TAIL
    steps = delay + (320 - 8 * delay) // 2 // 8
    assert trainer.state.global_step == steps
    assert trainer.model.trained == [8] * steps
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(
        0, abs=1e-6
    )  # it decays to its end


@pytest.mark.filterwarnings("ignore")
def test_the_hugging_face_trainer_requires_max_steps_or_epochs(tmp_path):
    trainer = trainer_of(tmp_path, num_train_epochs=2)
    enable_sifting(trainer, config(0), loss=DictLoss())
    with pytest.raises(ValueError, match="max_steps"):
        trainer.train()


@pytest.mark.filterwarnings("ignore")
def test_the_hugging_face_trainer_accumulates_gradients(tmp_path):
    trainer = trainer_of(tmp_path, num_train_epochs=3, gradient_accumulation_steps=2)
    enable_sifting(trainer, config(4), loss=DictLoss(), set_epochs=True)
    trainer.train()
    assert (
        trainer.state.global_step == trainer.args.max_steps == 3 + 2 + 2
    )  # of 7, 5 and 5 batches
    assert (
        0 <= 240 - trainer.sifting_dataloader.metrics["num_orig_samples_seen"] <= TAIL
    )


@pytest.mark.filterwarnings("ignore")
def test_epochs_of_unknown_length_are_refused(tmp_path):
    trainer = trainer_of(tmp_path, num_train_epochs=3)
    enable_sifting(
        trainer, config(0), loss=DictLoss(), set_epochs=True, pick="bernoulli"
    )
    with pytest.raises(SiftConfigValidationException, match=r"set_epochs.*max_steps"):
        trainer.train()


class Each(Loss):
    def loss(self, model, transformed_batch, original_batch=None):
        logits = model(original_batch)["logits"]
        return nn.functional.cross_entropy(
            logits, original_batch["labels"], reduction="none"
        )


def fit(
    epochs: int,
    folder,
    callbacks=(),
    state=None,
    makers=(),
    seed=0,
    drop=0.0,
    **arguments,
):
    """Train a LightningModule on sifted batches; return it, its loader and the epoch
    lengths of a fresh one.
    """
    lightning = needs("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model(drop)

        def forward(self, batch):
            return self.model(**batch)

        def training_step(self, batch, index):
            return self(batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(seed)
    module = Module()
    loader = SiftingDataloader(
        config(5), DataLoader(Rows(), batch_size=8, shuffle=True), module, Each()
    )
    lengths = loader.epoch_lengths(3)
    callbacks = [make(loader) for make in makers] + list(callbacks)
    if state is not None:
        loader.load_state_dict(state)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, **arguments)
    return module, loader, lengths


@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_on_sifted_batches_and_is_recorded(tmp_path):
    needs("lightning.pytorch")
    recorder = TrainingMetricsRecorder()
    module, loader, lengths = fit(3, tmp_path, [recorder])
    assert isinstance(recorder, sys.modules["lightning.pytorch"].Callback)
    assert module.model.trained == [8] * sum(lengths)
    assert loader.metrics["num_orig_samples_seen"] == 240
    assert recorder.train_step_count == sum(lengths)
    names = {
        f"train {name} latency"
        for name in ("forward pass", "backprop", "optimizer step", "total step")
    }
    assert set(recorder.latencies) == names
    assert all(seconds > 0 for seconds in recorder.latencies.values())
    total = recorder.latencies.pop("train total step latency")
    assert total == pytest.approx(sum(recorder.latencies.values()))


@pytest.mark.filterwarnings("ignore")
def test_lightning_keeps_the_state_of_the_loader_in_its_checkpoints(tmp_path):
    _, first, lengths = fit(2, tmp_path)
    path = next(tmp_path.rglob("*.ckpt"))
    state = torch.load(path)["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]
    module, loader, _ = fit(
        3, tmp_path / "again", state=state, ckpt_path=path, weights_only=False
    )
    assert module.model.trained == [8] * lengths[2]
    assert (
        loader.metrics["num_orig_samples_seen"]
        == first.metrics["num_orig_samples_seen"] + 80
        == 240
    )


def whole_run(folder, saves, **arguments):
    """Train three epochs with dropout, a bar's length recorded, and a checkpoint every
    `saves` steps or epochs.
    """
    lightning = needs("lightning.pytorch")
    lengths = []

    class Bar(lightning.Callback):
        def on_train_epoch_start(self, trainer, module):
            lengths.append(trainer.num_training_batches)

    keep = lightning.callbacks.ModelCheckpoint(
        folder, filename="{step}", save_top_k=-1, **saves
    )
    module, loader, expected = fit(
        3,
        folder,
        [Bar(), keep],
        makers=[TrainingMetricsRecorder],
        drop=0.3,
        **arguments,
    )
    return module, loader, lengths, expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "saves",
    [{"every_n_epochs": 1}, {"every_n_train_steps": 4}],
    ids=["after an epoch", "within an epoch"],
)
def test_lightning_resumes_bit_equal_with_a_length_in_the_bar(saves, tmp_path):
    module, loader, lengths, expected = whole_run(tmp_path, saves)
    assert lengths == expected
    assert len(set(expected)) > 1  # epochs differ in length
    steps = sorted(int(path.stem.partition("=")[2]) for path in tmp_path.glob("*.ckpt"))
    assert len(steps) > 2
    for step in steps[:-1]:
        arguments = {"ckpt_path": tmp_path / f"step={step}.ckpt", "weights_only": False}
        resumed, again, *_ = whole_run(tmp_path / str(step), saves, seed=9, **arguments)
        assert step + len(resumed.model.trained) == sum(expected)
        assert torch.equal(resumed.model.head.weight, module.model.head.weight), step
        assert (
            again.metrics["num_orig_samples_seen"]
            == loader.metrics["num_orig_samples_seen"]
            == 240
        )


def test_the_recorder_requires_lightning(monkeypatch):
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match="Lightning is not installed"):
        TrainingMetricsRecorder()
