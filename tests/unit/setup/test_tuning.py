"""Fine-tuning: parameter groups against timm's, frozen layers to the bit, early
stopping, and the rate of a fit.
"""

import json
import logging
import re
import sys
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from pieces import merged, without_clocks
from timm.optim import param_groups_layer_decay
from torch import nn

import kd
from kd import config
from kd.config.tuning import Tuning
from kd.core.errors import KdError, ModelError
from kd.core.facts import LossFacts
from kd.core.types import State
from kd.engine.criterion import Criterion, StudentWithLoss, Term
from kd.engine.loop import train
from kd.engine.optim import Frozen
from kd.jobs.description import describe
from kd.models.classifier import Classifier
from kd.parts.tasks.single_label import SingleLabel
from kd.setup.recipe import resolve
from kd.setup.student import parameter_groups
from kd.study.report.report import read_run

NETWORKS = {
    "ViT": (
        "vit_tiny_patch16_224",
        {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 2},
    ),
    "two heads": (
        "deit_tiny_distilled_patch16_224",
        {"img_size": 16, "embed_dim": 24, "depth": 2, "num_heads": 2},
    ),
    "XCiT": (
        "xcit_nano_12_p8_224",
        {"embed_dim": 32, "depth": 2, "num_heads": 2, "cls_attn_layers": 1},
    ),
    "ConvNeXt": ("convnext_atto", {"depths": (1, 1, 2, 1), "dims": (8, 8, 16, 16)}),
}
NORM = (
    "student.model=xcit_nano_12_p8_224",
    "student.args={embed_dim: 24, depth: 2, num_heads: 2, cls_attn_layers: 1}",
)
FROZEN = "student.tuning.freeze=[patch_embed.*, blocks.0.*]"


def distillation(network: nn.Module) -> StudentWithLoss:
    return StudentWithLoss(
        Classifier(network, 3, 16),
        Criterion([Term("extra", 1.0, Extra(), LossFacts())]),
        SingleLabel(),
    )


class Extra(nn.Linear):
    """A loss that learns a matrix."""

    def __init__(self) -> None:
        super().__init__(2, 2)


def described(network: nn.Module, groups: list[dict]) -> set[tuple]:
    """Return (names, rate, decay) of each group, in no order; of the network's
    parameters alone.
    """
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    named_groups = [
        ({names[id(p)] for p in group["params"] if id(p) in names}, group)
        for group in groups
    ]
    return {
        (frozenset(group_names), group["lr_scale"], group["weight_decay"])
        for group_names, group in named_groups
        if group_names
    }


@pytest.mark.parametrize("name", NETWORKS)
def test_groups_of_layers_are_timms(name):
    model, args = NETWORKS[name]
    network = timm.create_model(model, num_classes=3, **args)
    groups = parameter_groups(Tuning(layer_decay=0.75), 0.05, distillation(network))
    exempt = getattr(network, "no_weight_decay", set)()
    timms = param_groups_layer_decay(network, 0.05, exempt, layer_decay=0.75)
    assert described(
        network, [group for group in groups if "lr_scale" in group]
    ) == described(network, timms)
    assert len(described(network, timms)) > 4
    (extra,) = [
        group["weight_decay"]
        for group in groups
        if any(p.shape == (2, 2) for p in group["params"])
    ]
    assert extra == 0.05


def test_a_vits_rates_are_powers():
    network = timm.create_model(
        "vit_tiny_patch16_224", num_classes=3, **NETWORKS["ViT"][1]
    )
    groups = parameter_groups(
        Tuning(layer_decay=0.5, head_lr_scale=3.0), 0.05, distillation(network)
    )
    rates = {
        names: rate
        for names, rate, _ in described(
            network, [g for g in groups if g.get("lr_scale")]
        )
    }
    rate_of = {name: rate for names, rate in rates.items() for name in names}
    expected = {
        "pos_embed": 0.5**4,
        "blocks.0.attn.qkv.weight": 0.5**3,
        "blocks.2.mlp.fc1.bias": 0.5,
    }
    expected |= {"norm.weight": 0.5, "head.weight": 3.0, "head.bias": 3.0}
    assert {name: rate_of[name] for name in expected} == expected


