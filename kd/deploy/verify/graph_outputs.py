"""Recompute outputs: run an export's graphs and weights on its images, on random images, and behind `kd-serve`."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kd.core.errors import KdError, ModelError
from kd.core.evaluation import Task
from kd.core.host import cores
from kd.deploy.export import defer, parity, variants
from kd.deploy.export.calibrate import cross_fitted
from kd.deploy.export.graphs import CALIBRATION_IMAGES
from kd.deploy.export.parity import EAGER, GraphOutputs, Runner
from kd.deploy.export.receipt import OWN
from kd.deploy.serve import self_check
from kd.deploy.serve.engines import open_graph
from kd.deploy.verify.child import Confined
from kd.deploy.verify.claims import EXACT, EXPORT, IMAGES, Claims
from kd.deploy.verify.images import Shown
from kd.files.manifest import MANIFEST
from kd.models.classifier import Classifier
from kd.parts import registry
from kd.parts.tasks import label_sets, single_label

RANDOM = 48  # random images, unknown to the export's author
TOLERANCE = 1e-3  # tolerances of exact graphs, as in kd-export, and relative to the largest |logit| on random images
LOSSY = 30.0  # multiple of int8's and bfloat16's difference on the images allowed on random images; chosen
MOST_THREADS = 3  # kd-export measures servers at 3 numbers of threads: 1, --threads, all
AS_EXPORTED, SEEDED = "as at the export", "made from the seed"
GUESSED = "kd 0.3 took PyTorch's predictions for missing labels"
ALLOWED = 2.0  # multiple of the difference expected here that a graph may allow; chosen


def show_answers(
    known: Claims, folder: Path, shown: Shown, task: Task, network: Classifier | None, trust: bool
) -> None:
    """Runs graphs and weights on the images and recomputes the manifest's counts."""
    told, labels = known.claimed, known.labels
    if shown.repeated(known):  # a list of millions of lines would take hours
        return
    with ExitStack() as stack:
        runners = _runners(known, folder, trust, stack)
        if not runners:
            return
        mapped = told["output"].get("space")  # by weights that are not in model.safetensors
        eager = None if network is None or mapped else parity.eager_runner(network)
        reference = eager or next(iter(runners.values()))
        outputs = parity.compare(reference, runners, shown.batches(told["input"], labels, task))
        took = {name: run.cpu_ms(outputs.first[None]) for name, run in runners.items() if isinstance(run, Confined)}
        outputs = replace(outputs, cpu_ms={**outputs.cpu_ms, **took})
        known.images = len(outputs.labels)
        shown.show(known, labels, outputs.images)
        _show_counts(known, outputs, task, eager is not None)
        if eager is not None:
            _show_random(known, eager, runners, outputs)
    if eager is not None and task.logits:
        _show_scores(known, outputs, task)
    _show_promises(known, outputs, task, labels)
    _show_speed(known, folder, outputs)


def show_self_check(known: Claims, folder: Path) -> None:
    """Decode the self-check's pictures as `kd-serve` does, and run each graph on their pixels."""
    told, graphs = known.claimed, [name for name in known.graphs if not registry.graphs()[name].code]
    if self_check.KEY not in told:
        if (folder / self_check.FILE).exists() or (graphs and not known.old):  # kd 0.3 wrote none
            known.refuse(self_check.FILE, f"{MANIFEST} has no {self_check.KEY}")
        return
    reading = [told["input"].get(key, 16) for key in ("crop", "margin", "bits")]
    arrays = self_check.read((folder / self_check.FILE).read_bytes())
    exact = next((name for name in known.graphs if name in arrays), "")  # of the cheapest graph, float32
    told[self_check.FILE], found, seen = {"pixels": AS_EXPORTED, "pictures": SEEDED}, dict[str, Any](), dict[str, Any]()
    large, small = self_check.of_both_sizes(told["input"]["size"], reading[-1])
    stored = [array.tobytes() for key, array in arrays.items() if key.startswith("picture")]
    as_made = stored == large + small
    if as_made or not ("crops" not in arrays or known.elsewhere):  # an older list; another encoder's bytes
        seen["pictures"] = SEEDED if as_made else "others"
    for name in graphs:
        if name not in told[self_check.KEY]:
            known.refuse(f"{self_check.KEY}/{name}", f"{MANIFEST} has none")
            continue
        if registry.exporter(name).missing(name, False):
            continue
        with closing(Confined(folder / name, told["output"]["width"])) as run, known.reading(f"{name} on self_check"):
            least = registry.exporter(name).least(folder / name)
            found[name] = {key: least[key] for key in ("ir", "opset")}
            here = self_check.differences(arrays, name, run, *reading)
            most = told[self_check.KEY][name]["allowed"]
            usual = self_check.allowed(name, arrays[name], arrays[exact])
            found[name] |= {**least, "allowed": most if 0 <= most <= ALLOWED * usual else usual}
            told[self_check.FILE][name] = AS_EXPORTED
            seen[name] = AS_EXPORTED if here.logits <= most else f"differs by {here.logits:.2g}"
            near = here.pixels <= self_check.LEVELS
            seen["pixels"] = AS_EXPORTED if near else f"picture {here.picture} differs by {here.pixels:.3g} levels"
    known.show(EXPORT, {self_check.KEY: found, self_check.FILE: seen})


