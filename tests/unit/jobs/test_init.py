"""`kd init FOLDER`: what it finds, what it writes, and that the file passes `kd train
FILE --check`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
import yaml
from pieces import CLASSES, paint
from PIL import Image
from safetensors.torch import save_file
from torchvision.transforms.functional import pil_to_tensor

from kd import config
from kd.config.renamed import with_new_names
from kd.core.errors import KdError
from kd.jobs.check import check
from kd.jobs.init.init import _yaml, init
from kd.models.recognize import identify
from kd.setup.build import distributed
from kd.setup.data import open_data
from kd.setup.recipe import fit_folders, resolve

DATA = Path(
    os.environ.get("KD_TEST_DATA") or Path(__file__).parents[4] / "shared" / "data"
)
"""Where folders of real photographs lie, if they do."""


@pytest.fixture(autouse=True)
def hub(inside, monkeypatch) -> Path:
    """An empty cache of the hub, and a working folder of its own."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(inside / "hub"))
    return inside / "hub"


def loose(root: Path, count: int, size: tuple[int, int] = (40, 30)) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        Image.new("RGB", size, (9 * number % 256, 80, 40)).save(
            root / f"{number:03d}.jpg"
        )
    return root


def classes(root: Path, *counts: int, size: int = 20) -> Path:
    paint(root, counts, seed=1, size=size)
    return root


def split(root: Path) -> Path:
    for name, counts in {
        "training": (8, 8, 9),
        "valid": (2, 2, 2),
        "test": (1, 1, 1),
    }.items():
        classes(root / "all" / name, *counts)
    return root


def label_sets(root: Path) -> Path:
    loose(root / "images", 12)
    rows = [
        f"{number:03d}.jpg,{'apple;fig' if number % 2 else 'pear'}"
        for number in range(12)
    ]
    root.joinpath("labels.csv").write_text("\n".join(["file,labels", *rows]))
    return root


def columns(root: Path) -> Path:
    loose(root, 12)
    for name, numbers in {"train.tsv": range(8), "val.tsv": range(8, 12)}.items():
        rows = [f"{number}\t{number:03d}\t{CLASSES[number % 2]}" for number in numbers]
        root.joinpath(name).write_text("\n".join(["id\tpicture\tspecies", *rows]))
    root.joinpath("about.json").write_text('{"by": "somebody"}')
    return root


def phone(root: Path) -> Path:
    for name in CLASSES[:2]:
        loose(root / name, 3, (4032, 3024))
    return root


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "splits": split,
    "five": lambda root: classes(root, 2, 2, 1),
    "one class": lambda root: loose(root / "apple", 9).parent,
    "unlabelled": lambda root: loose(root, 9),
    "label sets": label_sets,
    "columns": columns,
    "phone": phone,
}
UNLABELLED = ("one class", "unlabelled")
FOUND = {
    "splits": {
        "root": "splits/all",
        "train_split": "training",
        "val_split": "valid",
        "test_split": "test",
    },
    "label sets": {
        "root": "label sets/images",
        "train_labels": "../labels.csv",
        "separator": ";",
        "val_fraction": 0.1,
    },
    "columns": {
        "train_list": "train.tsv",
        "val_list": "val.tsv",
        "image_key": "picture",
        "label_key": "species",
    },
    "unlabelled": {"kind": "imagefolder", "labels": "none", "val_fraction": 0.1},
    "one class": {"labels": "none"},
    "phone": {"image_size": 64, "store": "ram"},
    "five": {"batch_size": 2},
}


def wrote(folder: Path | str, weights: str = "", student: str = "") -> tuple[str, dict]:
    named = [student] if student else []
    file, _ = init(Path(folder), Path("made.yaml"), weights, named, None, None)
    written = yaml.safe_load(file.read_text())
    assert with_new_names(written, "", []) == written  # no old name of a key
    return file.read_text(), written