@pytest.mark.parametrize("name", ["ViT", "two heads"])
def test_the_rate_of_the_head_may_be_scaled_alone(name):
    model, args = NETWORKS[name]
    network = timm.create_model(model, num_classes=3, **args)
    groups = parameter_groups(Tuning(head_lr_scale=10.0), 0.05, distillation(network))
    fast = {
        n for names, rate, _ in described(network, groups) if rate == 10 for n in names
    }
    assert fast == {n for n, _ in network.named_parameters() if n.startswith("head")}
    assert {rate for _, rate, _ in described(network, groups)} == {1.0, 10.0}


def test_a_step_moves_each_layer_at_its_rate(make):
    """SGD without momentum: an update is the rate times the gradient."""
    keys = (
        "run.steps=1",
        "optimizer.kind=sgd",
        "optimizer.momentum=0",
        "optimizer.clip_grad_norm=0",
        "optimizer.warmup_ratio=0",
    )
    plain, tuned = (
        make(
            *keys,
            "optimizer.weight_decay=0",
            f"student.tuning={{layer_decay: {decay}, head_lr_scale: {head}}}",
        )
        for decay, head in ((1, 1), (0.5, 4))
    )
    before = {
        n: p.detach().clone()
        for n, p in plain.run.distillation.student.network.named_parameters()
    }
    train(plain.run)
    train(tuned.run)
    moved = [
        {
            n: p.detach() - before[n]
            for n, p in setup.run.distillation.student.network.named_parameters()
        }
        for setup in (plain, tuned)
    ]
    for name, rate in {
        "pos_embed": 0.25,
        "blocks.0.mlp.fc1.weight": 0.5,
        "norm.bias": 0.5,
        "head.weight": 4,
    }.items():
        assert moved[0][name].abs().max() > 0
        torch.testing.assert_close(
            moved[1][name], rate * moved[0][name], rtol=1e-3, atol=1e-7
        )
    assert tuned.store.rows[0]["lr"] == plain.store.rows[0]["lr"]


def tensors(setup) -> dict[str, torch.Tensor]:
    student = setup.run.distillation.student
    average = (
        {f"average.{n}": t.clone() for n, t in setup.run.average.average.items()}
        if setup.run.average
        else {}
    )
    return {n: t.clone() for n, t in student.state_dict().items()} | average


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    bits = [
        {n: t.flatten().view(torch.uint8) for n, t in each.items()}
        for each in (before, after)
    ]
    return {
        name.replace("network.", "")
        for name in before
        if not torch.equal(bits[0][name], bits[1][name])
    }


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("epochs", [0, 9])
def test_frozen_layers_keep_their_bits(make, optimizer, epochs):
    """Weights, statistics of batch norm and their average; weight decay does not reach
    them.
    """
    overrides = (
        f"optimizer.kind={optimizer}",
        "optimizer.lr=0.02",
        "optimizer.ema_decay=0.5",
        "optimizer.weight_decay=0.5",
    )
    setup = make(*NORM, FROZEN, f"student.tuning.freeze_epochs={epochs}", *overrides)
    before = tensors(setup)
    norms = {n for n in before if "running_mean" in n and "patch_embed" in n}
    assert norms
    train(setup.run)
    changed = moved(before, tensors(setup))
    still = {n.replace("network.", "") for n in before} - changed
    parameters = {
        n for n, _ in setup.run.distillation.student.network.named_parameters()
    }
    assert {n for n in parameters if n in still} == {
        n for n in parameters if n.startswith(("patch_embed", "blocks.0."))
    }
    assert not any(
        n.startswith(("patch_embed", "average.patch_embed")) for n in changed
    )
    assert {
        "blocks.1.mlp.fc1.weight",
        "average.head.weight",
        "blocks.1.local_mp.bn.running_mean",
    } <= changed


