"""Describe data, models, length and memory of a run for `kd-train CONFIG --check`."""

import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kd.config.schema import DataSection
from kd.config.tuning import Augment, Fit
from kd.core.contracts import TeacherModel
from kd.core.errors import NotPrepared
from kd.core.host import bf16_pays, bf16_units, cores
from kd.core.keys import fields_of
from kd.core.types import Batch, Outputs
from kd.engine.criterion import StudentWithLoss
from kd.jobs.check import CheckedRun, check, compare_teachers
from kd.jobs.recommend import recommendations
from kd.models.classifier import set_attention
from kd.models.examination import FAILURES
from kd.models.live_teacher import NoTeacher, count_parameters, on_meta
from kd.parts import registry
from kd.setup.build import sifter_alone
from kd.setup.build_teacher import Teachers
from kd.setup.data import split_batch
from kd.setup.modes import convolution_shares
from kd.setup.recipe import Recipe


def describe(recipe: Recipe, path: str = "given", answers: bool = False) -> str:
    """Check a recipe and describe the run.

    With `answers`, also run its teachers on validation images and count the memory of a
    step.
    """
    return "\n".join(description_lines(recipe, path, answers)[0])


def description_lines(
    recipe: Recipe, path: str, answers: bool
) -> tuple[list[str], float]:
    """Return these lines, ending with memory, and the MiB of the largest phase."""
    checked = check(recipe)
    section = recipe.data
    teachers = checked.teachers
    data = teachers.data
    split = checked.split
    student = checked.modules["distillation"].student
    small = section.progressive
    *full_epochs, last = recipe.length.planned(sifter_alone(recipe, data, split))
    steps = recipe.length.steps or sum(full_epochs) + last
    epochs = len(full_epochs) + (steps - sum(full_epochs)) / last
    labels = data.labels()
    test = f"{len(data.test)} test images, " if data.test is not None else ""
    lines = [
        f"config    {path}: well-formed",
        f"data      {section.kind}: {len(data.train)} training and {len(data.val)}"
        f" validation images, {test}{len(data.classes)} classes,"
        f" {section.image_size} px",
    ]
    if data.classes:
        lines.append(f"          in this order: {_first_names(data.classes)}")
    lines += [f"          {note}" for note in data.notes]
    lines += [
        *_class_skew(labels),
        *_missing_classes(labels, data.classes, "training", "which no label teaches"),
        *_missing_classes(
            data.labels(val=True),
            data.classes,
            "validation",
            "which accuracy does not cover",
        ),
        f"student   {recipe.student.model}: {_parameter_text(student)}, images of"
        f" {student.input_size} px, init {recipe.student.init}",
    ]
    for config_path, model in zip(recipe.members, teachers.members, strict=True):
        lines.append(_teacher_line(recipe, config_path, model))
    if recipe.fits:
        lines += _augmentation_lines(recipe.teacher.fit, section.augment)
    lines += [f"          {note}" for note in teachers.notes]
    if answers:
        lines += _comparison_lines(recipe, teachers)
    losses = " + ".join(f"{term.weight:g} x {term.kind}" for term in recipe.losses)
    lines += [
        f"losses    {losses}",
        f"batch     {split}",
        *_rate_lines(recipe),
        f"length    {steps} steps of {split.batch_size} images ({epochs:.3g}"
        f" {'epoch' if epochs == 1 else 'epochs'})",
    ]
    if small.size:
        lines.append(f"          at {small.size} px until {small.until:.0%} of them")
    lines += _store_lines(section, (len(data.train), len(data.val)))
    if checked.cache:
        lines.append(f"cache     {checked.cache}")
    if recipe.read.teacher:
        lines += recommendations(recipe, teachers, epochs)
    memory, mib = _memory_line(checked, steps=answers)
    lines += [
        f"backend   {recipe.backend.kind}, precision {recipe.backend.precision},"
        f" {split.world_size} process(es)",
        memory,
    ]
    return lines, mib


