"""`kd.Distiller` against formulas and kd's own criterion, and its examples as a user
runs them.
"""

import copy
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kd
from kd.core.errors import ConfigError, DataError, KdError, ModelError, RunError
from kd.core.types import Batch, Outputs
from kd.engine.criterion import Criterion
from kd.models.classifier import LogitsModel
from kd.models.live_teacher import LiveTeacher
from kd.setup.student import loss_term

EXAMPLES = Path(__file__).parents[3] / "examples"
CPU = torch.device("cpu")
IDS = torch.arange(48)


def network(width: int, classes: int = 3) -> nn.Module:
    torch.manual_seed(width)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(12, width), nn.GELU(), nn.Linear(width, classes)
    )


TEACHER = network(16)
STUDENT = network(4)
IMAGES = torch.randn(48, 3, 2, 2, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(48) % 3
LOSSES = [{"kind": "kl", "temperature": 2.0}, {"kind": "ce", "weight": 0.5}]


def own_loss(teacher: nn.Module, terms: list, batch: Batch, student: Tensor) -> Tensor:
    """The loss of kd's loop: its frozen teacher and its criterion."""
    live = LiveTeacher(LogitsModel(teacher), CPU)
    return Criterion(terms)(Outputs(student), live(batch), batch)["loss"].mean()


class Counted:
    """A callable teacher that counts its images."""

    def __init__(self, network: nn.Module = TEACHER) -> None:
        self.network = network
        self.images = 0

    def __call__(self, images: Tensor) -> Tensor:
        self.images += len(images)
        return self.network(images)

    def since(self) -> int:
        images = self.images
        self.images = 0
        return images


def test_the_loss_and_its_gradient_are_the_formulas():
    student = network(4)
    loss = kd.Distiller(TEACHER, LOSSES)(IMAGES, student(IMAGES), LABELS)
    loss.backward()
    by_hand = network(4)
    log_student = F.log_softmax(by_hand(IMAGES) / 2, 1)
    target = F.softmax(TEACHER(IMAGES).detach() / 2, 1)
    kl = 4 * F.kl_div(log_student, target, reduction="batchmean")
    expected = kl + 0.5 * F.cross_entropy(by_hand(IMAGES), LABELS)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for got, due in zip(student.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(got.grad, due.grad)


def test_the_loss_is_kds_own_bit_for_bit():
    terms = [loss_term("kl", temperature=2.0), loss_term("ce", 0.5)]
    distiller = kd.Distiller(TEACHER, LOSSES)
    logits = STUDENT(IMAGES)
    loss = distiller(IMAGES, logits, LABELS)
    own = own_loss(TEACHER, terms, Batch.of(IMAGES, LABELS), logits)
    assert torch.equal(loss, own)
    assert torch.equal(
        kd.Distiller(TEACHER, Criterion(terms))(IMAGES, logits, LABELS), own
    )
    assert torch.equal(distiller.per_image.mean(), loss.detach())
    torch.testing.assert_close(
        distiller.terms["kl"] + 0.5 * distiller.terms["ce"], distiller.per_image
    )
    assert not distiller.per_image.requires_grad


@pytest.mark.parametrize("form", ["module", "function", "tuple", "mapping", "several"])
def test_a_teacher_is_a_module_or_any_callable(form: str):
    logits = STUDENT(IMAGES)
    teachers: dict[str, Any] = {
        "module": copy.deepcopy(TEACHER).train(),
        "function": lambda images: TEACHER(images),
        "tuple": lambda images: (TEACHER(images), None),
        "mapping": lambda images: {"logits": TEACHER(images)},
        "several": [TEACHER, Counted()],
    }
    expected = kd.Distiller(TEACHER)(IMAGES, logits)
    loss = kd.Distiller(teachers[form])(IMAGES, {"logits": logits})
    torch.testing.assert_close(loss, expected)


def test_weights_multiply_the_losses_of_images():
    weight = torch.arange(48.0)
    distiller = kd.Distiller(TEACHER)
    loss = distiller(IMAGES, STUDENT(IMAGES), weight=weight)
    torch.testing.assert_close(
        loss, (weight * distiller.per_image).mean().detach(), check_stride=False
    )


def test_half_precision_logits_give_a_float32_loss():
    with torch.autocast("cpu", torch.bfloat16):
        loss = kd.Distiller(TEACHER)(IMAGES, STUDENT(IMAGES))
    assert loss.dtype == torch.float32


def test_label_sets_are_learned():
    sets = F.one_hot(LABELS, 3)
    loss = kd.Distiller(TEACHER, "bce")(IMAGES, STUDENT(IMAGES), sets)
    expected = F.binary_cross_entropy_with_logits(
        STUDENT(IMAGES), sets.float(), reduction="none"
    )
    ratio = loss / expected.sum(1).mean()
    assert any(ratio.item() == pytest.approx(share) for share in (1, 1 / 3))


def test_random_numbers_of_the_caller_stay_the_same():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    kd.Distiller(TEACHER)(IMAGES, STUDENT(IMAGES))
    assert torch.equal(torch.rand(3), expected)


def test_stored_outputs_replace_the_teacher(tmp_path: Path):
    """In the second epoch, for each view, and in the next process but for a check."""
    teacher = Counted()
    distiller = kd.Distiller(teacher, "kl", tmp_path)
    logits = STUDENT(IMAGES)

    def epoch(distiller: kd.Distiller, view: int) -> list[Tensor]:
        shown = IMAGES.flip(-1) if view else IMAGES
        order = torch.randperm(3, generator=torch.Generator().manual_seed(view))
        return [
            distiller(shown[rows], logits[rows], ids=rows, view=view)
            for rows in (IDS.view(3, 16)[i] for i in order)
        ]

    epoch(distiller, 1)
    teacher.since()
    first = epoch(distiller, 0)
    assert teacher.since() == 48
    assert all(map(torch.equal, epoch(distiller, 0), first))
    epoch(distiller, 1)
    assert teacher.since() == 0
    again = kd.Distiller(teacher, "kl", tmp_path)
    again(IMAGES.flip(0), logits.flip(0))  # without ids: examined and run, not stored
    teacher.since()
    assert all(map(torch.equal, epoch(again, 0), first))
    assert teacher.since() == 16, "one comparison of stored outputs"


def test_stored_outputs_are_the_teachers_up_to_rounding(tmp_path: Path):
    logits = STUDENT(IMAGES)
    exact = kd.Distiller(TEACHER)(IMAGES, logits)
    half = kd.Distiller(TEACHER, cache=tmp_path / "half")
    single = kd.Distiller(
        TEACHER, cache={"path": str(tmp_path / "one"), "dtype": "fp32"}
    )
    assert torch.equal(single(IMAGES, logits, ids=IDS), exact)
    loss = half(IMAGES, logits, ids=IDS.tolist())
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    assert not torch.equal(loss, exact)


def test_images_without_ids_are_not_stored(tmp_path: Path):
    distiller = kd.Distiller(TEACHER, cache=tmp_path)
    distiller(IMAGES, STUDENT(IMAGES))
    assert not list(tmp_path.glob("view_*"))


def test_different_images_of_one_id_in_a_batch_are_an_error(tmp_path: Path):
    distiller = kd.Distiller(TEACHER, cache=tmp_path)
    logits = STUDENT(IMAGES)
    with pytest.raises(DataError, match=r"^ids: has 0 for different images"):
        distiller(IMAGES, logits, ids=[0] * len(IMAGES))
    # a sampler with replacement repeats an image
    repeated = IMAGES[:1].repeat(len(IMAGES), *[1] * (IMAGES.ndim - 1))
    distiller(repeated, logits, ids=[0] * len(IMAGES))


def test_other_pixels_of_an_id_and_view_are_an_error(tmp_path: Path):
    distiller = kd.Distiller(TEACHER, cache=tmp_path)
    logits = STUDENT(IMAGES)
    distiller(IMAGES, logits, ids=IDS)
    distiller(IMAGES.flip(-1), logits, ids=IDS, view=1)
    with pytest.raises(DataError, match=r"view: image 7 .*pixels.*view 0"):
        distiller(IMAGES[7:].flip(-1), logits[7:], ids=IDS[7:])


@pytest.mark.parametrize(
    ("other", "error", "text"),
    [
        (network(8), RunError, "^cache: .*another"),
        (Counted(network(8)), ModelError, "^cache: .*differs"),
    ],
)
def test_a_folder_of_another_teacher_is_refused(other, error, text, tmp_path: Path):
    first = TEACHER if isinstance(other, nn.Module) else Counted()
    logits = STUDENT(IMAGES)
    kd.Distiller(first, cache=tmp_path)(IMAGES, logits, ids=IDS)
    with pytest.raises(error, match=text):
        kd.Distiller(other, cache=tmp_path)(IMAGES, logits, ids=IDS)


def loss_of(*arguments: Any, teacher: Any = TEACHER, losses: Any = "kl") -> Callable:
    return lambda: kd.Distiller(teacher, losses)(IMAGES, *arguments)


LOGITS = STUDENT(IMAGES).detach()


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (loss_of(LOGITS, losses="klx"), r"losses\[0\]: .*klx.* Did you mean 'kl'"),
        (loss_of(LOGITS, losses={"kind": "kl", "temp": 2}), r"losses\[0\]\['temp'\]"),
        (loss_of(LOGITS, losses="cosine"), "losses.*cosine.*features"),
        (loss_of(LOGITS, losses="tokens"), "losses.*tokens.*features"),
        (loss_of(LOGITS, losses="ce"), "labels: was not given.*'ce'"),
        (
            loss_of(LOGITS, LABELS, losses={"kind": "ce", "class_weights": "balanced"}),
            "losses: class_weights",
        ),
        (loss_of(LOGITS, LABELS - 1, losses="ce"), "labels: .*-1"),
        (loss_of(LOGITS, LABELS[:5]), "labels: .*5 rows for 48"),
        (loss_of(LOGITS, None, None, 0, torch.ones(3)), "weight: .*3 rows for 48"),
        (loss_of(LOGITS[:5]), r"student_outputs: .*\[5, 3\]"),
        (loss_of("logits"), "student_outputs: .*str"),
        (loss_of(LOGITS, teacher=network(4, 7)), "teacher: .*7 classes, the student 3"),
        (
            loss_of(LOGITS, teacher=[TEACHER, lambda x: TEACHER(x).softmax(1)]),
            r"teacher\[1\]: .*probabilities",
        ),
        (loss_of(LOGITS, teacher=lambda x: 1 / 0), "teacher: .*ZeroDivisionError"),
        (loss_of(LOGITS, teacher=3), "teacher: is int"),
        (loss_of(LOGITS, teacher=[]), "teacher: .*empty"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_argument(act: Callable, text: str):
    with pytest.raises(KdError, match=text) as caught:
        act()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("ids", "view", "text"),
    [
        (IDS[:3], 0, r"^ids: .*\[3\]"),
        (IDS.float(), 0, "^ids: .*float32"),
        (IDS - 1, 0, "^ids: .*>= 0"),
        (IDS, -1, "^view: .*-1"),
    ],
)
def test_ids_and_views_are_numbers(ids: Tensor, view: int, text: str, tmp_path: Path):
    distiller = kd.Distiller(TEACHER, cache=tmp_path)
    with pytest.raises(DataError, match=text):
        distiller(IMAGES, LOGITS, ids=ids, view=view)


@pytest.mark.parametrize(
    ("losses", "text"),
    [
        ("klx", r"losses\[0\]: is 'klx'.*Did you mean 'kl'"),
        ([{"kind": "kl", "temprature": 3}], r"temprature.*Did you mean 'temperature'"),
        ("cosine", r"losses\.cosine: .*no features"),
        ([{"kind": "ce", "class_weights": "balanced"}], "class_weights count all"),
    ],
)
def test_losses_are_checked_before_the_first_batch(losses: Any, text: str):
    before = torch.get_rng_state()
    with pytest.raises(KdError, match=text):
        kd.Distiller(TEACHER, losses)
    assert torch.equal(before, torch.get_rng_state())


def test_label_sets_need_no_labels_if_no_loss_reads_them():
    loss = kd.Distiller(TEACHER, "binary_kl")(IMAGES, STUDENT(IMAGES))
    teacher = TEACHER(IMAGES).sigmoid()
    expected = F.binary_cross_entropy_with_logits(STUDENT(IMAGES), teacher)
    entropy = F.binary_cross_entropy(teacher, teacher)
    torch.testing.assert_close(loss, 3 * (expected - entropy))  # summed over classes


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_weights_are_finite_numbers(value: float):
    distiller = kd.Distiller(TEACHER)
    weight = torch.ones(48)
    weight[3] = value
    with pytest.raises(DataError, match="weight: has a value"):
        distiller(IMAGES, STUDENT(IMAGES), weight=weight)


def test_a_teacher_behind_a_function_in_training_mode_is_told_to_evaluate():
    flat = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, 3))
    with pytest.raises(ModelError, match=r"Call \.eval\(\)"):
        kd.Distiller(lambda images: flat(images))(IMAGES, STUDENT(IMAGES))