def _runners(known: Claims, folder: Path, trust: bool, stack: ExitStack) -> dict[str, Runner]:
    """Return the graphs that can run here; a graph that fails on a grey image is WRONG."""
    told, found = known.claimed, dict[str, Runner]()
    size = told["input"]["size"]
    for name in known.graphs:
        why, code = registry.exporter(name).missing(name, False), registry.graphs()[name].code
        why = "a pickle: see --trust" if code and not trust else why
        if not why and code:
            found[name] = open_graph(folder / name)
        elif not why:
            run = stack.enter_context(closing(Confined(folder / name, told["output"]["width"])))
            try:
                run(np.full((1, 3, size, size), 127, np.uint8))
                found[name] = run
            except ModelError as error:
                known.refuse(name, error.wrong)
                why = "it does not run"
        if why:
            places = ("parity", "validation", "output/defer/stated", "variants", "random images")
            known.reasons |= {f"{place}/{name}": why for place in places}
    return found


def _show_counts(known: Claims, outputs: GraphOutputs, task: Task, eager: bool) -> None:
    told = known.claimed
    found: dict[str, Any] = {name: {} for name in ("parity", "validation", "variants")}
    found["output"] = {"width": told["output"]["width"]}
    for name in outputs.outputs.keys() - {EAGER}:
        facts = outputs.facts(name, task)
        left_out = ["images", "labelled", "accuracy", *(() if eager else ("max_difference", "same_top1", "cosine"))]
        if guessed := known.old and "labelled" in facts:
            left_out.append("correct")
            known.reasons |= dict.fromkeys((f"parity/{name}/correct", f"variants/{name}/title"), GUESSED)
        found["parity"][name] = {key: one for key, one in facts.items() if key not in left_out}
        found["validation"][name] = outputs.reference(name, task, known.labels, "calibration" in told).record()
        if name in told.get("variants", {}):
            quality = variants.quality(name, outputs, task)
            keys = ["unit", *(() if guessed else ("title",))]
            keys += [] if "labelled" in facts else ["interval", "drop"]  # a flip of few counts much: from counts alone
            found["variants"][name] = {key: quality[key] for key in keys}
    if eager:
        found["eager_ms"] = outputs.cpu_ms[EAGER]
        most, exact = _allowed(outputs.outputs[EAGER]), [name for name in found["parity"] if name in EXACT]
        if all(outputs.difference(name) <= most for name in exact):
            own = told["config.json"]  # another network, mean or std would give other outputs
            pixels = {key: own["pretrained_cfg"][key] for key in ("mean", "std") if key in own["pretrained_cfg"]}
            named = {key: own[key] for key in ("architecture", "model_args") if key in own}
            known.show(IMAGES, {"config.json": {**named, "pretrained_cfg": pixels}})
    else:
        known.reasons["parity"] = "no network of timm's, or vectors are mapped"
    known.show(IMAGES, found)


def _allowed(logits: torch.Tensor) -> float:
    return TOLERANCE * max(1.0, float(logits.abs().max()))


