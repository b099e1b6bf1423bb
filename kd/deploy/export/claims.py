"""What an export claims: the keys of manifest.json and of the files beside it.

The type of a value says from what it can be made again, and how close it must then be.
`kd verify` walks these types: a key that is not among them is one that kd does not
write.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, TypedDict

FILES = "the files"
IMAGES = "--data"
RUN = "--run"
SECOND = "--second"
Graph = Annotated[str, "the name of a graph in the export"]
Threads = Annotated[str, "a number of threads that the exporting machine has"]
TimmKey = Annotated[str, "a key of timm's `pretrained_cfg`"]


class Origin(NamedTuple):
    """The evidence from which a value can be made again, and how close it must be."""

    by: tuple[str, ...] = ()
    # a rule of `kd.deploy.verify.comparison`, for values that are made from images
    close: str = "equal"


FromFiles = Annotated[Any, Origin((FILES,))]
FromImages = Annotated[Any, Origin((IMAGES,))]
FromRun = Annotated[Any, Origin((RUN,))]
FromImagesOrRun = Annotated[Any, Origin((IMAGES, RUN))]
FromAll = Annotated[Any, Origin((FILES, IMAGES, RUN))]
FromFilesOrRun = Annotated[Any, Origin((FILES, RUN))]
FromNothing = Annotated[Any, Origin()]
Count = Annotated[Any, Origin((IMAGES,), "count")]  # images, or a share of them
Points = Annotated[Any, Origin((IMAGES,), "points")]
Number = Annotated[Any, Origin((IMAGES,), "number")]
Difference = Annotated[float, Origin((IMAGES,), "difference")]  # from PyTorch
Cost = Annotated[float, Origin((IMAGES,), "cost")]
Rate = Annotated[float, Origin((IMAGES,), "rate")]
ReferenceCost = Annotated[float, Origin((IMAGES,), "reference_cost")]
Tally = Annotated[Any, Origin((IMAGES,), "tally")]
Score = Annotated[float, Origin((IMAGES, RUN), "score")]
OfPair = Annotated[Any, Origin((IMAGES, SECOND), "points")]
ShareOfPair = Annotated[float, Origin((IMAGES, SECOND), "count")]


class FileClaims(TypedDict):
    """Size and hash of a file."""

    bytes: FromFiles
    sha256: FromFiles


class InputClaims(TypedDict, total=False):
    """The images that the graphs take."""

    name: FromFiles
    layout: FromFiles
    network_size: FromFiles
    size: FromImagesOrRun
    crop: FromImagesOrRun
    margin: FromImagesOrRun
    bits: FromImagesOrRun


class DeferClaims(TypedDict, total=False):
    """The threshold of sure predictions, see `kd.deploy.export.defer`."""

    rule: Number
    chosen_on: Number
    threshold: Number
    labels: Number
    stated: dict[Graph, Number]


class OutputClaims(TypedDict, total=False):
    """What the graphs return."""

    name: FromFiles
    layout: FromFiles
    width: FromImages
    space: FromRun
    thresholds: Number
    defer: DeferClaims
    values: FromNothing


class ParityClaims(TypedDict, total=False):
    """A graph beside PyTorch on the validation images."""

    images: FromFiles
    labelled: FromFiles
    correct: Count
    accuracy: Count
    same_top1: Count
    mAP: Count
    cosine: Count
    ece: Count
    max_difference: Difference
    cpu_ms: Cost
    int8_share: FromFiles


class SpeedClaims(TypedDict):
    """A graph behind `kd-serve`."""

    p50_ms: Cost
    p99_ms: Cost
    images_per_second: Rate
    memory_mb: Cost


class QualityClaims(TypedDict):
    """A graph's score beside PyTorch's."""

    title: FromImages
    unit: FromImages
    images: FromImages
    score: Count
    interval: Count
    drop: Count
    agreement: Count
    cpu_ms: Cost


class VariantClaims(QualityClaims):
    """A graph of `--compare`."""

    runtime: FromFiles
    precision: FromFiles
    bytes: FromFiles
    speed: dict[Threads, SpeedClaims]


AcceptedValues = TypedDict(
    "AcceptedValues",
    {
        "mb": FromFiles,
        "ms": Cost,
        "drop": Points,
        "teacher-drop": Points,
        "ece": Points,
    },
)
PairValues = TypedDict(
    "PairValues",
    {
        "passed_on": ShareOfPair,
        "mb": OfPair,
        "ms": FromNothing,
        "drop": OfPair,
        "teacher-drop": OfPair,
        "ece": OfPair,
    },
)


class AcceptedClaims(TypedDict):
    """The graph within the limits of `--accept`."""

    sentence: FromFiles
    file: FromFiles
    threads: FromImages
    found: AcceptedValues


class PairClaims(TypedDict):
    """A graph and a second export for its unsure images, within them."""

    sentence: FromFiles
    file: FromFiles
    threads: FromNothing
    second: OfPair
    found: PairValues


class CalibrationClaims(TypedDict):
    """The temperature of the logits."""

    images: FromImages
    temperature: Number
    ece: Number
    calibrated_ece: Number


class SelfCheckClaims(TypedDict, total=False):
    """The self-check of a graph, see `kd.deploy.serve.self_check`."""

    allowed: FromFiles
    least: FromFiles
    ir: FromFiles
    opset: FromFiles


ChainStudent = TypedDict(
    "ChainStudent",
    {
        "is": FromRun,
        "run": FromRun,
        "step": FromRun,
        "weights": FromRun,
        "exported": FromFiles,
    },
)


class ChainEnd(TypedDict):
    """The end of the way from the teacher to the graphs."""

    student: ChainStudent


class ChainClaims(ChainEnd, total=False):
    """That way."""

    teacher: FromRun
    answers: FromRun
    graphs: dict[Graph, FromFiles]


class AboutData(TypedDict):
    """The training data."""

    kind: FromRun
    hash: FromRun


class AboutClaims(TypedDict):
    """The network and its training."""

    model: FromRun
    parameters: FromFiles
    library: FromFiles
    losses: FromRun
    data: AboutData
    labels: FromRun
    weights: FromRun


class ScoreOfModel(TypedDict, total=False):
    """A score with the number of its images, or its interval."""

    value: Score
    images: FromRun
    interval: FromRun


class ScoreClaims(TypedDict):
    """The final scores of the run."""

    columns: FromFiles
    split: FromRun
    images: FromRun
    evaluations: FromRun
    models: dict[str, dict[str, ScoreOfModel]]
    differences: FromRun
    pair: FromRun


class Manifest(TypedDict, total=False):
    """manifest.json."""

    format: FromFiles
    name: FromRun
    version: FromFiles
    checksum: FromFiles
    files: dict[str, FileClaims]
    input: InputClaims
    output: OutputClaims
    parity: dict[Graph, ParityClaims]
    variants: dict[Graph, VariantClaims]
    pick: FromFiles
    accepted: AcceptedClaims
    cascade: PairClaims
    validation: dict[Graph, Tally]
    self_check: dict[Graph, SelfCheckClaims]
    environment: FromNothing
    chain: ChainClaims
    licences: dict[str, FromFilesOrRun]
    eager_ms: ReferenceCost
    calibration: CalibrationClaims
    about: AboutClaims
    scores: ScoreClaims


class ConfigClaims(TypedDict, total=False):
    """config.json, which timm reads."""

    architecture: FromImagesOrRun
    model_args: FromImagesOrRun
    num_classes: FromFilesOrRun
    num_features: FromFilesOrRun
    global_pool: FromFilesOrRun
    problem_type: FromFilesOrRun
    label_names: FromRun
    pretrained_cfg: dict[TimmKey, FromAll]


class ProvenanceClaims(TypedDict, total=False):
    """kd.json."""

    run: FromRun
    step: FromRun
    digest: FromRun
    eval_crop: FromRun
    metrics: FromRun
    calibration: FromFiles
    kd: FromNothing


class ImageListClaims(TypedDict, total=False):
    """images.csv: the images behind the numbers."""

    times: FromImages
    choice: FromRun


Beside = TypedDict(
    "Beside",
    {
        "README.md": FromFiles,
        "config.json": ConfigClaims,
        "kd.json": ProvenanceClaims,
        "images.csv": ImageListClaims,
        "model.safetensors": FromFiles,
        "self_check.npz": FromFiles,
        "random images": dict[str, FromImages],
    },
)
"""The other files, and what graphs return for random images."""
