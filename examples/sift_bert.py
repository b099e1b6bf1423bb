"""Classify texts with a small BERT-like encoder in a plain loop, with and without
sifting: dict batches.

Only the import line differs from a script for SageMaker's smart sifting. The texts are
synthetic: 32 tokens, a few of which decide between six topics. Most texts have many
such tokens; some have one. Sifting keeps the latter.

Run: python examples/sift_bert.py
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from kd.sifting import (
    Loss,
    LossConfig,
    RelativeProbabilisticSiftConfig,
    SiftingBaseConfig,
    SiftingDataloader,
)

TOPICS = 6
WORDS = 400
LENGTH = 32  # tokens of a text


class Texts(Dataset):
    """Token ids 1 to WORDS - 1, padded with 0.

    Words 1 to 10 indicate topic 0, 11 to 20 topic 1, and so on.
    """

    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(TOPICS, (count,), generator=draw)
        self.input_ids = torch.randint(
            10 * TOPICS + 1, WORDS, (count, LENGTH), generator=draw
        )
        is_topic_word = (
            torch.rand(count, LENGTH, generator=draw)
            < torch.rand(count, 1, generator=draw) ** 2 * 0.4
        )
        is_topic_word[:, 0] = True
        words = (
            1
            + 10 * self.labels[:, None]
            + torch.randint(10, (count, LENGTH), generator=draw)
        )
        self.input_ids[is_topic_word] = words[is_topic_word]
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (count, 1), generator=draw)
        self.attention_mask = (torch.arange(LENGTH) < lengths).long()
        self.input_ids *= self.attention_mask

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {
            "input_ids": self.input_ids[i],
            "attention_mask": self.attention_mask[i],
            "labels": self.labels[i],
        }


class Encoder(nn.Module):
    """Words and positions, a transformer encoder, their mean, a linear layer."""

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.positions = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, TOPICS)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        x = self.body(
            self.words(input_ids) + self.positions,
            src_key_padding_mask=attention_mask == 0,
        )
        mask = attention_mask[:, :, None]
        return self.head((x * mask).sum(1) / mask.sum(1))


class TextLoss(Loss):
    """The loss of each text, for sifting."""

    # the signature of smart sifting
    def loss(self, model, transformed_batch, original_batch=None):
        logits = model(original_batch["input_ids"], original_batch["attention_mask"])
        return nn.functional.cross_entropy(
            logits, original_batch["labels"], reduction="none"
        )


def train(
    train_data: Dataset, val: Texts, epochs: int, beta: float | None
) -> tuple[float, float, float]:
    """Train; return accuracy, seconds and the share of texts that were trained on."""
    torch.manual_seed(0)
    model = Encoder()
    loader = DataLoader(train_data, batch_size=32, shuffle=True, drop_last=True)
    steps = all_steps = epochs * len(loader)
    if beta is not None:
        base = SiftingBaseConfig(sift_delay=len(loader))
        config = RelativeProbabilisticSiftConfig(
            beta_value=beta,
            loss_history_length=500,
            loss_based_sift_config=LossConfig(sift_config=base),
        )
        loader = SiftingDataloader(
            sift_config=config,
            orig_dataloader=loader,
            loss_impl=TextLoss(),
            model=model,
        )
        steps = sum(loader.epoch_lengths(epochs))  # the schedule must end with the run
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    start = time.perf_counter()
    for _ in range(epochs):
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            logits = model(batch["input_ids"], batch["attention_mask"])
            nn.functional.cross_entropy(logits, batch["labels"]).backward()
            optimizer.step()
            schedule.step()
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        right = model(val.input_ids, val.attention_mask).argmax(1) == val.labels
    return right.float().mean().item(), seconds, steps / all_steps


def main(argv: list[str] | None = None) -> dict[str, tuple[float, float, float]]:
    """Train with and without sifting and print both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument(
        "--beta",
        type=float,
        default=2.0,
        help="keeps 1 / (1 + beta) after the first epoch",
    )
    args = parser.parse_args(argv)
    train_data = Texts(args.texts, seed=1)
    val = Texts(1000, seed=2)
    results = {}
    for name, beta in (("everything", None), ("sifted", args.beta)):
        accuracy, seconds, share = train(train_data, val, args.epochs, beta)
        results[name] = accuracy, seconds, share
        print(f"{name:10}  accuracy {accuracy:.1%}  kept {share:.1%}  {seconds:.1f} s")
    return results


if __name__ == "__main__":
    main()
