"""Run an export's graphs and weights on its images, and on random ones."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kd.core.errors import KdError, ModelError
from kd.core.evaluation import Task
from kd.core.host import cores
from kd.deploy.export import defer, parity, variants
from kd.deploy.export.accept import graph_losses
from kd.deploy.export.calibrate import fitted_temperature
from kd.deploy.export.claims import FILES, IMAGES, SECOND
from kd.deploy.export.parity import EAGER, GraphOutputs, Runner
from kd.deploy.export.passing_on import values_at
from kd.deploy.export.receipt import OWN
from kd.deploy.export.write_graphs import CALIBRATION_IMAGES
from kd.deploy.serve import self_check
from kd.deploy.serve.engines import open_graph
from kd.deploy.serve.model import Description
from kd.deploy.verify.child import Sandbox, Sandboxes
from kd.deploy.verify.comparison import Claims, mark_gaps
from kd.deploy.verify.images import ListedImages
from kd.files.manifest import MANIFEST
from kd.models.classifier import Classifier
from kd.parts import registry

RANDOM = 24  # random images of each kind, unknown to the export's author
# tolerances of exact graphs, as in kd-export, and relative to the largest |logit| on
# random images
TOLERANCE = 1e-3
# multiple of int8's and bfloat16's difference on the images allowed on random images;
# chosen
LOSSY = 30.0
# kd-export measures servers at 3 numbers of threads: 1, --threads, all
MOST_THREADS = 3
SEEDED = "made from the seed"
ALLOWED = 2.0  # multiple of the difference expected here that a graph may allow; chosen
OF_GRAPHS = ("parity", "validation", "output/defer/stated", "variants", "random images")
"""Keys of values by graph."""


def check_outputs(
    claims: Claims,
    images: ListedImages,
    task: Task,
    network: Classifier | None,
    second: Description | None,
    sandboxes: Sandboxes,
) -> None:
    """Run graphs and weights on the images, and make the manifest's values again."""
    labels = claims.labels
    if images.repeated(claims):  # a list of millions of lines would take hours
        return
    pixels = claims.claimed["input"]
    runners = _open_runners(claims, sandboxes)
    if not runners:
        return
    eager = None
    # vectors in the teacher's space need weights that model.safetensors lacks
    if network is not None and not claims.claimed["output"].get("space"):
        eager = parity.eager_runner(network)
    reference = eager or next(iter(runners.values()))
    outputs = parity.compare(reference, runners, images.batches(pixels, labels, task))
    sandbox_ms = {
        name: run.median_cpu_ms(outputs.first[None])
        for name, run in runners.items()
        if isinstance(run, Sandbox)
    }
    outputs = replace(outputs, cpu_ms={**outputs.cpu_ms, **sandbox_ms})
    claims.images = len(outputs.labels)
    images.compare_pixels(claims, outputs.images)
    remade = _repeated_facts(claims, outputs, task, eager is not None)
    claims.add_evidence(IMAGES, remade)
    if eager is not None:
        _check_random_images(claims, eager, runners, outputs)
    if second is not None:
        _check_pair(claims, outputs, task, second, images, sandboxes)
    sandboxes.close()  # servers are timed below
    if eager is not None:
        _check_preprocessing(claims, outputs)
        if task.logits and not claims.old:
            _check_scores(claims, outputs, task)
    _check_promises(claims, outputs, task, labels)
    _check_speed(claims, outputs)


