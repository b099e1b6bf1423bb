"""The sifter of a run, and its gate: does it pay? Measured at the start, before it can lose time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from kd import parts
from kd.config import Config
from kd.contracts import Backend, Dataset, Sifter, Source, Teacher
from kd.data.loader import LocalLoader
from kd.engine.criterion import Distillation
from kd.engine.probe import fastest
from kd.engine.scoring import at_size, resized
from kd.errors import ConfigError
from kd.start.batch import BatchSplit
from kd.start.kernels import trial_batch
from kd.start.workers import loading_ms, share_asked
from kd.types import Costs, SiftContext


def sifter(
    config: Config,
    source: Source,
    split: BatchSplit,
    backend: Backend,
    loader: LocalLoader,
    distillation: Distillation,
    teacher: Teacher,
    choices: dict[str, str],
) -> tuple[Sifter, str]:
    """Build the sifter of the training images; return it and what its gate has to say, once a run."""

    def labels() -> torch.Tensor:
        return torch.tensor([source.label(id) for id in range(len(source))])

    section, views = config.sifter, config.data.views or config.teacher.cache.views
    context = population(len(source), labels, backend, split, config.run.seed, views)
    made = parts.build("sifters", section.kind, section.options, "sifter.kind", population=context)
    require_size(distillation, getattr(section.options, "score_size", 0), config, backend)
    if choices.get("sifter") == "none":
        return everything(context), ""
    if section.kind == "none" or section.gate == "off" or "sifter" in choices:
        return made, ""
    costs = measure(config, split.micro_batch, distillation, teacher, loader.dataset, loader.workers, backend)
    return gated(config, made, context, costs, choices)


def require_size(distillation: Distillation, size: int, config: Config, backend: Backend) -> None:
    """Require that the student can look at images of the size at which a sifter scores.

    Raises:
        ConfigError: its architecture takes one size only.
    """
    if not size:
        return
    training = distillation.training
    try:
        with torch.no_grad(), backend.autocast(), at_size(distillation.student, size):
            distillation.student.eval()(resized(trial_batch(config, 1, backend), size).image)
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(
            "sifter.score_size",
            f"is {size}, but the student '{config.student.model}' cannot look at images of that size ({reason})",
            "0, or a size that the architecture takes (a ViT needs student.args.dynamic_img_size=true)",
            "Set sifter.score_size=0",
        ) from error
    finally:
        distillation.train(training)


def population(
    num_images: int,
    labels: Callable[[], torch.Tensor],
    backend: Backend,
    split: BatchSplit,
    seed: int,
    views: int = 0,
) -> SiftContext:
    """Return what a sifter must know of the images and of how they are divided."""
    return SiftContext(
        num_images=num_images,
        batch_size=split.batch_size,
        micro_batch=split.micro_batch,
        rank=backend.rank,
        world_size=backend.world_size,
        seed=seed,
        labels=labels,
        reduce_sum=lambda tensor: backend.reduce_sum(tensor.to(backend.device)).cpu(),
        views=views,
    )


def gated(
    config: Config,
    sifter: Sifter,
    population: SiftContext,
    costs: Costs,
    choices: dict[str, str],
) -> tuple[Sifter, str]:
    """Return the sifter, or one that visits everything where the sifter would lose time, and what to tell the user.

    Args:
        config: of the run.
        sifter: as configured.
        population: for the one that replaces it.
        costs: measured; equal on all ranks.
        choices: where the decision is written.
    """
    kind = config.sifter.kind
    whole, sifted = costs.per_image(), sifter.cost(costs)
    saving = 1 - sifted / whole
    measured = (
        f"teacher {costs.teacher:.2f}, student forward {costs.forward:.2f}, step {costs.step:.2f}, "
        f"loading {costs.load:.2f} ms an image"
    )
    if saving >= 0:
        choices["sifter"] = kind
        return sifter, f"sifter '{kind}' will save {100 * saving:.0f} % of a sifted epoch's time ({measured})"
    choices["sifter"] = "none"
    loses = f"sifter '{kind}' would make a sifted epoch {-100 * saving:.0f} % longer ({measured})"
    return everything(population), f"{loses}; everything is visited. sifter.gate=off sifts all the same"


def everything(population: SiftContext) -> Sifter:
    """Return the sifter that sifts nothing."""
    return parts.build("sifters", "none", parts.default_options("sifters", "none"), "sifter", population=population)


def measure(
    config: Config,
    micro_batch: int,
    distillation: Distillation,
    teacher: Teacher,
    dataset: Dataset,
    workers: int,
    backend: Backend,
) -> Costs:
    """Time the parts of a step on noise, and loading on a few images; all ranks take rank 0's numbers."""
    batch = trial_batch(config, micro_batch, backend)
    answers, count = teacher(batch), len(batch.label)
    kept = {name: buffer.clone() for name, buffer in distillation.named_buffers()}
    size = getattr(config.sifter.options, "score_size", 0)

    def forward() -> torch.Tensor:
        distillation.eval()
        with torch.no_grad(), backend.autocast(), at_size(distillation.student, size):
            loss = distillation(resized(batch, size), answers)[1]["loss"]
        backend.end_step()
        return loss

    def step() -> torch.Tensor:
        distillation.train()
        with backend.autocast():
            loss = distillation(batch, answers)[1]["loss"].mean()
        loss.backward()
        distillation.zero_grad()
        backend.end_step()
        return loss.detach()

    work: Mapping = {"teacher": lambda: teacher(batch).logits, "forward": forward, "step": step}
    table = fastest(work, backend, warm=True)[1]  # a compiled student meets new shapes here
    for name, buffer in distillation.named_buffers():
        buffer.copy_(kept[name])  # batch norm has seen noise
    load = loading_ms(dataset)[0] / max(1, workers)
    numbers = torch.tensor([table[name] / count for name in work] + [load], device=backend.device)
    backend.broadcast_([numbers])
    teacher_ms, forward_ms, step_ms, load_ms = numbers.tolist()
    asked = teacher_ms * share_asked(config)
    return Costs(asked, forward_ms, step_ms, load_ms, overlapped=workers > 0)
