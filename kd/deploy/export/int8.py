"""int8 within a budget: a ladder of ways to quantize. The climb stops at the first that loses at most so much.

1. dynamic: int8 weights, activations quantized as they come (onnxruntime). It leaves convolutions in float32, and
   does not hold where they have most of the weights.
2. post-training: weights and activations in OpenVINO's IR, ranges found on training views, with SmoothQuant
   (arXiv:2211.10438) and bias correction (NNCF).
3. accuracy control: the same, with those layers in float32 that cost the most, one after another (NNCF).
4. repair: the network is fake-quantized in PyTorch (NNCF) and trained on: see `kd.deploy.export.repair`.

NNCF finds the ranges on training views. What a rung loses is measured on the run's validation images.
"""

from __future__ import annotations

import ast
import copy
import io
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kd.core.errors import MissingExtra, ModelError
from kd.core.evaluation import Task
from kd.core.host import signal_stack
from kd.core.intervals import around, paired, resampled
from kd.core.scores import GraphScores
from kd.core.text import percent
from kd.deploy.export.calibrate import divide_logits
from kd.deploy.export.parity import Runner, eager_runner
from kd.deploy.export.subject import Train
from kd.deploy.export.variants import ONNX, Variant
from kd.models import runtimes
from kd.models.classifier import Classifier, set_attention

DYNAMIC, STATIC = "model.int8.onnx", "openvino.int8.xml"
LEAST = 0.5  # share of the weights that the first rung must make int8
VIEWS = 300  # training views on which NNCF finds ranges: its own default
RANKED, CONTROLLED = 20, 2000
"""Batches of images on which accuracy control ranks layers; images, which it holds in memory, on which it measures."""
Shown = Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]]
Views = Callable[[int], Iterable[tuple[np.ndarray, np.ndarray]]]


@dataclass(frozen=True, slots=True)
class Rung:
    """One way to quantize, and what it loses."""

    name: str
    file: str
    title: str  # of the score that decides
    score: float
    drop: float  # against the student in PyTorch
    interval: tuple[float, float]  # 95 % of the drop: of the difference on the same images
    agreement: float  # share of the images with the same answer as in PyTorch; of an embedding model the mean cosine
    bytes: int
    left_out: tuple[str, ...] = ()  # layers that stayed in float32 by accuracy control
    share: float = 1.0  # of the weights, that are int8; known of the first rung

    def line(self) -> str:
        low, high = (100 * each for each in self.interval)
        text = (
            f"int8, {self.name}: {self.title} {percent(self.score)}, drop {100 * self.drop:.2f} points "
            f"(95 %: {low:.2f} to {high:.2f}), as trained {percent(self.agreement)}, {self.bytes / 1e6:.2f} MB"
        )
        text += f"; {percent(self.share)} of the weights are int8" if self.share < LEAST else ""
        return text + (f"; in float32: {', '.join(self.left_out)}" if self.left_out else "")


