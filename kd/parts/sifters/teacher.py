"""Choose an epoch's views by the teacher's stored outputs, before they are decoded.

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
        """Return True also for an epoch with a new view, of which nothing is stored."""
        if epoch < len(self.score_VN):  # its view is new
            answers = self.context.answers
            first_batch = range(self.context.batch_size)
            if answers is None or not answers(epoch, first_batch)[1].all():
                return True
        return super().is_full(epoch, progress)

    def _fold(self) -> None:
        if self.epoch == NEVER:
            self._mark_stored()
        else:
            new_N = self.score_VN[self.view].isnan() & ~self.fresh_N.isnan()
            self.score_VN[self.view, new_N] = STORED
        super()._fold()

    def _mark_stored(self) -> None:
        """Mark outputs that are stored before the first epoch; equal on all ranks."""
        answers = self.context.answers
        if answers is None:
            return
        rank_ids = torch.arange(
            self.context.rank, self.context.num_images, self.context.world_size
        )
        stored_VN = torch.zeros_like(self.score_VN)
        for view, stored_N in enumerate(stored_VN):
            for ids in rank_ids.split(READ):
                stored_N[ids] = answers(view, ids.tolist())[1].float()
        self.score_VN[self.context.reduce_sum(stored_VN) > 0] = STORED

    def look(self) -> None:
        """Score views with newly stored outputs; equal on all ranks."""
        unread = (self.score_VN[self.view] == STORED).nonzero()[:, 0]
        # their scores, and 1 for each known one
        scores = torch.zeros(2, self.context.num_images)
        for ids in unread[self.context.rank :: self.context.world_size].split(READ):
            score_K, known_K = self._score(ids)
            scores[:, ids] = torch.stack([score_K.where(known_K, 0.0), known_K.float()])
        scores = self.context.reduce_sum(scores)
        known_N = scores[1] > 0
        self.score_VN[self.view, known_N] = scores[0, known_N]

    def _score(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of images, float32 [K], and a mask of known ones [K]."""
        answers = self.context.answers
        assert answers is not None, "the configuration was checked"
        kind = self.options.score
        id_list = ids.tolist()
        logits_KC, known_K = answers(self.view, id_list)
        log_KC = logits_KC.float().log_softmax(1)
        if kind == "entropy":
            return -(log_KC.exp() * log_KC).sum(1), known_K
        if kind == "margin":
            first_K, second_K = log_KC.exp().topk(2).values.unbind(1)
            return second_K - first_K, known_K
        if kind == "divergence":
            mean_KC = torch.zeros_like(log_KC)
            for view in range(len(self.score_VN)):
                view_KC, stored_K = answers(view, id_list)
                mean_KC = mean_KC + view_KC.float().softmax(1) / len(self.score_VN)
                known_K = known_K & stored_K & ~self.score_VN[view, ids].isnan()
            excess_KC = log_KC - mean_KC.clamp(min=1e-12).log()
            return (log_KC.exp() * excess_KC).sum(1), known_K
        return F.nll_loss(log_KC, self.context.labels()[ids], reduction="none"), known_K

    def unknown(self) -> Tensor:
        """Return the images without a score for this view or a loss of the student."""
        return ~self.score_VN[self.view].isfinite() | super().unknown()

    def choose(self, candidates: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the chosen images and their weights."""
        score_K = self.score_VN[self.view, candidates]
        if self.options.score == "learnable":
            score_K = self.loss_N[candidates] - score_K
        order = candidates[self.ascending(score_K)]
        num_skipped = len(candidates) - count
        if self.options.choose == "drawn" and num_skipped and count:
            return self._draw(order, count)
        starts = {"hardest": num_skipped, "middle": num_skipped // 2}
        start = starts.get(self.options.choose, 0)
        return order[start : start + count], torch.ones(count)

    def _draw(self, order: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Sample without replacement, harder images more often.

        The expected share is `keep`.
        """
        draws = generator(self.context, "sift", self.epoch)
        # a systematic draw depends on the order
        shuffle = torch.randperm(len(order), generator=draws)
        rank_K = (shuffle + 0.5) / len(order)
        probability_K = (rank_K.double() ** (1 / self.keep - 1)).clamp(min=LEAST)
        inclusion_K = inclusion(probability_K, count)
        drawn = systematic(inclusion_K, count, draws)
        weights = torch.ones(count)
        if self.options.reweight:
            weights = 1 / inclusion_K[drawn].float()
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
