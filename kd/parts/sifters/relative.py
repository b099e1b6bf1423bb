"""Keep candidates with high current losses among recent ones (SageMaker's rule).

Legend: B images of a step on all ranks, M images of a micro-batch (a chunk), G chunks
of a step (accumulate x ranks).
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Annotated

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from kd.core.contracts import Score
from kd.core.facts import SifterFacts
from kd.core.keys import Field, Keys, keys
from kd.core.types import Batch, Costs, Plan, SiftContext
from kd.parts.sifters._plan import full_plan
from kd.parts.sifters._window import (
    LossWindow,
    generator_at,
    inclusion,
    quota,
    systematic,
)

NO_EPOCH = -1  # before the first plan; epochs count from 0


@keys
class Options(Keys):
    """SageMaker's parameters, under its names."""

    beta_value: PositiveFloat = 1.0
    """An image is kept with probability percentile**beta_value, so 1 / (1 + beta_value)
    of all are kept. Values above 1 are risky: Amazon's own example, beta 3 after a
    delay of 10, lowered a small BERT from 91.6 to 56.7 %; training for a third of the
    epochs without sifting gave 91.6.
    """
    loss_history_length: PositiveInt = 500
    """Number of previous losses that a new one is compared with."""
    sift_delay: NonNegativeInt = 1000
    """Number of first optimizer steps that use all images, without scoring."""
    repeat_delay_per_epoch: bool = False
    """Apply the delay at the start of each epoch instead of once."""
    shrink: Annotated[int, Field(ge=1, le=4)] = 1
    """Score images with their sides divided by this: 2 makes the scoring pass about
    four times as fast. For students that take images of any size: convolutional
    networks, XCiT, timm's ViTs with dynamic_img_size.
    """


