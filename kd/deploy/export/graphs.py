"""The graphs of an export, each compared with PyTorch before it is kept."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from kd.core.errors import error_summary
from kd.core.evaluation import Task
from kd.core.facts import GraphFile, Network
from kd.core.host import cores
from kd.core.scores import Scored
from kd.deploy.export import parity, variants
from kd.deploy.export.claims import ParityClaims, QualityClaims, VariantClaims
from kd.deploy.export.defer import Rule
from kd.deploy.export.flags import ExportOptions
from kd.deploy.export.parity import EAGER, GraphOutputs
from kd.deploy.export.variants import ONNX
from kd.deploy.serve.bench import Latency
from kd.deploy.serve.engines import open_graph
from kd.deploy.serve.responses import Values
from kd.models import runtimes
from kd.models.classifier import Classifier
from kd.parts import registry
from kd.setup.recipe import Recipe

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
    # for kd.json: step, metrics, run, `digest` of the weights
    provenance: Mapping[str, Any]
    origin: str  # origin of its initial weights, as text
    # opener of the validation images
    images: Callable[[], AbstractContextManager[ReadImages]]
    # validation rows of the baseline on labels alone
    baseline: Sequence[Mapping[str, Any]] = ()
    # of the student and the baseline
    scored: tuple[Scored | None, Scored | None] = (None, None)
    # the run's record of `teacher` and `answers`
    made_from: Mapping[str, Any] = field(default_factory=dict)
    # see `kd.deploy.export.receipt`
    licences: Mapping[str, str] = field(default_factory=dict)
    values: Values = field(default_factory=dict)  # of each class


@dataclass(slots=True)
class ExportArtifacts:
    """Files and measurements of an export."""

    parity: dict[str, ParityClaims] = field(default_factory=dict)
    eager_ms: float = 0.0
    lines: list[str] = field(default_factory=list)
    # by class: see `Task.thresholds`
    thresholds: dict[str, dict[str, Any]] = field(default_factory=dict)
    # the threshold of sure predictions: see `defer.choose`
    defer: Any = field(default_factory=dict)
    # temperature scaling; empty: not applied
    calibration: Any = field(default_factory=dict)
    # by file: see `variants.quality`
    qualities: dict[str, QualityClaims] = field(default_factory=dict)
    # by file, through `kd-serve`, for manifest.json
    variants: dict[str, VariantClaims] = field(default_factory=dict)
    # limits, threads, chosen file and its values
    accepted: Any = field(default_factory=dict)
    # the same of a file with the second export, and its name
    cascade: Any = field(default_factory=dict)
    rule: Rule = field(default_factory=Rule)  # the rule of `defer`
    # by file: see `kd.deploy.shift.Reference`
    validation: dict[str, dict[str, Any]] = field(default_factory=dict)
    # by file: see `kd.deploy.serve.self_check`
    self_check: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class GraphExporter:
    """Writes an unfinished export's graphs, compares them with PyTorch and measures."""

    subject: Subject
    folder: Path
    options: ExportOptions
    images: ReadImages
    artifacts: ExportArtifacts
    graphs: Mapping[str, GraphFile] = field(default_factory=registry.graphs)
    failures: dict[str, str] = field(default_factory=dict)
    outputs: GraphOutputs = field(init=False)
    network: Network = field(init=False)

    @property
    def task(self) -> Task:
        return self.subject.recipe.task

    @property
    def candidates(self) -> list[str]:
        """The graphs to serve, without those that need a flag."""
        return [
            name
            for name, graph in self.graphs.items()
            if not graph.code and (self.options.wants(name) or not graph.named)
        ]

    def add_first(self) -> None:
        """Write and compare the graphs of flags and, with `--compare`, all others.

        One comparison times them in turns.
        """
        student = runtimes.reparameterized(self.subject.student)
        size = self.subject.recipe.data.image_size
        self.network = Network(
            cache(partial(runtimes.export_program, student, size)),
            self.folder / ONNX,
            partial(self.images, training=True),
            runtimes.LOGITS if student.num_classes else runtimes.EMBEDDING,
        )
        names = []
        compared = self.candidates if self.options.compare else []
        for name in self.graphs:
            if self.options.wants(name):
                registry.exporter(name).write(self.folder / name, self.network)
                names.append(name)
            elif name in compared and not self.write_candidate(name):
                names.append(name)
        self.compare(names)

    def missing(self, name: str) -> str:
        return registry.exporter(name).missing(name, True)

    def write_candidate(self, name: str) -> str:
        """Write a graph that may fail; return the reason if it does."""
        if reason := self.missing(name) or self.failures.get(name, ""):
            return reason
        try:
            registry.exporter(name).write(self.folder / name, self.network)
        except Exception as error:  # any type: runtimes and NNCF have their own
            self.remove(name)
            self.artifacts.lines.append(
                f"left out: {name}, because writing it failed ({error_summary(error)})"
            )
            self.failures[name] = f"cannot be written ({error_summary(error)})"
        return self.failures.get(name, "")

    def remove(self, name: str) -> None:
        for path in variants.files(self.folder / name):
            path.unlink(missing_ok=True)
        artifacts = self.artifacts
        for records in (artifacts.parity, artifacts.validation, artifacts.qualities):
            records.pop(name, None)

    def compare(self, names: Sequence[str]) -> None:
        """Compare graphs with PyTorch on the images; exact graphs must be exact."""
        outputs = self.run_graphs(self.folder, names)
        is_first = not self.artifacts.eager_ms
        self.outputs = outputs if is_first else self.outputs.joined(outputs)
        self.artifacts.eager_ms = outputs.cpu_ms[EAGER]
        for name in names:
            self._record(name)

    def run_graphs(self, folder: Path, names: Sequence[str]) -> GraphOutputs:
        """Run PyTorch and the graphs of a folder on the images."""
        return parity.compare(
            parity.eager_runner(self.subject.student),
            {name: open_graph(folder / name) for name in names},
            self.images(self.options.images),
        )

    def _record(self, name: str) -> None:
        artifacts = self.artifacts
        outputs = self.outputs
        task = self.task
        scores = outputs.scores(name, task)
        difference = outputs.difference(name)
        line = (
            f"{name:16s} {self.megabytes(name):6.2f} MB "
            f" max |d{'logit' if task.logits else 'value'}| {difference:.1e},"
            f" {scores.summary}, {outputs.cpu_ms[name]:.2f} ms CPU per image"
            f" (PyTorch {artifacts.eager_ms:.2f})"
        )
        if self.graphs[name].precision == "float32":
            images = len(outputs.labels)
            parity.require_exact(
                name, scores, difference, self.options.tolerance, images
            )
        else:
            low, high = outputs.drop_interval(name, task)
            line += (
                f", drop {100 * outputs.drop(name, task):.2f} points (95 %:"
                f" {100 * low:.2f} to {100 * high:.2f})"
            )
        facts = outputs.facts(name, task)
        if self.graphs[name].precision == "int8":
            share = round(registry.exporter(name).int8_share(self.folder / name), 4)
            facts["int8_share"] = share
            note = variants.int8_note(share)
            line += f"; {note}" if note else ""
        artifacts.lines.append(line)
        artifacts.parity[name] = facts
        reference = outputs.reference(
            name, task, self.subject.classes, bool(artifacts.calibration)
        )
        artifacts.validation[name] = reference.record()
        if self.options.measures and not self.graphs[name].code:
            artifacts.qualities[name] = variants.quality(name, outputs, task)

    def megabytes(self, name: str) -> float:
        return variants.size(self.folder / name) / 1e6

    def measure(
        self, names: Sequence[str], threads: Sequence[int]
    ) -> dict[str, dict[int, Latency]]:
        """Measure graphs through `kd-serve`; report disturbance by other work."""
        cpu_ms = {name: self.outputs.cpu_ms[name] for name in names}
        speeds = variants.measure(self.folder, cpu_ms, self.outputs.first, threads)
        disturbed = [
            name
            for name, speed in speeds.items()
            if variants.is_noisy(speed[self.options.threads], cpu_ms[name])
        ]
        if disturbed:
            self.artifacts.lines.append(
                f"noisy: other work disturbed the clients of {', '.join(disturbed)},"
                " twice; measure again on a quiet machine"
            )
        return speeds

    def measure_all(self) -> None:
        qualities = self.artifacts.qualities
        threads = sorted({1, self.options.threads, cores()})
        self.artifacts.variants = {
            name: variants.facts(self.folder / name, qualities[name], speed)
            for name, speed in self.measure(list(qualities), threads).items()
        }
        for name in self.candidates:
            if reason := self.missing(name):
                self.artifacts.lines.append(f"left out: {name}, because {reason}")
