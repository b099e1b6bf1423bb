"""Amazon's two example scripts run on `kd.sifting`, byte for byte.

Their text is not ours to keep: KD_AWS_SCRIPTS names a folder with `train_images.py` and
`train_bert.py`, which lie under archived/*/scripts in
github.com/aws/amazon-sagemaker-examples (commit 2d519b52). What the scripts take from
their job is made here: a tiny model and data, `evaluate` without its hub, a CPU in the
place of "cuda". `train_bert.py` as published names four things that it does not import;
they are given as builtins.
"""

import hashlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPTS = Path(os.environ.get("KD_AWS_SCRIPTS", "no folder"))
DIGESTS = {
    "train_images.py": (
        "04c922a2fa3d6e8071f86eb5e25de95c0c7f9500764efcfdb5b2fcdbc4668fe7"
    ),
    "train_bert.py": "e4a845449971696c44805feaf78b171d073f421840d7a58126367260201f31e7",
}
EVALUATE = """
class Accuracy:
    right = seen = 0

    def add_batch(self, predictions, references):
        self.right += int((predictions == references).sum())
        self.seen += len(references)

    def compute(self):
        return {"accuracy": self.right / self.seen}


def load(*name, **options):
    return Accuracy()


combine = list
"""
IMAGES = """
import os, runpy, sys
import kd.sifting, numpy, torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

draw = numpy.random.default_rng(0)
pictures = [draw.integers(0, 256, (32, 32, 3), dtype=numpy.uint8) for _ in range(160)]
rows = {"image": pictures, "label": [number % 2 for number in range(160)]}
features = Features({"image": Image(), "label": ClassLabel(names=["a", "b"])})
DatasetDict({"train": Dataset.from_dict(rows, features)}).save_to_disk("data")
shape = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
ViTForImageClassification(ViTConfig(**shape, image_size=32, patch_size=16)).save_pretrained("model")
ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained("model")
os.environ["SM_CHANNEL_TRAIN"] = "data"


class Torch:
    def __getattr__(self, name):
        return getattr(torch, name)

    def device(self, name):
        return torch.device("cpu" if name == "cuda" else name)


kd.sifting.install_as_smart_sifting()
sys.argv[2:] = "--use_sifting 1 --model_name_or_path model --num_train_epochs 3 --seed 1".split()
del sys.argv[0]
names = runpy.run_path(sys.argv[0], run_name="aws")
names["main"].__globals__["torch"] = Torch()
names["main"]()
"""
BERT = """
import builtins, os, random, runpy, sys
from pathlib import Path
import kd.sifting
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

draw, words, folder = random.Random(0), ["good", "bad", "the", "book", "was"], Path("bert-base-uncased")
folder.mkdir()
(folder / "vocab.txt").write_text("\\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
shape = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=10)
BertForSequenceClassification(BertConfig(**shape)).save_pretrained(folder)
lines = [f"{' '.join(draw.choices(words, k=6))}\\t{draw.randint(0, 1)}" for _ in range(600)]
Path("train.tsv").write_text("\\n".join(["sentence\\tlabel", *lines]))
os.environ["SM_CHANNEL_DATA"] = "."
kd.sifting.install_as_smart_sifting()
builtins.t = None
for name in ("RelativeProbabilisticSiftConfig", "LossConfig", "SiftingBaseConfig"):
    setattr(builtins, name, getattr(kd.sifting, name))
sys.argv[2:] = ["--log_level", "20", "--epochs", "2"]
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("name", "around", "needs", "images", "size"),
    [
        ("train_images.py", IMAGES, ("datasets", "transformers"), 3 * 136, 8),
        (
            "train_bert.py",
            BERT,
            ("pytorch_lightning", "sklearn", "pandas", "transformers"),
            2 * 486,
            32,
        ),
    ],
)
def test_a_quarter_is_trained_after_the_delay(
    name, around, needs, images, size, tmp_path
):
    script = SCRIPTS / name
    if not script.is_file():
        pytest.skip("KD_AWS_SCRIPTS names no folder with Amazon's scripts")
    if missing := [package for package in needs if find_spec(package) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    assert hashlib.sha256(script.read_bytes()).hexdigest() == DIGESTS[name]
    (tmp_path / "evaluate.py").write_text(EVALUATE)
    (tmp_path / "around.py").write_text(around)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    ran = subprocess.run(
        [sys.executable, "around.py", str(script.resolve())],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    counts = {
        name: [
            int(line.rsplit(": ")[-1])
            for line in ran.stderr.splitlines()
            if f"num_orig_samples_{name}" in line
        ]
        for name in ("seen", "kept")
    }
    last = {name: values[-1] for name, values in counts.items()}
    assert last["seen"] == pytest.approx(images, abs=size)
    delayed = (
        10 * size
    )  # all of them are trained; then 1 / (1 + beta) with the scripts' beta of 3
    assert last["kept"] == pytest.approx(
        delayed + (last["seen"] - delayed) / 4, abs=size
    )
