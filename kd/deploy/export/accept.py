"""The search for the first graph within the limits of `--accept`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kd.core.errors import ModelError
from kd.core.evaluation import Task
from kd.deploy.export import variants
from kd.deploy.export.flags import NotAcceptedError, missed_limits, parse_limits
from kd.deploy.export.graphs import ExportArtifacts, GraphExporter
from kd.deploy.export.parity import GraphOutputs
from kd.deploy.export.passing_on import PASSED_ON, SecondOutputs, smallest_share
from kd.deploy.export.variants import ONNX
from kd.deploy.serve.model import Description


def graph_losses(
    outputs: GraphOutputs, name: str, task: Task, behind: float
) -> dict[str, float]:
    """Return a graph's losses by the words of `--accept`, points.

    `behind`: points of the student behind its teacher.
    """
    drop = 100 * outputs.drop(name, task)
    losses = {"drop": drop, "teacher-drop": drop + behind}
    facts = outputs.facts(name, task)
    if "ece" in facts:
        losses["ece"] = 100 * facts["ece"]
    return losses


@dataclass(frozen=True, slots=True)
class AcceptSearch:
    """Tries each graph alone, then with the second export for its unsure images."""

    exporter: GraphExporter
    sentence: str
    # completes a folder so that `kd-serve` can serve it
    seal: Callable[[ExportArtifacts], object]
    second: Description | None

    @property
    def limits(self) -> dict[str, float]:
        return parse_limits(self.sentence)

    def pick_graph(self) -> None:
        """Record the first graph within the limits, and remove other candidates.

        Raises:
            NotAcceptedError: no graph is within the limits.
        """
        exporter = self.exporter
        requested = {ONNX, *exporter.artifacts.parity}
        reasons: list[str] = []
        for name, values, reason in self._attempts():
            if not reason:
                self._record(name, values)
                exporter.artifacts.lines.extend(self._student_lines())
                for candidate in {*exporter.candidates} - {*requested, name}:
                    exporter.remove(candidate)
                return
            reasons.append(reason)
            exporter.artifacts.lines.append(f"not accepted: {reason}")
        remedy = (
            "Nothing was written; allow more, use more --threads, or train another"
            " student"
        )
        wrong = f'nothing keeps "{self.sentence}". {"; ".join(reasons)}'
        raise NotAcceptedError("--accept", wrong, "", remedy)

    def _record(self, name: str, values: dict[str, float]) -> None:
        words = [word for word in (*self.limits, PASSED_ON) if word in values]
        facts = {
            "sentence": self.sentence,
            "threads": self.exporter.options.threads,
            "file": name,
            "found": {word: round(values[word], 4) for word in words},
        }
        second = self.second
        if second and PASSED_ON in values:
            facts["second"] = f"{second.name} {second.version}"
            self.exporter.artifacts.cascade = facts
        else:
            self.exporter.artifacts.accepted = facts

    def _attempts(self) -> Iterator[tuple[str, dict[str, float], str]]:
        """Yield the name of each tried graph, its values and the reason against it."""
        candidates = self.exporter.candidates
        for name in candidates:
            yield name, *self._try_alone(name)
        if self.second:
            second = self._second_outputs(self.second)
            for name in candidates:
                if name in self.exporter.artifacts.parity:
                    yield name, *self._try_with(second, name)

    def _second_outputs(self, second: Description) -> SecondOutputs:
        """Run the second export's graph on the images, and measure it if need be."""
        file = second.file
        outputs = self.exporter.run_graphs(second.folder, [file])
        ms = 0.0
        if "ms" in self.limits:
            cpu_ms = {file: outputs.cpu_ms[file]}
            threads = self.exporter.options.threads
            speeds = variants.measure(second.folder, cpu_ms, outputs.first, [threads])
            ms = speeds[file][threads].p50_ms
        megabytes = variants.size(second.folder / file) / 1e6
        return SecondOutputs(outputs.outputs[file], ms, megabytes)

    def _try_with(
        self, second: SecondOutputs, name: str
    ) -> tuple[dict[str, float], str]:
        """Try a graph that passes its unsure images on to the second export."""
        exporter = self.exporter
        trial = smallest_share(
            exporter.outputs,
            name,
            second.logits,
            exporter.task,
            self.limits,
            self._points_behind(),
        )
        values = trial.values
        values["mb"] = exporter.megabytes(name) + second.megabytes
        if "ms" in self.limits and not missed_limits(values, self.limits):
            values["ms"] = self._served_ms(name) + values[PASSED_ON] * second.ms
        reason = trial.reason(name, self.limits)
        if not reason:
            exporter.artifacts.rule = trial.rule
        return values, reason

    def _try_alone(self, name: str) -> tuple[dict[str, float], str]:
        """Measure a graph, cheap values first, until one misses its limit."""
        exporter = self.exporter
        is_compared = name in exporter.artifacts.parity
        if not is_compared and (reason := exporter.write_candidate(name)):
            return {}, f"{name}: {reason}"
        values = {"mb": exporter.megabytes(name)}
        if not missed_limits(values, self.limits):
            if not is_compared:
                exporter.compare([name])
            values |= self._losses(name)
            if "ms" in self.limits and not missed_limits(values, self.limits):
                values["ms"] = self._served_ms(name)
        missed = missed_limits(values, self.limits)
        return values, f"{name} misses {', '.join(missed)}" if missed else ""

    def _served_ms(self, name: str) -> float:
        """Return the median latency of a graph through `kd-serve`."""
        self.seal(self.exporter.artifacts)
        threads = self.exporter.options.threads
        return self.exporter.measure([name], [threads])[name][threads].p50_ms

    def _losses(self, name: str) -> dict[str, float]:
        """Return a graph's drop in points, and other losses that are limited."""
        exporter = self.exporter
        losses = graph_losses(
            exporter.outputs, name, exporter.task, self._points_behind()
        )
        if "ece" in self.limits and "ece" not in losses:
            wrong = "ece needs labels, and no validation image has one"
            raise ModelError("--accept", wrong, "", "Leave ece out")
        return {word: losses[word] for word in losses if word in ("drop", *self.limits)}

    def _student_lines(self) -> list[str]:
        """Return a line if the student itself is worse than its teacher."""
        behind = self._recorded_points_behind()
        if "teacher-drop" in self.limits or behind is None or behind <= 0:
            return []
        return [
            f"the student itself is {behind:.1f} points below its teacher on the"
            " validation images; drop counts from the student, teacher-drop from the"
            " teacher"
        ]

    def _recorded_points_behind(self) -> float | None:
        """Return the recorded points of the student behind its teacher, if any."""
        subject = self.exporter.subject
        key = self.exporter.task.scores.own[0].key
        scored = subject.scored[0]
        row = subject.provenance["metrics"] if scored is None else scored.row
        if key not in row or f"teacher_{key}" not in row:
            return None
        return 100 * (row[f"teacher_{key}"] - row[key])

    def _points_behind(self) -> float:
        """Return the points of the student behind its teacher; 0 if unused."""
        if "teacher-drop" not in self.limits:
            return 0.0
        behind = self._recorded_points_behind()
        if behind is None:
            wrong = (
                "teacher-drop has nothing to compare with: the run recorded no score of"
                " its teacher"
            )
            remedy = "Say drop, which is against the student as trained"
            raise ModelError("--accept", wrong, "", remedy)
        return behind
