"""`kd verify`: is what an export says of itself so? Its files are run on the images that its numbers are of.

A stranger may have written the folder. Of it run graphs, in onnxruntime and OpenVINO, and timm's own networks with
weights from safetensors; with `--trust` also model.pt2, which is a pickle.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from kd.core.errors import ConfigError, ModelError, in_short
from kd.core.evaluation import Task
from kd.core.options import option
from kd.deploy.export import defer, graphs, parity, variants
from kd.deploy.export.calibrate import divide_logits
from kd.deploy.export.card import drawn
from kd.deploy.export.options import limits, misses
from kd.deploy.export.parity import EAGER, GraphOutputs
from kd.deploy.export.receipt import NAMED, licences
from kd.deploy.serve.model import Description, describe, invalid_export
from kd.deploy.verify.claims import EXACT_SHARE, OTHER_SHARE, WRONG, Claims
from kd.deploy.verify.images import Shown
from kd.files.json_file import DAMAGE, read_json
from kd.files.manifest import DIGITS, GRAPHS, MANIFEST, sha256, unchanged
from kd.models import runtimes
from kd.models.classifier import digest, tensors_digest
from kd.models.licences import UNKNOWN, licence_of
from kd.models.load import Spec, load
from kd.parts import registry
from kd.setup.recipe import resolve
from kd.study.finished import Trust, best_student, opened_run, require_files


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions:
    """What to verify, on which images."""

    export: Path = option(metavar="EXPORT", parse=Path)
    """what kd-export wrote"""
    data: str = option("", "IMAGES")
    """the images that its numbers are of, among any others: a folder, a list, shards, a URL, as for kd-predict"""
    run: Path | None = option(None, "RUN", Path)
    """the run folder that it came from: the chain from the teacher on is compared too"""
    json: bool = option(False)
    """print JSON"""
    trust: bool = option(False)
    """also run model.pt2, which is a pickle, and code that the run's config.yaml names"""


def verify(options: VerifyOptions) -> Claims:
    """Recompute what an export claims."""
    folder = options.export
    try:
        return _verified(folder, options)
    except OSError as error:
        wrong = f"'{folder}' cannot be read ({error.strerror}: '{error.filename}')"
        raise ModelError("export", wrong, "", "Make it readable") from error
    except DAMAGE as error:
        reason = f"{type(error).__name__}: {in_short(error)}"
        raise invalid_export(f"'{folder}' is damaged, or was written by an older kd ({reason})") from error


def _verified(folder: Path, options: VerifyOptions) -> Claims:
    anew = "Export anew: kd-export RUN"
    manifest = read_json(folder / MANIFEST, "export", anew, kind=ModelError) if (folder / MANIFEST).is_file() else {}
    if "files" not in manifest:  # a run folder has another manifest.json
        wrong = f"'{folder}' is not an export: it has no {MANIFEST} of one"
        raise ModelError("export", wrong, "", "Name the folder that kd-export wrote")
    if not options.data:
        wrong, remedy = "is missing, and numbers are recomputed from images", "Name the run's validation images"
        raise ConfigError("--data", wrong, "A folder that holds them, among any others", remedy)
    known = Claims(manifest)
    if _files(folder, known):  # what has another hash is not run
        with tempfile.TemporaryDirectory() as copies:
            shown = Shown.among(options.data, folder, Path(copies, "shards"))
            _numbers(known, describe(folder), shown, options.trust)
        _chain(known, folder)
        if options.run is not None:
            _run(known, options.run, options.trust)
    return known


def _files(folder: Path, known: Claims) -> bool:
    """Compare the card with what the manifest says, and hashes; return whether the latter are right."""
    manifest = known.manifest
    file = folder / "README.md"
    card = file.read_text(encoding="utf-8", errors="replace").split("\n") if file.is_file() else []
    for part, lines in drawn(manifest).items():
        absent = [line for line in lines if line not in card]
        known.add(f"README.md: {part}", absent[0] if absent else "", "another line" if absent else "", not absent)
    first = len(known.rows)
    known.add(f"{MANIFEST}: checksum", manifest["checksum"], "of its content", unchanged(manifest))
    there = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    for name in sorted({*there, *manifest["files"]} - {MANIFEST}):
        claimed = manifest["files"].get(name, {"bytes": 0, "sha256": "not listed"})
        known.same(f"{name}: sha256", claimed["sha256"], sha256(there[name]) if name in there else "no file")
        if name in there:
            known.same(f"{name}: megabytes", claimed["bytes"] / 1e6, there[name].stat().st_size / 1e6)
    return not any(row.verdict == WRONG for row in known.rows[first:])


