"""Stand-ins for the columns of the built-in tasks. Removed when the tasks land: they are in kd/tasks/ then."""

from __future__ import annotations

from kd.scores import Column, Scores

SINGLE_LABEL = Scores(
    own=(Column("accuracy", "accuracy"), Column("top5", "top-5"), Column("ece", "calibration error")),
    pair=(
        Column("agreement", "agreement", meaning="same answer as the teacher"),
        Column("kl", "KL", "nats"),
        Column("agreement_ece", "calibration error against the teacher"),
    ),
)
LABEL_SETS = Scores(
    own=(Column("map", "mAP"), Column("f1_macro", "F1 (macro)"), Column("f1_micro", "F1 (micro)")),
    pair=(
        Column(
            "agreement",
            "agreement",
            meaning="labels in common with the teacher's, of those that one of them gives",
        ),
        Column("kl", "KL", "nats"),
    ),
)
EMBEDDING = Scores(
    own=(Column("knn", "nearest neighbours"), Column("probe", "linear probe")),
    pair=(Column("agreement", "agreement", "", "mean cosine of the projected student with its teacher"),),
    note="Accuracies with the vectors alone: 20 neighbours among training images, weighted by exp(cosine / 0.07), and "
    "a ridge classifier. The labels were not used in training.",
)
TASKS = (SINGLE_LABEL, LABEL_SETS, EMBEDDING)


def stand_in(student_logits: bool, sigmoid: bool) -> Scores:
    """Return the columns of a run by what its losses read."""
    return LABEL_SETS if sigmoid else SINGLE_LABEL if student_logits else EMBEDDING
