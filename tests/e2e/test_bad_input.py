"""Mistakes of every kind: one line with the config path and a remedy, exit code 2, and
nothing left lying about.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from kd import config
from kd.core.errors import ConfigError
from kd.setup.data import split_batch


@pytest.fixture
def copied(photos, settings, tmp_path) -> Path:
    """The photographs in a folder of their own, which `settings` names."""
    root = tmp_path / "photos"
    shutil.copytree(photos, root)
    settings["data"]["root"] = str(root)
    return root


@pytest.fixture
def copied_teacher(teacher, settings, tmp_path) -> Path:
    """The fitted teacher in a folder of its own, which `settings` names."""
    folder = tmp_path / "stored"
    shutil.copytree(teacher, folder)
    settings["teacher"]["model"] = str(folder)
    return folder


def runs(folder: Path) -> list[str]:
    return sorted(
        p.relative_to(folder).as_posix()
        for p in (folder / "runs").rglob("*")
        if p.is_file()
    )


def nothing_started(folder: Path) -> bool:
    """Whether no run folder exists, or one without rows and checkpoints, which a
    repaired start takes anew.
    """
    allowed = (
        "config.yaml",
        "manifest.json",
        ".lock",
        "timeline_0.jsonl",
    )  # and what the monitor saw of a slow start
    names = [
        name for name in runs(folder) if not Path(name).name.startswith("monitor_")
    ]
    return not [name for name in names if not name.endswith(allowed)]


# --------------------------------------------------------------------------------
# the config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("teacher.model=", "teacher.model: is missing, but losses[0] ('kl') needs it."),
        (
            "losses=[{kind: dkd}] data.augment.mixup=0.2",
            "losses[0].kind: 'dkd' needs one label per image, but mixup or",
        ),
        (
            "data.root=/no/such/folder",
            "data.root: the folder '/no/such/folder' does not exist.",
        ),
        (
            "data.train_split=trian",
            "has no folder 'trian'. It has: train, val. Did you mean 'train'?",
        ),
        (
            "data.batch_size=400",
            "data.batch_size: is 400, but the training split has 36 images.",
        ),
        (
            "data.micro_batch=3",
            (
                "data.batch_size: 8 images cannot be divided into 1 ranks x"
                " micro-batches of 3."
            ),
        ),
        (
            "data.augment.policy=rand-q9",
            "data.augment.policy: 'rand-q9' is not a policy that timm knows",
        ),
        (
            "student.model=vit_tinny_patch16_224",
            "student.model: no model 'vit_tinny_patch16_224'.",
        ),
        (
            "student.args.banana=1",
            "student.model: 'vit_tiny_patch16_224' cannot be built (TypeError: ",
        ),
        ("teacher.model=no/folder", "teacher.model: no model 'no/folder'."),
        (
            "teacher.checkpoint=no.safetensors",
            "teacher.checkpoint: no file 'no.safetensors'.",
        ),
    ],
)
def test_a_wrong_key_is_named(written, refused, tmp_path, override, message):
    overrides = re.split(" (?=data)", override)
    error = refused("train", written(), *overrides)
    assert message in error
    assert refused("train", written(), *overrides, "--check") == error
    assert nothing_started(tmp_path)


def test_several_errors_are_several_lines(written, command, tmp_path):
    answer = command(
        "train", written(), "optimizer.lr=0", "run.epoks=1", "losses=[{kind: kll}]"
    )
    assert answer.code == 2
    lines = answer.err.splitlines()
    assert sorted(line.split(": ")[0] for line in lines) == [
        "losses[0].kind",
        "optimizer.lr",
        "run.epoks",
    ]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("batch_size", "micro", "ranks", "images", "words"),
    [
        (8, 0, 3, 100, "cannot be divided into"),
        (8, 3, 2, 100, "cannot be divided into"),
        (2, 0, 4, 100, "cannot be divided into"),
        (9, 2, 1, 100, "cannot be divided into"),
        (64, 0, 1, 5, "is 64, but the training split has 5 images"),
        (64, 0, 4, 7, "is 64, but the training split has 7 images"),
    ],
)
def test_a_batch_that_does_not_divide_or_is_too_large_is_refused(
    settings, batch_size, micro, ranks, images, words
):
    settings["data"] |= {"batch_size": batch_size, "micro_batch": micro}
    with pytest.raises(ConfigError, match=rf"^data\.batch_size: .*{words}") as caught:
        split_batch(config.load(settings).data, ranks, images)
    settings["data"]["batch_size"] = int(
        re.search(r"Set data\.batch_size=(\d+)", str(caught.value))[1]
    )
    divided = split_batch(config.load(settings).data, ranks, images)  # the remedy works
    product = divided.world_size * divided.accumulate * divided.micro_batch
    assert product == divided.batch_size == settings["data"]["batch_size"] <= images


def test_a_batch_is_divided_into_ranks_and_micros():
    settings = {"kind": "imagefolder", "root": ".", "batch_size": 96, "micro_batch": 8}
    loaded = config.load(
        {"data": settings, "student": {"model": "a"}, "losses": [{"kind": "ce"}]}
    )
    divided = split_batch(loaded.data, 3, 1000)
    assert (divided.accumulate, divided.micro_batch, divided.eval_batch) == (4, 8, 8)
    assert str(divided) == "96 images = 3 ranks x 4 micros x 8"


# --------------------------------------------------------------------------------
# images


def empty(root: Path) -> None:
    shutil.rmtree(root / "train")
    (root / "train").mkdir()


def one_class(root: Path) -> None:
    for place in root.glob("*/[fp]*"):
        shutil.rmtree(place)


def misspelt(root: Path) -> None:
    (root / "val" / "fig").rename(root / "val" / "figg")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (empty, "data.root: no images for the split 'train'"),
        (one_class, "data.root: the split 'train' has only one class, 'apple'."),
        (misspelt, "Did you mean 'fig'?"),
    ],
)
def test_a_folder_that_cannot_be_learned_is_refused(
    written, refused, copied, tmp_path, change, words
):
    change(copied)
    assert words in refused("train", written())
    assert not (tmp_path / "runs").exists()


def damage(root: Path, split: str = "train") -> list[str]:
    """Spoil two images, in both ways that people meet."""
    text = root / split / "fig" / "00.jpg"
    cut = root / split / "pear" / "01.jpg"
    text.write_text("this is no picture")
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    return [f"{split}/fig/00.jpg", f"{split}/pear/01.jpg"]


@pytest.mark.parametrize(("workers", "split"), [(0, "val"), (1, "train")])
def test_a_corrupt_image_names_itself_and_the_way_out(
    written, refused, command, copied, tmp_path, workers, split
):
    names = damage(copied, split)
    path = written(data={"workers": workers}, run={"epochs": 1})
    error = refused("train", path)
    assert error.startswith("data.root: file '")
    assert any(name in error for name in names)
    assert error.endswith("Replace or delete it, or set data.on_corrupt=skip.")
    for name in names:  # the remedy works, in the same folder
        (copied / name).unlink()
    answer = command("train", path)
    assert answer.code == 0, answer


def test_skipping_counts_and_lists(written, command, copied, tmp_path):
    names = damage(copied) + damage(copied, "val")
    path = written(
        data={"workers": 1, "on_corrupt": "skip", "max_skipped": 0.2}, run={"epochs": 1}
    )
    answer = command("train", path)
    assert answer.code == 0, answer
    assert "4 images could not be decoded and had weight 0: " in answer.out
    manifest = json.loads((tmp_path / "runs" / "tiny" / "manifest.json").read_text())
    assert manifest["unreadable"] == sorted(names)
    again = command("train", path)  # decodes the validation only
    assert again.code == 0
    assert json.loads((tmp_path / "runs" / "tiny" / "manifest.json").read_text())[
        "unreadable"
    ] == sorted(names)


def test_odd_but_whole_images_simply_work(written, command, copied, tmp_path):
    folder = copied / "train" / "apple"
    Image.new("CMYK", (20, 20), (0, 200, 200, 0)).save(folder / "cmyk.jpg")
    Image.fromarray(np.full((20, 20), 40_000, np.uint16)).save(folder / "deep.png")
    Image.new("RGB", (1, 1), (255, 0, 0)).save(folder / "dot.png")
    Image.new("L", (1, 300), 9).save(folder / "line.png")
    Image.new("P", (9, 9)).save(folder / "palette.gif")
    Image.new("RGBA", (9, 9), (255, 0, 0, 0)).save(folder / "clear.webp")
    shutil.copytree(folder, copied / "val" / "apple", dirs_exist_ok=True)
    answer = command(
        "train",
        written(run={"epochs": 1}, data={"augment": {"mixup": 0.5, "crop": 0.1}}),
    )
    assert answer.code == 0, answer
    assert "could not be decoded" not in answer.out


# --------------------------------------------------------------------------------
# teachers


def test_a_teacher_of_another_class_count_is_refused(
    written, refused, copied, tmp_path
):
    for split in ("train", "val"):
        shutil.copytree(copied / split / "fig", copied / split / "quince")
    assert refused("train", written()).startswith(
        "teacher.model: has 3 classes, the data has 4. Both must be equal"
    )
    assert nothing_started(tmp_path)


def test_a_teacher_at_chance_level_can_be_replaced(
    written, refused, command, copied_teacher, teacher, tmp_path
):
    weights = load_file(copied_teacher / "model.safetensors")
    weights["head.bias"] = torch.tensor(
        [100.0, 0.0, 0.0]
    )  # always an apple: 4 of 13 are
    save_file(weights, copied_teacher / "model.safetensors", metadata={"format": "pt"})
    error = refused("train", written())
    begin = (
        "teacher: has the accuracy 30.8 % on the validation images; chance level is"
        " 33.3 %. More than 50.0 % "
    )
    assert error.startswith(
        f"{begin}(teacher.min_accuracy). Check that its weights were loaded"
    )
    assert nothing_started(tmp_path)
    assert (
        command("train", written(run={"epochs": 1}), "teacher.min_accuracy=0.2").code
        == 0
    )
    # the run that was refused is no obstacle to the same run with another teacher
    shutil.rmtree(tmp_path / "runs")
    refused("train", written())
    assert (
        command("train", written(run={"epochs": 1}), f"teacher.model={teacher}").code
        == 0
    )


def test_teaching_for_no_epoch_is_refused(written, refused):
    assert refused("teach", written()).startswith(
        "teacher.fit.epochs: is 0. At least 1."
    )


# --------------------------------------------------------------------------------
# run folders


def test_a_folder_that_holds_another_run_is_refused(
    written, refused, command, tmp_path
):
    assert command("train", written(run={"epochs": 1})).code == 0
    before = {p: p.read_bytes() for p in (tmp_path / "runs").rglob("*") if p.is_file()}
    error = refused(
        "train",
        written(run={"epochs": 1}),
        "optimizer.lr=0.5",
        "losses.0.temperature=3",
    )
    assert (
        error == f"run.name: '{tmp_path}/runs/tiny' holds another run; it differs in"
        " losses.0.temperature (1.0 -> 3.0), optimizer.lr (0.002 -> 0.5). One"
        " folder, one run. Choose another run.name, or remove the folder."
    )
    assert {
        p: p.read_bytes() for p in (tmp_path / "runs").rglob("*") if p.is_file()
    } == before
    # what only changes how it looks and how fast it goes is welcome
    assert (
        command(
            "train",
            written(run={"epochs": 1}),
            "run.every.log=1",
            "data.workers=1",
            "run.keep=5",
        ).code
        == 0
    )


def test_a_folder_that_is_no_run_is_refused(refused, tmp_path):
    for name in ("evaluate", "export"):
        error = refused(name, tmp_path)
        assert error.startswith(
            f"run: '{tmp_path}' is not a run folder: it has no config.yaml."
        )


def test_a_run_that_has_not_got_anywhere_is_refused(
    written, refused, copied_teacher, tmp_path
):
    weights = load_file(copied_teacher / "model.safetensors")
    save_file(
        {key: tensor.zero_() for key, tensor in weights.items()},
        copied_teacher / "model.safetensors",
    )
    assert "chance level is 33.3 %" in refused(
        "train", written()
    )  # known only after the folder was made
    for name in ("evaluate", "export"):
        assert refused(name, tmp_path / "runs" / "tiny").endswith(
            "Train it first: `kd-train CONFIG`."
        )


@pytest.mark.parametrize("text", ["run: [", "- a\n", ""])
def test_a_stored_config_that_cannot_be_read_is_refused(
    written, refused, distilled, tmp_path, text
):
    run = shutil.copytree(distilled, tmp_path / "runs" / "tiny")
    (run / "config.yaml").write_text(text)
    for name, argument in (("train", written()), ("export", run)):
        assert "config.yaml" in refused(name, argument)


def test_a_checkpoint_cut_short_is_named_with_its_remedy(
    written, refused, command, tmp_path
):
    assert command("train", written(run={"name": "whole"})).code == 0
    assert command("train", written()).code == 0
    newest = tmp_path / "runs" / "tiny" / "checkpoints" / "step_00000008"
    tensors = newest / "tensors.safetensors"
    content = tensors.read_bytes()
    tensors.write_bytes(content[:1000])
    error = refused("train", written())
    assert error.startswith(
        f"run.folder: checkpoint '{newest}' is cut short: 1000 of {len(content)} bytes."
    )
    removed = Path(error.partition("Remove '")[2].partition("'")[0])
    shutil.rmtree(removed)
    assert command("train", written()).code == 0
    again = (
        tmp_path
        / "runs"
        / "whole"
        / "checkpoints"
        / "step_00000008"
        / "tensors.safetensors"
    )
    assert tensors.read_bytes() == again.read_bytes()
    assert command("export", tmp_path / "runs" / "tiny", "--no-onnx").code == 0


def test_a_run_that_failed_lets_go_of_its_folder(
    written, refused, command, copied, tmp_path
):
    """In a notebook the process goes on: no lock may stay behind, not that of a teacher
    being fitted either.
    """
    names = damage(copied)
    args = {"patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2}
    fit = {"epochs": 1, "folder": str(tmp_path / "teachers")}
    path = written(
        teacher={
            "model": "vit_tiny_patch16_224",
            "args": args,
            "fit": fit,
            "min_accuracy": 0.0,
        }
    )
    assert "data.on_corrupt=skip" in refused("train", path)
    assert "data.on_corrupt=skip" in refused("train", path)
    for name in names:
        (copied / name).unlink()
    assert command("train", path).code == 0


# --------------------------------------------------------------------------------
# training


def test_a_loss_that_diverges_ends_the_run(written, refused, tmp_path):
    path = written(
        run={"epochs": 4, "every": {"log": 2}},
        optimizer={"lr": 1e30, "warmup_ratio": 0.0, "clip_grad_norm": 0.0},
    )
    error = refused("train", path)
    assert "became NaN or infinite in step" in error
    assert error.startswith(("losses: ", "optimizer: "))
    for file in (tmp_path / "runs" / "tiny" / "checkpoints").rglob("*.safetensors"):
        assert all(
            t.isfinite().all()
            for t in load_file(file).values()
            if t.is_floating_point()
        )
    file = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    rows = (
        [json.loads(line) for line in file.read_text().splitlines()]
        if file.exists()
        else []
    )
    assert all(np.isfinite(row["loss"]) for row in rows if row["kind"] == "train")


def test_errors_of_one_rank_among_several_say_whose(written, command, monkeypatch):
    """Without a rank in the environment (mpirun sets its own names) the error must
    still be the user's.
    """
    monkeypatch.setenv("WORLD_SIZE", "2")
    answer = command("train", written(), "optimizer.lr=0")
    assert answer.code == 2
    assert "optimizer.lr: is 0." in answer.err
    assert "Traceback" not in answer.err
    monkeypatch.setenv("RANK", "1")
    assert command("train", written(), "optimizer.lr=0").err.startswith(
        "[rank 1] optimizer.lr: is 0."
    )


@pytest.mark.parametrize("check", [False, True])
def test_a_pickle_in_a_teacher_s_folder_never_runs(
    written, refused, teacher, tmp_path, check
):
    folder = tmp_path / "teacher"
    folder.mkdir()
    shutil.copy(teacher / "config.json", folder)
    torch.save({"head.weight": Touch(tmp_path / "ran")}, folder / "pytorch_model.bin")
    line = refused(
        "train",
        written(teacher={"model": str(folder)}),
        *(["--check"] if check else []),
    )
    assert line.startswith("teacher.model: no model.safetensors in ")
    assert not (tmp_path / "ran").exists()


class Touch:
    """A pickle that leaves a file where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)
