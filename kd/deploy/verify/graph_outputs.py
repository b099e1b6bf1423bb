"""Values of an export that its images show: its graphs and weights are run on them, and
on random images.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kd.core.errors import KdError, ModelError
from kd.core.evaluation import Task
from kd.core.host import cores
from kd.deploy.export import defer, parity, variants
from kd.deploy.export.calibrate import fitted_temperature
from kd.deploy.export.claims import FILES, IMAGES, SECOND
from kd.deploy.export.graphs import CALIBRATION_IMAGES, graph_losses
from kd.deploy.export.parity import EAGER, GraphOutputs, Runner
from kd.deploy.export.passing_on import values_at
from kd.deploy.export.receipt import OWN
from kd.deploy.serve import self_check
from kd.deploy.serve.engines import open_graph
from kd.deploy.serve.model import Description
from kd.deploy.verify.child import Sandbox
from kd.deploy.verify.comparison import Claims, with_gaps
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
MOST_THREADS = (
    3  # kd-export measures servers at 3 numbers of threads: 1, --threads, all
)
SEEDED = "made from the seed"
ALLOWED = 2.0  # multiple of the difference expected here that a graph may allow; chosen


def show_outputs(
    known: Claims,
    shown: ListedImages,
    task: Task,
    network: Classifier | None,
    trust: bool,
    second: Description | None,
) -> None:
    """Run graphs and weights on the images, and fill the manifest again as `kd-export`
    does.
    """
    claimed, labels = known.claimed, known.labels
    if shown.repeated(known):  # a list of millions of lines would take hours
        return
    with ExitStack() as stack:
        runners = _runners(known, trust, stack)
        if not runners:
            return
        mapped = claimed["output"].get(
            "space"
        )  # by weights that are not in model.safetensors
        eager = None if network is None or mapped else parity.eager_runner(network)
        reference = eager or next(iter(runners.values()))
        outputs = parity.compare(
            reference, runners, shown.batches(claimed["input"], labels, task)
        )
        took = {
            name: run.cpu_ms(outputs.first[None])
            for name, run in runners.items()
            if isinstance(run, Sandbox)
        }
        outputs = replace(outputs, cpu_ms={**outputs.cpu_ms, **took})
        known.images = len(outputs.labels)
        shown.show(known, outputs.images)
        known.show(IMAGES, _counts(known, outputs, task, eager is not None))
        if eager is not None:
            _show_random(known, eager, runners, outputs)
        if second is not None:
            _show_pair(known, outputs, task, second, shown)
    if eager is not None:
        _show_pixels(known, outputs)
        if task.logits and not known.old:
            _show_scores(known, outputs, task)
    _show_promises(known, outputs, task, labels)
    _show_speed(known, outputs)


def show_self_check(known: Claims) -> None:
    """Decode the self-check's pictures as `kd-serve` does, and run each graph on their
    pixels.
    """
    claimed = known.claimed.get(self_check.KEY, {})
    graphs = [name for name in known.graphs if not registry.graphs()[name].code]
    for name in graphs if claimed or not known.old else ():  # kd 0.3 wrote none
        if name not in claimed:
            known.refuse(f"{self_check.KEY}/{name}", f"{MANIFEST} has none")
    if not claimed:
        return
    pixels = known.claimed["input"]
    reading = [pixels.get(key, 16) for key in ("crop", "margin", "bits")]
    arrays = self_check.read((known.folder / self_check.FILE).read_bytes())
    exact = next(
        (name for name in known.graphs if name in arrays), ""
    )  # of the cheapest graph, float32
    large, small = self_check.of_both_sizes(pixels["size"], reading[-1])
    stored = [
        array.tobytes() for key, array in arrays.items() if key.startswith("picture")
    ]
    as_made = stored == large + small
    known.claimed[self_check.FILE] = SEEDED
    if as_made or not (
        "crops" not in arrays or known.elsewhere
    ):  # an older list; another encoder's bytes
        known.show(FILES, {self_check.FILE: SEEDED if as_made else "other pictures"})
    for name in graphs:
        if name not in claimed or registry.exporter(name).missing(name, False):
            continue
        what, width = f"{self_check.KEY}/{name}", known.claimed["output"]["width"]
        with closing(Sandbox(known.folder / name, width)) as run, known.reading(what):
            here = self_check.differences(arrays, name, run, *reading)
            bound = ALLOWED * self_check.allowed(name, arrays[name], arrays[exact])
            passed = (
                here.pixels <= self_check.LEVELS
                and here.logits <= claimed[name]["allowed"] <= bound
            )
            differs = (
                f"{here.pixels:.3g} levels of picture {here.picture}, logits"
                f" {here.logits:.2g} of {bound:.2g}"
            )
            again = {"allowed": claimed[name]["allowed"] if passed else differs}
            known.show(
                FILES,
                {
                    self_check.KEY: {
                        name: again | registry.exporter(name).least(known.folder / name)
                    }
                },
            )


def _runners(known: Claims, trust: bool, stack: ExitStack) -> dict[str, Runner]:
    """Return the graphs that can run here; a graph that fails on a grey image
    is WRONG.
    """
    runners = dict[str, Runner]()
    size, width = known.claimed["input"]["size"], known.claimed["output"]["width"]
    for name in known.graphs:
        why, code = (
            registry.exporter(name).missing(name, False),
            registry.graphs()[name].code,
        )
        why = "a pickle: see --trust" if code and not trust else why
        if not why and code:
            runners[name] = open_graph(known.folder / name)
        elif not why:
            run = stack.enter_context(closing(Sandbox(known.folder / name, width)))
            try:
                run(np.full((1, 3, size, size), 127, np.uint8))
                runners[name] = run
            except ModelError as error:
                known.refuse(name, error.wrong)
                why = "it does not run"
        if why:
            places = (
                "parity",
                "validation",
                "output/defer/stated",
                "variants",
                "random images",
            )
            known.reasons |= {f"{place}/{name}": why for place in places}
    return runners


def _counts(
    known: Claims, outputs: GraphOutputs, task: Task, eager: bool
) -> dict[str, Any]:
    """Return what the graphs' outputs give, as `kd-export` wrote it; `eager`: PyTorch
    is the reference.
    """
    claimed, again = (
        known.claimed,
        dict[str, Any](parity={}, validation={}, variants={}),
    )
    if eager:
        again["eager_ms"] = outputs.cpu_ms[EAGER]
    else:
        known.reasons["parity"] = "no network of timm's, or vectors are mapped"
    for name in outputs.outputs.keys() - {EAGER}:
        facts, quality = (
            dict(outputs.facts(name, task)),
            dict(variants.quality(name, outputs, task)),
        )
        if "labelled" in facts:  # one image counts more there than the rules allow
            quality = {
                key: value
                for key, value in quality.items()
                if key not in ("score", "interval", "drop")
            }
            if known.old:
                known.reasons[f"parity/{name}"] = (
                    "kd 0.3 took PyTorch's predictions for missing labels"
                )
                facts, quality = {}, {}
        if not eager:
            facts = {
                key: facts[key]
                for key in facts.keys() - {"max_difference", "same_top1", "cosine"}
            }
            quality = {}
        elif not known.old:
            facts = with_gaps(claimed["parity"].get(name, {}), facts)
        again["parity"][name] = {
            key: value
            for key, value in facts.items()
            if key not in ("images", "labelled")
        }
        again["validation"][name] = outputs.reference(
            name, task, known.labels, "calibration" in claimed
        ).record()
        if name in claimed.get("variants", {}):
            again["variants"][name] = quality
    return {**again, "output": {"width": claimed["output"]["width"]}}


def _show_pixels(known: Claims, outputs: GraphOutputs) -> None:
    """Confirm network, mean and std: others would give other outputs than the exact
    graphs.
    """
    config, most = known.claimed["config.json"], _allowed(outputs.outputs[EAGER])
    exact = [
        name
        for name in outputs.outputs
        if name and registry.graphs()[name].precision == "float32"
    ]
    if all(outputs.difference(name) <= most for name in exact):
        pixels = {
            key: config["pretrained_cfg"][key]
            for key in ("mean", "std")
            if key in config["pretrained_cfg"]
        }
        network = {
            key: config[key] for key in ("architecture", "model_args") if key in config
        }
        known.show(IMAGES, {"config.json": {**network, "pretrained_cfg": pixels}})


def _allowed(logits: torch.Tensor) -> float:
    return TOLERANCE * max(1.0, float(logits.abs().max()))


def _show_random(
    known: Claims, eager: Runner, runners: Mapping[str, Runner], outputs: GraphOutputs
) -> None:
    """Compare with PyTorch on random images, one at a time as in serving: of any
    levels, and of 0 and 255 alone.
    """
    draw, shape = np.random.default_rng(), (RANDOM, *outputs.first.shape)
    pixels = np.concatenate(
        [draw.integers(0, 256, shape), 255 * draw.integers(0, 2, shape)]
    ).astype(np.uint8)
    expected = torch.from_numpy(self_check.outputs(eager, pixels))
    found, claimed = {}, {"all others": "as PyTorch"}
    for name, run in runners.items():
        try:
            logits = torch.from_numpy(self_check.outputs(run, pixels))
        except ModelError as error:
            known.refuse(f"{name} on random images", error.wrong)
            continue
        off = float((logits - expected).abs().nan_to_num(torch.inf).max())
        near = min(
            known.claimed["parity"][name]["max_difference"], outputs.difference(name)
        )  # a claim may be high
        exact = registry.graphs()[name].precision == "float32"
        most = _allowed(expected) if exact else LOSSY * near + 1e-4
        claimed[name] = f"within {most:.2g}"
        found[name] = (
            claimed[name] if off <= most < float("inf") else f"differs by {off:.2g}"
        )
    known.claimed["random images"] = claimed
    known.show(IMAGES, {"random images": found})


def _show_scores(known: Claims, outputs: GraphOutputs, task: Task) -> None:
    """Score the student again, and fit the temperature, which needs the run's
    logits.
    """
    scores, calibration = known.claimed["scores"], known.claimed.get("calibration")
    labelled = (
        outputs.labels >= 0
        if outputs.labels.ndim == 1
        else (outputs.labels >= 0).all(1)
    )
    all_images = (scores["images"] or known.images) == known.images
    key = task.scores.own[0].key
    if (
        scores["split"] == "val"
        and all_images
        and bool(labelled.any())
        and key in scores["models"].get(OWN, {})
    ):
        value = outputs.scores(EAGER, task).score
        known.show(IMAGES, {"scores": {"models": {OWN: {key: {"value": value}}}}})
    if calibration and known.images <= CALIBRATION_IMAGES and int(labelled.sum()) > 1:
        logits = outputs.outputs[EAGER][labelled].double() * calibration["temperature"]
        known.show(IMAGES, {"calibration": fitted_temperature(logits, outputs.labels[labelled])})


def _show_promises(
    known: Claims, outputs: GraphOutputs, task: Task, classes: Sequence[str]
) -> None:
    """Choose thresholds again, and measure what they and `--accept` promise."""
    claimed, accepted = (
        known.claimed["output"],
        known.claimed.get("accepted", {"file": ""}),
    )
    output = dict[str, Any]()
    chosen = task.thresholds(outputs.outputs[EAGER], outputs.labels, classes)
    if chosen or "thresholds" in claimed:
        output["thresholds"] = chosen
    if stated := claimed.get("defer"):
        kept = {
            name: each
            for name, each in outputs.outputs.items()
            if name == EAGER or name in known.graphs
        }
        try:
            rule = defer.Rule(**stated["rule"])
            output["defer"] = defer.choose(
                rule, kept, outputs.labels, claimed.get("thresholds") or {}, classes
            )
        except ModelError as error:
            known.refuse("output/defer", error.wrong)
    known.show(IMAGES, {"output": output})
    if accepted["file"] in outputs.outputs.keys() - {EAGER}:
        found = graph_losses(outputs, accepted["file"], task, _behind(known))
        known.show(
            IMAGES,
            {
                "accepted": {
                    "found": {k: v for k, v in found.items() if k in accepted["found"]}
                }
            },
        )


def _behind(known: Claims) -> float:
    """Return by how many points the claimed student is behind its teacher; NaN without
    a teacher.
    """
    scores = known.claimed["scores"]
    if known.old or "teacher" not in scores["models"]:
        return float("nan")
    key = scores["columns"]["own"][0]["key"]
    teacher, student = (
        scores["models"][name][key]["value"] for name in ("teacher", OWN)
    )
    return 100 * (teacher - student)


def _show_pair(
    known: Claims, outputs: GraphOutputs, task: Task, second: Description, shown: ListedImages
) -> None:
    """Run the second export's graph on the images, and measure what the pair
    promises.
    """
    claimed = known.claimed["cascade"]
    with closing(Sandbox(second.folder / second.file, second.output.width)) as run:
        batches = shown.batches(known.claimed["input"], known.labels, task)
        logits = torch.from_numpy(
            np.concatenate([run(pixels) for pixels, *_ in batches])
        )
    threshold = known.claimed["output"]["defer"]["threshold"]
    _, found = values_at(
        outputs, claimed["file"], logits, task, _behind(known), threshold
    )
    found["mb"] = (
        variants.size(known.folder / claimed["file"])
        + variants.size(second.folder / second.file)
    ) / 1e6
    found = {key: value for key, value in found.items() if key in claimed["found"]}
    known.show(
        SECOND,
        {"cascade": {"second": f"{second.name} {second.version}", "found": found}},
    )


def _show_speed(known: Claims, outputs: GraphOutputs) -> None:
    """Time `kd-serve` again, with at most this machine's number of threads."""
    claimed, accepted = (
        known.claimed.get("variants", {}),
        known.claimed.get("accepted", {"file": "", "found": {}}),
    )
    name = accepted["file"] if "ms" in accepted["found"] else ""
    timed = {
        one: outputs.cpu_ms[one]
        for one in outputs.outputs
        if one and (one in claimed or one == name)
    }
    wanted = {
        int(key)
        for one in claimed.values()
        for key in one["speed"]
        if key.isdecimal() and len(key) < 5
    }
    wanted |= {accepted["threads"]} if name else set()
    threads = sorted(one for one in wanted if 0 < one <= cores())[:MOST_THREADS]
    if not timed or not threads:
        return
    try:
        speeds = variants.measure(known.folder, timed, outputs.first, threads)
    except KdError as error:
        known.refuse("kd-serve", error.wrong)
        return
    known.noisy = any(
        variants.noisy(one, timed[file])
        for file, seen in speeds.items()
        for one in seen.values()
    )
    facts = {
        file: {"speed": variants.speed_facts(speeds[file])}
        for file in timed
        if file in claimed
    }
    known.show(IMAGES, {"variants": facts})
    if name in speeds and accepted["threads"] in threads:
        found = {"ms": speeds[name][accepted["threads"]].p50_ms}
        known.show(
            IMAGES, {"accepted": {"found": found, "threads": accepted["threads"]}}
        )
