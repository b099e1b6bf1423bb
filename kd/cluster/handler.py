"""The student in SageMaker's PyTorch container: the four hooks that its toolkit calls.

`kd-export --sagemaker` ships this file as `code/inference.py`, with `exported.py`, `pixels.py` and `sure.py` beside it.
It needs torch, timm and Pillow and nothing else of kd.

A body is image/jpeg, image/png, image/webp, application/x-image, or JSON: {"image": base64} or {"images": [base64]}.
The answer is JSON, one prediction an image. A ValueError is what the toolkit turns into an answer to the client.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image

try:
    from exported import MANIFEST, sha256, unchanged  # type: ignore[import-not-found]
    from pixels import centre_crop, least_of_centre, reduce, to_rgb  # type: ignore[import-not-found]
    from sure import bands, mark  # type: ignore[import-not-found]
except ImportError:  # inside of kd
    from kd.core.sure import bands, mark
    from kd.files.manifest import MANIFEST, sha256, unchanged
    from kd.files.pixels import centre_crop, least_of_centre, reduce, to_rgb

WEIGHTS = "model.safetensors"
FILES = (WEIGHTS, "config.json")
FORMATS = ("JPEG", "PNG", "WEBP")
IMAGE_TYPES = ("image/jpeg", "image/png", "image/webp", "application/x-image")
MAX_PIXELS, MAX_IMAGES, TOP = 25_000_000, 16, 5  # as in `deploy.serve.limits` and `app`: the same contract


class Student:
    """The network, its labels, and the preprocessing of an image."""

    def __init__(self, folder: Path) -> None:
        if not (folder / WEIGHTS).is_file():  # timm would take a pickle, which may run code
            raise FileNotFoundError(f"no {WEIGHTS} in '{folder}'")
        manifest = verified(folder)
        self.network = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        config: dict[str, Any] = self.network.pretrained_cfg  # type: ignore[assignment]
        self.embeds = manifest.get("output", {}).get("name") == "embedding"
        self.labels = [] if self.embeds else list(config["label_names"])
        thresholds = manifest.get("output", {}).get("thresholds", {})
        self.thresholds = [thresholds[label]["threshold"] for label in self.labels] if thresholds else []
        self.unsure = bands(manifest.get("output", {}), self.labels)
        self.version, pixels = manifest["version"], manifest["input"]
        self.size, self.crop, self.network_size = pixels["size"], pixels["crop"], pixels["network_size"]
        self.margin = pixels.get("margin", 0)  # an older export: JPEGs are decoded whole
        self.mean, self.std = (torch.tensor(config[key]).view(1, 3, 1, 1) for key in ("mean", "std"))

    def __call__(self, images: list[Image.Image]) -> torch.Tensor:
        """Return the probabilities of opened images, [B, C], or vectors of an embedding model, [B, D], of length 1."""
        crops = [np.asarray(centre_crop(self._decode(image), self.size, self.crop)).copy() for image in images]
        pixels = torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2).float()
        if self.network_size != self.size:
            size = (self.network_size, self.network_size)
            pixels = torch.nn.functional.interpolate(pixels, size, mode="bicubic", antialias=True).clamp(0, 255)
        with torch.inference_mode():
            output = self.network((pixels / 255 - self.mean) / self.std)
            if self.embeds:
                return torch.nn.functional.normalize(output, dim=1)
            return output.double().sigmoid() if self.thresholds else output.softmax(-1)

    def _decode(self, image: Image.Image) -> Image.Image:
        with image, _readable():
            reduce(image, lambda width, height: least_of_centre(width, height, self.size, self.crop), self.margin)
            image.load()
            return to_rgb(image)


def verified(folder: Path) -> dict[str, Any]:
    """Return the manifest of an export; ValueError: it, the weights or the labels are not what was exported."""
    manifest = json.loads((folder / MANIFEST).read_text())
    files = manifest.get("files", {})
    changed = [] if unchanged(manifest) else [MANIFEST]
    changed += [name for name in FILES if sha256(folder / name) != files.get(name, {}).get("sha256")]
    if changed:
        raise ValueError(f"not what was exported (the checksum differs): {', '.join(changed)} in '{folder}'")
    return manifest


def model_fn(model_dir: str, context: Any = None) -> Student:
    """Load the student from the unpacked model.tar.gz."""
    return Student(Path(model_dir))


def input_fn(request_body: bytes | str, content_type: str, context: Any = None) -> list[Image.Image]:
    """Open the images of a body; ValueError: an unknown type, no image, or a limit. `predict_fn` decodes them."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind in IMAGE_TYPES:
        return [_open(request_body.encode() if isinstance(request_body, str) else bytes(request_body))]
    if kind != "application/json":
        raise ValueError(f"content type '{kind}' is not one of {', '.join((*IMAGE_TYPES, 'application/json'))}")
    try:
        content = json.loads(request_body)
        texts = content["images"] if "images" in content else [content["image"]]
        bodies = [base64.b64decode(text, validate=True) for text in texts]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError('the JSON body is not {"image": base64} or {"images": [base64, ...]}') from error
    if not 1 <= len(bodies) <= MAX_IMAGES:
        raise ValueError(f"{len(bodies)} images; allowed are 1 to {MAX_IMAGES}")
    return [_open(body) for body in bodies]


def predict_fn(data: list[Image.Image], model: Student, context: Any = None) -> dict[str, Any]:
    """Classify the images or embed them; ValueError: one is damaged.

    Where an image may have several labels, return those above their threshold.

    An answer has `sure` where the export has a threshold for it, as that of `kd-serve` has.
    """
    if model.embeds:
        return {"version": model.version, "predictions": [{"embedding": row} for row in model(data).tolist()]}
    predictions, probabilities = [], model(data)
    for row in probabilities:
        order = row.argsort(descending=True, stable=True).tolist()
        ranked = [{"label": model.labels[i], "score": round(float(row[i]), 6)} for i in order]
        if model.thresholds:
            above = [entry for i, entry in zip(order, ranked, strict=True) if row[i] > model.thresholds[i]]
            predictions.append({"labels": above, "top": ranked[:TOP]})
        else:
            predictions.append({**ranked[0], "top": ranked[:TOP]})
    mark(predictions, probabilities.numpy(), model.labels, model.unsure)
    return {"version": model.version, "predictions": predictions}


def output_fn(prediction: dict[str, Any], accept: str, context: Any = None) -> tuple[str, str]:
    """Write the answer; ValueError: another type than JSON is asked for."""
    kinds = [kind.partition(";")[0].strip() for kind in accept.split(",")]
    if not {"application/json", "application/*", "*/*", ""} & set(kinds):
        raise ValueError(f"accept '{accept}' is not application/json")
    return json.dumps(prediction), "application/json"


def _open(body: bytes) -> Image.Image:
    with _readable():
        image = Image.open(io.BytesIO(body), formats=FORMATS)
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"{image.width} x {image.height} pixels are more than {MAX_PIXELS}")
    return image


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # on damaged data Pillow raises errors of every type
        raise ValueError(f"the body is not a whole image in {', '.join(FORMATS)} ({type(error).__name__})") from error