@pytest.mark.parametrize("name", FOLDERS)
def test_the_written_file_holds_what_was_found_and_is_checked(name, teacher):
    FOLDERS[name](Path(name))
    text, written = wrote(name, str(teacher) if name in UNLABELLED else "")
    assert FOUND[name].items() <= written["data"].items(), text
    checked = check(resolve(config.load("made.yaml", [f"run.folder={Path.cwd()}"])))
    assert set(checked.phases) == (
        {"distillation"}
        if name in UNLABELLED
        else {"distillation", "the fit of teacher"}
    )
    assert all(
        "#" in line
        for line in text.splitlines()
        if line.startswith(("  kind", "  model", "  epochs"))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["splits", "label sets", "unlabelled", "grocery-fruit", "cifar10", "tiny-imagenet"],
)
def test_the_written_file_passes_the_check_of_the_command(name, command, teacher):
    root = FOLDERS[name](Path(name)) if name in FOLDERS else DATA / name
    if not root.is_dir():
        pytest.skip(
            f"the folder '{name}' is not here; set KD_TEST_DATA to the one that"
            " holds it"
        )
    answer = command(
        "init",
        root,
        "-o",
        "food.yaml",
        *(["--teacher", teacher] if name in UNLABELLED else []),
    )
    assert answer.code == 0, answer
    assert answer.out.splitlines()[-5:] == [
        "  kd train food.yaml --check",
        "  kd train food.yaml",
        '  kd export runs/food --accept "drop<=3"',
        "  kd serve runs/food/export",
        f"  kd verify runs/food/export --data {_yaml(str(root))}",
    ]
    answer = command("train", "food.yaml", "--check", "run.steps=2")
    assert answer.code == 0, answer


def test_a_run_from_random_weights_says_what_to_expect(caplog):
    caplog.set_level("INFO", "kd")
    wrote(classes(Path("three"), 5, 5, 5))
    assert re.search(
        "teacher and student start from random weights: expect much less .*--teacher"
        " FILE and --student",
        caplog.text,
    )


def test_foreign_weights_are_recognized_and_written(inside, caplog):
    caplog.set_level("INFO", "kd")
    tensors = timm.create_model("tf_efficientnet_lite0").state_dict()
    weights = inside / "efficientnet-lite0-57934424.pth"
    torch.save(
        {
            f"_blocks.0._depthwise_conv.{number}": tensor
            for number, tensor in enumerate(tensors.values())
        },
        weights,
    )
    text, written = wrote(classes(Path("three"), 5, 5, 5), str(weights))
    taught = written["teacher"]
    assert (taught["model"], taught["weights"], taught["pretrained"]) == (
        "tf_efficientnet_lite0",
        "by_order",
        True,
    )
    assert taught["args"] == {"pretrained_cfg_overlay": {"input_size": [3, 128, 128]}}
    assert "under other names" in text
    assert "kd init --student WEIGHTS" in text
    assert "the student starts from random weights" in caplog.text
    caplog.clear()
    Path("made.yaml").unlink()
    text, written = wrote("three", str(weights), str(weights))
    assert "random weights" not in caplog.text
    section = {
        key: written["student"][key]
        for key in ("model", "checkpoint", "weights", "args", "init", "tuning")
    }
    shape = {
        "pretrained_cfg_overlay": {"input_size": [3, 64, 64]}
    }  # the photographs are smaller; the teacher sees 128
    expected = {key: taught[key] for key in ("model", "checkpoint", "weights")}
    assert section == {
        **expected,
        "args": shape,
        "init": "pretrained",
        "tuning": {"head_lr_scale": 5.0},
    }
    assert (written["run"]["epochs"], written["optimizer"]["lr"]) == (30, 0.001)
    assert "--student WEIGHTS" not in text
    check(resolve(config.load("made.yaml", [f"run.folder={Path.cwd()}"])))
    torch.save(tensors, weights)
    assert identify("--teacher", weights)[:2] == ("efficientnet_lite0", False)
    os.rename(weights, "mine.pth")
    assert identify("--teacher", Path("mine.pth"), "tf_efficientnet_lite0")[:2] == (
        "tf_efficientnet_lite0",
        False,
    )
    with pytest.raises(
        KdError, match=r"--teacher: .*not those of .resnet18.*name of the network"
    ):
        identify("--teacher", Path("mine.pth"), "resnet18")


