"""What is kept under which name: a fitted teacher, its cache, a store of pixels, a run
folder.
"""

import functools
import re
from dataclasses import asdict
from typing import Any

import pytest
import torch
import yaml

from kd import config
from kd.config import Config
from kd.config.explain import explain
from kd.data.store import identity
from kd.models.classifier import Ensemble
from kd.models.load_classifier import load
from kd.models.spec import Spec
from kd.parts.tasks.single_label import SingleLabel
from kd.setup.data import Data
from kd.setup.modes import ExecutionMode
from kd.setup.open_cache import cache_codec, cache_identity
from kd.setup.open_store import keep_rules
from kd.setup.recipe import (
    Recipe,
    fit_folders,
    is_resume_mutable,
    resolve,
    split_teachers,
)

SETTINGS = {
    "run": {"name": "tiny", "epochs": 10},
    "data": {"kind": "imagefolder", "root": "photos", "batch_size": 8},
    "teacher": {"model": "vit_tiny_patch16_224"},
    "student": {"model": "vit_tiny_patch16_224"},
    "losses": [{"kind": "kl"}],
    "backend": {"kind": "cpu"},
}


def folders_of(recipe: Recipe) -> dict[str, str]:
    """Return the names of the run folders of the fits; the exports lie in them."""
    folders = fit_folders(recipe, "photos")
    assert all(
        recipe.record.path in export.parents for recipe, export in folders.values()
    )
    return {
        config_path: recipe.record.path.name
        for config_path, (recipe, _) in folders.items()
    }