def _show_random(known: Claims, eager: Runner, runners: Mapping[str, Runner], outputs: GraphOutputs) -> None:
    """Compare with PyTorch on random images, one at a time as in serving: noise, dots, blots, other corners."""
    draw, shape = np.random.default_rng(), (RANDOM // 4, *outputs.first.shape)
    dots = 255 * draw.integers(0, 2, shape)
    blots = draw.integers(0, 256, (*shape[:2], 2, 2)).repeat(-(-shape[2] // 2), 2).repeat(-(-shape[3] // 2), 3)
    corners = np.broadcast_to(outputs.first, shape).copy()
    corners[..., :: max(1, shape[2] - 1), :: max(1, shape[3] - 1)] = 255 * draw.integers(0, 2, (*shape[:2], 2, 2))
    kinds = (draw.integers(0, 256, shape), dots, blots[:, :, : shape[2], : shape[3]], corners)
    pixels = np.concatenate([kind.astype(np.uint8) for kind in kinds])
    expected = torch.from_numpy(self_check.outputs(eager, pixels))
    found, told = {}, {"all others": "as PyTorch"}
    for name, run in runners.items():
        try:
            answer = torch.from_numpy(self_check.outputs(run, pixels))
        except ModelError as error:
            known.refuse(f"{name} on random images", error.wrong)
            continue
        off = float((answer - expected).abs().nan_to_num(torch.inf).max())
        near = min(known.claimed["parity"][name]["max_difference"], outputs.difference(name))  # a claim may be high
        most = _allowed(expected) if name in EXACT else LOSSY * near + 1e-4
        told[name] = f"within {most:.2g}"
        found[name] = told[name] if off <= most < float("inf") else f"differs by {off:.2g}"
    known.claimed["random images"] = told
    known.show(IMAGES, {"random images": found})


def _show_scores(known: Claims, outputs: GraphOutputs, task: Task) -> None:
    """Recompute the student's scores and the calibration, which needs the run's logits."""
    told, logits, label = known.claimed["scores"], outputs.outputs[EAGER].double(), outputs.labels
    calibration = known.claimed.get("calibration") or {}
    logits = logits * calibration.get("temperature", 1.0)
    there = label >= 0 if label.ndim == 1 else (label >= 0).all(1)
    logits, label = logits[there], label[there]
    if not len(label):
        return
    if told["split"] == "val" and (told["images"] or known.images) == known.images:
        if task.logits == "sigmoid":
            own = label_sets.score(logits, label > 0)
        else:
            sums = single_label.score(logits, label, torch.ones(len(label)))
            own = {"accuracy": float(sums["accuracy"]) / len(label), "top5": float(sums["top5"]) / len(label)}
            own["ece"] = single_label.calibration_error(logits, label)
        known.show(IMAGES, {"scores": {"value": own[task.scores.own[0].key]}} if "value" in told else {})
        claimed = told.get("models", {}).get(OWN, {})
        known.show(IMAGES, {"scores": {"models": {OWN: {key: {"value": own[key]} for key in own if key in claimed}}}})
    if calibration and known.images <= CALIBRATION_IMAGES and len(label) > 1:
        found = {"temperature": single_label.temperature(logits, label), "images": len(label)}
        found["ece"] = single_label.calibration_error(logits, label)
        found["calibrated_ece"] = single_label.calibration_error(cross_fitted(logits, label), label)
        known.show(IMAGES, {"calibration": found})


def _show_promises(known: Claims, outputs: GraphOutputs, task: Task, classes: Sequence[str]) -> None:
    """Choose thresholds again, and measure the errors among sure predictions."""
    told, found = known.claimed["output"], dict[str, Any]()
    chosen = task.thresholds(outputs.outputs[EAGER], outputs.labels, classes)
    if chosen or "thresholds" in told:
        found["thresholds"] = chosen
    if claimed := told.get("defer"):
        kept = {name: each for name, each in outputs.outputs.items() if name == EAGER or name in known.graphs}
        try:
            rule = defer.Rule(**claimed["rule"])
            found["defer"] = defer.choose(rule, kept, outputs.labels, told.get("thresholds") or {}, classes)
        except ModelError as error:
            known.refuse("output/defer", error.wrong)
    known.show(IMAGES, {"output": found})


def _show_speed(known: Claims, folder: Path, outputs: GraphOutputs) -> None:
    """Time `kd-serve` again, with at most this machine's number of threads."""
    told, accepted = known.claimed.get("variants", {}), known.claimed.get("accepted", {"file": "", "found": {}})
    name = accepted["file"] if "ms" in accepted["found"] else ""
    timed = {one: outputs.cpu_ms[one] for one in outputs.outputs if one and (one in told or one == name)}
    wanted = {int(key) for one in told.values() for key in one["speed"] if key.isdecimal() and len(key) < 5}
    wanted |= {accepted["threads"]} if name else set()
    threads = sorted(one for one in wanted if 0 < one <= cores())[:MOST_THREADS]
    if not timed or not threads:
        return
    try:
        speeds = variants.measure(folder, timed, outputs.first, threads)
    except KdError as error:
        known.refuse("kd-serve", error.wrong)
        return
    known.noisy = any(variants.noisy(one, timed[file]) for file, seen in speeds.items() for one in seen.values())
    facts = {file: {"speed": variants.speed_facts(speeds[file])} for file in timed if file in told}
    known.show(IMAGES, {"variants": facts})
    if name in speeds and accepted["threads"] in threads:
        found = {"ms": speeds[name][accepted["threads"]].p50_ms}
        known.show(IMAGES, {"accepted": {"found": found, "threads": accepted["threads"]}})
