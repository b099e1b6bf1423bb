"""The graphs of an export, each compared with PyTorch before it is kept."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from kd.core.errors import MissingExtra, ModelError, named
from kd.core.evaluation import Task
from kd.core.facts import GraphFile, Network
from kd.core.host import cores
from kd.core.scores import Scored
from kd.core.text import percent
from kd.deploy.export import defer, parity, variants
from kd.deploy.export.calibrate import calibrate
from kd.deploy.export.claims import ParityClaims, QualityClaims, VariantClaims
from kd.deploy.export.defer import Rule
from kd.deploy.export.flags import ExportOptions, NotAcceptedError, parse_limits, missed_limits
from kd.deploy.export.parity import EAGER, GraphOutputs
from kd.deploy.export.passing_on import (
    PASSED_ON,
    SecondOutputs,
    describe_second,
    smallest_share,
)
from kd.deploy.export.variants import INT8, ONNX
from kd.deploy.serve import self_check
from kd.deploy.serve.bench import Latency
from kd.deploy.serve.engines import open_graph
from kd.deploy.serve.model import Description
from kd.models import runtimes
from kd.models.classifier import Classifier
from kd.models.examination import examine
from kd.models.examined import IMAGES, noise
from kd.parts import registry
from kd.setup.recipe import Recipe

# most images for calibration: more do not improve one number, and PyTorch predicts each
CALIBRATION_IMAGES = 1000
ReadImages = Callable[..., parity.Batches]
"""(limit, training=False) -> `limit` validation images, evenly spaced; 0: all. With
`training`, views of training images.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A student and its provenance."""

    recipe: Recipe
    student: Classifier  # on the CPU
    classes: Sequence[str]
    data: str  # hash of the data
    provenance: Mapping[
        str, Any
    ]  # for kd.json: step, metrics, run, `digest` of the weights
    origin: str  # origin of its initial weights, as text
    images: Callable[
        [], AbstractContextManager[ReadImages]
    ]  # opener of the validation images
    baseline: Sequence[
        Mapping[str, Any]
    ] = ()  # validation rows of the baseline on labels alone
    scored: tuple[Scored | None, Scored | None] = (
        None,
        None,
    )  # of the student and the baseline
    made_from: Mapping[str, Any] = field(
        default_factory=dict
    )  # the run's record of `teacher` and `answers`
    licences: Mapping[str, str] = field(
        default_factory=dict
    )  # see `kd.deploy.export.receipt`


@dataclass(slots=True)
class ExportArtifacts:
    """Files and measurements of an export."""

    parity: dict[str, ParityClaims] = field(default_factory=dict)
    eager_ms: float = 0.0
    lines: list[str] = field(default_factory=list)
    thresholds: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # by class: see `Task.thresholds`
    defer: Any = field(
        default_factory=dict
    )  # the threshold of sure predictions: see `defer.choose`
    calibration: Any = field(
        default_factory=dict
    )  # temperature scaling; empty: not applied
    qualities: dict[str, QualityClaims] = field(
        default_factory=dict
    )  # by file: see `variants.quality`
    variants: dict[str, VariantClaims] = field(
        default_factory=dict
    )  # by file, through `kd-serve`, for manifest.json
    accepted: Any = field(
        default_factory=dict
    )  # limits, threads, chosen file and its values
    cascade: Any = field(
        default_factory=dict
    )  # the same of a file with the second export, and its name
    rule: Rule = field(default_factory=Rule)  # the rule of `defer`
    validation: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # by file: see `kd.deploy.shift.Reference`
    self_check: dict[str, Any] = field(
        default_factory=dict
    )  # by file: see `kd.deploy.serve.self_check`


def write(
    subject: Subject,
    folder: Path,
    options: ExportOptions,
    seal: Callable[[ExportArtifacts], object],
) -> ExportArtifacts:
    """Write the requested graphs and compare each with PyTorch. `seal` completes a
    folder that `kd-serve` can serve.
    """
    task, student, classes = subject.recipe.task, subject.student, subject.classes
    if not options.any_graph:
        examine(
            student, "student", noise(subject.recipe.data.image_size), bool(task.logits)
        )
        none = torch.zeros(0, len(classes))
        return ExportArtifacts(
            thresholds=task.thresholds(none, task.no_labels(0, len(classes)), classes)
        )
    known = registry.graphs()
    for name in filter(options.wants, known):  # refuse before the images are read
        if why := registry.exporter(name).missing(name, True):
            wrong, _, remedy = why.partition(": ")
            raise MissingExtra(known[name].option or "--onnx", wrong, "", remedy)
    second = describe_second(options, task, classes, subject.recipe.data)
    student.eval()
    made, notes = ExportArtifacts(rule=options.rule), []
    with subject.images() as images:
        pixels = next(iter(images(IMAGES)))[0]
        examine(student, "student", torch.from_numpy(pixels), bool(task.logits))
        if options.calibrate and task.logits == "softmax":
            few = min(options.images or CALIBRATION_IMAGES, CALIBRATION_IMAGES)
            made.calibration, line = calibrate(student, images(few))
            notes.append(line)
        work = GraphExporter(subject, folder, options, images, made, known)
        work.add_first()
        made.thresholds = task.thresholds(
            work.outputs.outputs[EAGER], work.outputs.labels, classes
        )
        made.lines += notes
        if options.accept is not None:
            work.accept(options.accept, seal, second)
        if options.compare:
            seal(made)
            work.measure_all()
    if any(encoded for encoded, _ in work.outputs.images):
        work.outputs.write_images(
            folder / parity.IMAGES, classes if task.logits else ()
        )
    kept = {
        name: one
        for name, one in work.outputs.outputs.items()
        if name == EAGER or name in made.parity
    }
    made.defer = defer.choose(
        made.rule, kept, work.outputs.labels, made.thresholds, classes
    )
    made.lines += defer.defer_lines(made.defer)
    made.self_check = _self_check(
        subject,
        folder,
        [name for name, one in known.items() if name in made.parity and not one.code],
    )
    return made


def _self_check(
    subject: Subject, folder: Path, names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Write the self-check of the graphs (the first is model.onnx); return its entry in
    manifest.json.
    """
    data, engines = (
        subject.recipe.data,
        {name: open_graph(folder / name) for name in names},
    )
    if not engines:
        return {}
    labels = subject.classes if subject.recipe.task.logits else ()
    entries = self_check.write(
        folder, engines, labels, data.image_size, data.crop_pct, data.bits
    )
    return {
        name: entry | registry.exporter(name).least(folder / name)
        for name, entry in entries.items()
    }


