"""Build the student from the run's seed, apply tuning, choose its execution."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn

from kd.config.reads import loss_facts
from kd.config.schema import LossSection
from kd.config.tuning import Tuning
from kd.core.contracts import Backend, Teacher
from kd.core.errors import ConfigError, ModelError, error_with_line
from kd.core.host import environment
from kd.core.seeds import seed_from
from kd.core.text import author_name
from kd.core.types import Batch, Dims, Outputs
from kd.engine.criterion import Criterion, StudentWithLoss, Term, at_size
from kd.engine.optim import Frozen, groups, scaled
from kd.engine.snapshot import load_student
from kd.files.run_dir import RunDir
from kd.models.classifier import (
    Classifier,
    digest,
    feature_shapes,
    head_parameters,
    layer_groups,
    set_attention,
    trained_network,
)
from kd.models.examination import FAILURES, examine, fails, unused_parameters
from kd.models.examined import IMAGES
from kd.models.spec import Spec
from kd.parts import registry
from kd.setup.build_teacher import RunContext, Teachers, sample_images
from kd.setup.data import BatchSplit
from kd.setup.modes import ExecutionMode, Trial, require_mode, torch_mode
from kd.setup.recipe import Recipe


def build_student(
    recipe: Recipe,
    classes: Sequence[str],
    weights: bool = True,
    features: Sequence[str] = (),
    any_size: bool = False,
) -> Classifier:
    """Build the student.

    Its weights are random from the seed, or the pretrained ones if `weights`.
    """
    torch.manual_seed(seed_from(recipe.seed, "student"))
    section = recipe.student
    spec = replace(student_spec(recipe, classes), any_size=any_size)
    if not weights:
        spec = replace(spec, checkpoint="", pretrained=False)
    return registry.build(
        "networks",
        section.kind,
        section.options,
        "student.kind",
        spec=spec,
        image_size=recipe.data.image_size,
        features=features,
    )


def student_spec(recipe: Recipe, classes: Sequence[str]) -> Spec:
    """Return a student's specification: model and weights."""
    section = recipe.student
    task = recipe.task
    return Spec(
        config_path=recipe.config_path,
        model=section.model,
        args=section.args,
        classes=classes if task.logits else (),
        checkpoint=section.checkpoint,
        weights=section.weights,
        pretrained=section.init == "pretrained",
        free_size=section.init == "scratch",
        task=None if section.kind == "timm" else task,
    )


def dims_of(student: Classifier, teachers: Teachers) -> list[Dims]:
    """Return the losses' dimensions for each teacher; one entry without teachers."""
    data = teachers.data
    size = data.plan.image_size
    classes = tuple(data.classes)
    student_shapes = feature_shapes(student, size)
    teacher_shapes = [feature_shapes(model, size) for model in teachers.members]
    return [
        Dims(
            len(classes),
            student_shapes.get("pooled", (0,))[0],
            shapes.get("pooled", (0,))[0],
            student_shapes.get("tokens", (0, 0)),  # type: ignore[arg-type]
            shapes.get("tokens", (0, 0)),  # type: ignore[arg-type]
            classes,
            data.labels,
        )
        for shapes in teacher_shapes or [{}]
    ]


def loss_term(
    kind: str, weight: float = 1.0, dims: Dims | None = None, **options: Any
) -> Term:
    """Build a loss by name for your own loop, as in `loss_term("kl", temperature=2.0)`.

    `kind`: a file of `kd/parts/losses`, or a module from outside; `dims`: sizes for a
    loss that learns a projector.
    """
    checked = registry.default_options("losses", kind, **options)
    loss = registry.build("losses", kind, checked, "losses", dims=dims or Dims(0, 0, 0))
    return Term(kind, weight, loss, registry.facts("losses", kind, checked, "losses"))


def build_criterion(
    losses: Sequence[LossSection],
    dims: Sequence[Dims],
    seed: int,
    shares: Sequence[float] = (1.0,),
    labelled: float = 1.0,
) -> Criterion:
    """Build the loss terms; learned parameters start from the run's seed.

    A term on features is built once for each of several teachers, with a projector for
    each (arXiv:2312.06709). `labelled` is the share of the training images that have a
    label.
    """
    torch.manual_seed(seed_from(seed, "criterion"))
    terms = []
    for i, (section, facts) in enumerate(zip(losses, loss_facts(losses), strict=True)):
        for number, share in enumerate(shares if facts.features else (1.0,)):
            loss = registry.build(
                "losses",
                section.kind,
                section.options,
                f"losses[{i}]",
                dims=dims[number],
            )
            terms.append(
                Term(section.kind, section.weight * share, loss, facts, number)
            )
    return Criterion(terms, labelled)