def test_frozen_for_all_epochs_is_frozen_for_good(make):
    """Gradients that are dropped, or never computed: the same bits, of a ViT.

    Not of each network: torch folds a product of strided inputs where a weight needs a
    gradient, and not where none does. XCiT has one, and where oneDNN has kernels of AMX
    the two have other last bits.
    """
    both = [
        make(FROZEN, f"student.tuning.freeze_epochs={epochs}", "run.every.log=1")
        for epochs in (0, 9)
    ]
    for setup in both:
        train(setup.run)
    assert moved(tensors(both[0]), tensors(both[1])) == set()
    assert (
        without_clocks(both[0].store.rows)[0]["grad_norm"]
        == without_clocks(both[1].store.rows)[0]["grad_norm"]
    )


def test_permanently_frozen_parameters_need_no_gradients(settings):
    vit = ["student.args={embed_dim: 384, depth: 12, num_heads: 6}"]
    frozen = [
        "student.tuning.freeze=[cls_token, pos_embed, patch_embed.*, blocks.*, norm.*]"
    ]
    descriptions = [
        describe(resolve(config.load(settings, [*vit, *overrides])))
        for overrides in ([], frozen)
    ]
    trained_mib, weights = (
        int(re.search(r"memory +(\d+) MiB", text)[1]) for text in descriptions
    )
    assert trained_mib == pytest.approx(
        4 * weights, rel=0.05
    )  # weights; gradients and AdamW's two averages


def test_layers_thaw_after_freeze_epochs(make, tmp_path):
    setup = make(
        *NORM,
        FROZEN,
        "student.tuning.freeze_epochs=1",
        "run.keep=9",
        folder=tmp_path / "run",
    )
    before = tensors(setup)
    train(setup.run)
    first = setup.store.restore  # the checkpoint of each epoch lies in the folder
    assert first()[0].epoch == 2
    setup.store.close()
    checkpoints = sorted((tmp_path / "run" / "checkpoints").glob("step_*"))
    assert len(checkpoints) == 2
    from safetensors.torch import load_file

    prefix = "model.student."
    student_tensors = {}
    for folder in checkpoints:
        saved = load_file(folder / "tensors.safetensors")
        student_tensors[folder.name] = {
            n.removeprefix(prefix): t for n, t in saved.items() if n.startswith(prefix)
        }
    frozen_epoch, thawed_epoch = (
        moved(before, student_tensors[folder.name]) for folder in checkpoints
    )
    assert not any(n.startswith(("patch_embed", "blocks.0.")) for n in frozen_epoch)
    assert {"patch_embed.proj.0.0.weight", "blocks.0.mlp.fc1.weight"} <= thawed_epoch
    assert any(
        n.startswith("patch_embed") and n.endswith("running_var") for n in thawed_epoch
    )


def test_frozen_statistics_go_on_in_the_step_after_the_last_frozen_one(make):
    """No evaluation lies between, which would set the mode of every layer again."""
    setup = make(
        *NORM, FROZEN, "student.tuning.freeze_epochs=1", "run.every.evaluate=999"
    )
    frozen = setup.run.distillation.frozen
    assert frozen.norms
    setup.run.distillation.train()
    for epoch in (0, 1):
        with frozen.held(State(epoch=epoch)):
            assert {norm.training for norm in frozen.norms} == {epoch == 1}
        assert {norm.training for norm in frozen.norms} == {True}


def test_layers_are_held_where_their_parameters_are_replaced():
    """As those of a network that moves to an XLA device are."""
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    frozen = Frozen(network, ["0.*"], 1)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        network.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    with frozen.held(State()):
        network(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    assert [parameter.grad is None for parameter in network.parameters()] == [
        True,
        True,
        False,
        False,
    ]


def test_a_layer_that_is_frozen_is_named_where_it_diverges(make):
    setup = make(*NORM, FROZEN)
    statistics = {
        n: b
        for n, b in setup.run.distillation.student.named_buffers()
        if "patch_embed" in n
    }
    next(b for n, b in statistics.items() if n.endswith("running_var")).fill_(
        float("nan")
    )
    with pytest.raises(
        KdError, match=r"became NaN.*first in the output of layer 'network\.patch_embed"
    ):
        train(setup.run)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "student.tuning.freeze=[blocks.0.*, block.1.*]",
            r"^student\.tuning\.freeze: 'block\.1\.\*'.*blocks",
        ),
        ("student.tuning.freeze=['*']", r"^student\.tuning\.freeze: freezes all"),
    ],
)
def test_a_pattern_that_means_nothing_is_refused(settings, make, override, words):
    with pytest.raises(ModelError, match=words):
        make(override)
    with pytest.raises(ModelError, match=words):
        describe(resolve(config.load(settings, [override])))


