"""`SiftingDataloader` wraps a loader and yields full batches of high losses."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kd.parts.sifters._window import LossWindow, generator_at, quota
from kd.sifting.batch import Pending, SiftingBatch, SiftingBatchTransform
from kd.sifting.config import (
    RelativeProbabilisticSiftConfig,
    UnsupportedDataFormatException,
    from_dict,
    require,
)
from kd.sifting.formats import DefaultTransform
from kd.sifting.loss import device_of, losses_of, method_of
from kd.sifting.original import random_state, restore_order, resume_epoch, sizes_of
from kd.sifting.timing import Meter, logger, now

COUNTERS = ("steps", "steps_in_epoch", "position", "seen", "draws", "size")


class SiftingDataloader:
    """Score every batch of a loader and yield batches of the selected samples.

    The current model scores them.

    The first `sift_delay` batches pass unchanged and unscored, a short last one
    included. Later batches are scored in evaluation mode. A sample is kept with
    probability q**beta, where q (0 to 1) ranks its loss among the last
    `loss_history_length` losses and its batch's. Kept samples wait until they fill a
    batch of the original size, so all sifted batches have one size. The remainder of an
    epoch goes into the next one; at the end of the run less than one batch is lost.

    Each rank uses its own losses, and all ranks yield equally many batches. With
    `pick="fixed"` and loaders of equal, known length this holds by construction.
    Otherwise the ranks all-reduce a flag before each batch and stop together.

    `state_dict` is per rank: each rank saves its own.

    Args:
        sift_config: a `RelativeProbabilisticSiftConfig` or a dict of its keys.
        orig_dataloader: any iterable of batches. Unknown attributes are looked up there
            (`dataset`, `sampler`).
        model: the model in training; samples are scored with its current weights.
        loss_impl: an object with `loss(model, transformed_batch, original_batch)`, see
            `Loss`.
        batch_transforms: converts a batch to a `SiftingBatch` and back; None for lists,
            tuples, dicts and tensors.
        log_batch_data: keep and log the losses of each batch; copies them from the
            device.
        batch_format_index: the sample dimension of a batch, 0 or 1, where the batch
            size leaves it open.
        pick: "fixed" keeps a fixed number of each batch, exactly 1 / (1 + beta)
            overall; "bernoulli" draws each sample independently, as smart sifting
            documents it.
        seed: of the draws, which do not use the global random state.

    Raises:
        SiftConfigValidationException: a configuration or an argument is not allowed.
        LossImplementationNotProvidedException: `loss_impl` has no loss.
        UnsupportedDataFormatException: during iteration, a batch cannot be split into
            samples.
    """

    def __init__(
        self,
        sift_config: RelativeProbabilisticSiftConfig | Mapping[str, Any],
        orig_dataloader: Any,
        model: nn.Module,
        loss_impl: Any = None,
        batch_transforms: SiftingBatchTransform | None = None,
        log_batch_data: bool = False,
        batch_format_index: int | None = None,
        *,
        pick: Literal["fixed", "bernoulli"] = "fixed",
        seed: int = 0,
    ) -> None:
        self.orig_dataloader = orig_dataloader
        self.model = model
        self.pick = pick
        self.seed = seed
        self.sift_config = from_dict(
            RelativeProbabilisticSiftConfig, sift_config, "sift_config"
        )
        self.loss_method = method_of(loss_impl)
        _check_arguments(
            model, orig_dataloader, batch_transforms, batch_format_index, pick
        )
        sizes = sizes_of(orig_dataloader)
        self.transform = batch_transforms or DefaultTransform(
            sizes.batch_size, batch_format_index, alone=sizes.batches == 1
        )
        self.window = LossWindow(self.sift_config.loss_history_length)
        self.pending = Pending()
        self.meter = Meter(log_batch_data)
        self.steps = self.steps_in_epoch = self.position = self.seen = self.draws = 0
        self.size = 0  # number of samples of a full batch; 0 before the first batch
        self.sized = not any(
            kind.__name__ == "LightningModule" for kind in type(model).__mro__
        )
        """Whether `len` is available. With a length, Lightning does not read to the
        end, so its checkpoint after an epoch would be one within the epoch. For the
        Hugging Face Trainer see `enable_sifting`.
        """
        # the loop reads `len` before each epoch, and no batch beyond it: `follow`
        self.counted = False
        self._order = random_state(orig_dataloader)
        self._resuming = False

    @property
    def metrics(self) -> dict[str, Any]:
        """The latest values under smart sifting's names.

        For example `num_orig_samples_seen` and `num_orig_samples_kept`, numbers of
        samples.
        """
        return self.meter.metrics

    @property
    def keep(self) -> float:
        """The kept fraction, 1 / (1 + beta)."""
        return 1 / (1 + self.sift_config.beta_value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "orig_dataloader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.orig_dataloader, name)

    def __iter__(self) -> Iterator[Any]:
        if not self._resuming:
            self.position = self.steps_in_epoch = 0
        batches = self._sifted_batches()
        device = device_of(self.model)
        equal_lengths = self._lengths_agree(device)
        length = self.epoch_lengths(1)[0] if self.counted else 0
        while True:
            start = now()
            batch = next(batches, None)
            if not equal_lengths and not _gather([batch is not None], device).all():
                # another rank has no batch left: this one goes into the next epoch
                if batch is not None:
                    self.pending.put_back(batch)
                break
            if batch is None:
                break
            self.steps += 1
            self.steps_in_epoch += 1
            self.meter.log(len(batch), now() - start)
            with self.meter.timed("reverse_transform"):
                converted = self.transform.reverse_transform(batch)
            if last := self.steps_in_epoch == length:
                # score the rest of the epoch now, since the loop does not come back
                next(batches, None)
                self.position = self.steps_in_epoch = 0
            pilot = self.draws > 0 and self.meter.saving is None
            start = now(device if pilot else None)
            yield converted
            if pilot:
                self.meter.train(now(device) - start, len(batch), self.keep)
            if last:
                return
        if not self.steps_in_epoch:
            text = (
                "an epoch of %d batches gave no full batch of %d kept samples; %d wait"
                " for the next epoch"
            )
            logger.warning(text, self.position, self.size, len(self.pending))
        # a checkpoint from here on starts an epoch
        self.position = self.steps_in_epoch = 0

    def _open(self) -> Iterator[Any]:
        """Begin an epoch of the original loader, or resume the one of a checkpoint."""
        if self._resuming:
            self._resuming = False
            if self.position:
                return resume_epoch(self.orig_dataloader, self._order, self.position)
            restore_order(self.orig_dataloader, self._order)
        self._order = random_state(self.orig_dataloader)
        return iter(self.orig_dataloader)

    def _sifted_batches(self) -> Iterator[SiftingBatch]:
        """Yield batches to train on.

        At each yield, the counters include the batch yielded.
        """
        # put back, or from a checkpoint
        while self.size and len(self.pending) >= self.size:
            yield self.pending.pop(self.size)
        for original in self._open():
            self.position += 1
            with self.meter.timed("transform"):
                batch = self._to_sifting_batch(original)
            self.size = self.size or len(batch)
            if self._is_delayed():
                self.meter.count(len(batch), len(batch))
                yield batch
                continue
            self._sift(batch, original)
            while len(self.pending) >= self.size:
                yield self.pending.pop(self.size)

    def _to_sifting_batch(self, original: Any) -> SiftingBatch:
        batch = self.transform.transform(original)
        if not isinstance(batch, SiftingBatch):
            wrong = f"transform() returned a {type(batch).__name__}"
            allowed = (
                "It must return a SiftingBatch: ListBatch, TensorBatch or a class"
                " derived from SiftingBatch"
            )
            raise UnsupportedDataFormatException("batch_transforms", wrong, allowed)
        return batch

    def _is_delayed(self) -> bool:
        base = self.sift_config.base
        steps = self.steps_in_epoch if base.repeat_delay_per_epoch else self.steps
        return steps < base.sift_delay

    def _sift(self, batch: SiftingBatch, original: Any) -> None:
        size = len(batch)
        beta = float(self.sift_config.beta_value)
        with self.meter.timed(
            "calculate_relevance_values", wait_for=device_of(self.model)
        ):
            losses = losses_of(self.loss_method, self.model, batch, original)
        self.meter.score(size)
        with self.meter.timed("should_sift"):
            generator = generator_at(self.seed, _rank_and_size()[0], self.draws)
            number = quota(self.seen, size, beta) if self.pick == "fixed" else None
            index = self.window.sift(losses, beta, generator, number)
        self.meter.record_losses(losses, index)
        with self.meter.timed("sift"):
            selected = batch.take(index)
        with self.meter.timed("accumulate"):
            self.pending.add(selected)
        self.seen += size
        self.draws += 1
        self.meter.count(size, len(selected))

    def _lengths_agree(self, device: torch.device) -> bool:
        """Return whether all ranks yield equally many batches.

        Then no flag per batch is needed in this epoch.
        """
        if _rank_and_size()[1] == 1:
            return True
        sizes = sizes_of(self.orig_dataloader)
        predictable = self.pick == "fixed" and None not in sizes
        counters = [getattr(self, name) for name in COUNTERS]
        # A collective: every rank calls it, whatever its own values are.
        table = _gather(
            [predictable, *(size or 0 for size in sizes), *counters, len(self.pending)],
            device,
        )
        return predictable and bool((table == table[0]).all())

    def __len__(self) -> int:
        """Return the number of batches of the current or the next epoch.

        Returns:
            The number for the current epoch; between epochs for the next one.

        Raises:
            TypeError: as of `epoch_lengths`, and before the first delay is over,
                because epochs differ then.
        """
        base = self.sift_config.base
        steps_before = self.steps - self.steps_in_epoch
        if self.counted:
            return self.epoch_lengths(1)[0]
        if not self.sized or (
            steps_before < base.sift_delay and not base.repeat_delay_per_epoch
        ):
            raise TypeError(
                "a SiftingDataloader has no length before sift_delay is over; see"
                " epoch_lengths(epochs)"
            )
        return self.epoch_lengths(1)[0]

    def epoch_lengths(self, epochs: int) -> list[int]:
        """Return the numbers of batches of the next epochs.

        A schedule needs them. The current epoch counts as a whole.

        Args:
            epochs: number of epochs, the current one included.

        Returns:
            One number of batches per epoch.

        Raises:
            TypeError: they are not known: `pick="bernoulli"`, or a loader without a
                length.
        """
        batches, samples, batch_size = sizes_of(self.orig_dataloader)
        if (
            self.pick != "fixed"
            or batches is None
            or samples is None
            or batch_size is None
        ):
            raise TypeError(
                "the number of batches of this SiftingDataloader is not known in"
                " advance"
            )
        size = self.size or min(batch_size, samples)
        base = self.sift_config.base
        beta = float(self.sift_config.beta_value)
        position = yielded = 0
        if 0 < self.position <= batches:
            position = self.position
            yielded = self.steps_in_epoch
        steps = self.steps
        samples_seen = self.seen
        pending = len(self.pending)
        lengths = []
        for _ in range(epochs):
            steps_before = yielded if base.repeat_delay_per_epoch else steps
            delay = base.sift_delay - steps_before
            flushed, pending = divmod(pending, size)  # batches that were put back
            # batches of the delay
            passed = min(batches - position, max(0, delay - flushed))
            scored = max(0, samples - (position + passed) * size)  # samples
            full, pending = divmod(pending + quota(samples_seen, scored, beta), size)
            yielded += flushed + passed + full
            lengths.append(yielded)
            steps += flushed + passed + full
            samples_seen += scored
            position = yielded = 0
        return lengths

    def state_dict(self) -> dict[str, Any]:
        """Return the state as of the last batch, for `torch.save`.

        Returns:
            The window, the counters, the pending samples and the order of the epoch, by
            name.
        """
        pending = self.pending.join_all()
        state: dict[str, Any] = {name: getattr(self, name) for name in COUNTERS}
        state |= {
            f"window.{name}": value for name, value in self.window.state_dict().items()
        }
        order = self._order
        if not self.position and not self._resuming:
            order = random_state(self.orig_dataloader)
        state |= {f"order.{name}": value for name, value in order.items()}
        state["pending"] = None
        if pending is not None:
            state["pending"] = self.transform.reverse_transform(pending)
        # too few pending samples may not show the format
        if isinstance(self.transform, DefaultTransform):
            state["format"] = [self.transform.form, self.transform.index]
        state["seen_and_kept"] = [
            self.metrics["num_orig_samples_seen"],
            self.metrics["num_orig_samples_kept"],
        ]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state, with the same loader.

        The next iteration yields the remaining batches of the epoch. Between epochs it
        first sets torch's random state to that of `state`, so that its order and all
        later draws are those of the run that saved it.

        Args:
            state: the result of `state_dict` on this rank.
        """
        for name in COUNTERS:
            setattr(self, name, int(state[name]))
        self.window.load_state_dict(_without_prefix("window.", state))
        self._order = _without_prefix("order.", state)
        self.pending = Pending()
        if isinstance(self.transform, DefaultTransform):
            self.transform.form, self.transform.index = state["format"]
        if state["pending"] is not None:
            self.pending.add(self._to_sifting_batch(state["pending"]))
        candidates, selected = state["seen_and_kept"]
        self.metrics["num_orig_samples_seen"] = candidates
        self.metrics["num_orig_samples_kept"] = selected
        self._resuming = True


