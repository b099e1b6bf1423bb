"""Checks against the run folder: claims on teacher, student, data and scores, recomputed from it."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from kd.core.errors import KdError
from kd.core.host import versions
from kd.deploy.export import parity
from kd.deploy.export.calibrate import divide_logits
from kd.deploy.export.export import subject_of, teacher_of
from kd.deploy.export.graphs import Subject
from kd.deploy.export.receipt import about, chain_of, scores_of
from kd.deploy.verify.claims import RUN, Claims
from kd.deploy.verify.images import Line
from kd.models.classifier import digest
from kd.models.licences import UNKNOWN
from kd.models.timm_folder import export_files
from kd.setup.recipe import resolve
from kd.study.finished import Trust, opened_run, require_files

LIMITS = (2000, 0)  # numbers of images that kd-export compares: its default, all


def show_run(known: Claims, path: Path, trust: bool, lines: Sequence[Line] | None) -> None:
    """Make the receipt again from a run folder; without `trust` no code is run."""
    folder, stored = opened_run(path, trust)
    require_files(path, stored.data)
    recipe, told = resolve(stored), known.claimed
    vouched = Trust.of(trust, (), recipe.data)
    vouched.check_models({"student": recipe.student})
    subject = subject_of(folder, recipe, vouched, bool(told["output"].get("space")))
    if told["chain"]["student"]["is"] == "teacher":
        subject = teacher_of(subject, folder, vouched)
    if by := told.get("calibration", {}).get("temperature"):
        divide_logits(subject.student.network, by)
    recipe, task, exported = subject.recipe, subject.recipe.student.task, digest(subject.student.network)
    labels = subject.classes if task.logits else ()
    own, extra = subject.provenance, {} if recipe.data.bits == 16 else {"bits": recipe.data.bits}
    found = {
        "name": recipe.record.name,
        "chain": chain_of(subject, exported),
        "licences": {key: one for key, one in subject.licences.items() if one != UNKNOWN},
        "input": {"size": recipe.data.image_size, "crop": recipe.data.crop_pct} | extra,
        "kd.json": {**{key: own[key] for key in ("run", "step", "metrics", "eval_crop")}, "digest": exported},
        "output": {"space": "teacher"} if subject.student.project is not None else {},
        "about": about(subject),
    }
    if known.old:
        del found["about"]
    else:
        found["scores"] = scores_of(subject)
    if versions("timm")["timm"] == told["environment"]["packages"]["timm"] and not known.old:
        found["config.json"] = export_files(subject.student, labels, recipe.data.crop_pct, task.problem_type)[0]
    known.show(RUN, found)
    if lines is not None:
        _show_choice(known, subject, vouched, lines)


def _show_choice(known: Claims, subject: Subject, vouched: Trust, lines: Sequence[Line]) -> None:
    """Compare the list of images and their labels with the run's own validation images."""
    claimed = _named([(encoded, names) for encoded, _, names in lines])
    known.claimed["images.csv"]["choice"] = claimed
    try:
        vouched.check_folder(subject.recipe.data)
        with subject.images() as read:
            for limit in (len(lines), *LIMITS):
                found = _named([one for batch in read(limit) for one in _lines(subject, *batch)])
                if found == claimed:
                    break
    except KdError as error:
        known.reasons["images.csv/choice"] = f"the run's images: {error.wrong}"
        return
    known.show(RUN, {"images.csv": {"choice": found}})


def _lines(subject: Subject, _: object, labels: parity.np.ndarray, crcs: Sequence[int]) -> list[tuple]:
    """Return CRC-32 and names in the form of `GraphOutputs.write_images`."""
    classes, found = subject.classes if subject.recipe.student.task.logits else (), []
    for crc, label in zip(crcs, labels, strict=True):
        shown = [int(label)] if label.ndim == 0 else [i for i, there in enumerate(label) if there > 0]
        known = label.min() >= 0 and bool(classes)
        found.append((crc, [classes[i] for i in shown] if known else None))
    return found


def _named(lines: list[tuple]) -> str:
    return f"{len(lines)} images, {hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:12]}"
