"""What models answer on validation images, each alone: for the page of a run, and for trackers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kd.core.contracts import Dataset
from kd.core.seeds import evenly_spaced
from kd.data.batches import ask, batches_of
from kd.data.views import Views
from kd.parts.tasks.single_label import temperature

LOOKED, SHOWN = 500, 12  # images among which the surest mistakes are looked for; mistakes


def ask_all(models: Mapping[str, Any], shown: Dataset, images: int, device: torch.device) -> dict[str, Any]:
    """Run models over so many images of a split as evaluation shows them, in float32; 0: all.

    Return JSON values: `of` (images of the split), `ids`, `label`, and of each model its answers, by its name, and
    their probabilities (`NAME_share`). "student" takes pixels, any other model a batch. `student_sure` are its
    probabilities after a temperature that every second image gave; `cpu_ms` is the CPU time of an image by model.
    """
    sampled = evenly_spaced(len(shown), images or len(shown))
    content: dict[str, Any] = {"of": len(shown), "ids": [], "label": []}
    content |= {f"{name}{part}": [] for name in models for part in ("", "_share")}
    logits: list[torch.Tensor] = []
    seconds = dict.fromkeys(models, 0.0)
    for every in batches_of(shown, sampled):
        batch = every.take((every.label >= 0).nonzero()[:, 0])
        if not len(batch.ids):
            continue
        content["ids"] += batch.ids.tolist()
        content["label"] += batch.label.tolist()
        for name, model in models.items():
            takes_pixels = name == "student"
            start = time.process_time()
            (answer,) = ask((lambda one: model(one.image)) if takes_pixels else model, [batch], device)  # noqa: B023
            seconds[name] += time.process_time() - start
            logits_BC = answer.outputs.logits.float()
            best = logits_BC.softmax(-1).max(-1)
            logits += [logits_BC] if takes_pixels else []
            content[name] += best.indices.tolist()
            content[f"{name}_share"] += [round(share, 4) for share in best.values.tolist()]
    content["student_sure"] = _calibrated(torch.cat(logits), torch.tensor(content["label"])) if logits else []
    count = max(1, len(content["label"]))
    content["cpu_ms"] = {} if device.type != "cpu" else {name: 1000 * each / count for name, each in seconds.items()}
    return content


def _calibrated(logits_NC: torch.Tensor, label_N: torch.Tensor) -> list[float]:
    """Return the probability of each answer, after a temperature that every second image gave."""
    chosen_NC, labels = logits_NC[::2], label_N[::2]
    wrong = bool((chosen_NC.argmax(1) != labels).any())  # without a mistake no temperature is the best
    by = temperature(chosen_NC, labels) if wrong else 1.0
    return (logits_NC.double() / by).softmax(1).amax(1).tolist()


def mistakes(student: Any, shown: Views, classes: Sequence[str], device: torch.device) -> dict[str, np.ndarray]:
    """Return images of a split that a student gets wrong, uint8 [S, S, 3], its surest mistakes first, by a title."""
    found = ask_all({"student": student}, shown, LOOKED, device)
    wrong = [i for i, label in enumerate(found["label"]) if label != found["student"][i]]
    wrong.sort(key=lambda i: -found["student_share"][i])
    pictures = {}
    for i in wrong[:SHOWN]:
        id, label, answer = found["ids"][i], classes[found["label"][i]], classes[found["student"][i]]
        title = f"{label}, answered {answer} ({100 * found['student_share'][i]:.0f} %): {shown.source.name(id)}"
        pictures[title] = shown.load(id, 0).pixels.permute(1, 2, 0).numpy()
    return pictures