@dataclass(frozen=True, slots=True)
class Exam:
    """Says what a graph loses against the student in PyTorch, on the same images."""

    task: Task
    images: Shown  # yields uint8 [B, 3, S, S] and labels [B], always the same N
    reference: torch.Tensor  # what the student returns for them in PyTorch: logits [N, C] or vectors [N, D]
    labels: torch.Tensor

    @classmethod
    def of(cls, task: Task, student: Classifier, images: Shown) -> Exam:
        answer = eager_runner(student)
        seen = [(answer(pixels), label) for pixels, label in images()]
        outputs, labels = (torch.from_numpy(np.concatenate(each)) for each in zip(*seen, strict=True))
        return cls(task, images, outputs, labels)

    def __call__(self, name: str, path: Path, left_out: tuple[str, ...] = ()) -> Rung:
        variant = Variant.at(path)
        outputs = self.answers(variant.runner())
        scores, before = self.scores(outputs), self.scores(self.reference)
        value, facts = scores.facts[scores.decides], scores.facts
        drop = before.facts[before.decides] - value
        same = facts["same_top1"] / len(outputs) if "same_top1" in facts else facts.get("cosine", value)
        interval = self._interval(outputs, drop)
        return Rung(name, path.name, scores.title, value, drop, interval, same, variant.bytes, left_out)

    def answers(self, run: Runner) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([run(pixels) for pixels, _ in self.images()]))

    def first(self, images: int) -> Iterator[tuple[np.ndarray, np.ndarray, torch.Tensor]]:
        """Yield the first batches of at least so many images with what the student returns for each."""
        done = 0
        for pixels, label in self.images():
            yield pixels, label, self.reference[done : done + len(label)]
            done += len(label)
            if done >= images:
                return

    def scores(self, outputs: torch.Tensor) -> GraphScores:
        return self.task.graph_scores(outputs, self.reference, self.labels)

    def _interval(self, outputs: torch.Tensor, drop: float) -> tuple[float, float]:
        images = len(outputs)
        if "correct" in self.scores(outputs).facts:  # one label an image: right or wrong
            expected = self.reference.argmax(1)
            label = torch.where(self.labels < 0, expected, self.labels)
            was, now = expected == label, outputs.argmax(1) == label
            return paired(int((was & ~now).sum()), int((now & ~was).sum()), images)

        def lost(picks: np.ndarray) -> float:
            pair = [
                self.task.graph_scores(each[picks], self.reference[picks], self.labels[picks])
                for each in (self.reference, outputs)
            ]
            return pair[0].facts[pair[0].decides] - pair[1].facts[pair[1].decides]

        return around(drop, resampled(lost, images))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ladder:
    """What a climb needs."""

    folder: Path  # with model.onnx; the quantized files are written beside it
    student: Classifier
    size: int
    exam: Exam
    views: Views  # yields so many training views, uint8 [B, 3, S, S], with labels
    max_drop: float  # a share: 0.005 is half a point
    both: bool = False  # go on to the second rung where the first one holds: whoever compares speeds wants both files
    repair: int = 0  # steps of the last rung; 0: there is none
    train: Train | None = None  # None: this student cannot be trained on
    temperature: float = 1.0  # by which the student's logits were divided after its training
    rungs: list[Rung] = field(default_factory=list)

    def climb(self) -> list[Rung]:
        """Quantize until the drop holds; return all rungs that were tried, the last one holds.

        A file of a rung that does not hold is removed, unless `both` wants it in a table.
        """
        runtimes.write_int8(self.folder / ONNX, self.folder / DYNAMIC)
        share = runtimes.int8_share(self.folder / DYNAMIC)
        self.rungs.append(replace(self.exam("dynamic", self.folder / DYNAMIC), share=share))
        held = self._holds()
        if held and not self.both:
            return self.rungs
        if not held and not self.both:
            (self.folder / DYNAMIC).unlink()
        require(self)
        for rung in [self._post_training, self._controlled, *([self._repaired] if self.repair else [])]:
            self.rungs.append(rung())
            if held := self._holds() or held:
                return self.rungs
        remedy = ", or train on for longer" if self.repair else ", or add --repair 500" if self.train else ""
        few = {one.name: f" ({percent(one.share)} of the weights)" for one in self.rungs if one.share < LEAST}
        tried = ", ".join(f"{one.name} {100 * one.drop:.2f}{few.get(one.name, '')}" for one in self.rungs)
        wrong = f"no int8 graph holds it: on {len(self.exam.labels)} validation images they lose {tried} points"
        allowed = f"A drop of at most {100 * self.max_drop:g} points"
        raise ModelError("--max-drop", wrong, allowed, f"Nothing was written; raise --max-drop{remedy}")

    def _holds(self) -> bool:
        return self.rungs[-1].drop <= self.max_drop and self.rungs[-1].share >= LEAST

    def _post_training(self) -> Rung:
        post_training(self.folder / ONNX, self.folder / STATIC, self.views)
        return self.exam("post-training", self.folder / STATIC)

    def _controlled(self) -> Rung:
        left_out = controlled(self.folder / ONNX, self.folder / STATIC, self.views, self.exam, self.max_drop)
        return self.exam("accuracy control", self.folder / STATIC, left_out)

    def _repaired(self) -> Rung:
        assert self.train is not None
        own, fake = fake_quantized(self.student, self.size, self.views, self.temperature)
        self.train(fake, own, self.repair)
        write_fake(fake, self.size, self.folder / STATIC, self.temperature)
        return self.exam(f"repair, {self.repair} steps", self.folder / STATIC)


