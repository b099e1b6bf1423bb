"""Which network is built, with which weights, for which classes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kd.core.contracts import Source
from kd.core.errors import ModelError
from kd.core.evaluation import Task
from kd.models.timm_folder import PROBLEM_TYPES


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """The dataset's facts for a teacher that looks outputs up by image id."""

    train: Source
    val: Source
    seed: int  # of the run; the views depend on it
    views: int  # how many views a training image has; 0: a fresh one every epoch
    transform: dict[str, Any]  # what a training image goes through, as JSON values
    test: Source | None = None

    def shown(self) -> dict[str, Any]:
        """Return all that the pixels of the views depend on beside the files, as JSON values."""
        return {"views": self.views, "seed": self.seed, "transform": self.transform}


@dataclass(frozen=True, slots=True)
class Spec:
    """Which model, with which weights, for which classes."""

    where: str  # config path of the section, `student` or `teacher`, for messages
    model: str
    args: dict[str, Any]
    classes: Sequence[str] | None
    """The data's, in order. None: its images have no labels, and the model's own are taken. Empty: features alone are
    needed, and no classifier."""
    checkpoint: str = ""  # a .safetensors file or a folder
    weights: str = "by_name"  # which of the checkpoint's tensors are taken, and how, as `student.weights` says it
    pretrained: bool = False  # load the weights that come with the name, the folder or the hub id
    free_size: bool = False
    """Its weights start at random: a network that takes images of any size sees them as the data delivers them."""
    any_size: bool = False  # it must take images of other sizes too
    exact_head: bool = False  # the pretrained head must have these very classes in this order; otherwise it is replaced
    images: DatasetSpec | None = None  # for a teacher that looks outputs up by name
    task: Task | None = None
    """Meaning of its logits for the losses; None for a student, or a model whose cost is measured."""

    @property
    def softmax(self) -> bool:
        """Whether its logits are those of one class per image: one logit z stands for [0, z] then."""
        return self.task is None or self.task.logits == "softmax"

    @property
    def logits(self) -> bool:
        """Whether it has a classifier; without one, a head that the weights bring is left out."""
        return self.classes is None or len(self.classes) > 0

    def require_bare(self, why: str) -> None:
        """Refuse a checkpoint and arguments."""
        for key in ("checkpoint", "args"):
            if getattr(self, key):
                raise ModelError(f"{self.where}.{key}", f"is set, but {why}", "", f"Leave {key} out")

    def require_meaning(self, problem_type: str) -> None:
        """Require that logits have the meaning that the losses expect.

        `problem_type` is that of a config.json of transformers or of kd; empty, or another word: unknown.
        """
        if not self.logits or self.task is None or problem_type not in PROBLEM_TYPES:
            return
        if problem_type != self.task.problem_type:
            have, wanted = PROBLEM_TYPES[problem_type], PROBLEM_TYPES.get(self.task.problem_type, self.task.name)
            wrong = f"'{self.model}' was trained for {have} per image ({problem_type}), but the losses are for {wanted}"
            raise ModelError(f"{self.where}.model", wrong, "The same for both", "Take another teacher, or other losses")