def repeat_self_check(claims: Claims, sandboxes: Sandboxes) -> None:
    """Decode the self-check's images as `kd-serve` does, and run each graph on them."""
    entries = claims.claimed.get(self_check.KEY, {})
    graphs = [name for name in claims.graphs if not registry.graphs()[name].code]
    if entries or not claims.old:  # kd 0.3 wrote none
        for name in graphs:
            if name not in entries:
                claims.refuse(f"{self_check.KEY}/{name}", f"{MANIFEST} has none")
    if not entries:
        return
    pixels = claims.claimed["input"]
    reading = [pixels.get(key, 16) for key in ("crop", "margin", "bits")]
    arrays = self_check.read((claims.folder / self_check.FILE).read_bytes())
    large, small = self_check.large_and_small(pixels["size"], reading[-1])
    stored = [
        array.tobytes() for key, array in arrays.items() if key.startswith("picture")
    ]
    is_as_made = stored == large + small
    claims.claimed[self_check.FILE] = SEEDED
    # an older list has no crops, and elsewhere another encoder makes other bytes
    if is_as_made or ("crops" in arrays and not claims.elsewhere):
        remade = SEEDED if is_as_made else "other pictures"
        claims.add_evidence(FILES, {self_check.FILE: remade})
    # the cheapest graph, float32
    exact = next((name for name in claims.graphs if name in arrays), "")
    for name in graphs:
        if name not in entries or registry.exporter(name).missing(name, False):
            continue
        path = claims.folder / name
        width = claims.claimed["output"]["width"]
        reads = claims.reading(f"{self_check.KEY}/{name}")
        with reads:
            run = sandboxes.open(path, width)
            differences = self_check.differences(arrays, name, run, *reading)
            bound = ALLOWED * self_check.allowed(name, arrays[name], arrays[exact])
            if (
                differences.pixels <= self_check.LEVELS
                and differences.logits <= entries[name]["allowed"] <= bound
            ):
                allowed = entries[name]["allowed"]
            else:
                allowed = (
                    f"{differences.pixels:.3g} levels of picture"
                    f" {differences.picture}, logits {differences.logits:.2g} of"
                    f" {bound:.2g}"
                )
            remade = {"allowed": allowed} | registry.exporter(name).least(path)
            claims.add_evidence(FILES, {self_check.KEY: {name: remade}})


def _open_runners(claims: Claims, sandboxes: Sandboxes) -> dict[str, Runner]:
    """Return the graphs that run here; a graph that fails on a grey image is WRONG."""
    runners: dict[str, Runner] = {}
    size = claims.claimed["input"]["size"]
    width = claims.claimed["output"]["width"]
    for name in claims.graphs:
        path = claims.folder / name
        code = registry.graphs()[name].code
        reason = registry.exporter(name).missing(name, False)
        if code and not sandboxes.trust:
            reason = "a pickle: see --trust"
        if not reason and code:
            runners[name] = open_graph(path)
        elif not reason:
            run = sandboxes.open(path, width)
            try:
                run(np.full((1, 3, size, size), 127, np.uint8))
                runners[name] = run
            except ModelError as error:
                claims.refuse(name, error.wrong)
                reason = "it does not run"
        if reason:
            for key in OF_GRAPHS:
                claims.reasons[f"{key}/{name}"] = reason
    return runners


def _repeated_facts(
    claims: Claims, outputs: GraphOutputs, task: Task, eager: bool
) -> dict[str, Any]:
    """Return the values of the graphs' outputs, as `kd-export` wrote them.

    `eager`: PyTorch is the reference.
    """
    claimed = claims.claimed
    remade: dict[str, Any] = {"parity": {}, "validation": {}, "variants": {}}
    if eager:
        remade["eager_ms"] = outputs.cpu_ms[EAGER]
    else:
        claims.reasons["parity"] = "no network of timm's, or vectors are mapped"
    for name in outputs.outputs.keys() - {EAGER}:
        facts = dict(outputs.facts(name, task))
        quality = dict(variants.quality(name, outputs, task))
        if "labelled" in facts:  # one image counts more there than the rules allow
            quality = _without(quality, "score", "interval", "drop")
            if claims.old:
                claims.reasons[f"parity/{name}"] = (
                    "kd 0.3 took PyTorch's predictions for missing labels"
                )
                facts = {}
                quality = {}
        if not eager:
            facts = _without(facts, "max_difference", "same_top1", "cosine")
            quality = {}
        elif not claims.old:
            parity = claimed["parity"].get(name, {})
            facts = mark_gaps(_without(parity, "int8_share"), facts)  # from the file
        remade["parity"][name] = _without(facts, "images", "labelled")
        remade["validation"][name] = outputs.reference(
            name, task, claims.labels, "calibration" in claimed
        ).record()
        if name in claimed.get("variants", {}):
            remade["variants"][name] = quality
    return {**remade, "output": {"width": claimed["output"]["width"]}}


