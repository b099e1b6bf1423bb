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

    runtime = "onnxruntime"
    reads_ids = False
    features: tuple[str, ...] = ()
    classes: Sequence[str]

    def __init__(
        self, path: Path, options: Options, config_path: str, image_size: int
    ) -> None:
        super().__init__()
        self.path = path
        self.options = options
        self.config_path = config_path
        self.network = nn.Module()
        self.classes = ()
        self.num_classes = 0
        self.to_logits: Callable[[Tensor], Tensor] = Tensor.float
        self.pick: nn.Module = nn.Identity()
        self.sessions = Sessions(
            lambda threads: open_session(path, threads, f"{config_path}.model")
        )
        self.files = graph_files(path, f"{config_path}.model")
        session = self.sessions()
        inputs = session.get_inputs()
        if (
            len(inputs) != 1
            or inputs[0].type not in DTYPES
            or len(inputs[0].shape) != 4
        ):
            texts = [f"{input.name} {input.type} {input.shape}" for input in inputs]
            wrong = f"'{path}' takes {', '.join(texts)}"
            allowed = "One image input of rank 4: uint8, float32 or float16"
            raise ModelError(f"{config_path}.model", wrong, allowed, "Export it anew")
        self.input = inputs[0].name
        self.dtype = DTYPES[inputs[0].type]
        self.output = self._choose_output([out.name for out in session.get_outputs()])
        shape = inputs[0].shape
        self.channels_last = shape[3] == 3 and shape[1] != 3
        self.input_size = _fixed(shape[2]) or options.input_size or image_size
        self.batch_size = _fixed(shape[0])  # 0: any
        if self.dtype == np.uint8 and options.mean:
            wrong = "is set, but the graph takes uint8 and normalizes by itself"
            raise ModelError(f"{config_path}.mean", wrong, "", "Leave mean and std out")
        if self.dtype != np.uint8:
            shared.require_normalization(config_path, options.mean)

    def _choose_output(self, names: Sequence[str]) -> str:
        option = self.options.output
        output = option or ("logits" if "logits" in names else names[0])
        is_clear = bool(option) or len(names) == 1 or output == "logits"
        if output in names and is_clear:
            return output
        wrong = f"'{self.path}' has the outputs {', '.join(names)}"
        config_path = f"{self.config_path}.output"
        raise ModelError(config_path, wrong, "One of them", f"Set {config_path}")

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
        """Return the graph's output for uint8 images [B, 3, H, W], float32."""
        pixels = resized(image, self.input_size)
        if self.dtype == np.uint8:
            pixels = pixels.round().clamp(0, 255).to(torch.uint8)
        else:
            mean, std = (
                torch.tensor(numbers, device=image.device).view(1, 3, 1, 1)
                for numbers in (self.options.mean, self.options.std)
            )
            pixels = (pixels / 255 - mean) / std
        if self.channels_last:
            pixels = pixels.permute(0, 2, 3, 1)
        array = pixels.contiguous().cpu().numpy().astype(self.dtype, copy=False)
        size = self.batch_size or len(array)
        # the last batch is filled with the first image
        filled = np.concatenate([array, np.repeat(array[:1], -len(array) % size, 0)])
        session = self.sessions()
        answers = []
        for start in range(0, len(filled), size):
            batch = filled[start : start + size]
            answers += session.run([self.output], {self.input: batch})
        answer = torch.from_numpy(np.concatenate(answers)[: len(array)])
        return answer.float().to(image.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphTeacher:
        return self  # a session cannot be copied, and it is immutable


def build(
    options: Options, spec: Spec, image_size: int, features: Collection[str]
) -> GraphTeacher:
    """Open the graph and run it once."""
    shared.require_one_output(spec, features, "onnx")
    path = Path(spec.model).expanduser()
    config_path = f"{spec.config_path}.model"
    if not path.is_file():
        wrong = f"no file '{path}'"
        raise ModelError(config_path, wrong, "An ONNX file", "Check the path")
    spec.require_bare("a graph holds its weights")
    teacher = GraphTeacher(path, options, spec.config_path, image_size)
    noise = torch.randint(
        256, (2, 3, image_size, image_size), generator=torch.Generator().manual_seed(0)
    )
    try:
        answer = teacher.answer(noise.to(torch.uint8))
    except Exception as error:  # onnxruntime has its own, unrelated error types
        raise fails(spec.config_path, str(path), teacher.input_size, error) from error
    if len(answer) != 2:
        wrong = f"'{path}' returns for two images the shape {tuple(answer.shape)}"
        allowed = "One row of outputs per image"
        raise ModelError(config_path, wrong, allowed, "Export it anew")
    if not spec.logits:
        teacher.features = tuple(features)
        return teacher
    shared.require_logits(spec, answer, options.outputs)
    # of a folder exported by kd
    spec.require_meaning(folder_config(path.parent).get("problem_type") or "")
    teacher.to_logits = shared.to_logits(spec, options.outputs)
    teacher.classes, teacher.pick = shared.select_classes(
        spec, answer.shape[1], (), options.classes
    )
    teacher.num_classes = len(teacher.classes)
    return teacher


def _fixed(size: object) -> int:
    """Return a fixed size of a graph's input; 0: any."""
    return size if isinstance(size, int) and size > 0 else 0