def loaded(classes=("apple", "fig"), **args):
    """Return a teacher whose weights are the same whatever the arguments."""
    sizes = {"patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
    model = load(Spec("teacher", "vit_tiny_patch16_224", sizes | args, classes), 16)
    torch.manual_seed(0)
    for tensor in model.network.state_dict().values():
        tensor.copy_(torch.randn_like(tensor))
    return model


@pytest.mark.parametrize("args", [{"num_heads": 8}, {"act_layer": "relu"}])
def test_weights_in_another_architecture_get_another_cache(args):
    teacher = loaded()
    changed = loaded(**args)
    assert teacher.identity()["teacher"] == changed.identity()["teacher"]
    assert teacher.identity() != changed.identity()
    assert loaded().identity() == teacher.identity()
    average = SingleLabel().average
    both = (
        Ensemble([teacher, teacher], [1, 1], average),
        Ensemble([teacher, changed], [1, 1], average),
    )
    assert both[0].identity() != both[1].identity()


class Listing:
    """A listing of images, as far as an identity asks for it."""

    classes = ("apple", "fig", "pear")
    fingerprint = "photos"

    def __len__(self) -> int:
        return 36


def identities(settings: Config) -> dict[str, Any]:
    """Return by what each kind of work that is kept is found again: F fits, C cache, S
    store, R run folder.

    The content of weights and images is held constant: it is compared by its own hash.
    """
    recipe = resolve(settings)
    section = settings.teacher
    source: Any = Listing()
    stored = (source, source) if settings.data.store != "none" else None
    precision = "fp32" if section.precision == "auto" else section.precision
    mode = ExecutionMode(precision, section.exported(cpu=True) or "fused")
    teachers = [section, *section.also]
    shares = [member.weight for member in section.also]
    model = {
        "architecture": [
            [member.kind, member.model, member.args, asdict(member.options)]
            for member in teachers
        ]
    }
    model["shares"] = shares
    data = Data(recipe.data, source, source, stored)
    codec = cache_codec(recipe, len(source.classes))
    splits = zip(("train", "val"), keep_rules(settings.data), strict=True)
    return {
        "F": folders_of(recipe),
        "C": cache_identity(recipe, model, mode, data, codec),
        "S": [identity(source, split, asdict(rule)) for split, rule in splits],
        "R": {
            key: value
            for key, value in recipe.record.keys.items()
            if not is_resume_mutable(key)
        },
    }


BASE = (
    "data.store=disk",
    "teacher.fit.epochs=2",
    "teacher.cache.views=2",
    "teacher.also=[{model: vit_small_patch16_224}]",
)
ALONE = ("teacher.cache.views=0", "teacher.also=[]")
FOOD = ("kind: food_mini",)
HF = ("kind: hf, path: a",)
SEVERAL = "losses=[{kind: binary_kl}]"
TRAYS = ("kind: food_mini, dishes: 2", SEVERAL)
SETS = ("kind: multilabel, root: a, train_labels: a, val_labels: b", SEVERAL)
HELD = ("kind: multilabel, root: a, train_labels: a, val_fraction: 0.2", SEVERAL)
SHARDS = ("kind: webdataset, train: a, val: b",)
LISTS = ("kind: csv, root: a, train_list: a.csv, val_list: b.csv",)
HELD_OUT = ("kind: csv, root: a, train_list: a.csv, val_fraction: 0.2",)
SMALL = "data.progressive={size: 64, until: 0.5}"
SMDDP = ("backend.kind=smddp",)
CUDA = ("backend.kind=cuda",)
HISTORY = ("sifter.kind=history",)
RELATIVE = ("sifter.kind=relative",)
BY_TEACHER = ("sifter.kind=teacher", "teacher.cache.views=1")


def loss(kind: str) -> tuple[str, ...]:
    return (*ALONE, f"losses=[{{kind: {kind}}}]")


# "key [kind]": the identities that it changes, the value, what it is changed beside.
# "": nothing that is kept depends on it, so that a run, a cache or a teacher is found
# again.
KEYS: dict[str, tuple[Any, ...]] = {
    "run.name": ("", "other"),
    "run.folder": ("", "elsewhere"),
    "run.seed": ("CR", "1"),
    "run.epochs": ("R", "11"),
    "run.steps": ("R", "7"),
    "run.times": ("R", "2"),
    "run.patience": ("R", "2"),
    "run.every.log": ("", "3"),
    "run.every.evaluate": ("", "3"),
    "run.every.checkpoint": ("", "3"),
    "run.keep": ("", "3"),
    "run.baseline": (
        "",
        "true",
    ),  # the student is the same; each baseline has a folder of its own
    "run.baseline_steps": ("", "5"),
    "run.trackers": ("", "[tensorboard]"),
    "data.kind": ("FR", "food_mini"),
    "data.train_images [food_mini]": ("FR", "9", *FOOD),
    "data.val_images [food_mini]": ("FR", "9", *FOOD),
    "data.pixels [food_mini]": ("FR", "32", *FOOD),
    "data.art_seed [food_mini]": ("FR", "1", *FOOD),
    "data.label_noise [food_mini]": ("FR", "0.1", *FOOD),
    "data.redundancy [food_mini]": ("FR", "2", *FOOD),
    "data.imbalance [food_mini]": ("FR", "5", *FOOD),
    "data.dishes [food_mini]": ("FR", "3", *TRAYS),
    "data.root [food_mini]": ("", "elsewhere", *FOOD),
    "data.path [hf]": ("FR", "b", *HF),
    "data.name [hf]": ("FR", "b", *HF),
    "data.train_split [hf]": ("FR", "b", *HF),
    "data.val_split [hf]": ("FR", "b", *HF),
    "data.val_fraction [hf]": ("FR", "0.1", *HF),
    "data.image_key [hf]": ("FR", "b", *HF),
    "data.label_key [hf]": ("FR", "b", *HF),
    "data.exclude": (
        "",
        "exclude.txt",
    ),  # the listing without them has another fingerprint
    "data.test_fraction": ("", "0.3"),  # so have the validation images that are left
    "data.test_split [imagefolder]": ("", "c"),
    "data.test_split [hf]": ("", "c", *HF),
    "data.test_list [csv]": ("", "c.csv", *LISTS),
    "data.test_labels [multilabel]": ("", "c", *SETS),
    "data.test [webdataset]": ("", "c", *SHARDS),
    "data.root [imagefolder]": ("", "elsewhere"),
    "data.train_split [imagefolder]": ("FR", "b"),
    "data.val_split [imagefolder]": ("FR", "b"),
    "data.val_fraction [imagefolder]": ("FR", "0.1"),
    "data.root [csv]": ("", "elsewhere", *LISTS),
    "data.train_list [csv]": ("FR", "c.csv", *LISTS),
    "data.val_list [csv]": ("FR", "c.csv", *LISTS),
    "data.val_fraction [csv]": ("FR", "0.1", *HELD_OUT),
    "data.image_key [csv]": ("FR", "c", *LISTS),
    "data.label_keys [hf]": (
        "FR",
        "[a, c]",
        "kind: hf, path: a, label_keys: [a, b]",
        SEVERAL,
    ),
    "data.label_sets [webdataset]": (
        "R",
        "true",
        *SHARDS,
        "data.labels=none",
        "teacher.fit.epochs=0",
    ),
    "data.bits": ("FR", "12"),
    "data.group [imagefolder]": ("", "(.*)_"),  # other splits have another fingerprint
    "data.group [csv]": ("", "clip", *LISTS),
    "data.group [hf]": ("", "clip", *HF),
    "data.group [multilabel]": ("", "parent", *SETS),
    "data.progressive.size": ("R", "32", SMALL),
    "data.progressive.until": ("R", "0.6", SMALL),
    "data.label_key [csv]": ("FR", "c", *LISTS),
    "data.root [multilabel]": ("", "elsewhere", *SETS),
    "data.train_labels [multilabel]": ("FR", "c", *SETS),
    "data.val_labels [multilabel]": ("FR", "c", *SETS),
    "data.val_fraction [multilabel]": ("FR", "0.1", *HELD),
    "data.separator [multilabel]": ("FR", "';'", *SETS),
    "data.train [webdataset]": ("FR", "c", *SHARDS),
    "data.val [webdataset]": ("FR", "c", *SHARDS),
    "data.image_keys [webdataset]": ("FR", "jpg", *SHARDS),
    "data.label_key [webdataset]": ("FR", "label", *SHARDS),
    "data.label_field [webdataset]": ("FR", "f", *SHARDS),
    "data.class_names [webdataset]": ("FR", "c", *SHARDS),
    "data.copies [webdataset]": ("", "c", *SHARDS),
    "data.unlabelled [imagefolder]": ("FR", "b"),
    "data.labels": ("FR", "some"),
    "data.labels_per_class": ("FR", "5"),
    "data.image_size": ("FCSR", "64"),
    "data.batch_size": ("FR", "16"),
    "data.micro_batch": ("FR", "4"),
    "data.eval_batch": ("", "4"),
    "data.crop_pct": ("FSR", "0.9"),
    "data.workers": ("", "2"),
    "data.loader": ("", "ray", "data.store=none"),
    "data.deadline": ("", "5"),
    "data.store": ("FCR", "none"),
    "data.store_size": ("FCSR", "300"),
    "data.balance": ("FR", "0.5"),
    "data.views": ("R", "2"),
    "data.on_corrupt": ("FR", "skip"),
    "data.max_skipped": ("", "0.5"),  # it can only end a run
    "data.license": ("", "cc-by-4.0"),
    "data.augment.crop_scale": ("FCSR", "0.5"),
    "data.augment.flip": ("FCR", "0.1"),
    "data.augment.jitter": ("FCR", "0.1"),
    "data.augment.policy": ("FCR", "rand-m9"),
    "data.augment.erase": ("FCR", "0.5"),
    "data.augment.mixup": ("CR", "0.5"),
    "data.augment.cutmix": ("CR", "0.5"),
    "data.augment.mix_probability": ("CR", "0.5"),
    "task.kind": (
        "FR",
        "kd.parts.tasks.single_label",
    ),  # by another name: kd's others do not go with the losses
    "teacher.kind": ("FCR", "torch"),
    "teacher.model": ("FCR", "vit_base_patch16_224"),
    "teacher.args": ("FCR", "{num_heads: 8}"),
    "teacher.checkpoint": ("FR", "a"),
    "teacher.weights": ("R", "by_order", "teacher.checkpoint=a"),
    "teacher.pretrained": ("FR", "true"),
    "teacher.attention": ("FR", "fused"),
    "teacher.precision": ("CR", "bf16"),
    "teacher.runtime": ("R", "onnxruntime"),
    "teacher.compile": ("R", "on"),
    "teacher.min_accuracy": ("R", "0.1"),
    "teacher.micro_batch": ("R", "4"),
    "teacher.also[].kind": ("FCR", "torch"),
    "teacher.also[].model": ("FCR", "vit_base_patch16_224"),
    "teacher.also[].args": ("FCR", "{num_heads: 8}"),
    "teacher.also[].checkpoint": ("FR", "a"),
    "teacher.also[].weights": (
        "R",
        "by_order",
        "teacher.also=[{model: vit_base_patch16_224, checkpoint: a}]",
    ),
    "teacher.also[].weight": ("CR", "2"),
    "teacher.also[].license": ("", "apache-2.0"),
    "teacher.cache.views": ("R", "3"),
    "teacher.cache.path": ("", "elsewhere"),
    "teacher.cache.dtype": ("CR", "fp32"),
    "teacher.cache.topk": ("CR", "2"),
    "teacher.cache.max_gb": ("", "5"),
    "teacher.license": ("", "apache-2.0"),
    "teacher.shard": ("", "true", *ALONE),
    "teacher.pipeline": ("", "2", *ALONE),
    "teacher.fit.epochs": ("FR", "3"),
    "teacher.fit.steps": ("FR", "9"),
    "teacher.fit.lr": ("FR", "0.1"),
    "teacher.fit.weight_decay": ("FR", "0.1"),
    "teacher.fit.batch_size": ("FR", "16"),
    "teacher.fit.label_smoothing": ("FR", "0.2"),
    "teacher.fit.warmup_ratio": ("FR", "0.1"),
    "teacher.fit.evaluate": ("FR", "5"),
    "teacher.fit.patience": ("FR", "2"),
    "teacher.fit.tuning.layer_decay": ("FR", "0.75"),
    "teacher.fit.tuning.head_lr_scale": ("FR", "10"),
    "teacher.fit.tuning.freeze": ("FR", "[blocks.0.*]"),
    "teacher.fit.tuning.freeze_epochs": (
        "FR",
        "1",
        "teacher.fit.tuning.freeze=[blocks.0.*]",
    ),
    "teacher.fit.augment": ("FR", "{crop: 0.5}"),
    "teacher.fit.augment.crop_scale": ("FR", "0.5"),
    "teacher.fit.augment.flip": ("FR", "0.1"),
    "teacher.fit.augment.jitter": ("FR", "0.1"),
    "teacher.fit.augment.policy": ("FR", "rand-m9"),
    "teacher.fit.augment.erase": ("FR", "0.5"),
    "teacher.fit.augment.mixup": ("FR", "0.5"),
    "teacher.fit.augment.cutmix": ("FR", "0.5"),
    "teacher.fit.augment.mix_probability": ("FR", "0.5"),
    "teacher.fit.seed": ("FR", "1"),
    "teacher.fit.folder": ("R", "elsewhere"),
    "student.kind": ("R", "torch"),
    "student.model": ("R", "vit_small_patch16_224"),
    "student.args": ("R", "{num_heads: 8}"),
    "student.init": ("R", "pretrained"),
    "student.attention": ("R", "fused"),
    "student.compile": ("R", "on"),
    "student.checkpoint": ("R", "a", "student.init=pretrained"),
    "student.weights": (
        "R",
        "by_order",
        "student.init=pretrained",
        "student.checkpoint=a",
    ),
    "student.classes [timm]": ("R", "b"),
    "student.classes [transformers]": ("R", "b", "student.kind=transformers"),
    "student.tuning.layer_decay": ("R", "0.75"),
    "student.tuning.head_lr_scale": ("R", "10"),
    "student.tuning.freeze": ("R", "[blocks.0.*]"),
    "student.tuning.freeze_epochs": ("R", "1", "student.tuning.freeze=[blocks.0.*]"),
    "losses[].kind": ("R", "ce"),
    "losses[].weight": ("R", "2"),
    "losses[].label_smoothing [bce]": (
        "R",
        "0.1",
        TRAYS[0],
        *ALONE,
        "losses=[{kind: bce}]",
    ),
    "losses[].temperature [binary_kl]": ("R", "3", *TRAYS),
    "losses[].label_smoothing [ce]": ("R", "0.1", *loss("ce")),
    "losses[].class_weights [ce]": ("R", "balanced", *loss("ce")),
    "losses[].beta [dist]": ("R", "2", *loss("dist")),
    "losses[].gamma [dist]": ("R", "2", *loss("dist")),
    "losses[].temperature [dist]": ("R", "3", *loss("dist")),
    "losses[].alpha [dkd]": ("R", "2", *loss("dkd")),
    "losses[].beta [dkd]": ("R", "2", *loss("dkd")),
    "losses[].temperature [dkd]": ("R", "3", *loss("dkd")),
    "losses[].temperature [kl]": ("R", "3", *loss("kl")),
    "losses[].hard [kl]": ("R", "true", *loss("kl")),
    "losses[].gamma [wttm]": ("R", "0.3", *loss("wttm")),
    "sifter.kind": ("R", "random"),
    "sifter.keep [history]": ("R", "0.5", *HISTORY),
    "sifter.floor [history]": ("R", "0.1", *HISTORY),
    "sifter.warmup [history]": ("R", "2", *HISTORY),
    "sifter.anneal [history]": ("R", "0.2", *HISTORY),
    "sifter.refresh [history]": ("R", "5", *HISTORY),
    "sifter.keep [random]": ("R", "0.5", "sifter.kind=random"),
    "sifter.warmup [random]": ("R", "2", "sifter.kind=random"),
    "sifter.anneal [random]": ("R", "0.2", "sifter.kind=random"),
    "sifter.score [teacher]": ("R", "entropy", *BY_TEACHER),
    "sifter.choose [teacher]": ("R", "hardest", *BY_TEACHER),
    "sifter.keep [teacher]": ("R", "0.5", *BY_TEACHER),
    "sifter.warmup [teacher]": ("R", "2", *BY_TEACHER),
    "sifter.anneal [teacher]": ("R", "0.2", *BY_TEACHER),
    "sifter.refresh [teacher]": ("R", "5", *BY_TEACHER),
    "sifter.reweight [teacher]": ("R", "true", *BY_TEACHER),
    "sifter.shrink [relative]": ("R", "2", *RELATIVE),
    "sifter.beta_value [relative]": ("R", "2", *RELATIVE),
    "sifter.loss_history_length [relative]": ("R", "5", *RELATIVE),
    "sifter.sift_delay [relative]": ("R", "5", *RELATIVE),
    "sifter.repeat_delay_per_epoch [relative]": ("R", "true", *RELATIVE),
    "optimizer.kind": ("R", "sgd"),
    "optimizer.lr": ("R", "0.1"),
    "optimizer.lr_scaling": ("R", "sqrt", "optimizer.lr_batch=4"),
    "optimizer.lr_batch": ("R", "16"),
    "optimizer.min_lr_ratio": ("R", "0.1"),
    "optimizer.warmup_ratio": ("R", "0.1"),
    "optimizer.schedule": ("R", "constant"),
    "optimizer.weight_decay": ("R", "0.1"),
    "optimizer.betas": ("R", "[0.8, 0.9]"),
    "optimizer.momentum": ("R", "0.8"),
    "optimizer.clip_grad_norm": ("R", "2"),
    "optimizer.on_nonfinite": (
        "",
        "skip",
    ),  # a run that has met no such step has the same bits
    "optimizer.zero": ("R", "true"),
    "optimizer.ema_decay": ("R", "0.9"),
    "backend.kind": ("FR", "cuda"),
    "backend.threads [cpu]": ("FR", "2"),
    "backend.tf32 [cuda]": ("FR", "false", *CUDA),
    "backend.cudnn_benchmark [cuda]": ("FR", "true", *CUDA),
    "backend.fallback [smddp]": ("FR", "gloo", *SMDDP, "backend.device=cpu"),
    "backend.device [smddp]": ("FR", "cpu", *SMDDP),
    "backend.tf32 [smddp]": ("FR", "false", *SMDDP),
    "backend.precision": ("FR", "bf16"),
    "backend.timeout_seconds": ("", "5"),
    "profile.steps": ("", "[3, 5]"),
    "price.instance": ("", "ml.p4d.24xlarge"),
    "price.per_hour": ("", "2.5"),
}

NORMAL = {"mean": "[0.5, 0.5, 0.5]", "std": "[0.5, 0.5, 0.5]"}
NAMED = {"outputs": "probabilities", "classes": "b"}
TEACHERS = {
    "answers": NAMED,
    "onnx": {**NORMAL, **NAMED, "input_size": "32", "output": "b"},
    "torch": {**NORMAL, **NAMED, "input_size": "32"},
    "timm": {"classes": "b"},
    "transformers": {"classes": "b"},
    "zero_shot": {"classes": "b", "prompts": "['a {}']", "vectors": "b", "scale": "2"},
}
for kind, options in TEACHERS.items():
    normal = "mean" in options
    first = ("teacher.mean=[0, 0, 0]", "teacher.std=[1, 1, 1]") if normal else ()
    normalization = "mean: [0, 0, 0], std: [1, 1, 1]" if normal else ""
    for name, value in options.items():
        changes = "FCR" if kind in ("timm", "torch") else "CR"  # kd fits these
        KEYS[f"teacher.{name} [{kind}]"] = (
            changes,
            value,
            f"teacher.kind={kind}",
            *first,
        )
        KEYS[f"teacher.also[].{name} [{kind}]"] = (
            changes,
            value,
            f"teacher.also=[{{kind: {kind}, model: a, {normalization}}}]",
        )
for name, value in TEACHERS["torch"].items():
    KEYS[f"student.{name} [torch]"] = (
        "R",
        value,
        "student.kind=torch",
        "student.mean=[0,0,0]",
        "student.std=[1,1,1]",
    )


def listed() -> set[str]:
    """Return every key of the schema, with the kind of part that has it."""
    names = set()
    for key, _, _, meaning in explain():
        kind = re.match(r"\[kind: (\w+)\]", meaning)
        names.add(f"{key} [{kind[1]}]" if kind else key)
    return names


def test_every_key_of_the_schema_has_an_entry():
    assert listed() - KEYS.keys() == set(), "say which identities these keys change"
    assert KEYS.keys() - listed() == set(), "these keys are gone"


@functools.cache
def identities_of(*overrides: str) -> dict[str, Any]:
    """Return the identities of the base with overrides; one that begins with "kind:" is
    another dataset.
    """
    settings = dict(SETTINGS)
    remaining = list(overrides)
    if overrides and overrides[0].startswith("kind:"):
        settings["data"] = {
            **yaml.safe_load(f"{{{remaining.pop(0)}}}"),
            "batch_size": 8,
        }
    return identities(config.load(settings, [*BASE, *remaining]))


@pytest.mark.parametrize("key", KEYS)
def test_a_key_changes_the_identities_of_what_depends_on_it_and_no_other(
    key, monkeypatch
):
    monkeypatch.setenv(
        "RAY_ADDRESS", "127.0.0.1:6379"
    )  # data.loader=ray asks for one; nothing is contacted
    expected, value, *context = KEYS[key]
    path = key.partition(" ")[0].replace("[]", "[0]")
    before = identities_of(*context)
    after = identities_of(*context, f"{path}={value}")
    assert "".join(name for name in "FCSR" if before[name] != after[name]) == expected


def test_a_store_has_the_same_pixels_in_memory_and_on_a_disk_for_a_cache_and_for_a_teacher():
    disk, ram, none = (
        identities_of(f"data.store={config_path}")
        for config_path in ("disk", "ram", "none")
    )
    assert disk["C"] == ram["C"] != none["C"]
    assert disk["F"] == ram["F"] != none["F"]


def test_each_of_several_teachers_has_a_licence_of_its_own():
    also = [{"model": "vit_small_patch16_224", "license": "mit"}]
    teacher = {"model": "vit_tiny_patch16_224", "license": "apache-2.0", "also": also}
    split = split_teachers(config.load({**SETTINGS, "teacher": teacher}).teacher)
    assert {config_path: section.license for config_path, section in split.items()} == {
        "teacher": "apache-2.0",
        "teacher.also[0]": "mit",
    }
