"""Try a fitted teacher on validation images before a configuration names it."""

import logging
from dataclasses import replace

import torch

from kd.core.evaluation import least_score
from kd.core.seeds import evenly_spaced
from kd.core.text import percent
from kd.jobs.init.folder import ImageFolder
from kd.jobs.init.networks import ChosenTeacher

TRIED = 100
"""Validation images of a trial: twice the chance level of 12 classes is three standard
deviations above it, and a ViT-B takes half a minute on a core or two.
"""
FEWEST = 50  # labels of validation below which a good teacher is not told from chance
BATCH = 16  # images at once: 200 MB of activations in a ViT-B at 224 px

log = logging.getLogger("kd")


def tried(teacher: ChosenTeacher, images: ImageFolder, size: int) -> ChosenTeacher:
    """Return a teacher with its accuracy in the reason; one at chance is to be fitted.

    Without its network, or without one label per image, it is returned as it is.

    Args:
        teacher: the teacher.
        images: the folder with the validation images.
        size: `data.image_size`, pixels.
    """
    if teacher.network is None or images.labels == "none" or images.sets:
        return teacher
    correct = _correct(teacher, images, size)
    count = len(correct)
    if not count:
        return teacher
    score = sum(correct) / count
    chance = 1 / len(images.data.classes)
    text = f"right on {percent(score)} of {count} validation images"
    if count < FEWEST or score > least_score(chance) or score == 1:
        log.info("--teacher: %s", text)
        return teacher._replace(why=f"{teacher.why}, {text}")
    text += f", where chance is {percent(chance)}"
    log.warning(
        "--teacher: %s. It will be fitted to the labels. Was it fitted to these classes"
        " in another order? Then leave out teacher.pretrained and teacher.fit, and name"
        " its classes in its order with teacher.classes=FILE",
        text,
    )
    return teacher._replace(why=f"{teacher.why}, {text}", role="fit")


@torch.inference_mode()
def _correct(teacher: ChosenTeacher, images: ImageFolder, size: int) -> list[bool]:
    """Return for each readable image of the trial whether the prediction is right."""
    data = images.data
    plan = replace(data.plan, image_size=size)
    views = replace(data, plan=plan).evaluation_views(data.val, on_corrupt="skip")
    labelled = data.labels(val=True).ge(0).nonzero().flatten().tolist()
    ids = [labelled[place] for place in evenly_spaced(len(labelled), TRIED)]
    network = teacher.network.eval()
    correct: list[bool] = []
    for start in range(0, len(ids), BATCH):
        samples = [views.load(id, 0) for id in ids[start : start + BATCH]]
        samples = [sample for sample in samples if sample.readable]
        if samples:
            pixels = torch.stack([sample.pixels for sample in samples])
            predicted = network(pixels).logits.argmax(1).tolist()
            labels = [int(sample.label) for sample in samples]
            correct += map(int.__eq__, predicted, labels)
    return correct
