"""Several teachers: the averaged probabilities against the formula in float64, and what
a cache must know of them.
"""

import pytest
import torch

from kd.core.types import Batch
from kd.models.classifier import Ensemble, digest
from kd.models.live_teacher import LiveTeacher
from kd.models.load_classifier import load
from kd.models.spec import Spec
from kd.parts.networks.answers import TableTeacher
from kd.parts.tasks.single_label import SingleLabel

CLASSES = ("a", "b", "c", "d")
CPU = torch.device("cpu")
AVERAGE = SingleLabel().average


def member(seed: int, size: int = 16, width: int = 24):
    torch.manual_seed(seed)
    args = {
        "patch_size": 8,
        "embed_dim": width,
        "depth": 1,
        "num_heads": 2,
        "img_size": size,
    }
    model = load(Spec("teacher", "vit_tiny_patch16_224", args, CLASSES), 16)
    # a fresh head says the same of everything
    torch.nn.init.normal_(model.network.head.weight, std=0.5)
    return model.eval()


def batch(count: int = 5) -> Batch:
    image = torch.randint(
        256,
        (count, 3, 16, 16),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(1),
    )
    return Batch.of(image, torch.zeros(count, dtype=torch.int64))


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 3.0)])
def test_probabilities_are_averaged_and_not_logits(weights):
    models = member(0), member(1, size=24, width=32)  # the second resizes for itself
    logits = LiveTeacher(Ensemble(models, weights, AVERAGE), CPU)(batch()).logits
    with torch.no_grad():
        probabilities = [
            model(batch().image).logits.double().softmax(-1) for model in models
        ]
    expected = sum(w * p for w, p in zip(weights, probabilities, strict=True)) / sum(
        weights
    )
    torch.testing.assert_close(logits.double().exp(), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        logits.double().softmax(-1), expected, rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("split", ["training", "validation", "test"])
def test_a_table_beside_a_network_is_read_in_the_rows_of_the_split(split):
    values = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))
    rows = {"training": 1, "validation": 2, "test": 0}
    table = TableTeacher(
        values, [torch.tensor([row]) for row in rows.values()], CLASSES
    )
    live = LiveTeacher(Ensemble((member(0), table), (1.0, 3.0), AVERAGE), CPU)
    logits = (live if split == "training" else live.validation(split == "test"))(
        batch(1)
    ).logits
    with torch.no_grad():
        probabilities = member(0)(batch(1).image).logits.softmax(-1)
    torch.testing.assert_close(
        logits.exp(), 0.25 * probabilities + 0.75 * values[:, rows[split]].softmax(-1)
    )


def test_precision_reaches_the_networks_and_spares_the_pixels():
    live = LiveTeacher(
        Ensemble((member(0), member(1)), (1.0, 1.0), AVERAGE), CPU, torch.bfloat16
    )
    assert {parameter.dtype for parameter in live.model.parameters()} == {
        torch.bfloat16
    }
    assert {model.scale.dtype for model in live.model.members} == {torch.float32}
    assert live(batch()).logits.dtype == torch.float32


def test_the_identity_has_every_member():
    first = member(0)
    second = member(1)
    third = member(2)
    pair = Ensemble((first, second), (1.0, 1.0), AVERAGE)
    changed_pair = Ensemble((first, third), (1.0, 1.0), AVERAGE)
    assert digest(pair.network) != digest(changed_pair.network)
    assert pair.identity() != changed_pair.identity()
    assert pair.identity() != Ensemble((first, second), (1.0, 2.0), AVERAGE).identity()
    assert pair.identity() == Ensemble((first, second), (2.0, 2.0), AVERAGE).identity()