def _without(facts: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if key not in keys}


def _check_preprocessing(claims: Claims, outputs: GraphOutputs) -> None:
    """Confirm network, mean and std: others would differ from the exact graphs."""
    tolerance = _tolerance(outputs.outputs[EAGER])
    exact = [
        name
        for name in outputs.outputs
        if name and registry.graphs()[name].precision == "float32"
    ]
    if all(outputs.difference(name) <= tolerance for name in exact):
        config = claims.claimed["config.json"]
        pretrained = config["pretrained_cfg"]
        remade = {
            key: config[key] for key in ("architecture", "model_args") if key in config
        }
        remade["pretrained_cfg"] = {
            key: pretrained[key] for key in ("mean", "std") if key in pretrained
        }
        claims.add_evidence(IMAGES, {"config.json": remade})


def _tolerance(logits: torch.Tensor) -> float:
    return TOLERANCE * max(1.0, float(logits.abs().max()))


def _check_random_images(
    claims: Claims, eager: Runner, runners: Mapping[str, Runner], outputs: GraphOutputs
) -> None:
    """Compare with PyTorch on random images, one at a time as in serving.

    Half of them have any levels, half 0 and 255 alone.
    """
    generator = np.random.default_rng()
    shape = (RANDOM, *outputs.first.shape)
    pixels = np.concatenate(
        [generator.integers(0, 256, shape), 255 * generator.integers(0, 2, shape)]
    ).astype(np.uint8)
    expected = torch.from_numpy(self_check.outputs(eager, pixels))
    claimed = {"all others": "as PyTorch"}
    remade = {}
    for name, run in runners.items():
        try:
            logits = torch.from_numpy(self_check.outputs(run, pixels))
        except ModelError as error:
            claims.refuse(f"{name} on random images", error.wrong)
            continue
        difference = float((logits - expected).abs().nan_to_num(torch.inf).max())
        # the claim may be high
        claim = claims.claimed["parity"][name]["max_difference"]
        tolerance = LOSSY * min(claim, outputs.difference(name)) + 1e-4
        if registry.graphs()[name].precision == "float32":
            tolerance = _tolerance(expected)
        claimed[name] = f"within {tolerance:.2g}"
        remade[name] = f"differs by {difference:.2g}"
        if difference <= tolerance < float("inf"):
            remade[name] = claimed[name]
    claims.claimed["random images"] = claimed
    claims.add_evidence(IMAGES, {"random images": remade})


def _check_scores(claims: Claims, outputs: GraphOutputs, task: Task) -> None:
    """Score the student again, and fit the temperature to the run's logits."""
    scores = claims.claimed["scores"]
    labelled_N = outputs.labels >= 0
    if labelled_N.ndim > 1:
        labelled_N = labelled_N.all(1)
    all_images = (scores["images"] or claims.images) == claims.images
    key = task.scores.own[0].key
    if (
        scores["split"] == "val"
        and all_images
        and bool(labelled_N.any())
        and key in scores["models"].get(OWN, {})
    ):
        value = outputs.scores(EAGER, task).score
        models = {OWN: {key: {"value": value}}}
        claims.add_evidence(IMAGES, {"scores": {"models": models}})
    calibration = claims.claimed.get("calibration")
    is_small = claims.images <= CALIBRATION_IMAGES
    if calibration and is_small and int(labelled_N.sum()) > 1:
        logits = outputs.outputs[EAGER][labelled_N].double()
        remade = fitted_temperature(
            logits * calibration["temperature"], outputs.labels[labelled_N]
        )
        claims.add_evidence(IMAGES, {"calibration": remade})