def require(ladder: Ladder) -> None:
    """Require what the rungs above the first one need."""
    for name in ("nncf", "openvino"):
        if not runtimes.installed(name):
            first = ladder.rungs[0]
            lost = f"dynamic int8 loses {100 * first.drop:.2f} points, "
            lost += f"at most {100 * ladder.max_drop:g} are allowed (--max-drop)"
            if first.share < LEAST:
                lost = f"dynamic int8 leaves convolutions in float32, {percent(1 - first.share)} of the weights"
            wrong = f"{lost}, and the next rung needs {name}, which is not installed"
            raise MissingExtra("--int8", wrong, "", "pip install 'kd[nncf]'")


def post_training(source: Path, path: Path, views: Views, smooth: bool = True) -> None:
    """Write OpenVINO's IR, `path` (.xml) and its .bin, with int8 weights and activations, ranges from training views.

    `smooth`: use SmoothQuant. `views`: see `Ladder.views`.
    """
    with _nncf() as nncf:
        openvino = runtimes.require("openvino", "--int8", "nncf")
        model = openvino.convert_model(str(source))
        data = nncf.Dataset(_singles(views))
        quantized = nncf.quantize(model, data, advanced_parameters=_advanced(nncf, smooth), **_common(nncf))
        openvino.save_model(quantized, str(path), compress_to_fp16=False)


def controlled(source: Path, path: Path, views: Views, exam: Exam, max_drop: float) -> tuple[str, ...]:
    """Write the same with layers in float32 until the drop holds on the validation images; return their names.

    The layers are chosen on images on which the drop is measured (at most `CONTROLLED`), which flatters it a little.
    """

    def score(model: Any, items: Iterable[Any]) -> tuple[float, list[list[np.ndarray]]]:
        outputs, others, labels = [], [], []
        for pixels, label, reference in items:
            outputs.append(next(iter(model(pixels).values())))
            labels.append(torch.from_numpy(label))
            others.append(reference)
        joined = torch.from_numpy(np.concatenate(outputs))
        found = exam.task.graph_scores(joined, torch.cat(others), torch.cat(labels))
        return found.facts[found.decides], [[each] for each in outputs]

    with _nncf() as nncf:
        openvino = runtimes.require("openvino", "--int8", "nncf")
        model, data = openvino.convert_model(str(source)), nncf.Dataset(_singles(views))
        plain = int8_layers(nncf.quantize(model, data, **_common(nncf)))
        items = list(exam.first(CONTROLLED))
        found = nncf.quantize_with_accuracy_control(
            openvino.convert_model(str(source)),
            data,
            nncf.Dataset(items, lambda item: item[0]),
            score,
            max_drop=max_drop,
            advanced_accuracy_restorer_parameters=nncf.AdvancedAccuracyRestorerParameters(ranking_subset_size=RANKED),
            **_common(nncf),
        )
        openvino.save_model(found, str(path), compress_to_fp16=False)
    names = modules_of(source)
    return tuple(sorted({names.get(one.removesuffix("/WithoutBiases"), one) for one in plain - int8_layers(found)}))


def int8_layers(model: Any) -> set[str]:
    """Return the names of the products and convolutions of a quantized OpenVINO model that have int8 inputs."""
    passed = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Split", "VariadicSplit", "StridedSlice", "Gather")
    found = set()
    for layer in model.get_ops():
        if layer.get_type_name() in ("MatMul", "Convolution", "GroupConvolution"):
            node = layer.input_value(0).get_node()
            while node.get_type_name() in passed:
                node = node.input_value(0).get_node()
            if node.get_type_name() == "FakeQuantize":
                found.add(layer.get_friendly_name())
    return found


