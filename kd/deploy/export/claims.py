"""What an export claims: the keys of manifest.json and of the files beside it.

The type of a value says from what it can be made again, and how close it must then be.
`kd verify` walks these types: a key that is not among them is one that kd does not
write.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, TypedDict

FILES, IMAGES, RUN, SECOND = "the files", "--data", "--run", "--second"
Graph = Annotated[str, "the name of a graph in the export"]
Threads = Annotated[str, "a number of threads that the exporting machine has"]
TimmKey = Annotated[str, "a key of timm's `pretrained_cfg`"]


class Origin(NamedTuple):
    """From what a value can be made again, and how close it must be where another
    machine may round differently.
    """

    by: tuple[str, ...] = ()
    close: str = (
        "equal"  # a rule of `kd.deploy.verify.comparison`, for what is made from images
    )


Exported = Annotated[Any, Origin((FILES,))]
Shown = Annotated[Any, Origin((IMAGES,))]
Trained = Annotated[Any, Origin((RUN,))]
Pixels = Annotated[Any, Origin((IMAGES, RUN))]
Preprocessing = Annotated[Any, Origin((FILES, IMAGES, RUN))]
Stated = Annotated[Any, Origin((FILES, RUN))]
Unknown = Annotated[Any, Origin()]
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

    bytes: Exported
    sha256: Exported


class InputClaims(TypedDict, total=False):
    """The images that the graphs take."""

    name: Exported
    layout: Exported
    network_size: Exported
    size: Pixels
    crop: Pixels
    margin: Pixels
    bits: Pixels


class DeferClaims(TypedDict, total=False):
    """The threshold of sure predictions, see `kd.deploy.export.defer`."""

    rule: Number
    chosen_on: Number
    threshold: Number
    labels: Number
    stated: dict[Graph, Number]


class OutputClaims(TypedDict, total=False):
    """What the graphs return."""

    name: Exported
    layout: Exported
    width: Shown
    space: Trained
    thresholds: Number
    defer: DeferClaims


class ParityClaims(TypedDict, total=False):
    """A graph beside PyTorch on the validation images."""

    images: Exported
    labelled: Exported
    correct: Count
    accuracy: Count
    same_top1: Count
    mAP: Count
    cosine: Count
    ece: Count
    max_difference: Difference
    cpu_ms: Cost


class SpeedClaims(TypedDict):
    """A graph behind `kd-serve`."""

    p50_ms: Cost
    p99_ms: Cost
    images_per_second: Rate
    memory_mb: Cost


class QualityClaims(TypedDict):
    """A graph's score beside PyTorch's."""

    title: Shown
    unit: Shown
    images: Shown
    score: Count
    interval: Count
    drop: Count
    agreement: Count
    cpu_ms: Cost


class VariantClaims(QualityClaims):
    """A graph of `--compare`."""

    runtime: Exported
    precision: Exported
    bytes: Exported
    speed: dict[Threads, SpeedClaims]


Found = TypedDict(
    "Found",
    {"mb": Exported, "ms": Cost, "drop": Points, "teacher-drop": Points, "ece": Points},
)
PairFound = TypedDict(
    "PairFound",
    {
        "passed_on": ShareOfPair,
        "mb": OfPair,
        "ms": Unknown,
        "drop": OfPair,
        "teacher-drop": OfPair,
        "ece": OfPair,
    },
)


class AcceptedClaims(TypedDict):
    """The graph within the limits of `--accept`."""

    sentence: Exported
    file: Exported
    threads: Shown
    found: Found


class PairClaims(TypedDict):
    """A graph and a second export for its unsure images, within them."""

    sentence: Exported
    file: Exported
    threads: Unknown
    second: OfPair
    found: PairFound


class CalibrationClaims(TypedDict):
    """The temperature of the logits."""

    images: Shown
    temperature: Number
    ece: Number
    calibrated_ece: Number


class SelfCheckClaims(TypedDict, total=False):
    """The self-check of a graph, see `kd.deploy.serve.self_check`."""

    allowed: Exported
    least: Exported
    ir: Exported
    opset: Exported


ChainStudent = TypedDict(
    "ChainStudent",
    {
        "is": Trained,
        "run": Trained,
        "step": Trained,
        "weights": Trained,
        "exported": Exported,
    },
)


class ChainEnd(TypedDict):
    """The end of the way from the teacher to the graphs."""

    student: ChainStudent


class ChainClaims(ChainEnd, total=False):
    """That way."""

    teacher: Trained
    answers: Trained
    graphs: dict[Graph, Exported]


class AboutData(TypedDict):
    """The training data."""

    kind: Trained
    hash: Trained


class AboutClaims(TypedDict):
    """The network and its training."""

    model: Trained
    parameters: Exported
    library: Exported
    losses: Trained
    data: AboutData
    labels: Trained
    weights: Trained


class ScoreOfModel(TypedDict, total=False):
    """A score with the number of its images, or its interval."""

    value: Score
    images: Trained
    interval: Trained


class ScoreClaims(TypedDict):
    """The final scores of the run."""

    columns: Exported
    split: Trained
    images: Trained
    evaluations: Trained
    models: dict[str, dict[str, ScoreOfModel]]
    differences: Trained
    pair: Trained


class Manifest(TypedDict, total=False):
    """manifest.json."""

    format: Exported
    name: Trained
    version: Exported
    checksum: Exported
    files: dict[str, FileClaims]
    input: InputClaims
    output: OutputClaims
    parity: dict[Graph, ParityClaims]
    variants: dict[Graph, VariantClaims]
    pick: Exported
    accepted: AcceptedClaims
    cascade: PairClaims
    validation: dict[Graph, Tally]
    self_check: dict[Graph, SelfCheckClaims]
    environment: Unknown
    chain: ChainClaims
    licences: dict[str, Stated]
    eager_ms: ReferenceCost
    calibration: CalibrationClaims
    about: AboutClaims
    scores: ScoreClaims


class ConfigClaims(TypedDict, total=False):
    """config.json, which timm reads."""

    architecture: Pixels
    model_args: Pixels
    num_classes: Stated
    num_features: Stated
    global_pool: Stated
    problem_type: Stated
    label_names: Trained
    pretrained_cfg: dict[TimmKey, Preprocessing]


class ProvenanceClaims(TypedDict, total=False):
    """kd.json."""

    run: Trained
    step: Trained
    digest: Trained
    eval_crop: Trained
    metrics: Trained
    calibration: Exported
    kd: Unknown


class ImageListClaims(TypedDict, total=False):
    """images.csv: the images behind the numbers."""

    times: Shown
    choice: Trained


Beside = TypedDict(
    "Beside",
    {
        "README.md": Exported,
        "config.json": ConfigClaims,
        "kd.json": ProvenanceClaims,
        "images.csv": ImageListClaims,
        "model.safetensors": Exported,
        "self_check.npz": Exported,
        "random images": dict[str, Shown],
    },
)
"""The other files, and what graphs return for random images."""
