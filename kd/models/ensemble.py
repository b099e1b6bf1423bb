"""Several teachers as one: the logarithm of their averaged probabilities stands where one model's logits would.

Legend: B images of a batch, C classes, K teachers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kd.models.classifier import Classifier, LogitsModel
from kd.types import Outputs


class Ensemble(nn.Module):
    """Average the probabilities of several classifiers (arXiv:1503.02531 distils such an ensemble).

    Probabilities and not logits: one teacher's large logits would drown the others'. The average is taken at
    temperature 1 and then softened like one model's answer, so that a cache keeps one record an image.
    Each model normalizes and resizes for itself. No features: there is no one space that all share.
    """

    num_features = 0

    def __init__(self, members: Sequence[Classifier | LogitsModel], weights: Sequence[float]) -> None:
        """Join K classifiers of the same classes.

        Args:
            members: the classifiers.
            weights: K numbers above 0, relative to each other.
        """
        super().__init__()
        self.members = nn.ModuleList(members)
        self.shares = [weight / sum(weights) for weight in weights]

    @property
    def network(self) -> nn.Module:
        """The networks alone, without what normalizes their pixels: what a precision is chosen for, what is hashed."""
        return nn.ModuleList([member.network for member in self.members])  # type: ignore[arg-type]

    @property
    def input_spec(self) -> list[float]:
        """What each network's pixels go through, and its share, as plain numbers."""
        both = zip(self.members, self.shares, strict=True)
        return [number for member, share in both for number in (*member.input_spec, share)]  # type: ignore[misc]

    def forward(self, image: Tensor) -> Outputs:
        """Classify uint8 images [B, 3, H, W]; the logits are log-probabilities, float32."""
        said = [member(image).logits.float().log_softmax(-1) for member in self.members]
        shares_K = torch.tensor(self.shares, device=image.device).log()
        stacked_KBC = torch.stack(said) + shares_K[:, None, None]
        return Outputs(stacked_KBC.logsumexp(0))


TeacherModel = Classifier | Ensemble
"""What a run may distil."""


def first(model: TeacherModel) -> Classifier:
    """Return the teacher that `teacher.model` names."""
    return model.members[0] if isinstance(model, Ensemble) else model  # type: ignore[return-value]