NETS = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, how):
        super().__init__(nn.Conv2d(3, 4, 8, 8), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
        if how == "layers":
            self.group_matcher = lambda coarse=False: {"stem": r"^0", "blocks": r"^3"}
            self.get_classifier = lambda: self[3]
        elif how == "arguments":
            self.group_matcher = self.get_classifier = lambda which: self[3]
        elif how == "pattern":
            self.group_matcher = lambda coarse=False: {"stem": "^(0"}
        elif how == "one layer":
            self.group_matcher = lambda coarse=False: {"all": "."}
        elif how == "held":
            self[0].requires_grad_(False)

def net(how=""):
    return Net(how)
"""


@pytest.fixture
def own_settings(settings, tmp_path, monkeypatch) -> dict[str, Any]:
    """Settings whose student is a network of `NETS`."""
    (tmp_path / "nets_to_tune.py").write_text(NETS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nets_to_tune", raising=False)
    return {
        **settings,
        "student": {
            "kind": "torch",
            "model": "nets_to_tune:net",
            "mean": [0] * 3,
            "std": [1] * 3,
        },
    }


@pytest.mark.parametrize("key", ["layer_decay", "head_lr_scale"])
def test_a_network_of_ones_own_says_what_its_layers_are(own_settings, key):
    own_settings["student"]["tuning"] = {key: 0.5}
    with pytest.raises(
        ModelError, match=rf"^student\.tuning\.{key}: is 0\.5, but 'nets_to_tune:net'"
    ):
        kd.train(own_settings)
    own_settings["student"]["args"] = {"how": "layers"}
    assert kd.train(own_settings, "run.steps=2").steps == 2
    frozen = config.load(
        own_settings,
        [
            "student.args={}",
            f"student.tuning.{key}=1",
            "student.tuning.freeze=[0.weight]",
        ],
    )
    assert "well-formed" in describe(resolve(frozen))  # names are those of the author


@pytest.mark.parametrize(
    ("form", "override", "words"),
    [
        (
            "arguments",
            "layer_decay=0.5",
            "layer_decay: needs group_matcher of .*TypeError",
        ),
        (
            "arguments",
            "head_lr_scale=2",
            "head_lr_scale: needs get_classifier of .*TypeError",
        ),
        ("pattern", "layer_decay=0.5", "layer_decay: needs group_matcher of"),
        (
            "one layer",
            "layer_decay=0.5",
            "layer_decay: is 0.5, but .* has one layer by its group_matcher",
        ),
        ("held", "freeze=['3.*']", "freeze: freezes all"),
        ("held", "{freeze: ['3.*'], freeze_epochs: 1}", "freeze: freezes all"),
    ],
)
def test_a_network_that_cannot_be_tuned_is_refused_before_its_teacher_is_fitted(
    own_settings, form, override, words
):
    own_settings["student"]["args"] = {"how": form}
    key = (
        f"student.tuning={override}"
        if override.startswith("{")
        else f"student.tuning.{override}"
    )
    with pytest.raises(ModelError, match=rf"^student\.tuning\.{words}"):
        describe(resolve(config.load(own_settings, [key])))


SLOW = ("run.epochs=9", "optimizer.lr=1e-12", "run.patience=2")


@pytest.mark.parametrize("checkpoint", [0, 3])
def test_a_run_ends_after_patience_evaluations(make, tmp_path, checkpoint):
    """And stays ended: entered again, it trains nothing."""
    keys = (*SLOW, f"run.every.checkpoint={checkpoint}")
    setup = make(*keys, folder=tmp_path / "run")
    state = train(setup.run)
    setup.store.close()
    assert (state.epoch, state.no_better) == (3, 2)
    again = make(*keys, folder=tmp_path / "run")
    assert train(again.run) == state
    again.store.close()
    assert moved(tensors(setup), tensors(again)) == set()
    patient = make(*SLOW, "run.patience=0", "run.epochs=3")
    assert train(patient.run).no_better == 2  # ended by its length


def test_a_better_score_begins_anew(make):
    setup = make("run.epochs=6", "run.patience=2")
    best = []
    scores = iter([0.3, 0.2, 0.4, 0.4, 0.3, 0.9])

    class Scripted:
        """Stands for a student whose accuracy goes up and down."""

        def __init__(self, inner) -> None:
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def __call__(self, student, stop=lambda: False):
            best.append(next(scores))
            return {**self.inner(student, stop=stop), "accuracy": best[-1]}

    state = train(replace(setup.run, evaluator=Scripted(setup.run.evaluator)))
    assert best == [0.3, 0.2, 0.4, 0.4, 0.3]
    assert (state.epoch, state.best, state.no_better) == (5, 0.4, 2)


def test_a_run_that_ended_early_says_so_and_is_finished(settings, capsys):
    result = kd.train(
        merged(
            settings, {"run": {"epochs": 9, "patience": 2}, "optimizer": {"lr": 1e-12}}
        )
    )
    assert "2 evaluations in a row were no better" in capsys.readouterr().out
    rows = [
        json.loads(line)
        for line in (result.folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert max(row["epoch"] for row in rows) == 3
    assert read_run(result.folder, 0).unfinished == ""
    text = (result.folder / "config.yaml").read_text()
    (result.folder / "config.yaml").write_text(
        text.replace("patience: 2", "patience: 3")
    )
    assert "epoch 3 of 9" in read_run(result.folder, 0).unfinished


def test_a_fit_is_tuned_and_stops_as_a_student(settings, tmp_path, caplog):
    fit = {
        "epochs": 9,
        "lr": 1e-12,
        "patience": 1,
        "folder": str(tmp_path / "teachers"),
    }
    fit["tuning"] = {"layer_decay": 0.5, "freeze": ["patch_embed.*"]}
    values = {
        **settings,
        "teacher": {**settings["student"], "min_accuracy": 0, "fit": fit},
    }
    with caplog.at_level(logging.INFO, "kd"):
        kd.train(values, "run.steps=1")
    assert "teacher: learning rate 1e-12, from random weights" in caplog.messages
    (rows,) = (tmp_path / "teachers").glob("*/metrics.jsonl")
    assert max(json.loads(line)["epoch"] for line in rows.read_text().splitlines()) == 2
    values["teacher"]["fit"]["tuning"]["freeze"] = ["patch.*"]
    with pytest.raises(KdError, match=r"^teacher\.fit\.tuning\.freeze: 'patch\.\*'"):
        describe(resolve(config.load(values)))


@pytest.mark.parametrize(
    ("pretrained", "lr", "expected"),
    [(False, 0, 1e-3), (True, 0, 5e-5), (True, 2e-4, 2e-4)],
)
def test_the_rate_of_a_fit_follows_its_weights(settings, pretrained, lr, expected):
    teacher = {
        "model": "test_vit",
        "pretrained": pretrained,
        "fit": {"epochs": 1, "lr": lr},
    }
    (fit,) = resolve(config.load({**settings, "teacher": teacher})).fits.values()
    assert fit.optimizer.lr == expected


@pytest.mark.parametrize(("share", "steps"), [(0.01, 1), (0.1, 1), (0.6, 3), (1, 4)])
def test_the_length_of_a_balanced_run_is_printed(settings, make, share, steps):
    key = f"data.balance={share}"
    assert f"{2 * steps} steps of 8 images (2 epochs)" in describe(
        resolve(config.load(settings, [key]))
    )
    assert len(make(key).run.sifter.plan(0, 0.0).ids) == 8 * steps