def _without_prefix(prefix: str, state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in state.items()
        if name.startswith(prefix)
    }


def _check_arguments(
    model: Any, loader: Any, transforms: Any, index: Any, pick: Any
) -> None:
    has_methods = hasattr(transforms, "transform") and hasattr(
        transforms, "reverse_transform"
    )
    is_transform = has_methods and not isinstance(transforms, type)
    is_index = index in (0, 1) and not isinstance(index, bool)
    for name, value, valid, allowed in (
        ("model", model, isinstance(model, nn.Module), "a torch.nn.Module"),
        (
            "orig_dataloader",
            loader,
            hasattr(loader, "__iter__"),
            "a DataLoader or another iterable of batches",
        ),
        (
            "batch_transforms",
            transforms,
            transforms is None or is_transform,
            "None or an object of a class derived from SiftingBatchTransform",
        ),
        ("batch_format_index", index, index is None or is_index, "0 or 1"),
        ("pick", pick, pick in ("fixed", "bernoulli"), "'fixed' or 'bernoulli'"),
    ):
        require(f"SiftingDataloader.{name}", value, valid, allowed)


def _rank_and_size() -> tuple[int, int]:
    """Return this rank and the number of ranks; (0, 1) outside torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _gather(values: Sequence[int], device: torch.device) -> Tensor:
    """Return the values of all ranks by SUM alone, int64 [ranks, len(values)].

    All ranks must call it.
    """
    rank, size = _rank_and_size()
    if dist.get_backend() == "gloo":
        device = torch.device("cpu")
    table = torch.zeros(size, len(values), dtype=torch.int64, device=device)
    table[rank] = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(table)
    return table.cpu()