def _check_promises(
    claims: Claims, outputs: GraphOutputs, task: Task, classes: Sequence[str]
) -> None:
    """Choose thresholds again, and measure what they and `--accept` promise."""
    claimed = claims.claimed["output"]
    remade: dict[str, Any] = {}
    thresholds = task.thresholds(outputs.outputs[EAGER], outputs.labels, classes)
    if thresholds or "thresholds" in claimed:
        remade["thresholds"] = thresholds
    if entry := claimed.get("defer"):
        present = {
            name: logits
            for name, logits in outputs.outputs.items()
            if name == EAGER or name in claims.graphs
        }
        thresholds = claimed.get("thresholds") or {}
        try:
            rule = defer.Rule(**entry["rule"])
            remade["defer"] = defer.choose(
                rule, present, outputs.labels, thresholds, classes
            )
        except ModelError as error:
            claims.refuse("output/defer", error.wrong)
    claims.add_evidence(IMAGES, {"output": remade})
    accepted = claims.claimed.get("accepted", {"file": ""})
    if accepted["file"] in outputs.outputs.keys() - {EAGER}:
        behind = _points_behind(claims)
        losses = graph_losses(outputs, accepted["file"], task, behind)
        values = {word: losses[word] for word in losses if word in accepted["found"]}
        claims.add_evidence(IMAGES, {"accepted": {"found": values}})


def _points_behind(claims: Claims) -> float:
    """Return the claimed points of the student behind its teacher; NaN without one."""
    scores = claims.claimed["scores"]
    if claims.old or "teacher" not in scores["models"]:
        return float("nan")
    key = scores["columns"]["own"][0]["key"]
    teacher, student = (
        scores["models"][name][key]["value"] for name in ("teacher", OWN)
    )
    return 100 * (teacher - student)


def _check_pair(
    claims: Claims,
    outputs: GraphOutputs,
    task: Task,
    second: Description,
    images: ListedImages,
    sandboxes: Sandboxes,
) -> None:
    """Run the second export's graph on the images, and measure the pair's promises."""
    claimed = claims.claimed["cascade"]
    file = claimed["file"]
    second_path = second.folder / second.file
    run = sandboxes.open(second_path, second.output.width)
    batches = images.batches(claims.claimed["input"], claims.labels, task)
    logits = np.concatenate([run(pixels) for pixels, *_ in batches])
    threshold = claims.claimed["output"]["defer"]["threshold"]
    _, values = values_at(
        outputs, file, torch.from_numpy(logits), task, _points_behind(claims), threshold
    )
    size = variants.size(claims.folder / file) + variants.size(second_path)
    values["mb"] = size / 1e6
    remade = {
        "second": f"{second.name} {second.version}",
        "found": {word: values[word] for word in values if word in claimed["found"]},
    }
    claims.add_evidence(SECOND, {"cascade": remade})


def _check_speed(claims: Claims, outputs: GraphOutputs) -> None:
    """Time `kd-serve` again, with at most this machine's number of threads."""
    claimed = claims.claimed.get("variants", {})
    accepted = claims.claimed.get("accepted", {"file": "", "found": {}})
    accepted_file = accepted["file"] if "ms" in accepted["found"] else ""
    cpu_ms = {
        name: outputs.cpu_ms[name]
        for name in outputs.outputs
        if name and (name in claimed or name == accepted_file)
    }
    counts = {
        int(key)
        for entry in claimed.values()
        for key in entry["speed"]
        if key.isdecimal() and len(key) < 5
    }
    if accepted_file:
        counts.add(accepted["threads"])
    threads = sorted(count for count in counts if 0 < count <= cores())[:MOST_THREADS]
    if not cpu_ms or not threads:
        return
    try:
        speeds = variants.measure(claims.folder, cpu_ms, outputs.first, threads)
    except KdError as error:
        claims.refuse("kd-serve", error.wrong)
        return
    claims.noisy = any(
        variants.is_noisy(latency, cpu_ms[name])
        for name, by_threads in speeds.items()
        for latency in by_threads.values()
    )
    remade = {
        name: {"speed": variants.speed_facts(speeds[name])}
        for name in cpu_ms
        if name in claimed
    }
    claims.add_evidence(IMAGES, {"variants": remade})
    if accepted_file in speeds and accepted["threads"] in threads:
        ms = speeds[accepted_file][accepted["threads"]].p50_ms
        facts = {"found": {"ms": ms}, "threads": accepted["threads"]}
        claims.add_evidence(IMAGES, {"accepted": facts})
