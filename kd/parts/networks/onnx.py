"""An ONNX file, run by onnxruntime on the CPU, with its normalization.

The graph has one image input, float32, float16 or uint8, [B, 3, S, S] or [B, S, S, 3].
kd's own exports take uint8 and normalize inside.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kd.core.errors import ModelError
from kd.core.keys import keys
from kd.core.types import Outputs
from kd.models.classifier import resized
from kd.models.examination import fails
from kd.models.runtimes import Sessions, graph_files, open_session
from kd.models.spec import Spec
from kd.models.timm_folder import folder_config
from kd.parts.networks import _shared as shared

DTYPES = {
    "tensor(uint8)": np.uint8,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
}


@keys
class Options(shared.Options):
    """Options of a graph."""

    output: str = ""
    """Name of the output, if the graph has several. Empty: the only one, or
    `logits`.
    """


class GraphTeacher(nn.Module):
    """Predicts with a graph. See `kd.core.contracts.TeacherModel`."""

    runtime, reads_ids = "onnxruntime", False
    features: tuple[str, ...] = ()
    classes: Sequence[str]

    def __init__(
        self, path: Path, options: Options, config_path: str, image_size: int
    ) -> None:
        super().__init__()
        self.path, self.options, self.config_path = path, options, config_path
        self.network = nn.Module()
        self.classes, self.num_classes = (), 0
        self.to_logits: Callable[[Tensor], Tensor] = Tensor.float
        self.pick: nn.Module = nn.Identity()
        self.sessions = Sessions(
            lambda threads: open_session(path, threads, f"{config_path}.model")
        )
        self.files = graph_files(path, f"{config_path}.model")
        session = self.sessions()
        inputs, outputs = (
            session.get_inputs(),
            [output.name for output in session.get_outputs()],
        )
        if (
            len(inputs) != 1
            or inputs[0].type not in DTYPES
            or len(inputs[0].shape) != 4
        ):
            found = ", ".join(f"{one.name} {one.type} {one.shape}" for one in inputs)
            allowed = "One image input of rank 4: uint8, float32 or float16"
            raise ModelError(
                f"{config_path}.model",
                f"'{path}' takes {found}",
                allowed,
                "Export it anew",
            )
        self.input, self.shape, self.dtype = (
            inputs[0].name,
            inputs[0].shape,
            DTYPES[inputs[0].type],
        )
        self.output = options.output or (
            "logits" if "logits" in outputs else outputs[0]
        )
        if self.output not in outputs or (
            not options.output and len(outputs) > 1 and self.output != "logits"
        ):
            wrong = f"'{path}' has the outputs {', '.join(outputs)}"
            raise ModelError(
                f"{config_path}.output",
                wrong,
                "One of them",
                f"Set {config_path}.output",
            )
        self.last = self.shape[3] == 3 and self.shape[1] != 3
        side = self.shape[2]
        self.input_size = (
            side
            if isinstance(side, int) and side > 0
            else options.input_size or image_size
        )
        self.fixed = (
            self.shape[0] if isinstance(self.shape[0], int) and self.shape[0] > 0 else 0
        )
        if self.dtype == np.uint8 and options.mean:
            wrong = "is set, but the graph takes uint8 and normalizes by itself"
            raise ModelError(f"{config_path}.mean", wrong, "", "Leave mean and std out")
        if self.dtype != np.uint8:
            shared.require_normalization(config_path, options.mean)

    def identity(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for file in self.files:
            with file.open("rb") as opened:
                while block := opened.read(1 << 24):
                    digest.update(block)
        numbers = [self.input_size, *self.options.mean, *self.options.std]
        architecture = {
            "onnx": self.output,
            "outputs": self.options.outputs,
            **shared.columns(self.pick),
        }
        return {
            "teacher": digest.hexdigest(),
            "architecture": architecture,
            "input": numbers,
        }

    def forward(self, image: Tensor) -> Outputs:
        answer = self.answer(image)
        if not self.num_classes:
            return Outputs(
                answer.new_zeros(len(answer), 0), {"pooled": answer.flatten(1)}
            )
        return Outputs(self.pick(self.to_logits(answer)))

    def answer(self, image: Tensor) -> Tensor:
        pixels = resized(image, self.input_size)
        if self.dtype == np.uint8:
            pixels = pixels.round().clamp(0, 255).to(torch.uint8)
        else:
            numbers = self.options.mean, self.options.std
            mean, std = (
                torch.tensor(one, device=image.device).view(1, 3, 1, 1)
                for one in numbers
            )
            pixels = (pixels / 255 - mean) / std
        pixels = (pixels.permute(0, 2, 3, 1) if self.last else pixels).contiguous()
        array = pixels.cpu().numpy().astype(self.dtype, copy=False)
        size, session, answers = self.fixed or len(array), self.sessions(), []
        filled = np.concatenate(
            [array, np.repeat(array[:1], -len(array) % size, 0)]
        )  # if its batch size is fixed
        for start in range(0, len(filled), size):
            answers.append(
                session.run([self.output], {self.input: filled[start : start + size]})[
                    0
                ]
            )
        return (
            torch.from_numpy(np.concatenate(answers)[: len(array)])
            .float()
            .to(image.device)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphTeacher:
        return self  # a session cannot be copied, and it is immutable


def build(
    options: Options, spec: Spec, image_size: int, features: Collection[str]
) -> GraphTeacher:
    """Open the graph and run it once."""
    shared.require_one_output(spec, features, "onnx")
    path = Path(spec.model).expanduser()
    if not path.is_file():
        raise ModelError(
            f"{spec.config_path}.model",
            f"no file '{path}'",
            "An ONNX file",
            "Check the path",
        )
    spec.require_bare("a graph holds its weights")
    made = GraphTeacher(path, options, spec.config_path, image_size)
    noise = torch.randint(
        256, (2, 3, image_size, image_size), generator=torch.Generator().manual_seed(0)
    )
    try:
        first = made.answer(noise.to(torch.uint8))
    except Exception as error:  # onnxruntime has its own, unrelated error types
        raise fails(spec.config_path, str(path), made.input_size, error) from error
    if len(first) != 2:
        wrong = f"'{path}' returns for two images the shape {tuple(first.shape)}"
        raise ModelError(
            f"{spec.config_path}.model",
            wrong,
            "One row of outputs per image",
            "Export it anew",
        )
    if not spec.logits:
        made.features = tuple(features)
        return made
    shared.require_logits(spec, first, options.outputs)
    spec.require_meaning(
        folder_config(path.parent).get("problem_type") or ""
    )  # from a folder exported by kd
    made.to_logits = shared.to_logits(spec, options.outputs)
    made.classes, made.pick = shared.named(spec, first.shape[1], (), options.classes)
    made.num_classes = len(made.classes)
    return made