def few_labels(root: Path, labelled: int = 5) -> Path:
    """Three classes of so many labelled images, and 60 without a label."""
    classes(root / "train", *[labelled] * 3)
    classes(root / "val", 2, 2, 2)
    loose(root / "train" / "unlabelled", 60)
    return root


def test_a_fit_counts_labelled_images(inside):
    """Of 150 labels and 992 images without one it once said that 20,000 images fit the
    teacher; 1,024 did.
    """
    torch.save(timm.create_model("test_resnet").state_dict(), "test_resnet.pth")
    for weights in ("test_resnet.pth", ""):
        text, written = wrote(few_labels(Path("few" + weights)), weights)
        fit = written["teacher"]["fit"]
        assert written["data"]["labels"] == "some"
        assert fit["batch_size"] == 8  # whole batches of 15 images
        checked = resolve(config.load("made.yaml", [f"run.folder={Path.cwd()}"]))
        check(checked)
        ((recipe, _),) = fit_folders(checked, "").values()
        views = recipe.length.steps * recipe.data.batch_size
        assert f"{views:,} views of 15 labelled images" in text
        assert (views == 20_000) == bool(weights)
        Path("made.yaml").unlink()


def trained(names: list[str], outputs: int, file: Path) -> Path:
    """Write weights of a network of so many outputs, and the names of its classes, as a
    folder of timm's does.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(timm.create_model("test_vit", num_classes=outputs).state_dict(), file)
    if names:
        content = {
            "architecture": "test_vit",
            "num_classes": outputs,
            "label_names": names,
        }
        (file.parent / "config.json").write_text(json.dumps(content))
    return file


@pytest.mark.parametrize(
    ("names", "outputs", "fitted"),
    [
        (["apple", "fig", "pear"], 3, True),
        (["pear", "apple", "fig"], 3, True),
        ([], 3, True),  # kd-train refuses it unless it is above chance
        (["ant", "bee", "cat"], 3, False),
        ([], 5, False),
    ],
)
def test_weights_of_the_datas_own_classes_are_not_fitted_again(
    names, outputs, fitted, inside
):
    """It said "its classes are others" of every file, and fitted a fitted teacher
    again.
    """
    root = classes(Path("three"), 5, 5, 5)
    _, written = wrote(root, str(trained(names, outputs, Path("weights/test_vit.pth"))))
    taught = written["teacher"]
    assert ("fit" in taught, "pretrained" in taught) == (not fitted, not fitted)
    assert ("min_accuracy" in taught) == (not fitted)
    assert taught["args"] == {
        "img_size": 160 if fitted else 128
    }  # the size of its weights
    (teacher,) = check(
        resolve(config.load("made.yaml", [f"run.folder={Path.cwd()}"]))
    ).teachers.members
    assert teacher.classes == CLASSES
    assert teacher.input_size == taught["args"]["img_size"]


def fitted(root: Path) -> dict[str, torch.Tensor]:
    """Fit a ViT's head to painted images by least squares; its body stays random."""
    torch.manual_seed(0)
    network = timm.create_model("test_vit", num_classes=3, img_size=96).eval()
    files = [file for name in CLASSES for file in sorted((root / name).iterdir())]
    labels = torch.tensor([CLASSES.index(file.parent.name) for file in files])
    pixels = torch.stack(
        [pil_to_tensor(Image.open(file).resize((96, 96))) for file in files]
    )
    with torch.no_grad():
        inner = network.forward_features(pixels / 127.5 - 1)
        features = network.forward_head(inner, pre_logits=True)
        ones = torch.ones(len(files), 1)
        targets = torch.eye(3)[labels]
        solved = torch.linalg.lstsq(torch.cat((features, ones), 1), targets).solution
        network.head.weight.copy_(solved[:-1].T)
        network.head.bias.copy_(solved[-1])
    return network.state_dict()


