"""Static capabilities of a component: `facts` of its module. Options that name files."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """How often things happen, in optimizer steps; each also happens at the last step. The section `run.every`."""

    log: int = field(default=20, metadata={"low": 1})
    """Write a row of training metrics, which waits for the device."""
    evaluate: int = field(default=0, metadata={"low": 0})
    """Evaluate on the validation split. 0: at the end of each epoch."""
    checkpoint: int = field(default=0, metadata={"low": 0})
    """Write a checkpoint. 0: at each evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    """The `Options` of a part without keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """Inputs and capabilities of a loss. A loss without `facts` is refused."""

    teacher: bool = False
    labels: bool = False
    unmixed: bool = False  # each image alone: mixup and cutmix are refused
    logits: str = ""
    """The function under which it reads both models' logits: "softmax" (one label per image) or "sigmoid" (each class
    alone). "": it reads none."""
    features: frozenset[str] = frozenset()  # by the names of `Outputs.features`: "pooled", "tokens"
    agreement: bool = False  # it has `agreement(student, teacher)`, -1 to 1 [B], which evaluation shows
    projects: bool = False  # it has `projected(student)` [B, D] in the teacher's space, by its module `project`


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFacts:
    """What others must know of a dataset's options."""

    label: str = "class"  # what the label of an image is: "class", or "set" where it may have several
    root: str = ""  # the folder whose files are the images; "": they do not lie in files of one folder
    test: str = ""  # the key that names a test split, where it is set


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts:
    """What others must know of a network's options."""

    runs_code: bool = False  # what `model` names is imported and called
    trains: bool = False  # it builds an nn.Module with weights that can be trained: it may be a student too


@dataclass(frozen=True, slots=True, kw_only=True)
class SifterFacts:
    """What others must know of a sifter's options."""

    by_class: bool = False  # it reads the class of every image
    delay: int = 0  # steps at the start of a run in which it visits everything
    answers: bool = False  # it reads the logits that the teacher's cache stores


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFacts:
    """What others must know of a backend and its device, before it is built and after; `Backend.facts` has them."""

    cpu: bool = False  # runs on the CPU, where onnxruntime and OpenVINO can run a teacher
    cuda: bool = False  # torch.cuda names its device, pins memory for it, times and profiles it
    compiles: bool = False  # compiles a graph for each shape: torch.compile is refused
    complete: bool = False  # its device has all of torch: fused optimizers, float64, a sort
    inference: bool = True  # torch's inference mode works on its device
    muon: bool = True  # the optimizer muon was tried on it
    own_zero: str = ""  # a ZeRO of its own, by name, that applies every step and needs every gradient
    threads: int | None = None
    """Of torch on each rank, by its key `threads`. 0: all cores divided by the ranks here. None: it has no such key."""
    instances: tuple[str, ...] = ("",)  # how the names of SageMaker's instance types begin that it runs on
    chosen_on: tuple[str, ...] = ()  # of these, those on which `backend.kind: auto` means it; the longest name decides


class Network(NamedTuple):
    """What a graph of an export is made of."""

    program: Callable[[int], Any]
    """(batch) -> the ExportedProgram for that many images, 0: any number. uint8 [B, 3, S, S] to logits or vectors."""
    onnx: Path  # model.onnx of the same export, if it has one
    views: Callable[[int], Any]  # (number) -> batches of so many training views, each (uint8 [B, 3, S, S], ...)
    output: str  # its name: "logits" or "embedding"


@dataclass(frozen=True, slots=True)
class GraphFile:
    """A file of an export that holds a network."""

    runtime: str  # the package that runs it
    precision: str  # "float32", which must compute what PyTorch computes, "bf16" or "int8", which may lose a little
    option: str = ""  # of `kd-export`, that writes it; "": all do. A new format: "--formats NAME" and `named`
    weights: str = ""  # a second file, with its weights
    integer: bool = False  # its activations are integers too, so that sums are equal on all processors
    code: bool = False  # loading it may run code that it holds: no endpoint does, kd-verify with --trust
    cost: int = 9  # `--accept` tries cheap ones first; model.onnx, the reference of the self-check, has 1
    named: bool = False  # written only where `--formats` names it
    kind: str = ""  # the part that knows it; the registry adds it


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterFacts:
    """What others must know of a format: its files."""

    graphs: Mapping[str, GraphFile] = field(default_factory=dict)


def file_key(default: Any = MISSING, within: str = "", or_name: bool = False) -> Any:
    """Declare an option that names files which a run reads, so that a launcher can bring them along; see `FileKey`."""
    metadata = {"files": within, "or_name": or_name}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


class FileKey(NamedTuple):
    """A key of a configuration that `file_key` has declared."""

    key: str  # dotted: "teacher.also.0.model"
    value: str
    within: str  # the key of the folder that a relative path starts from; "": the working folder
    or_name: bool  # a value may also be a name that is looked up, such as a model's