def _numbers(known: Claims, export: Description, shown: Shown, trust: bool) -> None:
    """Ask weights and graphs about the images, and compare all that the manifest counts."""
    manifest, folder = known.manifest, export.folder
    config = read_json(folder / "config.json", "export", "Export anew", kind=ModelError)
    own = (registry.build("tasks", one, registry.default_options("tasks", one), "") for one in registry.names("tasks"))
    task = next((one for one in own if one.problem_type == config.get("problem_type", "")), None)
    if task is None:
        raise ModelError("export", "its task is none of kd's own", "", "Ask who wrote it")
    why = {name: graphs.missing(name) if name in GRAPHS else "a pickle: see --trust" for name in manifest["parity"]}
    runners = {name: variants.runner(folder / name) for name in why if not why[name] or name == export.file}
    if trust and graphs.PT2 in why:
        runners[graphs.PT2] = runtimes.program_runner(folder / graphs.PT2)
    eager = _weights(known, export, config)
    outputs = parity.compare(eager or runners[export.file], runners, shown.batches(export, task))
    known.same("preprocessing: crop of config.json", config["pretrained_cfg"]["crop_pct"], export.crop)
    shown.compare(known, export, outputs.images)
    for name, told in manifest["parity"].items():
        if name not in runners:
            known.add(name, f"{len(told)} numbers", why[name], None)
            continue
        key = outputs.scores(name, task).decides
        claimed, found = dict(told), outputs.facts(name, task)
        if name not in graphs.EXACT:
            drop = manifest["parity"][variants.ONNX][key] - told[key]
            claimed["drop"], found["drop"] = drop, outputs.drop(name, task)
        left_out = () if eager else ("max_difference", "same_top1")
        claimed, found = ({k: v for k, v in one.items() if k not in left_out} for one in (claimed, found))
        ends = {f"{name}: {key}": outputs.interval(name, task), f"{name}: drop": outputs.drop_interval(name, task)}
        known.numbers(name, claimed, found, _share(name), ends=ends)
    _score(known, outputs, task, export.file)
    _promises(known, outputs, task, export.labels)
    _speed(known, folder, outputs, task)


def _share(name: str) -> float:
    return EXACT_SHARE if name in graphs.EXACT else OTHER_SHARE


def _weights(known: Claims, export: Description, config: Mapping[str, Any]) -> parity.Runner | None:
    """Return what answers as PyTorch does; None where that would be code that did not come with kd."""
    if not isinstance(config["architecture"], str) or known.manifest["output"].get("space") == "teacher":
        known.add("model.safetensors: answers as graphs do", "", "no network of timm's, or vectors are mapped", None)
        return None
    spec = Spec("export", f"local-dir:{export.folder}", {}, export.labels, str(export.folder), exact_head=True)
    try:
        return parity.eager_runner(load(spec, export.size))
    except ModelError as error:
        known.add("model.safetensors: weights of the network in config.json", "", error.wrong, False)
        return None


def _score(known: Claims, outputs: GraphOutputs, task: Task, name: str) -> None:
    """Compare the score that the card begins with, which was counted in the precision of training."""
    told, images = known.manifest["scores"], len(outputs.labels)
    if told["value"] is None or told["split"] != "val" or (told["images"] or images) != images or not task.logits:
        known.add(f"README.md: {told['title']}", told["value"], "counted on other images", None)
    else:
        share = OTHER_SHARE + 1 / images
        known.numbers(f"README.md: {told['title']}", float(told["value"]), outputs.score(name, task), share)


def _promises(known: Claims, outputs: GraphOutputs, task: Task, classes: Sequence[str]) -> None:
    """Choose thresholds again, and count what the promises of `sure` are worth."""
    told = known.manifest["output"]
    if of_labels := told.get("thresholds"):
        again = task.thresholds(outputs.outputs[EAGER], outputs.labels, classes)
        known.numbers("thresholds", of_labels, again, EXACT_SHARE)
    if claimed := told.get("defer"):
        try:
            asked = {name: each for name, each in outputs.outputs.items() if name == EAGER or name in claimed["stated"]}
            found = defer.choose(defer.Rule(**claimed["rule"]), asked, outputs.labels, of_labels or {}, classes)
        except ModelError as error:
            known.add("sure: threshold", claimed.get("threshold", "of labels"), error.wrong, False)
            return
        stated = found.pop("stated")
        known.numbers("sure", {key: one for key, one in claimed.items() if key != "stated"}, found, EXACT_SHARE)
        for name, one in stated.items():
            known.numbers(f"sure: promise of {name}", claimed["stated"][name], one, _share(name))