@pytest.mark.parametrize("record", ["nothing", "dictionary", "metadata"])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_a_fitted_teacher_is_tried_on_validation_images(record, order, inside, caplog):
    """Names in the metadata of safetensors were not read, and without names a file of
    as many classes was believed.
    """
    caplog.set_level("INFO", "kd")
    root = Path("three")
    classes(root / "train", 10, 10, 10)
    classes(root / "val", 20, 20, 20)
    tensors = fitted(root / "train")
    for key in ("head.weight", "head.bias"):
        tensors[key] = tensors[key][order]
    names = [CLASSES[place] for place in order]
    file = Path("test_vit.pth")
    if record == "metadata":
        file = Path("test_vit.safetensors")
        save_file(tensors, file, {"format": "pt", "class_names": json.dumps(names)})
    elif record == "dictionary":
        torch.save({"state_dict": tensors, "class_to_idx": indices(names)}, file)
    else:
        torch.save(tensors, file)
    text, written = wrote(root, str(file))
    taught = written["teacher"]
    unknown_order = record == "nothing" and order != [0, 1, 2]
    assert ("fit" in taught) == unknown_order
    (percent,) = re.findall(r"right on ([\d.]+) % of 60 validation images", text)
    assert (float(percent) < 40) == unknown_order
    assert ("where chance is 33.3 %" in text) == unknown_order
    assert ("teacher.classes=FILE" in caplog.text) == unknown_order
    if not unknown_order:
        assert float(percent) > 80
        assert taught["args"] == {"img_size": 96}  # not the 160 of timm's default


def indices(names: list[str]) -> dict[str, int]:
    return {name: place for place, name in enumerate(names)}


@pytest.mark.parametrize(
    ("name", "size", "side"),
    [
        ("test_vit", {"img_size": 96}, 96),
        ("deit_tiny_distilled_patch16_224", {"img_size": 96}, 96),  # two other tokens
        ("vit_tiny_patch16_224", {}, 224),
        ("test_resnet", {}, 0),
    ],
)
def test_the_size_of_a_files_positions_is_known(name, size, side, inside):
    """A ViT of 96 px was said to be one of 224, with resampled positions."""
    file = Path(f"{name}.pth")
    torch.save(timm.create_model(name, **size).state_dict(), file)
    recognized = identify("--teacher", file)
    assert recognized.side == side
    assert "became" not in recognized.why


def test_resampled_positions_of_a_transformer_are_stated(inside):
    """Of 196 positions 16 were left at 64 px, and no line said so."""
    torch.save(
        timm.create_model("vit_tiny_patch16_224").state_dict(),
        "vit_tiny_patch16_224.pth",
    )
    root = classes(Path("three"), 5, 5, 5)
    weights = "vit_tiny_patch16_224.pth"
    text, written = wrote(root, weights, weights)
    assert written["teacher"]["args"] == {"img_size": 128}
    for section, used in {"teacher": 128, "student": 64}.items():
        part = text.partition(f"{section}:")[2].partition("cache:")[0]
        assert f"from 224 to {used} px" in part
        assert f"{(224 / used) ** 2:.1f} times the pixels" in part


def test_a_file_in_an_export_is_its_export(teacher):
    root = classes(Path("three"), 5, 5, 5)
    for weights in (teacher, teacher / "model.safetensors"):
        _, written = wrote(root, str(weights))
        assert written["teacher"]["model"] == str(teacher)
        assert "checkpoint" not in written["teacher"]
        Path("made.yaml").unlink()


def test_the_store_takes_whole_pages():
    """It said "up to 32 MB" of a store of 44: images of other pixels, and no pages."""
    text, _ = wrote(classes(Path("three"), 300, 300, 300))
    settings = config.load("made.yaml", ["data.store=disk", f"run.folder={Path.cwd()}"])
    with distributed(settings.backend) as backend:
        opened = open_data(resolve(settings).data, backend)
        for source in opened.stored:
            for id in range(len(source)):
                source.decode(id)
    stored_bytes = sum(
        file.stat().st_blocks * 512 for file in Path("stores").rglob("pixels")
    )
    (stated,) = re.findall(r"store: ram .* ([\d.,]+) M", text)
    assert float(stated) == pytest.approx(stored_bytes / 2**20, abs=0.6)


