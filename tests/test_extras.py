"""Each extra of pyproject.toml alone: what it names, and what that needs, is enough for
what kd does with it.

An environment is made for each: links to the packages of this one that `pip install
'kd[EXTRA]'` would bring, and no others. So nothing is downloaded, and a package that
the suite has by accident is missed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from pieces import tiny

import kd
from kd.cluster.requests import IMAGE_RUNTIMES
from kd.parts import registry

tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
NOT_TRIED = {
    "dev": "this suite",
    "xla": "make test-xla",
    "executorch": "tests/outside/test_exporter.py, where it is installed",
}
ACCOUNT = (
    "--image 1.dkr.ecr.us-east-1.amazonaws.com/kd --role"
    " arn:aws:iam::123456789012:role/kd --output s3://bucket/kd"
)
TRIED: dict[str, str] = {
    "": "-m kd.cli train food.yaml --check",
    "hf": "-c 'import datasets, kd.parts.datasets.hf'",
    "heic": "-c 'from kd.files import pixels; assert pixels.load_heif()'",
    "nncf": "-c 'import nncf, openvino, kd.parts.exporters.openvino; nncf.quantize'",
    "openvino": (
        "-c 'import onnx, openvino, kd.models.runtimes, kd.deploy.export.export;"
        " openvino.Core()'"
    ),
    "track": "-m kd.cli train food.yaml run.steps=1 run.trackers=[tensorboard]",
    "sagemaker": (
        f"-m kd.cli launch food.yaml --instance ml.c5.xlarge --dry-run {ACCOUNT}"
    ),
    "ray": "-m kd.cli launch food.yaml --local dnn=1,data=1 run.steps=1",
    "transformers": (
        "-c 'import transformers, kd.parts.networks.transformers,"
        " kd.parts.networks.zero_shot'"
    ),
    "sign": (
        "-c 'import model_signing.signing, model_signing.verifying,"
        " kd.deploy.export.signature'"
    ),
    "sweep": (
        "-c 'import kd.study.sweeps.conduct; from optuna import storages, samplers;"
        " samplers.TPESampler(seed=0)'"
    ),
    "completion": "-c 'import argcomplete, kd.cli.__main__'",
    "sift-integrations": "-c 'import lightning, transformers, kd.sifting.frameworks'",
}
"""Arguments of Python."""


def closure(requirements: list[str]) -> set[str]:
    """Return the names of all packages that requirements bring."""
    packages: set[tuple[str, str]] = set()
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate(
            {"extra": extra}
        ):
            continue
        for package_extra in {"", *requirement.extras}:
            package = (requirement.name.lower().replace("_", "-"), package_extra)
            if package not in packages:
                packages.add(package)
                texts = distribution(requirement.name).requires or []
                waiting += [(Requirement(text), package_extra) for text in texts]
    return {name for name, _ in packages}


def environment(folder: Path, names: set[str]) -> Path:
    """Make an environment of links to packages, with kd; return its Python."""
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for name in sorted(names):
        files = distribution(name).files or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            source = Path(str(distribution(name).locate_file(top)))
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    (site / "kd.pth").write_text(f"{ROOT}\n")
    return folder / "bin" / "python"


@pytest.fixture
def food(tmp_path) -> None:
    """Write food.yaml: a run of a second."""
    settings = {
        "run": {
            "folder": "runs",
            "name": "alone",
            "steps": 1,
            "every": {"evaluate": 0},
        },
        "data": {
            "kind": "food_mini",
            "train_images": 4,
            "val_images": 2,
            "image_size": 16,
            "batch_size": 8,
        },
        "teacher": {
            **tiny(),
            "precision": "fp32",
            "attention": "unfused",
            "min_accuracy": 0,
            "fit": {"epochs": 1},
        },
        "student": {**tiny(), "init": "scratch"},
        "losses": [{"kind": "kl"}],
        "backend": {"threads": 1, "precision": "fp32"},
    }
    (tmp_path / "food.yaml").write_text(yaml.safe_dump(settings))


@pytest.mark.slow
@pytest.mark.parametrize("extra", TRIED)
def test_an_extra_alone_is_enough(extra, food, tmp_path):
    try:
        names = closure([*PROJECT["dependencies"], *EXTRAS.get(extra, [])])
    except PackageNotFoundError as error:
        pytest.skip(f"{error} is not installed")
    python = environment(tmp_path / "env", names)
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL", "KD_"))
    }
    environ |= {
        "HF_HUB_OFFLINE": "1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "TMPDIR": "/tmp",
    }
    argv = [str(python), *shlex.split(TRIED[extra])]
    process = subprocess.run(
        argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]


def test_every_extra_is_tried():
    assert set(EXTRAS) == (set(TRIED) | set(NOT_TRIED)) - {""}


def test_the_reasons_of_the_floors_name_what_kd_uses():
    """accelerate's named reduce_batch_size_fn long after its use was removed."""
    section = re.search(
        r"^dependencies = \[(.*?)^\]",
        (ROOT / "pyproject.toml").read_text(),
        re.S | re.M,
    )
    named = {
        word
        for comment in re.findall("#(.*)", section[1])
        for word in re.findall("[a-z]+(?:_[a-z]+)+", comment)
    }
    source = "".join(path.read_text() for path in (ROOT / "kd").rglob("*.py"))
    assert "save_config_for_hf" in named
    assert {word for word in named if word not in source} == set()


def image_requirements() -> list[str]:
    """Run the line of Dockerfile that lists what the image installs."""
    (words,) = re.findall(
        r"sed -nE '(.*?)' /src/pyproject.toml", (ROOT / "Dockerfile").read_text()
    )
    command = ["sed", "-nE", words, str(ROOT / "pyproject.toml")]
    return subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.split()


def test_the_image_of_the_endpoint_takes_its_floors_from_pyproject():
    """Dockerfile had its own starlette>=0.40; below 0.49.1 a Range header burns time."""
    floors = image_requirements()
    names = {floor.partition(">=")[0] for floor in floors}
    server = {"starlette", "granian", "python-multipart", "prometheus-client"}
    assert names == {"numpy", "pillow", *server, *IMAGE_RUNTIMES}
    assert set(floors) <= {*PROJECT["dependencies"], *EXTRAS["openvino"]}


def test_the_image_has_the_runtime_of_each_file_that_accept_may_choose():
    """`--accept` once shipped openvino.int8.xml, which the container could not run."""
    candidates = {
        graph.runtime
        for graph in registry.graphs().values()
        if not graph.code and not graph.named
    }
    assert candidates == set(IMAGE_RUNTIMES)


@pytest.mark.slow
def test_an_endpoint_answers_with_the_packages_of_the_image_alone(
    distilled, photos, command, tmp_path
):
    """Without torch and timm, from the graph of each runtime."""
    assert (
        command("export", distilled, "--to", tmp_path / "export", "--openvino").code
        == 0
    )
    python = environment(tmp_path / "env", closure(image_requirements()))
    picture = next((photos / "val" / "fig").glob("*.jpg"))
    code = (
        "import importlib.util, kd, sys; assert not any(map(importlib.util.find_spec,"
        " ('torch', 'timm'))); "
    )
    code += (
        "print(*[kd.load('export', file)(sys.argv[1]).label for file in ('model.onnx',"
        " 'openvino.xml')])"
    )
    process = subprocess.run(
        [str(python), "-c", code, str(picture)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    labels = process.stdout.split()
    assert labels == [kd.load(tmp_path / "export")(picture).label] * 2