def _speed(known: Claims, folder: Path, outputs: GraphOutputs, task: Task) -> None:
    """Measure through `kd-serve` what is claimed of it, and whether the sentence of `--accept` holds."""
    told, accepted = known.manifest.get("variants", {}), known.manifest.get("accepted", {"file": None, "found": {}})
    name, count = accepted["file"], accepted.get("threads", 1)
    timed = {
        one: outputs.cpu_ms[one]
        for one in outputs.outputs
        if one in told or (one == name and "ms" in accepted["found"])
    }
    speeds = variants.measure(folder, timed, outputs.first, sorted({1, count})) if timed else {}
    noisy = {one: any(variants.noisy(seen, timed[one]) for seen in speeds[one].values()) for one in timed}
    for one in told.keys() & timed.keys():
        again = variants.facts(folder / one, variants.quality(one, outputs, task), speeds[one])
        claimed = {**told[one], "speed": {key: told[one]["speed"][key] for key in again["speed"]}}
        known.numbers(f"{one}: as compared", claimed, again, _share(one), noisy[one])
    if name in outputs.outputs:
        found = {"mb": variants.size(folder / name) / 1e6, "drop": 100 * outputs.drop(name, task)}
        found["ece"] = 100 * outputs.facts(name, task).get("ece", 0)
        found |= {"ms": speeds[name][count].p50_ms} if name in timed else {}
        for word in found.keys() & accepted["found"].keys():
            share = 1e-3 if word == "mb" else 100 * _share(name)
            known.numbers(f"accepted: {word}", accepted["found"][word], found[word], share, noisy.get(name, False))
        stated = accepted["found"] | {key: one for key, one in found.items() if key != "ms"}
        missed = misses(stated, limits(accepted["sentence"]))
        known.add("accepted: the sentence", accepted["sentence"], ", ".join(missed) or "holds", not missed)
        known.same("accepted: the file that is served", name, known.manifest.get("pick"))


def _chain(known: Claims, folder: Path) -> None:
    """Compare weights and graphs with what the chain says, and the licence with that of a name that timm knows."""
    manifest, record = known.manifest, read_json(folder / "kd.json", "export", "Export anew", kind=ModelError)
    chain, tensors = manifest["chain"], load_file(folder / "model.safetensors")
    own, inner = chain["student"], {f"inner.{key}": one for key, one in tensors.items()}  # of a network of one's own
    found = [tensors_digest(one) for one in (inner, tensors)]
    known.same("chain: weights", own["exported"], found[own["exported"] != found[0]])
    said = [record["run"], record["step"], record["digest"][:DIGITS], record["digest"][:DIGITS]]
    version = manifest["version"].removesuffix("-index")
    claimed = [own["run"], own["step"], own["exported"][:DIGITS], version]
    known.same("chain: run, step, weights and version", claimed, said)
    for name, claimed in chain["graphs"].items():
        known.same(f"chain: {name}", claimed, manifest["files"].get(name, {}).get("sha256", "no file"))
    for where, one in chain.get("teacher", {"members": {}})["members"].items():
        if NAMED in one["source"] and (licence := licence_of(one["name"], "", True)):
            known.same(f"licence: {where}, as timm has it", manifest["licences"].get(where), licence)


def _run(known: Claims, path: Path, trust: bool) -> None:
    """Compare the chain from the teacher on with a run folder, which runs no code without `trust`."""
    folder, stored = opened_run(path, trust)
    require_files(path, stored.data)
    recipe, recorded, chain = resolve(stored), folder.manifest(), known.manifest["chain"]
    Trust.of(trust, (), recipe.data).check_models({"student": recipe.student})
    own = chain["student"]
    if own["is"] == "teacher":
        raise ModelError("--run", "the export is of a run's teacher, whose chain it ends", "", "Leave out --run")
    student, provenance = best_student(folder, recipe.student, recipe.data, recorded["classes"])
    if "teacher" in chain:
        known.same("chain: the teacher's weights", chain["teacher"]["weights"], recorded.get("teacher"))
        known.numbers("chain: the teacher's answers", chain["answers"], recorded.get("answers") or {}, 0)
    known.same("chain: run and step", [own["run"], own["step"]], [provenance["run"], provenance["step"]])
    known.same("chain: weights of the step", own["weights"], provenance["digest"])
    if by := known.manifest.get("calibration", {}).get("temperature"):
        divide_logits(student.network, by)
    known.same("chain: weights of the step, as exported", own["exported"], digest(student.network))
    for what, licence in licences(recipe).items():
        claimed = known.manifest["licences"].get(what)  # of one that the run does not know: somebody said it later
        known.add(f"licence: {what}", claimed, licence, claimed == licence or (None if licence == UNKNOWN else False))