def _rate_lines(recipe: Recipe) -> list[str]:
    """Report what each rule makes of the learning rate at another batch size.

    Without `optimizer.lr_batch`: only of a batch larger than kd's default.
    """
    section = recipe.config.optimizer
    size = recipe.length.batch_size
    default = fields_of(DataSection)["batch_size"].default
    chosen_for = section.lr_batch or min(default, size)
    if chosen_for == size:
        return []
    based = replace(section, lr_batch=chosen_for)
    linear, root = (based.scaled_lr(size, rule) for rule in ("linear", "sqrt"))
    origin = "" if section.lr_batch else ", kd's default; name yours by it"
    return [
        f"rate      {recipe.lr:.4g} (optimizer.lr_scaling {section.lr_scaling}); from"
        f" {chosen_for:,} images (optimizer.lr_batch{origin}) to {size:,}, linear"
        f" scaling of {section.lr:g} gives {linear:.4g}; sqrt, for Adam-like"
        f" optimizers, {root:.4g}"
    ]


def _class_skew(labels: torch.Tensor) -> list[str]:
    """Report the largest fifth of the classes if it has twice its share of images."""
    counts = (
        (labels > 0).sum(0) if labels.ndim == 2 else torch.bincount(labels[labels >= 0])
    )
    sizes = counts.sort(descending=True).values
    num_largest = -(-len(sizes) // 5)
    share = sizes[:num_largest].sum().item() / max(1, int(sizes.sum()))
    if share <= 2 * num_largest / max(1, len(sizes)):
        return []
    return [
        f"classes   the {num_largest} largest have {100 * share:.0f} % of the images"
        f" ({sizes[0]} to {sizes[num_largest - 1]} each, the smallest {sizes[-1]}); see"
        " docs/faster.md, uneven classes"
    ]


def _missing_classes(
    labels: torch.Tensor, classes: Sequence[str], split: str, hence: str
) -> list[str]:
    """Name the classes without a labelled image of a split."""
    # Whole numbers in shards and tables of hf leave gaps.
    if labels.ndim == 2:
        present = set((labels > 0).any(0).nonzero()[:, 0].tolist())
    else:
        present = set(labels.tolist())
    missing = [name for label, name in enumerate(classes) if label not in present]
    if not missing or present <= {-1}:
        return []
    return [
        f"          no {split} image: {len(missing)} of {len(classes)} classes,"
        f" {hence}: {_first_names(missing)}"
    ]


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


def _store_lines(section: DataSection, sizes: tuple[int, int]) -> list[str]:
    if section.store == "none":
        return []
    if section.store == "views":
        stored_bytes = section.views * sizes[0] * 3 * section.image_size**2
        return [
            f"store     views: {stored_bytes / 2**30:.2f} GiB of memory on each rank,"
            " once all of them are made"
        ]
    from kd.data.store import slot_bytes  # only if pixels are stored
    from kd.setup.open_store import keep_rules

    stored_bytes = sum(
        slot_bytes(rule.max_pixels) * size
        for rule, size in zip(keep_rules(section), sizes, strict=True)
    )
    return [
        f"store     {section.store}: at most {stored_bytes / 2**30:.2f} GiB; estimated"
        " from images at the start"
    ]


def _teacher_line(recipe: Recipe, config_path: str, model: TeacherModel) -> str:
    section = recipe.members[config_path]
    if config_path in recipe.fits:
        return (
            f"teacher   {section.model}: {_parameter_text(model)}, fitted for"
            f" {section.fit.length} if not found"
        )
    size = (
        _parameter_text(model)
        if model.runtime == "torch"
        else f"runs in {model.runtime}"
    )
    return (
        f"teacher   {section.model}: {size}; weights and classes fit; the run measures"
        " its accuracy before step 1"
    )


def _augmentation_lines(fit: Fit, student: Augment) -> list[str]:
    """Report how the augmentation of a teacher's fit differs from the student's."""
    augment = fit.augmented(student)
    texts = []
    for field in fields(Augment):
        fit_value = getattr(augment, field.name)
        student_value = getattr(student, field.name)
        if fit_value != student_value:
            texts.append(f"{field.name} {fit_value}, the student's {student_value}")
    return (
        [f"          its fit augments otherwise: {'; '.join(texts)}"] if texts else []
    )


def _comparison_lines(recipe: Recipe, teachers: Teachers) -> list[str]:
    try:
        comparisons = compare_teachers(recipe, teachers)
    except NotPrepared:
        return ["          not run: the images do not exist yet"]
    return [f"          {comparison.text}" for comparison in comparisons]


def _parameter_text(model: Any) -> str:
    return f"{count_parameters(model) / 1e6:.2f} M parameters"


def _memory_line(checked: CheckedRun, steps: bool) -> tuple[str, float]:
    """Report the memory of all phases, the largest first, and its MiB.

    `steps`: also trace a step's peak, which takes seconds.
    """
    mib = {}
    teachers = checked.teachers
    num_ranks = checked.split.world_size
    distillation = checked.phases["distillation"]
    section = distillation.teacher
    torch_teachers = [model for model in teachers.members if model.runtime == "torch"]
    teacher_bytes: float = sum(map(count_parameters, torch_teachers)) * (
        2 if executed_mode(distillation, section.precision)[0] else 4
    )
    if section.shard or section.pipeline:
        teacher_bytes /= num_ranks
    for name, recipe in checked.phases.items():
        module = checked.modules[name]
        held = held_bytes(recipe, module, num_ranks)
        teacher = None
        if recipe is distillation:
            held += teacher_bytes
            if len(torch_teachers) == len(teachers.members):
                teacher = teachers.model
        # gradients
        step = 4 * sum(p.numel() for p in module.parameters() if p.requires_grad)
        if steps:
            split = split_batch(recipe.data, num_ranks, len(teachers.data.train))
            try:
                step = step_bytes(
                    recipe,
                    module,
                    teacher,
                    split.micro_batch,
                    num_ranks > 1,
                    split.eval_batch,
                )
            except FAILURES:  # a network whose shapes depend on values
                steps = False
        mib[name] = (held + step) / 2**20
    (largest, largest_mib), *smaller = sorted(mib.items(), key=lambda pair: -pair[1])
    line = f"memory    {largest_mib:.0f} MiB per rank in {largest}"
    line += "".join(f", {phase_mib:.0f} in {name}" for name, phase_mib in smaller)
    contents = "gradients and optimizer; activations come on top"
    if steps:
        contents = "optimizer and the peak of a step or an evaluation"
    return f"{line}: weights, {contents}", largest_mib


# --------------------------------------------------------------------------------
# memory of a traced step


class LiveBytes(TorchDispatchMode):
    """Count the bytes of live tensors, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count(tree_leaves(result))
        return result

    def count(self, tensors: Iterable[Any]) -> None:
        """Count tensors that were not counted yet."""
        storages = [
            tensor.untyped_storage()
            for tensor in tensors
            if isinstance(tensor, torch.Tensor)
        ]
        for storage in storages:
            if storage._cdata not in self._alive:
                self._alive.add(storage._cdata)
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, address: int, size: int) -> None:
        self._alive.discard(address)
        self.bytes -= size


def held_bytes(recipe: Recipe, distillation: StudentWithLoss, num_ranks: int) -> int:
    """Return the bytes of a student's weights, their average and its optimizer."""
    section = recipe.config.optimizer
    moments = (2 if section.kind == "adamw" else 1) / (num_ranks if section.zero else 1)
    trained = sum(
        parameter.numel()
        for parameter in distillation.parameters()
        if parameter.requires_grad
    )
    average = count_parameters(distillation.student) if section.ema_decay else 0
    return round(4 * (count_parameters(distillation) + average + moments * trained))


def step_bytes(
    recipe: Recipe,
    distillation: StudentWithLoss,
    teacher: Any,
    images: int,
    reduced: bool,
    scored: int = 0,
) -> int:
    """Return the peak bytes of a step of `images`: gradients, but not the weights.

    Operators are the CPU's, on fake tensors; weights may be on the meta device. Not
    counted: workspaces of operators, and an allocator's reserve. `teacher`: a torch
    teacher or None. `reduced`: gradients stay in DDP's buckets between steps. `scored`:
    images of an evaluation batch, which may need more memory than a step; 0: no
    evaluation.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    # untraceable models raise too
    logging.getLogger("torch._subclasses").setLevel(logging.CRITICAL)
    live = LiveBytes()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    size = recipe.data.image_size
    half, fused = executed_mode(
        recipe,
        recipe.backend.precision,
        recipe.student.attention,
        distillation.student,
        trained=True,
    )
    module = on_meta(distillation, fake).train()
    set_attention(module, fused)
    live.count([*module.parameters(), *module.buffers()])
    if teacher is not None:
        teacher_half, fused = executed_mode(
            recipe, recipe.teacher.precision, recipe.teacher.attention, teacher
        )
        dtype = torch.bfloat16 if teacher_half else None
        teacher = on_meta(teacher, fake, dtype).eval()
        set_attention(teacher, fused)
        live.count([*teacher.parameters(), *teacher.buffers()])
    model_bytes = live.peak

    def make_batch(count: int) -> tuple[Batch, Outputs]:
        labels = recipe.task.no_labels(count, distillation.student.num_classes)  # type: ignore[arg-type]
        batch = Batch.of(torch.empty(count, 3, size, size, dtype=torch.uint8), labels)
        if teacher is None:
            return batch, NoTeacher()(batch)
        with torch.no_grad():
            micro_batches = batch.image.split(recipe.teacher.micro_batch or count)
            outputs = [teacher(pixels) for pixels in micro_batches]
            joined = Outputs.cat(outputs)
            return batch, joined.map(lambda tensor: tensor.float().clone())

    with fake, live:
        for parameter in module.parameters() if reduced else ():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        batch, outputs = make_batch(images)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = module(batch, outputs)[1]["loss"].mean()
        loss.backward()
        del batch, outputs, loss
        if scored:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
                module.eval().student(make_batch(scored)[0].image)
    return live.peak - model_bytes


def executed_mode(
    recipe: Recipe,
    precision: str,
    attention: str = "auto",
    model: Any = None,
    trained: bool = False,
) -> tuple[bool, bool]:
    """Return (bfloat16, fused); `auto` as on this machine's CPU, or on a GPU."""
    facts = registry.facts(
        "backends", recipe.backend.kind, recipe.backend.options, "backend.kind"
    )
    half = precision == "bf16" or (
        precision == "auto" and (not facts.cpu or bool(bf16_units()))
    )
    if half and precision == "auto" and facts.cpu and model is not None:
        half = bf16_pays(*convolution_shares(model), trained, facts.threads or cores())
    return half, attention == "fused" or (attention == "auto" and not facts.cpu)


def bit_depth_lines(used_bits: Counter[int], bits: int) -> list[str]:
    """Report images of 16 bits per channel whose upper bits are zero."""
    lines = []
    for sign, kind in ((1, "grey"), (-1, "colour")):
        counts = {
            sign * number: count
            for number, count in used_bits.items()
            if sign * number > 0
        }
        depth = max(counts, default=bits)
        if depth < bits:
            remedy = (
                f"Set data.bits={max(9, depth)}"
                if sign > 0
                else "Convert them to 8 bits: Pillow keeps the upper 8"
            )
            lines.append(
                f"bits      {sum(counts.values())} {kind} images of 16 bits use {depth}"
                f" of them: read as {bits}, {2 ** max(0, depth - bits + 8)} of 256"
                f" levels are left. {remedy}"
            )
    return lines
