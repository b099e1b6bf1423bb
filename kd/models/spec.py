"""The specification of a network: model, weights, classes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kd.core.contracts import Source
from kd.core.errors import ModelError
from kd.core.evaluation import Task
from kd.models.timm_folder import PROBLEM_TYPES


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """Describe the dataset for a teacher that looks up outputs by image id."""

    train: Source
    val: Source
    seed: int  # of the run; the views depend on it
    views: int  # views per training image; 0: a fresh view every epoch
    transform: dict[str, Any]  # transform of training images, as JSON values
    test: Source | None = None

    def pixel_facts(self) -> dict[str, Any]:
        """Return what the views' pixels depend on besides the files, as JSON values."""
        return {"views": self.views, "seed": self.seed, "transform": self.transform}


@dataclass(frozen=True, slots=True)
class Spec:
    """Specify the model, weights and classes of a network."""

    config_path: str  # config path of the section, `student` or `teacher`, for messages
    model: str
    args: dict[str, Any]
    classes: Sequence[str] | None
    """The data's classes in order. None: the images are unlabelled, so the model's own
    classes are used. Empty: only features are needed, no classifier.
    """
    checkpoint: str = ""  # a .safetensors file or a folder
    # which of the checkpoint's tensors are loaded, as in `student.weights`
    weights: str = "by_name"
    pretrained: bool = False  # load the weights of the name, the folder or the hub id
    free_size: bool = False
    """Weights start at random: a network for any image size gets the data's size."""
    any_size: bool = False  # it must accept other image sizes too
    # the pretrained head must have these classes in this order; otherwise it is
    # replaced
    exact_head: bool = False
    images: DatasetSpec | None = None  # for a teacher that looks outputs up by name
    task: Task | None = None
    """Meaning of its logits for the losses; None for a student, or a model whose cost
    is measured.
    """

    @property
    def softmax(self) -> bool:
        """Return whether it predicts one class per image.

        A single logit z then means [0, z].
        """
        return self.task is None or self.task.logits == "softmax"

    @property
    def logits(self) -> bool:
        """Return whether it has a classifier.

        Without one, a head in the weights is left out.
        """
        return self.classes is None or len(self.classes) > 0

    def require_bare(self, why: str) -> None:
        """Refuse a checkpoint or arguments."""
        for key in ("checkpoint", "args"):
            if getattr(self, key):
                raise ModelError(
                    f"{self.config_path}.{key}",
                    f"is set, but {why}",
                    "",
                    f"Leave {key} out",
                )

    def require_meaning(self, problem_type: str) -> None:
        """Require that logits have the meaning that the losses expect.

        `problem_type` is that of a config.json of transformers or of kd; empty, or
        another word: unknown.
        """
        if not self.logits or self.task is None or problem_type not in PROBLEM_TYPES:
            return
        if problem_type != self.task.problem_type:
            meaning = PROBLEM_TYPES[problem_type]
            needed = PROBLEM_TYPES.get(self.task.problem_type, self.task.name)
            wrong = (
                f"'{self.model}' was trained for {meaning} per image ({problem_type}),"
                f" but the losses are for {needed}"
            )
            raise ModelError(
                f"{self.config_path}.model",
                wrong,
                "The same for both",
                "Take another teacher, or other losses",
            )