def require_images(split: BatchSplit, criterion: Criterion) -> None:
    """Require micro-batches with enough images for every loss.

    Some losses compare images with one another.
    """
    for name, term in zip(criterion.names, criterion.all, strict=True):
        key = "data.micro_batch" if split.accumulate > 1 else "data.batch_size"
        sizes = {key: split.micro_batch}
        if term.facts.agreement:
            sizes["data.eval_batch"] = split.eval_batch
        for key, images in sizes.items():
            if term.weight and images < term.facts.images:
                wrong = (
                    f"gives '{name}' micro-batches of {images}, and it compares images"
                    " with one another"
                )
                raise ConfigError(
                    key, wrong, f"{term.facts.images} or more on each rank", "Raise it"
                )


def build_distillation(
    recipe: Recipe, teachers: Teachers, micro_batch: int, meta: bool = False
) -> StudentWithLoss:
    """Build student and criterion as one nn.Module.

    `meta`: the student has no values, except a file's.
    """
    data = teachers.data
    size = recipe.data.image_size
    small = recipe.data.progressive.size
    config_path = recipe.config_path
    model = recipe.student.model
    with torch.device("meta") if meta else nullcontext():
        # a file may not fit; other weights always do
        weights = not meta or bool(recipe.student.checkpoint)
        student = build_student(
            recipe, data.classes, weights, recipe.read.features, any_size=small > 0
        )
        if meta:
            images = torch.zeros(IMAGES, 3, size, size, dtype=torch.uint8)
        else:
            images = sample_images(data)
        examine(
            student,
            f"{config_path}.model",
            images,
            bool(recipe.task.logits),
            micro_batch,
            partial(fails, config_path, model, student.input_size or size),
        )
        if small:
            require_size(student, model, small, size)
    frozen = apply_tuning(recipe, student)
    dims = dims_of(student, teachers)
    shares = getattr(teachers.model, "shares", (1.0,))
    criterion = build_criterion(
        recipe.losses, dims, recipe.seed, shares, data.labelled_share()
    )
    module = StudentWithLoss(student, criterion, recipe.task, frozen, size)
    if not meta:
        note_unused(module, images, dims)
    return module


def note_unused(
    module: StudentWithLoss, images: torch.Tensor, dims: Sequence[Dims]
) -> Sequence[str]:
    """Find the parameters that get no gradient; return the student's notes.

    The step is on images [N, ...].
    """
    student: Any = module.student
    labels = module.task.no_labels(len(images), dims[0].num_classes)
    batch = Batch.of(images, labels.to(images.device))
    teacher = random_outputs(dims, len(images), images.device)
    module.unused = unused_parameters(
        module, lambda: module(batch, teacher)[1]["loss"].mean()
    )
    if module.unused:
        names = list(map(author_name, module.unused))
        listed = ", ".join(names[:4])
        if len(names) > 4:
            listed += f" and {len(names) - 4} more"
        note = f"no gradient reaches {listed}: they keep their first values"
        student.notes = (*getattr(student, "notes", ()), note)
    return getattr(student, "notes", ())


