"""Describe where an export comes from.

The chain leads from its teacher to its graphs, with the comparison at each step.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from kd.core.scores import TITLES, Scores
from kd.core.text import as_one_line
from kd.files.manifest import DIGITS, graphs_by_priority
from kd.setup.open_cache import CHECKED


def chain_lines(manifest: Mapping[str, Any]) -> list[str]:
    """Return an export's chain of provenance as lines of text; [] if it has none."""
    chain = manifest.get("chain", {})
    lines: list[str] = []
    if "teacher" in chain:
        lines += _teacher_lines(manifest)
    if "student" in chain:
        lines += _student_lines(chain["student"], manifest.get("calibration", {}))
    if chain:
        lines += _graph_lines(manifest)
    return [as_one_line(line.replace("`", "'")) for line in lines]


def _teacher_lines(manifest: Mapping[str, Any]) -> Iterator[str]:
    chain = manifest["chain"]
    members = [
        f"{config_path}  {member['name']} ({member['source']}), licence"
        f" {manifest['licences'].get(config_path, 'unknown')}"
        for config_path, member in chain["teacher"]["members"].items()
    ]
    members[-1] += f", weights {_short(chain['teacher']['weights'])}"
    if len(members) > 1:
        members[-1] += " of all"
    yield from members
    outputs = chain["answers"]
    if outputs:
        yield (
            f"  | compared: {CHECKED} stored outputs, computed again whenever a run"
            " opened them"
        )
        yield (
            f"outputs  {outputs.get('count', 'not counted')} in the cache"
            f" {_short(outputs['cache'])}"
        )
    else:
        yield "  | compared: nothing, since the teacher ran live"
        yield "outputs  not stored"
    yield (
        "  | compared:"
        f" {_against_teacher(manifest) or 'no score against the teacher is recorded'}"
    )


def _student_lines(
    student: Mapping[str, Any], calibration: Mapping[str, Any]
) -> Iterator[str]:
    yield (
        f"{student['is']}  run {student['run']}, step {student['step']}, weights"
        f" {_short(student['weights'])}"
    )
    if student["weights"] != student["exported"]:
        yield (
            "  | compared: its logits, divided by"
            f" {calibration.get('temperature', 0):.3g}"
        )
        yield f"calibrated  weights {_short(student['exported'])}"


def _graph_lines(manifest: Mapping[str, Any]) -> Iterator[str]:
    for name in graphs_by_priority(manifest):
        parity = manifest["parity"][name]
        equal = ""
        if "same_top1" in parity:
            equal = f"the same prediction on {parity['same_top1']} of "
        yield (
            f"  | compared: {equal}{parity['images']} images, largest difference"
            f" {parity['max_difference']:.1e}"
        )
        yield f"graph  {name} {_short(manifest['chain']['graphs'][name])}"


def _against_teacher(manifest: Mapping[str, Any]) -> str:
    scores = manifest["scores"]
    if "columns" not in scores:  # of kd 0.3
        return manifest["chain"]["against_teacher"]
    return Scores.read(scores["columns"]).against_teacher(
        scores["pair"], TITLES[scores["split"]]
    )


def _short(digest: str) -> str:
    return digest[:DIGITS] or "unknown"
