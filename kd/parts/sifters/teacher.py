"""Choose the views of an epoch by the teacher's stored outputs, before they are
decoded.

Legend: N images of the dataset, V views of each, K images of some kind, C classes.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kd.core.facts import SifterFacts
from kd.core.keys import keys
from kd.core.types import SiftContext
from kd.parts.sifters._plan import generator
from kd.parts.sifters._table import NEVER, Limits, Remembering
from kd.parts.sifters._window import inclusion, systematic

READ = 4096  # images with outputs in memory at once
# smallest probability relative to the largest, so no weight is larger than 1 / 0.15
LEAST = 0.15
STORED = -torch.inf  # in place of the score of a stored output that was not read yet


@keys
class Options(Limits):
    """The score of a view, and the share of an epoch to keep."""

    score: Literal["loss", "entropy", "margin", "divergence", "learnable"] = "learnable"
    """Difficulty of a view, from the teacher's stored output: loss against the label;
    entropy; margin of the top class; divergence from the mean output over the image's
    views; or the student's last loss minus the teacher's (arXiv:2206.07137).
    """
    choose: Literal["hardest", "easiest", "middle", "drawn"] = "drawn"
    """Which images are kept by that score. `drawn`: with a probability that grows with
    the rank. Views without a stored output are kept too, so an epoch that fills the
    cache visits all images. In our study no choice beat random images, see
    `sifter.kind: random`.
    """
    reweight: bool = False
    """Weigh a drawn image with 1 / its probability, as InfoBatch does
    (arXiv:2303.04947); the mean weight is 1.
    """

    def __post_init__(self) -> None:
        if self.reweight and self.choose != "drawn":
            raise ValueError(
                f"reweight=true needs choose=drawn: '{self.choose}' has no"
                " probabilities"
            )


class ByAnswers(Remembering):
    """Sifts by a score of the teacher's stored output for the epoch's view.

    Views without a stored output are always visited. Each view is scored once. Stored
    are the outputs found before the first epoch, and those of images trained on since.
    Both are part of the state, so a resumed run selects the same images: before it was
    killed it may have stored more. Each rank reads only its share.
    """

    def __init__(self, options: Options, context: SiftContext) -> None:
        super().__init__(options, context)
        self.options = options
        self.score_VN = torch.full(
            (max(1, context.views), context.num_images), torch.nan
        )
        """Score of each view: higher is harder, NaN if nothing is stored. For
        `learnable`, the teacher's loss.
        """

    @property
    def view(self) -> int:
        """The epoch's view."""
        return self.epoch % len(self.score_VN)

    def is_full(self, epoch: int, progress: float) -> bool:
        """Return True also for an epoch with a new view, of which no output is
        stored.
        """
        view, answers = epoch % len(self.score_VN), self.context.answers
        first = epoch < len(self.score_VN) and not (
            answers and bool(answers(view, range(self.context.batch_size))[1].all())
        )
        return first or super().is_full(epoch, progress)

    def _fold(self) -> None:
        if self.epoch == NEVER:
            self._find()
        else:
            new_N = self.score_VN[self.view].isnan() & ~self.fresh_N.isnan()
            self.score_VN[self.view, new_N] = STORED
        super()._fold()

    def _find(self) -> None:
        """Find the outputs that are stored before the first epoch; equal on
        all ranks.
        """
        answers, found = self.context.answers, torch.zeros_like(self.score_VN)
        if answers is None:
            return
        own = torch.arange(
            self.context.rank, self.context.num_images, self.context.world_size
        )
        for view, found_N in enumerate(found):
            for ids in own.split(READ):
                found_N[ids] = answers(view, ids.tolist())[1].float()
        self.score_VN[self.context.reduce_sum(found) > 0] = STORED

    def look(self) -> None:
        """Score views with newly stored outputs; equal on all ranks."""
        missing = (self.score_VN[self.view] == STORED).nonzero()[:, 0]
        found = torch.zeros(2, self.context.num_images)
        for ids in missing[self.context.rank :: self.context.world_size].split(READ):
            score, known = self._read(ids)
            found[:, ids] = torch.stack([score.where(known, 0.0), known.float()])
        found = self.context.reduce_sum(found)
        known_N = found[1] > 0
        self.score_VN[self.view, known_N] = found[0, known_N]

    def _read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of images, float32 [K], and a mask of known ones,
        bool [K].
        """
        answers = self.context.answers
        assert answers is not None, "the configuration was checked"
        kind, asked = self.options.score, ids.tolist()
        logits_KC, known_K = answers(self.view, asked)
        log_KC = logits_KC.float().log_softmax(1)
        if kind == "entropy":
            return -(log_KC.exp() * log_KC).sum(1), known_K
        if kind == "margin":
            first_K, second_K = log_KC.exp().topk(2).values.unbind(1)
            return second_K - first_K, known_K
        if kind == "divergence":
            mean_KC = torch.zeros_like(log_KC)
            for view in range(len(self.score_VN)):
                other_KC, there_K = answers(view, asked)
                mean_KC = mean_KC + other_KC.float().softmax(1) / len(self.score_VN)
                known_K = known_K & there_K & ~self.score_VN[view, ids].isnan()
            return (log_KC.exp() * (log_KC - mean_KC.clamp(min=1e-12).log())).sum(
                1
            ), known_K
        return F.nll_loss(log_KC, self.context.labels()[ids], reduction="none"), known_K

    def unknown(self) -> Tensor:
        """Return the images without a score for this view, or never seen by the
        student.
        """
        return ~self.score_VN[self.view].isfinite() | super().unknown()

    def choose(self, rest: Tensor, room: int) -> tuple[Tensor, Tensor]:
        """Return the chosen images and their weights."""
        score_K = self.score_VN[self.view, rest]
        if self.options.score == "learnable":
            score_K = self.loss_N[rest] - score_K
        order, spare = rest[self.ascending(score_K)], len(rest) - room
        if self.options.choose == "drawn" and spare and room:
            return self._draw(order, room)
        start = {"hardest": spare, "drawn": 0, "easiest": 0, "middle": spare // 2}[
            self.options.choose
        ]
        return order[start : start + room], torch.ones(room)

    def _draw(self, order: Tensor, room: int) -> tuple[Tensor, Tensor]:
        """Sample without replacement, harder images more often; the expected share is
        `keep`.
        """
        draws = generator(self.context, "sift", self.epoch)
        shuffle = torch.randperm(
            len(order), generator=draws
        )  # a systematic draw depends on the order
        rank_K = (shuffle + 0.5) / len(order)
        likely_K = inclusion(
            (rank_K.double() ** (1 / self.keep - 1)).clamp(min=LEAST), room
        )
        drawn = systematic(likely_K, room, draws)
        weights = (
            1 / likely_K[drawn].float() if self.options.reweight else torch.ones(room)
        )
        return order[shuffle[drawn]], weights

    def state_dict(self) -> dict[str, Tensor]:
        """Return the table and the scores."""
        return {**super().state_dict(), "score": self.score_VN.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what `state_dict` returned, on this number of ranks or another one."""
        super().load_state_dict(state)
        self.score_VN.copy_(state["score"])


def facts(options: Options) -> SifterFacts:
    """Return the sifter's facts."""
    return SifterFacts(by_class=options.score in ("loss", "learnable"), answers=True)


def build(options: Options, context: SiftContext) -> ByAnswers:
    """Build the sifter that reads the teacher's stored outputs."""
    return ByAnswers(options, context)