def random_outputs(dims: Sequence[Dims], images: int, device: torch.device) -> Outputs:
    """Return normal random outputs of teachers with these dimensions."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(images, *shape, generator=generator).to(device)

    features = {}
    for number, teacher in enumerate(dims):
        suffix = f".{number}" if number else ""
        features[f"pooled{suffix}"] = drawn(teacher.teacher_features)
        features[f"tokens{suffix}"] = drawn(*teacher.teacher_tokens)
    return Outputs(drawn(dims[0].num_classes), features)


def require_size(student: Classifier, model: str, small: int, image_size: int) -> None:
    """Require a student to accept images of `data.progressive.size`.

    The error lists accepted sizes.
    """

    @torch.no_grad()
    def takes(side: int) -> bool:
        device = next(student.parameters()).device
        pixels = torch.zeros(2, 3, side, side, dtype=torch.uint8, device=device)
        try:
            with at_size(student, side, image_size):
                student(pixels)
        except FAILURES as error:
            # no shapes on the meta device: the run itself will show it
            return isinstance(error, NotImplementedError)
        return True

    training = student.training
    student.eval()
    if not takes(small):
        sides = ", ".join(str(side) for side in range(8, image_size) if takes(side))
        wrong = f"is {small}, but '{model}' takes no images of {small} px"
        allowed = f"It takes {image_size} px alone"
        remedy = "Leave data.progressive out, or choose another student"
        if sides:
            allowed = f"Sizes that it takes: {sides}"
            remedy = "Choose one of them"
        raise ModelError("data.progressive.size", wrong, allowed, remedy)
    student.train(training)


def choose_student(
    context: RunContext, distillation: StudentWithLoss, teacher: Teacher
) -> ExecutionMode:
    """Return the student's execution mode.

    `distillation` is on the device and not wrapped yet.
    """
    backend = context.backend
    section = context.recipe.student
    precision = context.recipe.backend.precision
    mode = torch_mode(
        precision, section.attention, section.compile == "on", distillation, backend
    )
    if mode.compiled:
        copied = copy.deepcopy(distillation)  # compiling cannot be undone
        apply_mode(mode, copied, backend)
        size = context.data.plan.image_size
        with Trial(copied, teacher, backend, size, context.split.micro_batch) as trial:
            require_mode(trial.step, "student.compile", mode)
    return mode


def apply_mode(mode: ExecutionMode, module: StudentWithLoss, backend: Backend) -> None:
    """Set student and backend to a mode."""
    backend.autocast_dtype = torch.bfloat16 if mode.precision == "bf16" else None
    set_attention(module, mode.kernel == "fused")
    if mode.compiled and module.student._compiled_call_impl is None:
        from kd.models.compiled import compile_forward  # only where a compiler is used

        # inside DDP's wrapper, whose hooks stay outside the graph
        compile_forward(module.student)


def apply_tuning(recipe: Recipe, student: nn.Module) -> Frozen | None:
    """Freeze the layers of a student that `tuning` names.

    It must have all layers that are named there.
    """
    tuning = recipe.student.tuning
    model = recipe.student.model
    network = trained_network(student)
    # all fits have a `tuning` section
    config_path = "teacher.fit.tuning"
    if recipe.config_path == "student":
        config_path = "student.tuning"
    if tuning.layer_decay < 1:
        _require_layers(network, model, tuning, f"{config_path}.layer_decay")
    if tuning.head_lr_scale != 1:
        key = f"{config_path}.head_lr_scale"
        with _method_errors(key, model, "get_classifier"):
            head = head_parameters(network)
        if not head:
            wrong = (
                f"is {tuning.head_lr_scale:g}, but '{model}' names no classifier with"
                " parameters"
            )
            allowed = "A classifier of timm, or a method get_classifier as timm's"
            raise ModelError(key, wrong, allowed, f"Set {key}=1")
    if not tuning.freeze:
        return None
    return _freeze(network, model, tuning, f"{config_path}.freeze")


def _require_layers(
    network: nn.Module, model: str, tuning: Tuning, config_path: str
) -> None:
    wrong = "does not declare its layers"
    if hasattr(network, "group_matcher"):
        with _method_errors(config_path, model, "group_matcher"):
            groups = layer_groups(network, 0.0, tuning.layer_decay)
            rates = {group["lr_scale"] for group in groups}
        if len(rates) > 1:
            return
        wrong = "has one layer by its group_matcher"
    raise ModelError(
        config_path,
        f"is {tuning.layer_decay:g}, but '{model}' {wrong}",
        "A network of timm, or one with a method group_matcher as timm's",
        f"Set {config_path}=1",
    )


def _freeze(network: nn.Module, model: str, tuning: Tuning, config_path: str) -> Frozen:
    names = [name for name, _ in network.named_parameters()]
    for pattern in tuning.freeze:
        if not any(fnmatchcase(name, pattern) for name in names):
            firsts = dict.fromkeys(name.partition(".")[0] for name in names)
            wrong = f"'{pattern}' is the name of no parameter of '{model}'"
            allowed = f"Names begin with {', '.join(firsts)}"
            raise ModelError(config_path, wrong, allowed, "Correct the pattern")
    trainable = {id(p) for p in network.parameters() if p.requires_grad}
    frozen = Frozen(network, tuning.freeze, tuning.freeze_epochs)
    if trainable <= {id(parameter) for parameter in frozen.parameters}:
        raise ModelError(
            config_path,
            f"freezes all parameters of '{model}'",
            "Something must learn",
            "Leave the classifier out",
        )
    return frozen


@contextmanager
def _method_errors(key: str, model: str, method: str) -> Iterator[None]:
    """Name the key for which a network's method was called if the method fails."""
    try:
        yield
    except Exception as error:  # a foreign method may raise anything
        wrong = f"needs {method} of '{model}', which fails: {error_with_line(error)}"
        raise ModelError(
            key, wrong, "A method as timm's", f"Correct it, or set {key}=1"
        ) from error


def parameter_groups(
    tuning: Tuning, weight_decay: float, module: StudentWithLoss
) -> list[dict[str, Any]]:
    """Return the parameter groups of student and criterion for a torch optimizer."""
    trained = trained_network(module.student)
    if tuning.layer_decay < 1:
        parameters = layer_groups(trained, weight_decay, tuning.layer_decay)
        parameters += groups([module.criterion], weight_decay)
    else:
        # it defines which parameters do not decay
        network = getattr(module.student, "network", module.student)
        parameters = groups([network, module.criterion], weight_decay)
    if tuning.head_lr_scale == 1:
        return parameters
    scales = dict.fromkeys(head_parameters(trained), tuning.head_lr_scale)
    return scaled(parameters, scales)


def best_student(
    folder: RunDir, recipe: Recipe, classes: Sequence[str]
) -> tuple[Classifier, dict[str, Any]]:
    """Return the chosen checkpoint's student and its origin.

    The losses' learned parameters are left out.
    """
    state, tensors, _ = folder.best()
    student = build_student(recipe, classes, weights=False)
    load_student(student, tensors)
    rows = [row for row in folder.metrics("val") if row["step"] == state.step]
    provenance = {
        "kd": environment()["packages"]["kd"],
        "step": state.step,
        "metrics": rows[-1] if rows else {},
        "run": folder.path.name,
        "digest": digest(student.network),
        "eval_crop": recipe.data.crop_pct,
    }
    return student, provenance