def test_a_student_may_be_a_transformer_or_a_folder(teacher):
    tensors = timm.create_model("vit_tiny_patch16_224").state_dict()
    torch.save(tensors, "vit_tiny_patch16_224.pth")
    classes(Path("three"), 5, 5, 5)
    for weights, keys in {
        "vit_tiny_patch16_224.pth": {
            "model": "vit_tiny_patch16_224",
            "checkpoint": "vit_tiny_patch16_224.pth",
        },
        str(teacher): {"model": str(teacher)},
    }.items():
        _, written = wrote("three", str(teacher), weights)
        assert written["student"] == {
            **keys,
            "init": "pretrained",
            "tuning": {"head_lr_scale": 10.0},
        }
        assert float(written["optimizer"]["lr"]) == 5e-5
        check(resolve(config.load("made.yaml", [f"run.folder={Path.cwd()}"])))
        Path("made.yaml").unlink()
    with pytest.raises(KdError, match="no model 'no_such_net'"):
        wrote("three", str(teacher), "no_such_net")


def test_weights_in_the_hubs_cache_are_taken(hub):
    for name, size in {
        "timm--lcnet_050.ra2_in1k": 10,
        "timm--resnet10t.c3_in1k": 20,
    }.items():
        snapshot = hub / f"models--{name}" / "snapshots" / "1"
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").write_bytes(bytes(size))
    text, written = wrote(classes(Path("three"), 5, 5, 5))
    assert written["teacher"]["model"] == "resnet10t.c3_in1k"
    assert written["teacher"]["pretrained"]
    assert "lcnet_050.ra2_in1k" in text


@pytest.mark.slow
def test_a_student_is_timed(command):
    classes(Path("three"), 5, 5, 5)
    answer = command("init", "three", "--student-mb", "2", "--student-ms", "5000ms")
    assert answer.code == 0, answer
    assert '--accept "drop<=3 ms<=5000 mb<=2"' in answer.out
    assert re.search(
        r"model: xcit_.*1\.8 MB, [0-9.]+ ms here", Path("three.yaml").read_text()
    )


def cached(hub: Path, *names: str) -> dict[str, Path]:
    """Put networks of random weights into the hub's cache, as timm's repositories."""
    files = {}
    for name in names:
        snapshot = hub / f"models--timm--{name}" / "snapshots" / "1"
        snapshot.mkdir(parents=True)
        files[name] = snapshot / "model.safetensors"
        save_file(timm.create_model(name).state_dict(), files[name])
    return files


def row(text: str, name: str) -> list[str]:
    """Return the cells of a network in the table of students."""
    (line,) = re.findall(rf"^\| {re.escape(name)} .*$", text, re.MULTILINE)
    return [cell.strip() for cell in line.strip("|").split("|")]


VIT, RESNET, LARGE = "test_vit.r160_in1k", "test_resnet.r160_in1k", "resnet10t.c3_in1k"
"""Networks of timm: 1.1, 1.4 and 19.7 MB with three classes."""


@pytest.fixture
def taught(inside) -> str:
    """A teacher as a file, larger than `VIT` and `RESNET`."""
    torch.save(timm.create_model("resnet10t").state_dict(), "mine.pth")
    classes(Path("three"), 9, 9, 9)
    return "resnet10t=mine.pth"


def test_weights_at_hand_within_the_limits_are_the_student(hub, taught, command):
    files = cached(hub, VIT, RESNET, LARGE)
    limits = ("--student-mb", "1.3")
    answer = command("init", "three", "--teacher", taught, *limits)
    assert answer.code == 0, answer
    student = yaml.safe_load(Path("three.yaml").read_text())["student"]
    assert student["model"] == VIT
    assert student["checkpoint"] == str(files[VIT])
    assert student["init"] == "pretrained"
    shown = answer.out + answer.err
    assert "at hand" in row(shown, VIT)
    assert row(shown, VIT)[-1].startswith("chosen")
    assert row(shown, RESNET)[-1] == "over 1.3 MB"
    assert row(shown, LARGE)[-1] == "not smaller than the teacher"
    assert "random" in row(shown, "lcnet_050")
    assert "from random weights" not in shown
    short = ["run.steps=2", "run.every.evaluate=0", "teacher.fit.steps=2"]
    short += ["teacher.fit.evaluate=1", "teacher.min_accuracy=0"]
    answer = command("train", "three.yaml", "--check", *short)
    assert answer.code == 0, answer
    assert "init pretrained" in answer.out
    answer = command("train", "three.yaml", *short)
    assert answer.code == 0, answer
    metrics = Path("runs/three/metrics.jsonl").read_text()
    assert json.loads(metrics.splitlines()[-1])["step"] == 2


