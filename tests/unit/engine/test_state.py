"""The state of a network that is no average: its averaged weights, its checkpoint, and
what a new network loads.
"""

from __future__ import annotations

import pytest
import torch
from pieces import merged
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import TensorDataset

import kd
from kd.core.errors import KdError
from kd.engine.optim import EMA
from kd.engine.snapshot import load_student
from kd.files.run_dir import RunDir
from kd.models.classifier import LogitsModel, trained_network

CODE = """
import safetensors.torch
import torch
from torch import nn

COMPLEX = torch.complex64 if torch.complex64 in safetensors.torch._SIZE else torch.float32  # 0.5 stores no complex ones


class Indexed(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.head = nn.Linear(12, classes)
        self.register_buffer("index", torch.arange(11, -1, -1))
        self.register_buffer("mask", torch.arange(12) > 0)
        self.register_buffer("wave", torch.ones(12, dtype=COMPLEX))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, image):
        if self.training:
            self.seen += 1
        pooled = nn.functional.adaptive_avg_pool2d(image, 2).flatten(1)
        return self.head(pooled[:, self.index] * self.mask * self.wave.real)
"""


def indexed() -> nn.Module:
    space: dict = {"__name__": "indexed"}
    exec(CODE, space)
    torch.manual_seed(2)
    return space["Indexed"]()


def items(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(count, 3, 2, 2, generator=generator)
    return TensorDataset(image, image.mean((2, 3)).argmax(1))


def distill(student: nn.Module, **changes: object) -> kd.Distilled:
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    sections = {
        "optimizer": {"lr": 1e-2, "ema_decay": 0.9},
        "backend": {"kind": "cpu", "precision": "fp32"},
    }
    sections |= {"epochs": 2, "batch_size": 16, "progress": False, **changes}
    return kd.distill(
        teacher=teacher,
        student=student,
        train=items(64, 3),
        val=items(33, 9),
        **sections,
    )


def test_power_iterations_are_copied_so_the_average_keeps_its_norm():
    """The averages of unit vectors are shorter than 1, and the weights were divided by
    a norm that is too small.
    """
    torch.manual_seed(0)
    module = nn.Sequential(spectral_norm(nn.Linear(16, 8)))
    average = EMA(module, 0.9)
    original = module[0].parametrizations.weight.original
    module.train()
    for step in range(1, 60):
        with torch.no_grad():
            original.copy_(torch.randn_like(original))
        for _ in range(20):
            module(torch.zeros(1, 16))  # the vectors of these weights
        average.update(step)
    vectors = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.eval()
    with average.applied():
        assert {
            name: buffer.norm().item() for name, buffer in module.named_buffers()
        } == pytest.approx(dict.fromkeys(vectors, 1.0), abs=1e-5)
        left, right = (vectors[f"0.parametrizations.weight.0._{name}"] for name in "uv")
        smooth = average.average["0.parametrizations.weight.original"]
        expected = smooth / (left @ smooth @ right)
        torch.testing.assert_close(module[0].weight.detach(), expected)


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_a_new_network_loads_the_averages_and_every_other_buffer(tmp_path, decay):
    student = indexed()
    result = distill(
        student, folder=tmp_path / "run", optimizer={"lr": 1e-2, "ema_decay": decay}
    )
    fresh = indexed()
    load_student(LogitsModel(fresh, "student"), RunDir(tmp_path / "run").restore()[1])
    for name, tensor in student.state_dict().items():
        torch.testing.assert_close(fresh.state_dict()[name], tensor, rtol=0, atol=0)
    assert fresh.seen.item() == 8  # a count of steps, and no average of counts
    image, label = items(33, 9).tensors
    with torch.no_grad():
        reached = (fresh.eval()(image).argmax(1) == label).float().mean().item()
    assert result.metrics["accuracy"] == pytest.approx(reached)
    again = indexed()
    assert (
        distill(
            again, folder=tmp_path / "run", optimizer={"lr": 1e-2, "ema_decay": decay}
        ).metrics
        == result.metrics
    )


def test_a_run_with_averages_and_buffers_of_any_kind_can_be_used(
    settings, tmp_path, monkeypatch
):
    (tmp_path / "indexed.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    student = {
        "kind": "torch",
        "model": "indexed:Indexed",
        "mean": [0.5, 0.5, 0.5],
        "std": [0.25, 0.25, 0.25],
    }
    changes = {"optimizer": {"lr": 1e-2, "ema_decay": 0.9}, "run": {"epochs": 1}}
    run = kd.train({**merged(settings, changes), "student": student})
    state = dict(trained_network(run.student).named_buffers())
    assert state["index"].tolist() == list(range(11, -1, -1))
    assert state["mask"].tolist() == [False] + [True] * 11
    assert run.scored is not None


class Grows(nn.Module):
    """Its first training step adds a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.register_buffer("queue", torch.zeros(len(image)))
        return self.head(image.flatten(1))


class Renames(Grows):
    """It saves its weight under another name than it loads."""

    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(
            lambda module, state, prefix, metadata: state.update(old=state.popitem()[1])
        )


class Extra(Grows):
    """A part of its state is a dictionary."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 2}

    def set_extra_state(self, state: dict[str, int]) -> None: ...


@pytest.mark.parametrize(
    ("student", "words"),
    [
        (Grows, "'queue'.*persistent=False"),
        (Renames, "does not fit.*head"),
        (Extra, "does not fit.*_extra_state"),
    ],
)
@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_a_state_that_no_new_network_loads_is_refused_at_the_first_step(
    tmp_path, student, words, decay
):
    with pytest.raises(KdError, match=rf"^student: .*{words}"):
        distill(
            student(),
            folder=tmp_path / "run",
            epochs=10**6,
            optimizer={"lr": 1e-2, "ema_decay": decay},
        )
    assert not [*(tmp_path / "run").rglob("step_*")]
