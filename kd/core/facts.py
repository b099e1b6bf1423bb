"""Facts are static capabilities of a part, `facts` of its module, and its file keys."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    """The `Options` of a part without keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """A loss declares its inputs and capabilities; every loss must have `facts`."""

    teacher: bool = False
    labels: bool = False
    unmixed: bool = False  # one label per image: mixup and cutmix are refused
    # fewest images of a micro-batch: more than 1 if it compares them with one another
    images: int = 1
    logits: str = ""
    """The activation that it applies to both models' logits: "softmax" (one label per
    image) or "sigmoid" (classes are independent). "": it reads no logits.
    """
    # names in `Outputs.features` that it reads: "pooled", "tokens"
    features: frozenset[str] = frozenset()
    # it has `agreement(student, teacher)` [B], -1 to 1, which evaluation shows
    agreement: bool = False
    # it has `projected(student)` [B, D] in the teacher's space, by its module `project`
    projects: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFacts:
    """A dataset's options have these static properties."""

    # kind of an image's label: "class", or "set" if it may have several
    label: str = "class"
    # the folder whose files are the images; "": the images are stored otherwise
    root: str = ""
    test: str = ""  # the key that names a test split, if it is set


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts:
    """A network's options have these static properties."""

    runs_code: bool = False  # `model` names a function that is imported and called
    trains: bool = False  # it builds a trainable nn.Module, so it may be a student too
    weights: bool = False  # `model` may name weights, which `init: pretrained` loads


@dataclass(frozen=True, slots=True, kw_only=True)
class SifterFacts:
    """A sifter's options have these static properties."""

    by_class: bool = False  # it reads each image's class
    delay: int = 0  # first steps of a run, in which it visits all images
    each_epoch: bool = False  # whether the delay is at the start of each epoch
    answers: bool = False  # it reads the logits that the teacher's cache stores


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFacts:
    """A backend and its device have capabilities that are known before building."""

    # runs on the CPU, where onnxruntime and OpenVINO can run a teacher
    cpu: bool = False
    # torch.cuda names its device, pins memory for it, times and profiles it
    cuda: bool = False
    compiles: bool = False  # compiles a graph for each shape: torch.compile is refused
    # its device supports all of torch: fused optimizers, float64, sorting
    complete: bool = False
    inference: bool = True  # torch's inference mode works on its device
    muon: bool = True  # the optimizer muon was tested on it
    # name of its own ZeRO, which applies every step and needs every gradient; "":
    # torch's
    own_zero: str = ""
    threads: int | None = None
    """CPU threads of torch per rank, from its key `threads`. 0: cores divided by the
    ranks here. None: it has no such key.
    """
    # prefixes of the SageMaker instance types that it runs on
    instances: tuple[str, ...] = ("",)
    # prefixes for which `backend.kind: auto` chooses it; the longest match wins
    chosen_on: tuple[str, ...] = ()


class Network(NamedTuple):
    """An exporter gets these inputs."""

    program: Callable[[int], Any]
    """(batch) -> the ExportedProgram for this batch size (0: any). It maps uint8 [B, 3,
    S, S] to logits or vectors.
    """
    onnx: Path  # model.onnx of the same export, if it has one
    # (number) -> batches of that number of training views, each (uint8 [B, 3, S, S],
    # ...)
    views: Callable[[int], Any]
    output: str  # name of the output: "logits" or "embedding"


@dataclass(frozen=True, slots=True)
class GraphFile:
    """An export has this file, which holds a network."""

    runtime: str  # the package that runs it
    # "float32" (must equal PyTorch), or "bf16" or "int8" (may lose some accuracy)
    precision: str
    # flag of `kd-export` that writes it; "": always. A new format: "--formats NAME" and
    # `named`
    option: str = ""
    weights: str = ""  # a second file that holds its weights
    # its activations are integers too, so sums are equal on all processors
    integer: bool = False
    # loading it may run its code: no endpoint loads it; kd-verify only with --trust
    code: bool = False
    # `--accept` tries cheaper files first; model.onnx, the self-check's reference, has
    # 1
    cost: int = 9
    named: bool = False  # written only where `--formats` names it
    kind: str = ""  # the exporter's name; the registry adds it


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterFacts:
    """An export format has these files."""

    graphs: Mapping[str, GraphFile] = field(default_factory=dict)


class FileKey(NamedTuple):
    """`kd.core.keys.file_key` has declared this key of a configuration."""

    key: str  # dotted: "teacher.also.0.model"
    value: str
    # key of the folder that relative paths start from; "": the working folder
    within: str
    or_name: bool  # the value may also be a name, such as a model's
