"""Match the direction of the teacher's pooled features through a learned projector.

Ranzinger et al. 2023 (AM-RADIO, arXiv:2312.06709), the loss on the summary vector. Only
directions count, because the lengths of different teachers' vectors are not comparable.

    L = 1 - cos(W student + b, teacher)

The projector is trained with the student; only `kd-export --index` exports it. Its
initial weights come from torch's global generator.

Not handled: projectors of several layers.

Shape legend: B images of a batch, D teacher features, E student features.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from kd.core.contracts import Loss
from kd.core.facts import LossFacts
from kd.core.facts import NoOptions as Options
from kd.core.types import Batch, Dims, Outputs
from kd.parts.losses._features import require_features

facts = LossFacts(
    teacher=True, features=frozenset({"pooled"}), agreement=True, projects=True
)


class Cosine(nn.Module):
    """Computes 1 - the cosine of the projected student features and the teacher's.

    Reads the pooled features of student [B, E] and teacher [B, D]; returns float32 [B].
    The equation is in the module's docstring (arXiv:2312.06709).

    Args:
        student_features: E.
        teacher_features: D.
    """

    def __init__(self, student_features: int, teacher_features: int) -> None:
        super().__init__()
        self.project = nn.Linear(student_features, teacher_features)

    def forward(self, student: Outputs, teacher: Outputs, batch: Batch) -> Tensor:
        return 1 - self.agreement(student, teacher)

    def agreement(self, student: Outputs, teacher: Outputs) -> Tensor:
        """Return the cosine of the projected features and the teacher's, [B]."""
        return F.cosine_similarity(
            self.projected(student), teacher.features["pooled"].detach().float(), dim=1
        )

    def projected(self, student: Outputs) -> Tensor:
        """Return the student's features in the teacher's space, float32 [B, D]."""
        # The first float() matches the float32 weights. The second one undoes autocast,
        # which multiplies in bfloat16.
        return self.project(student.features["pooled"].float()).float()


def build(options: Options, dims: Dims) -> Loss:
    """Build the loss, with a projector from the student's width to the teacher's."""
    require_features("losses.cosine", dims.student_features, dims.teacher_features)
    return Cosine(dims.student_features, dims.teacher_features)