def test_a_cache_needs_a_folder():
    with pytest.raises(ConfigError, match=r"^cache: .*folder"):
        kd.Distiller(TEACHER, cache={"dtype": "fp32"})


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("hf_trainer", "transformers"),
        ("accelerate_loop", "accelerate"),
        ("lightning_module", "lightning"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of those libraries
def test_the_examples_losses_are_kds_own(
    name: str, library: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Bit for bit, and stored outputs replace the teacher once each view was shown."""
    pytest.importorskip(library, reason=f"pip install {library}")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "own_modules", raising=False)
    monkeypatch.chdir(tmp_path)
    example = importlib.import_module(name)
    calls: list[tuple[Any, int, Tensor]] = []
    exact = "fp32"

    class Recorded(kd.Distiller):
        def __init__(self, teacher: nn.Module, losses: Any, cache: str) -> None:
            self.teacher = teacher
            self.runs: list[int] = []
            super().__init__(teacher, losses, {"path": cache, "dtype": exact})

        def __call__(self, images, student_outputs, *arguments, **named) -> Tensor:
            loss = super().__call__(images, student_outputs, *arguments, **named)
            live = self._parts.live  # type: ignore[union-attr]
            batch = Batch.of(images, arguments[0])
            terms = [loss_term("kl"), loss_term("ce")]
            own = own_loss(self.teacher, terms, batch, student_outputs)
            calls.append((own.detach(), live.images, loss.detach()))
            return loss

    monkeypatch.setattr(kd, "Distiller", Recorded, raising=False)
    example.main(str(tmp_path / "answers"))
    assert len(calls) >= 8
    for own, _, loss in calls:
        assert torch.equal(loss, own)
    runs = [images for _, images, _ in calls]
    half = len(calls) // 2
    assert runs[half - 1] == runs[-1] > 0, "the second half has stored outputs"
    assert runs[0] < runs[half - 1]
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 40