def test_the_largest_weights_come_first_and_broken_ones_are_passed_over(
    hub, taught, command
):
    files = cached(hub, VIT, RESNET)
    files[RESNET].write_bytes(b"cut off")
    answer = command("init", "three", "--teacher", taught, "--student-mb", "9")
    assert answer.code == 0, answer
    shown = answer.out + answer.err
    assert row(shown, VIT)[-1].startswith("chosen")
    assert str(files[RESNET]) in row(shown, RESNET)[-1]
    save_file(timm.create_model(RESNET).state_dict(), files[RESNET])
    limits = ("--mb", "9", "-o", "again.yaml")  # the old name
    answer = command("init", "three", "--teacher", taught, *limits)
    assert yaml.safe_load(Path("again.yaml").read_text())["student"]["model"] == RESNET
    assert "after the chosen" in row(answer.out + answer.err, VIT)[-1]


def test_nothing_at_hand_is_within_the_limits(hub, taught, command):
    cached(hub, VIT)
    answer = command("init", "three", "--teacher", taught, "--student-mb", "0.5")
    assert answer.code == 2
    (error,) = [line for line in answer.err.splitlines() if "is within" in line]
    assert re.match(r"--student-ms, --student-mb: .*test_vit.*over 0.5 MB", error)
    assert not Path("three.yaml").exists()


def test_a_teacher_of_random_weights_takes_no_student_from_the_cache(hub, command):
    classes(Path("three"), 5, 5, 5)
    answer = command("init", "three", "--student-mb", "2")
    assert answer.code == 0, answer
    assert "docs/weights.md, Where weights come from" in answer.out + answer.err
    cached(hub, VIT)  # now the teacher
    answer = command("init", "three", "--student-mb", "2", "-o", "again.yaml")
    assert row(answer.out + answer.err, VIT)[-1] == "it is the teacher"


def test_limits_choose_between_files(taught, command):
    for name in ("test_vit", "test_resnet"):
        torch.save(timm.create_model(name).state_dict(), f"{name}.pth")
    named = ("--student", "test_vit.pth", "--student", "test_resnet=test_resnet.pth")
    answer = command("init", "three", "--teacher", taught, *named)
    assert answer.code == 2
    assert "--student: is given 2 times, and no limit" in answer.err
    limits = ("--student-mb", "1.3")
    answer = command("init", "three", "--teacher", taught, *named, *limits)
    assert answer.code == 0, answer
    written = yaml.safe_load(Path("three.yaml").read_text())
    assert written["student"]["checkpoint"] == "test_vit.pth"
    limits = ("--student-mb", "0.5", "-o", "none.yaml")
    answer = command("init", "three", "--teacher", taught, *named, *limits)
    assert answer.code == 2
    assert "lcnet" not in answer.err  # no random weights in place of named ones


@pytest.mark.slow
def test_weights_at_hand_are_timed(hub, taught, command):
    cached(hub, VIT)
    limits = ("--student-ms", "5000", "--student-mb", "2")
    answer = command("init", "three", "--teacher", taught, *limits)
    assert answer.code == 0, answer
    shown = answer.out + answer.err
    for name in (VIT, "xcit_nano_12_p8_224"):
        assert 1 < float(row(shown, name)[1]) < 5000
    assert re.search(r"test_vit\S+ +# .* ms here", Path("three.yaml").read_text())
    limits = ("--student-ms", "1.0001", "--student-mb", "1.3", "-o", "none.yaml")
    answer = command("init", "three", "--teacher", taught, *limits)
    assert answer.code == 2
    assert re.search(r"test_vit.*over 1.0001 ms\).*lcnet_050.*over 1.3 MB", answer.err)