class Relative:
    """Sifts by relative probabilities (Selective-Backprop, arXiv:1910.00762).

    See `kd.core.contracts.Sifter`. The number kept of each chunk is fixed, 1 / (1 +
    beta) of all candidates over the epochs, drawn in proportion to their probabilities.
    So all ranks make the same number of steps, shapes are constant, and the length of
    an epoch is known in advance. The step reuses the teacher's outputs of the scoring
    pass. Percentiles are taken over the losses of all ranks. An epoch keeps whole
    steps. Kept images have weight 1: like SageMaker's rule, this is biased towards hard
    images.

    A resumed epoch begins at the oldest candidates whose kept images were not trained
    on yet, with the saved draws.
    """

    def __init__(self, options: Options, context: SiftContext) -> None:
        self.options = options
        self.context = context
        self.window = LossWindow(options.loss_history_length)
        self.epoch = NO_EPOCH
        self.counts: list[int] = []
        """Number of images kept of each chunk, by candidate step of this epoch."""
        self.decided: dict[int, Tensor] = {}
        """Kept positions, int64 [G, K], by candidate step of this epoch.

        Only steps with images still pending are in it.
        """

    def plan(self, epoch: int, progress: float) -> Plan:
        """Return all images as candidates, and the exact number of optimizer steps."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.decided = {}
            self.counts = self._counts(epoch)
        plan = full_plan(self.context, epoch)
        steps = sum(self.counts) // self.context.micro_batch
        return Plan(plan.ids, plan.weights, steps=steps)

    def steps(self, epoch: int, progress: float) -> int:
        return sum(self._counts(epoch)) // self.context.micro_batch

    def _counts(self, epoch: int) -> list[int]:
        """Return how many images of a chunk each candidate step of an epoch keeps."""
        candidates = self.context.num_images // self.context.batch_size
        micro = self.context.micro_batch
        delay = self.options.sift_delay
        scored = unsifted = sifted = steps = 0
        for _ in range(epoch + 1):
            unsifted = min(delay, candidates)
            sifted = candidates - unsifted
            # A fraction of a step is carried to the next epoch: dropping it would cost
            # an epoch of 17 candidate steps at beta 0.5 a 34th of its images (64.7
            # instead of 66.7 %).
            steps = quota(scored, sifted, self.options.beta_value)
            if not unsifted:  # an epoch has at least one step
                steps = max(1, steps)
            scored += sifted
            if not self.options.repeat_delay_per_epoch:
                delay -= unsifted
        totals = [n * steps * micro // max(1, sifted) for n in range(sifted + 1)]
        counts = [after - before for before, after in itertools.pairwise(totals)]
        return [micro] * unsifted + counts

    def first(self, start: int) -> int:
        """Return the candidate step with the first image of optimizer step `start`."""
        return self._locate(start)[0]

    def _locate(self, start: int) -> tuple[int, int]:
        """Return that candidate step and, of each of its chunks, the images before."""
        skipped = start * self.context.micro_batch
        for candidate_step, count in enumerate(self.counts):
            if skipped < count:
                return candidate_step, skipped
            skipped -= count
        return len(self.counts), 0

    def stream(
        self, batches: Iterable[Batch], score: Score, start: int
    ) -> Iterator[Batch]:
        """Yield full micro-batches of kept images, those of a whole step together."""
        micro = self.context.micro_batch
        accumulate = self.context.batch_size // (micro * self.context.world_size)
        incoming = iter(batches)
        candidate_step, skipped = self._locate(start)
        pools: list[list[Batch]] = [[] for _ in range(accumulate)]
        steps = sum(self.counts) // micro
        while start < steps:
            chunks = list(itertools.islice(incoming, accumulate))
            if not chunks:
                return
            for pool, batch in zip(
                pools, self._select(candidate_step, chunks, score), strict=False
            ):
                if skipped:  # images trained on before the checkpoint
                    batch = batch.take(torch.arange(skipped, len(batch.ids)))
                if len(batch.ids):
                    pool.append(batch)
            candidate_step += 1
            skipped = 0
            while (pending := sum(len(batch.ids) for batch in pools[0])) >= micro:
                joined = [Batch.cat(pool) for pool in pools]
                rows = torch.arange(len(joined[0].ids))
                pools = [
                    [batch.take(rows[micro:])] if len(rows) > micro else []
                    for batch in joined
                ]
                full = [batch.take(rows[:micro]) for batch in joined]
                # otherwise XLA would compile a graph for each way to assemble a batch
                score.cut()
                yield from full
                self._drop_draws(candidate_step, pending - micro)
                start += 1

    def _select(
        self, candidate_step: int, chunks: list[Batch], score: Score
    ) -> list[Batch]:
        """Return the kept images of this rank's chunks of a candidate step."""
        count = self.counts[candidate_step]
        if count == self.context.micro_batch:
            return chunks
        losses_B, scored = score(chunks, self.options.shrink)
        if candidate_step not in self.decided:
            self.decided[candidate_step] = self._decide(candidate_step, losses_B)
        rows = self.decided[candidate_step]
        rows = rows.view(len(chunks), self.context.world_size, count)
        rows = rows[:, self.context.rank]
        return [batch.take(chosen) for batch, chosen in zip(scored, rows, strict=True)]

    def _decide(self, candidate_step: int, losses_B: Tensor) -> Tensor:
        """Draw the kept positions, int64 [G, K]; equal on all ranks."""
        count = self.counts[candidate_step]
        candidates = self.context.num_images // self.context.batch_size
        position = self.epoch * candidates + candidate_step
        draws = generator_at(self.context.seed, 0, position)
        losses_B = losses_B if self.context.on_device else losses_B.cpu()
        probability_B = self.window.probability(
            losses_B, self.options.beta_value, draws
        )
        chunks = probability_B.view(-1, self.context.micro_batch)
        return torch.stack(
            [systematic(inclusion(chunk, count), count, draws) for chunk in chunks]
        )

    def _drop_draws(self, candidate_step: int, pending: int) -> None:
        """Drop the draws of steps before the one with the oldest pending image."""
        while pending > 0:
            candidate_step -= 1
            pending -= self.counts[candidate_step]
        self.decided = {
            step: rows for step, rows in self.decided.items() if step >= candidate_step
        }

    def cost(self, costs: Costs) -> float:
        """Return the cost of scoring every candidate and training on the kept ones."""
        share = 1 / (1 + self.options.beta_value)
        return costs.per_image(forward=1 / self.options.shrink**2, step=share)

    def observe(self, ids: Tensor, losses: Tensor) -> None:
        """Do nothing: this sifter compares scores, not training losses."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the window and the draws with pending images; equal on all ranks."""
        draws = {f"draw.{step}": rows for step, rows in self.decided.items()}
        window = {
            f"window.{name}": value for name, value in self.window.state_dict().items()
        }
        return {"epoch": torch.tensor(self.epoch), **window, **draws}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what `state_dict` returned.

        The micro-batch size must be the same, the number of ranks may differ.
        """
        self.epoch = int(state["epoch"])
        self.counts = self._counts(self.epoch) if self.epoch >= 0 else []
        window = {}
        self.decided = {}
        for name, value in state.items():
            kind, _, key = name.partition(".")
            if kind == "window":
                window[key] = value
            elif kind == "draw":
                self.decided[int(key)] = value
        self.window.load_state_dict(window)


def facts(options: Options) -> SifterFacts:
    """Return the sifter's facts."""
    return SifterFacts(
        delay=options.sift_delay, each_epoch=options.repeat_delay_per_epoch
    )


def build(options: Options, context: SiftContext) -> Relative:
    """Build the relative sifter."""
    return Relative(options, context)
