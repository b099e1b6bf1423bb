"""What a row of the table says, and how a search in a teacher's index is scored."""

import numpy as np
import pytest
import timm
import torch

from kd.core.text import AS_TRAINED, variant_rows
from kd.deploy.export.parity import EAGER, GraphOutputs
from kd.deploy.export.variants import facts, is_noisy, measure, quality
from kd.deploy.serve import bench
from kd.deploy.serve.bench import Latency
from kd.models import runtimes
from kd.models.classifier import Classifier
from kd.parts.tasks import label_sets
from kd.parts.tasks.embedding import recalled


def test_a_row_of_the_table_has_what_was_measured(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(bytes(2_500_000))
    graph = {
        "title": "accuracy",
        "unit": "%",
        "score": 0.9,
        "interval": (0.88, 0.92),
        "agreement": 0.99,
    }
    measured = facts(path, graph, {1: Latency(10.0, 20.0, 100.0, 99.0)})
    (row,) = variant_rows({"variants": {"model.onnx": measured}, "pick": "model.onnx"})
    assert row["file"] == "model.onnx (accepted)"
    assert (row["p50 ms"], row["accuracy"], row["95 %"]) == (
        "10.00",
        "90.0 %",
        "88.0 % to 92.0 %",
    )
    assert (row["MB"], row["images/s"], row["memory MB"]) == (
        "2.50",
        "100.0",
        "99",
    )
    assert variant_rows({}) == []


def test_a_row_of_images_without_labels_has_one_column_for_the_same_predictions():
    speed = {
        "1": {"p50_ms": 1.0, "p99_ms": 2.0, "images_per_second": 3.0, "memory_mb": 4.0}
    }
    measured = {
        "title": AS_TRAINED,
        "unit": "%",
        "score": 0.5,
        "interval": (0.2, 0.8),
        "agreement": 0.5,
        "bytes": 1,
    }
    (row,) = variant_rows({"variants": {"model.onnx": {**measured, "speed": speed}}})
    assert list(row)[-2:] == ["as trained", "95 %"]
    assert (row["as trained"], row["95 %"]) == ("50.0 %", "20.0 % to 80.0 %")


@pytest.mark.parametrize("name", ["repvit_m0_9", "fastvit_t8"])
def test_branches_are_merged_and_the_student_stays(name):
    torch.manual_seed(0)
    network = timm.create_model(name, num_classes=3).eval()
    student = Classifier(network, 3, 64)
    before = len(list(network.modules()))
    merged = runtimes.reparameterized(student)
    assert merged.network is not network
    assert (
        len(list(merged.network.modules()))
        < 0.6 * before
        == 0.6 * len(list(network.modules()))
    )
    image = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        assert (merged(image).logits - student(image).logits).abs().max() < 1e-4


def test_a_vit_has_no_branches():
    student = Classifier(
        timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=3).eval(), 3, 224
    )
    assert runtimes.reparameterized(student) is student


def test_a_search_in_the_teachers_index_is_that_over_all_pairs():
    """Against loops over all pairs, in float64; the teacher's own vectors find
    themselves.
    """
    torch.manual_seed(0)
    bank, student, teacher = (
        torch.nn.functional.normalize(torch.randn(n, 8), dim=1) for n in (60, 20, 20)
    )
    label = torch.randint(0, 12, (60,))
    truth = torch.randint(0, 12, (20,))
    right, overlap = recalled(bank, label, student, teacher, truth)
    shares = []
    for student_vector, teacher_vector, student_right, teacher_right in zip(
        student, teacher, right["recall"], right["teacher_recall"], strict=True
    ):
        near = [
            sorted(range(60), key=lambda n, q=q: -float(bank[n].double() @ q.double()))[
                :10
            ]
            for q in (student_vector, teacher_vector)
        ]
        shares.append(len(set(near[0]) & set(near[1])) / 10)
        i = len(shares) - 1
        assert [any(label[n] == truth[i] for n in each) for each in near] == [
            bool(student_right),
            bool(teacher_right),
        ]
    assert overlap == pytest.approx(sum(shares) / 20)
    same, all_found = recalled(bank, label, teacher, teacher, truth)
    assert all_found == 1.0
    assert torch.equal(same["recall"], same["teacher_recall"])


@pytest.mark.parametrize(
    ("p50", "p99", "cpu", "noisy"),
    [(2.0, 5.0, 0.4, False), (2.0, 6.5, 0.4, True), (39.5, 41.0, 0.42, True)],
)
def test_times_that_other_work_disturbed_are_noisy(p50, p99, cpu, noisy):
    """Issue 49: before, the pick came out of such noise without a word."""
    assert is_noisy(Latency(p50, p99, 1.0, 1.0), cpu) is noisy


@pytest.mark.parametrize(("clients", "rate"), [(1, 2.5), (4, 10.0)])
def test_the_rate_is_that_of_all_clients_together(clients, rate):
    """Each sends four requests in 1.6 seconds."""
    latency = bench._latency([0.5, 0.1, 0.8, 0.2] * clients, clients, 99.0)
    assert latency == Latency(500.0, 800.0, pytest.approx(rate), 99.0)


def test_a_row_has_the_latency_of_one_client_and_the_rate_of_many(
    tmp_path, monkeypatch
):
    calls = []

    def ask(folder, names, file, threads, slots, seconds):
        calls.append((folder, tuple(names), threads, slots))
        return {
            name: Latency(10.0 * threads, 12.0 * threads, 100.0 * slots, 50.0)
            for name in names
        }

    monkeypatch.setattr(bench, "ask", ask)
    speeds = measure(
        tmp_path, {"a": 9.0, "b": 9.0}, np.zeros((3, 8, 8), np.uint8), (1, 4)
    )
    assert calls == [(tmp_path, ("a", "b"), *call) for call in ((1, 1), (4, 1), (4, 4))]
    for name in ("a", "b"):
        assert speeds[name][1] == Latency(10.0, 12.0, 100.0, 50.0)
        assert speeds[name][4] == Latency(
            40.0, 48.0, 400.0, 50.0
        )  # p50 of one client, images/s of four


def test_the_interval_of_a_graphs_map_ends_at_100_percent():
    """The card of a small export said "-32.8 % to 70.4 %"."""
    logits = torch.tensor([[2.0, -1.0], [1.0, 1.0], [0.0, 0.0], [-1.0, 2.0]])
    truth = torch.tensor([[1, 0], [0, 1], [1, 0], [0, 1]], dtype=torch.int8)
    task = label_sets.build(label_sets.Options())
    outputs = {
        EAGER: logits,
        "model.onnx": logits,
    }
    graphs = GraphOutputs(outputs, truth, (), {"model.onnx": 1.0})
    low, high = graphs.interval("model.onnx", task)
    assert low < 1 < high
    assert quality("model.onnx", graphs, task)["interval"] == (low, 1.0)