def test_no_student_is_small_enough(command):
    classes(Path("three"), 5, 5, 5)
    answer = command("init", "three", "--student-mb", "0.1MB")
    assert answer.code == 2
    assert re.search(
        r"--student-ms, --student-mb: .* 1\.8 MB.*lcnet_050: .* 2\.4 MB", answer.err
    )
    assert not Path("three.yaml").exists()


def test_damaged_images_are_counted_and_skipped():
    damaged = classes(Path("three"), 9, 9, 9) / "fig" / "00.jpg"
    damaged.write_bytes(damaged.read_bytes()[:100])
    text, written = wrote("three")
    assert written["data"]["on_corrupt"] == "skip"
    assert "1 of 2" in text
    assert written["data"]["max_skipped"] > 0.03


def bad(root: Path, case: str) -> list[object]:
    root.mkdir()
    if case == "folders":
        root.joinpath("a", "b", "c").mkdir(parents=True)
    if case in ("damaged", "mixed", "exists", "lost", "student"):
        classes(root, 3, 3, 3)
    if case == "damaged":
        for path in root.rglob("*.jpg"):
            path.write_bytes(b"no image")
    if case == "mixed":
        shutil.copy(root / "fig" / "00.jpg", root / "more.jpg")
    if case == "exists":
        Path("bad.yaml").write_text("run: {}")
    if case == "loose":
        loose(root, 5)
    options = {
        "lost": ["-o", "gone/a.yaml"],
        "student": ["--student", "resnet10t"],
    }.get(case, [])
    return {"file": [__file__], "absent": ["gone"]}.get(case, [root, *options])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("empty", "FOLDER: no images"),
        ("folders", "FOLDER: no images"),
        ("damaged", "FOLDER: none of 6 sampled images can be decoded"),
        ("mixed", "FOLDER: the image 'more.jpg' lies outside any class folder"),
        ("loose", "--teacher: the images have no labels"),
        ("exists", "-o: 'bad.yaml' exists"),
        ("lost", "-o: 'gone' is no folder that can be written to"),
        ("student", "--teacher: a student with pretrained weights"),
        ("file", "FOLDER: .*is a file"),
        ("absent", "FOLDER: 'gone' does not exist"),
    ],
)
def test_bad_input_is_one_line(case, words, command):
    answer = command("init", *bad(Path("bad"), case))
    assert answer.code == 2, answer
    assert len(answer.err.splitlines()) == 1, answer
    assert re.search(words, answer.err), answer
    if case == "exists":
        assert Path("bad.yaml").read_text() == "run: {}"


@pytest.mark.parametrize(
    ("names", "proposed"),
    [
        ([f"clip{clip}_{frame:04d}" for clip in range(4) for frame in range(5)], True),
        (
            [f"IMG_20{clip}-frame{frame}" for clip in range(4) for frame in range(5)],
            True,
        ),
        ([f"IMG_{number:04d}" for number in range(20)], False),
        ([f"{number:05d}" for number in range(20)], False),
        ([f"n01440764_{number}" for number in range(20)], False),
        ([f"DSC{number // 10}_{number}" for number in range(20)], False),
        (
            [f"jumbo_jet_s_{number:06d}" for number in range(10)]
            + [f"liner_s_{number}" for number in range(10)],
            False,
        ),
    ],
)
def test_names_of_frames_propose_the_key_that_keeps_them_together(
    inside, names, proposed
):
    for number, name in enumerate(CLASSES[:2]):
        (inside / "photos" / name).mkdir(parents=True)
        for place, stem in enumerate(names):
            Image.new("RGB", (20, 20), (9 * place, 80 * number, 40)).save(
                inside / "photos" / name / f"{stem}.jpg"
            )
    file, _ = init(inside / "photos", None, "", [], None, None)
    line = [
        line for line in file.read_text().splitlines() if line.startswith("  # group: ")
    ]
    assert len(line) == proposed
    if proposed:
        file.write_text(file.read_text().replace(line[0], line[0].replace("# ", "", 1)))
        section = config.load(str(file)).data
        assert re.search(section.options.group, f"apple/{names[7]}.jpg")
