"""Recompute claims on teacher, student, data and scores from the run folder."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from kd.core.errors import KdError
from kd.core.host import package_versions
from kd.deploy.export import parity
from kd.deploy.export.calibrate import divide_logits
from kd.deploy.export.claims import RUN
from kd.deploy.export.export import (
    input_claims,
    output_claims,
    read_subject,
    teacher_subject,
)
from kd.deploy.export.graphs import ExportArtifacts, Subject
from kd.deploy.export.receipt import about_claims, export_chain, export_scores
from kd.deploy.verify.comparison import Claims, mark_gaps
from kd.deploy.verify.images import ListedImage
from kd.models.licences import UNKNOWN
from kd.models.timm_folder import export_files
from kd.setup.finished import Trust, opened_run, require_files
from kd.setup.recipe import resolve

LIMITS = (2000, 0)  # numbers of images that kd-export compares: its default, all


def check_run(
    claims: Claims, path: Path, trust: bool, lines: Sequence[ListedImage] | None
) -> None:
    """Make the receipt again from a run folder; without `trust` no code is run."""
    folder, stored = opened_run(path, trust)
    require_files(path, stored.data)
    recipe = resolve(stored)
    claimed = claims.claimed
    vouched = Trust.of(trust, (), recipe.data)
    vouched.check_models({"student": recipe.student})
    subject = read_subject(
        folder, recipe, vouched, bool(claimed["output"].get("space"))
    )
    if claimed["chain"]["student"]["is"] == "teacher":
        subject = teacher_subject(subject, folder, vouched)
    if temperature := claimed.get("calibration", {}).get("temperature"):
        divide_logits(subject.student.network, temperature)
    recipe = subject.recipe
    chain = export_chain(subject)
    provenance = {**subject.provenance, "digest": chain["student"]["exported"]}
    keys = ("run", "step", "metrics", "eval_crop", "digest")
    remade = {
        "name": recipe.name,
        "chain": chain,
        "licences": {
            key: licence
            for key, licence in subject.licences.items()
            if licence != UNKNOWN
        },
        "input": input_claims(subject.student, recipe.data),
        "output": output_claims(subject.student, ExportArtifacts()),
        "kd.json": {key: provenance[key] for key in keys},
    }
    # the folder was renamed
    if path.resolve().name != claimed["chain"]["student"]["run"]:
        del remade["chain"]["student"]["run"], remade["kd.json"]["run"]
    if not claims.old:
        remade["about"] = about_claims(subject)
        remade["scores"] = mark_gaps(claimed["scores"], export_scores(subject))
        if (
            package_versions("timm")["timm"]
            == claimed["environment"]["packages"]["timm"]
        ):
            labels = subject.classes if recipe.task.logits else ()
            remade["config.json"], _ = export_files(
                subject.student, labels, recipe.data.crop_pct, recipe.task.problem_type
            )
    claims.add_evidence(RUN, remade)
    if lines is not None:
        _check_choice(claims, subject, vouched, lines)


def _check_choice(
    claims: Claims, subject: Subject, vouched: Trust, lines: Sequence[ListedImage]
) -> None:
    """Compare the listed images and their labels with the run's validation images."""
    claimed = _choice_text([(encoded, names) for encoded, _, names in lines])
    classes = subject.classes if subject.recipe.task.logits else ()
    claims.claimed["images.csv"]["choice"] = claimed
    try:
        vouched.check_folder(subject.recipe.data)
        with subject.images() as read:
            for limit in (len(lines), *LIMITS):
                images = (
                    image
                    for _, labels, crcs in read(limit)
                    for image in zip(crcs, labels, strict=True)
                )
                choice = _choice_text(
                    [
                        (encoded, parity.label_names(label, classes))
                        for encoded, label in images
                    ]
                )
                if choice == claimed:
                    break
    except KdError as error:
        claims.reasons["images.csv/choice"] = f"the run's images: {error.wrong}"
        return
    claims.add_evidence(RUN, {"images.csv": {"choice": choice}})


def _choice_text(lines: list[tuple]) -> str:
    digest = hashlib.sha256(json.dumps(lines).encode()).hexdigest()
    return f"{len(lines)} images, {digest[:12]}"