def graph_losses(
    outputs: GraphOutputs, name: str, task: Task, behind: float
) -> dict[str, float]:
    """Return a graph's losses by the words of `--accept`, points; `behind`: the student
    behind its teacher.
    """
    lost, facts = 100 * outputs.drop(name, task), outputs.facts(name, task)
    return {"drop": lost, "teacher-drop": lost + behind} | (
        {"ece": 100 * facts["ece"]} if "ece" in facts else {}
    )


@dataclass(slots=True)
class GraphExporter:
    """An unfinished export with its open images."""

    subject: Subject
    folder: Path
    options: ExportOptions
    images: ReadImages
    made: ExportArtifacts
    known: Mapping[str, GraphFile]
    failures: dict[str, str] = field(default_factory=dict)
    outputs: GraphOutputs = field(init=False)
    network: Network = field(init=False)

    @property
    def task(self) -> Task:
        return self.subject.recipe.task

    def add_first(self) -> None:
        """Write torch's graphs and those requested by flags or `--compare`, and time
        all in turns.
        """
        student, size, names = (
            runtimes.reparameterized(self.subject.student),
            self.subject.recipe.data.image_size,
            [],
        )
        output = runtimes.LOGITS if student.num_classes else runtimes.EMBEDDING
        program, views = (
            cache(partial(runtimes.export_program, student, size)),
            partial(self.images, training=True),
        )
        self.network = Network(program, self.folder / ONNX, views, output)
        for name in self.known:
            if self.options.wants(name):
                registry.exporter(name).write(self.folder / name, self.network)
            elif (
                not self.options.compare
                or name not in self.candidates
                or self._missing(name)
                or self._failed(name)
            ):
                continue
            names.append(name)
        self._compare(names)

    @property
    def candidates(self) -> list[str]:
        """The graphs to serve, without those that need a flag."""
        served = ((name, one) for name, one in self.known.items() if not one.code)
        return [
            name for name, one in served if self.options.wants(name) or not one.named
        ]

    def _missing(self, name: str) -> str:
        return registry.exporter(name).missing(name, True)

    def _failed(self, name: str) -> str:
        """Write a candidate; return the reason if it fails, and keep finished files."""
        if name in self.failures:
            return self.failures[name]
        try:
            registry.exporter(name).write(self.folder / name, self.network)
        except Exception as error:  # any type: runtimes and NNCF have their own
            self._remove(name)
            self.made.lines.append(
                f"left out: {name}, because writing it failed ({named(error)})"
            )
            self.failures[name] = f"cannot be written ({named(error)})"
        return self.failures.get(name, "")

    def _remove(self, name: str) -> None:
        for path in variants.files(self.folder / name):
            path.unlink(missing_ok=True)
        for one in (self.made.parity, self.made.validation, self.made.qualities):
            one.pop(name, None)

    def _compare(self, names: Sequence[str]) -> None:
        """Run PyTorch and the graphs on the images, require exact graphs to be exact,
        and record the predictions.
        """
        eager = parity.eager_runner(self.subject.student)
        opened = {name: open_graph(self.folder / name) for name in names}
        found = parity.compare(eager, opened, self.images(self.options.images))
        first = not self.made.eager_ms
        self.outputs = found if first else self.outputs.joined(found)
        self.made.eager_ms = found.cpu_ms[EAGER]
        for name in names:
            self._judge(name)

    def _judge(self, name: str) -> None:
        made, outputs, task, exact = (
            self.made,
            self.outputs,
            self.task,
            self.known[name].precision == "float32",
        )
        scores, difference, images = (
            outputs.scores(name, task),
            outputs.difference(name),
            len(outputs.labels),
        )
        if exact:
            parity.require_exact(name, scores, difference, self.options.tolerance, images)
        made.parity[name] = outputs.facts(name, task)
        made.validation[name] = outputs.reference(
            name, task, self.subject.classes, bool(made.calibration)
        ).record()
        line = (
            f"max |d{'logit' if task.logits else 'value'}| {difference:.1e},"
            f" {scores.summary}, "
        )
        line += (
            f"{outputs.cpu_ms[name]:.2f} ms CPU per image (PyTorch {made.eager_ms:.2f})"
        )
        if not exact:
            low, high = outputs.drop_interval(name, task)
            line += (
                f", drop {100 * outputs.drop(name, task):.2f} points (95 %:"
                f" {100 * low:.2f} to {100 * high:.2f})"
            )
        if (
            name == INT8
            and (share := runtimes.int8_share(self.folder / name)) < variants.LEAST_INT8
        ):
            line += f"; {percent(share)} of the weights are int8"
        made.lines.append(f"{name:16s} {self._megabytes(name):6.2f} MB  {line}")
        if self.options.measures and not self.known[name].code:
            made.qualities[name] = variants.quality(name, outputs, task)

    def _megabytes(self, name: str) -> float:
        return variants.size(self.folder / name) / 1e6

    def accept(
        self, text: str, seal: Callable[[ExportArtifacts], object], described: Description | None
    ) -> None:
        """Find the first graph within the limits, alone or with the second export;
        other candidates are removed.
        """
        wanted, asked, told = parse_limits(text), {ONNX, *self.made.parity}, list[str]()
        for name, found, why in self._attempts(wanted, seal, described):
            if not why:
                rounded = {
                    word: round(found[word], 4)
                    for word in (*wanted, PASSED_ON)
                    if word in found
                }
                facts = {
                    "sentence": text,
                    "threads": self.options.threads,
                    "file": name,
                    "found": rounded,
                }
                if described and PASSED_ON in found:
                    self.made.cascade = {
                        **facts,
                        "second": f"{described.name} {described.version}",
                    }
                else:
                    self.made.accepted = facts
                for other in {*self.candidates} - {*asked, name}:
                    self._remove(other)
                return
            told.append(why)
            self.made.lines.append(f"not accepted: {why}")
        remedy = (
            "Nothing was written; allow more, use more --threads, or train another"
            " student"
        )
        raise NotAcceptedError(
            "--accept", f'nothing keeps "{text}". {"; ".join(told)}', "", remedy
        )

    def _attempts(
        self,
        wanted: Mapping[str, float],
        seal: Callable[[ExportArtifacts], object],
        described: Description | None,
    ) -> Iterator[tuple[str, dict[str, float], str]]:
        """Try each graph alone, then with the second export; yield name, values and the
        reason against it.
        """
        for name in self.candidates:
            yield name, *self._tried(name, wanted, seal)
        if described:
            second = self._second(described, "ms" in wanted)
            for name in [name for name in self.candidates if name in self.made.parity]:
                yield name, *self._tried_with(second, name, wanted, seal)

    def _second(self, described: Description, timed: bool) -> SecondOutputs:
        """Run the second export's graph on the images, and measure it through
        `kd-serve` if `timed`.
        """
        path, threads = described.folder / described.file, self.options.threads
        engines = {described.file: open_graph(path)}
        found = parity.compare(
            parity.eager_runner(self.subject.student),
            engines,
            self.images(self.options.images),
        )
        cpu_ms = {described.file: found.cpu_ms[described.file]}
        speeds = (
            variants.measure(described.folder, cpu_ms, found.first, [threads])
            if timed
            else {}
        )
        ms = speeds[described.file][threads].p50_ms if timed else 0.0
        return SecondOutputs(found.outputs[described.file], ms, variants.size(path) / 1e6)

    def _tried_with(
        self,
        second: SecondOutputs,
        name: str,
        wanted: Mapping[str, float],
        seal: Callable[[ExportArtifacts], object],
    ) -> tuple[dict[str, float], str]:
        """Like `_tried`, for a graph that passes its unsure images on to the second
        export.
        """
        tried = smallest_share(
            self.outputs, name, second.logits, self.task, wanted, self._behind(wanted)
        )
        found = tried.values
        found["mb"] = self._megabytes(name) + second.megabytes
        if not missed_limits(found, wanted) and "ms" in wanted:
            seal(self.made)
            threads = self.options.threads
            found["ms"] = (
                self._measure([name], [threads])[name][threads].p50_ms
                + found[PASSED_ON] * second.ms
            )
        why = tried.reason(name, wanted)
        if not why:
            self.made.rule = tried.rule
        return found, why

    def _tried(
        self, name: str, wanted: Mapping[str, float], seal: Callable[[ExportArtifacts], object]
    ) -> tuple[dict[str, float], str]:
        """Measure a graph, cheap values first, until one misses its limit; return
        values and the reason.
        """
        if name not in self.made.parity and (
            why := self._missing(name) or self._failed(name)
        ):
            return {}, f"{name}: {why}"
        found = {"mb": self._megabytes(name)}
        if not missed_limits(found, wanted):
            if name not in self.made.parity:
                self._compare([name])
            found |= self._losses(name, wanted)
            if "ms" in wanted and not missed_limits(found, wanted):
                seal(self.made)
                threads = self.options.threads
                found["ms"] = self._measure([name], [threads])[name][threads].p50_ms
        missed = missed_limits(found, wanted)
        return found, f"{name} misses {', '.join(missed)}" if missed else ""

    def _losses(self, name: str, wanted: Mapping[str, float]) -> dict[str, float]:
        """Return a graph's loss in points, and the calibration error if requested."""
        found = graph_losses(self.outputs, name, self.task, self._behind(wanted))
        if "ece" in wanted and "ece" not in found:
            raise ModelError(
                "--accept",
                "ece needs labels, and no validation image has one",
                "",
                "Leave ece out",
            )
        return {
            word: value
            for word, value in found.items()
            if word == "drop" or word in wanted
        }

    def _behind(self, wanted: Mapping[str, float]) -> float:
        """Return by how many points the run's recorded student is behind its teacher; 0
        if it is not asked.
        """
        if "teacher-drop" not in wanted:
            return 0.0
        scored, key = self.subject.scored[0], self.task.scores.own[0].key
        row = self.subject.provenance["metrics"] if scored is None else scored.row
        if key not in row or f"teacher_{key}" not in row:
            wrong = (
                "teacher-drop has nothing to compare with: the run recorded no score of"
                " its teacher"
            )
            raise ModelError(
                "--accept",
                wrong,
                "",
                "Say drop, which is against the student as trained",
            )
        return 100 * (row[f"teacher_{key}"] - row[key])

    def _measure(
        self, names: Sequence[str], threads: Sequence[int]
    ) -> dict[str, dict[int, Latency]]:
        """Measure graphs through `kd-serve`; report disturbance by other work."""
        cpu_ms = {name: self.outputs.cpu_ms[name] for name in names}
        found = variants.measure(self.folder, cpu_ms, self.outputs.first, threads)
        noisy = [
            name
            for name, speed in found.items()
            if variants.noisy(speed[self.options.threads], cpu_ms[name])
        ]
        if noisy:
            text = (
                "noisy: other work disturbed the clients of {}, twice; measure again on"
                " a quiet machine"
            )
            self.made.lines.append(text.format(", ".join(noisy)))
        return found

    def measure_all(self) -> None:
        made, found = (
            self.made,
            self._measure(
                list(self.made.qualities), sorted({1, self.options.threads, cores()})
            ),
        )
        made.variants = {
            name: variants.facts(self.folder / name, made.qualities[name], found[name])
            for name in found
        }
        made.lines += [
            f"left out: {name}, because {why}"
            for name in self.candidates
            if (why := self._missing(name))
        ]
