"""Checks against the run folder: claims on teacher, student, data and scores,
recomputed from it.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from kd.core.errors import KdError
from kd.core.host import versions
from kd.deploy.export import parity
from kd.deploy.export.calibrate import divide_logits
from kd.deploy.export.claims import RUN
from kd.deploy.export.export import input_claims, output_claims, read_subject, teacher_subject
from kd.deploy.export.graphs import ExportArtifacts, Subject
from kd.deploy.export.receipt import about_claims, export_chain, export_scores
from kd.deploy.verify.comparison import Claims, with_gaps
from kd.deploy.verify.images import ListedImage
from kd.models.licences import UNKNOWN
from kd.models.timm_folder import export_files
from kd.setup.finished import Trust, opened_run, require_files
from kd.setup.recipe import resolve

LIMITS = (2000, 0)  # numbers of images that kd-export compares: its default, all


def show_run(
    known: Claims, path: Path, trust: bool, lines: Sequence[ListedImage] | None
) -> None:
    """Make the receipt again from a run folder; without `trust` no code is run."""
    folder, stored = opened_run(path, trust)
    require_files(path, stored.data)
    recipe, told = resolve(stored), known.claimed
    vouched = Trust.of(trust, (), recipe.data)
    vouched.check_models({"student": recipe.student})
    subject = read_subject(folder, recipe, vouched, bool(told["output"].get("space")))
    if told["chain"]["student"]["is"] == "teacher":
        subject = teacher_subject(subject, folder, vouched)
    if by := told.get("calibration", {}).get("temperature"):
        divide_logits(subject.student.network, by)
    recipe, task, chain = subject.recipe, subject.recipe.task, export_chain(subject)
    labels = subject.classes if task.logits else ()
    own = {**subject.provenance, "digest": chain["student"]["exported"]}
    found = {
        "name": recipe.name,
        "chain": chain,
        "licences": {
            key: one for key, one in subject.licences.items() if one != UNKNOWN
        },
        "input": input_claims(subject.student, recipe.data),
        "output": output_claims(subject.student, ExportArtifacts()),
        "kd.json": {
            key: own[key] for key in ("run", "step", "metrics", "eval_crop", "digest")
        },
    }
    if path.resolve().name != told["chain"]["student"]["run"]:  # the folder was renamed
        del found["chain"]["student"]["run"], found["kd.json"]["run"]
    if not known.old:
        found |= {
            "about": about_claims(subject),
            "scores": with_gaps(told["scores"], export_scores(subject)),
        }
    if (
        versions("timm")["timm"] == told["environment"]["packages"]["timm"]
        and not known.old
    ):
        found["config.json"] = export_files(
            subject.student, labels, recipe.data.crop_pct, task.problem_type
        )[0]
    known.show(RUN, found)
    if lines is not None:
        _show_choice(known, subject, vouched, lines)


def _show_choice(
    known: Claims, subject: Subject, vouched: Trust, lines: Sequence[ListedImage]
) -> None:
    """Compare the list of images and their labels with the run's own validation
    images.
    """
    claimed = _named([(encoded, names) for encoded, _, names in lines])
    classes = subject.classes if subject.recipe.task.logits else ()
    known.claimed["images.csv"]["choice"] = claimed
    try:
        vouched.check_folder(subject.recipe.data)
        with subject.images() as read:
            for limit in (len(lines), *LIMITS):
                images = (
                    image
                    for _, labels, crcs in read(limit)
                    for image in zip(crcs, labels, strict=True)
                )
                found = _named(
                    [
                        (encoded, parity.label_names(label, classes))
                        for encoded, label in images
                    ]
                )
                if found == claimed:
                    break
    except KdError as error:
        known.reasons["images.csv/choice"] = f"the run's images: {error.wrong}"
        return
    known.show(RUN, {"images.csv": {"choice": found}})


def _named(lines: list[tuple]) -> str:
    return (
        f"{len(lines)} images,"
        f" {hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:12]}"
    )