def modules_of(path: Path) -> dict[str, str]:
    """Return the module of each node of an ONNX file that torch wrote, such as `blocks.0.attn.qkv`, by node."""
    onnx, found = runtimes.require("onnx", "--int8"), {}
    for node in onnx.load(path, load_external_data=False).graph.node:
        metadata = {pair.key: pair.value for pair in node.metadata_props}
        scopes = ast.literal_eval(metadata.get("pkg.torch.onnx.name_scopes", "[]"))
        if len(scopes) > 1:
            found[node.name] = scopes[-2].removeprefix("model.network.") or scopes[-1]
    return found


def fake_quantized(
    student: Classifier, size: int, views: Views, temperature: float = 1.0, smooth: bool = True
) -> tuple[Classifier, Classifier]:
    """Return a student with the logits that it was trained for, and the same fake-quantized: as in int8, and trainable.

    The student, on the CPU, is not changed. `size` is S of the images, `temperature` what its logits were divided by
    after its training. `smooth`: use SmoothQuant. `views`: see `Ladder.views`.
    """
    own = copy.deepcopy(runtimes.reparameterized(student)).eval()
    own.features = ()
    divide_logits(own.network, 1 / temperature)
    set_attention(own, False)  # NNCF hooks in at torch's functions, and the loop runs these
    with _nncf() as nncf, torch.no_grad():
        pixels = [own.normalize(torch.from_numpy(image)) for image in _singles(views)]
        data = nncf.Dataset(pixels)
        network = nncf.quantize(own.network, data, advanced_parameters=_advanced(nncf, smooth), **_common(nncf))
    fake = copy.copy(own)
    fake._modules = {**own._modules, "network": network}
    return own, fake


def write_fake(fake: Classifier, size: int, path: Path, temperature: float = 1.0) -> None:
    """Write a fake-quantized student as OpenVINO's IR with int8 weights; its logits are divided by `temperature`."""
    network = fake.network

    class Divided(runtimes.Graph):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return super().forward(image) / temperature

    network.eval()
    with _nncf(), torch.no_grad():
        openvino = runtimes.require("openvino", "--int8", "nncf")
        from openvino._offline_transformations import compress_quantize_weights_transformation  # as NNCF does

        shape = openvino.PartialShape([-1, 3, size, size])
        example = torch.zeros(2, 3, size, size, dtype=torch.uint8)
        model = openvino.convert_model(Divided(fake, size).eval(), example_input=example, input=shape)
        compress_quantize_weights_transformation(model)
        model.inputs[0].get_tensor().set_names({runtimes.INPUT})
        model.outputs[0].get_tensor().set_names({runtimes.LOGITS})
        openvino.save_model(model, str(path), compress_to_fp16=False)


def _singles(views: Views) -> list[np.ndarray]:
    """Return training views one by one, uint8 [1, 3, S, S]: NNCF's statistics are those of an image."""
    pixels = (image[None] for batch, _ in views(VIEWS) for image in batch)
    return list(itertools.islice(pixels, VIEWS))


def _common(nncf: Any) -> Mapping[str, Any]:
    return {"model_type": nncf.ModelType.TRANSFORMER, "target_device": nncf.TargetDevice.CPU, "subset_size": VIEWS}


def _advanced(nncf: Any, smooth: bool) -> Any:
    off = nncf.AdvancedSmoothQuantParameters(convolution=-1, matmul=-1)
    return nncf.AdvancedQuantizationParameters(**({} if smooth else {"smooth_quant_alphas": off}))


@contextmanager
def _nncf() -> Iterator[Any]:
    """Import NNCF, and keep its progress bars and log from a user who cannot act on them."""
    os.environ.setdefault("NNCF_CI", "1")  # nothing is sent to Intel: NNCF's telemetry is off
    os.environ.setdefault("NNCF_EXTENSION_LOAD_TIMEOUT", "0")  # it compiles its fake quantization once, in minutes
    level = logging.getLogger("nncf").level
    with signal_stack(), runtimes.quiet(), redirect_stdout(io.StringIO()):
        yield runtimes.require("nncf", "--int8", "nncf")
    logging.getLogger("nncf").setLevel(level)
