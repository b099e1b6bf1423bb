"""A sifter from outside the repository: visits everything, notes what was trained on,
and can kill its own process.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from kd.core.types import SiftContext
from kd.parts.sifters.history import History
from kd.parts.sifters.history import Options as HistoryOptions
from kd.parts.sifters.none import Everything


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is recorded; what a test wants of one start of a run is no property of the
    run: it is in the environment.
    """

    history: bool = False
    """Sift by history, half of the images; else visit all."""


class Recorder:
    """Write the ids of each micro-batch to KD_RECORD/rank_R.jsonl.

    KD_DIE=RANK:MICRO sends SIGKILL to that rank in the middle of a step, after so many
    micro-batches of this process; with KD_DIE_ONCE=FILE only where the file does not
    exist yet.
    """

    calls = 0

    def observe(self, ids: Tensor, losses: Tensor) -> None:
        super().observe(ids, losses)
        rank = os.environ.get("RANK", "0")
        self.calls += 1
        if "KD_RECORD" in os.environ:
            with open(f"{os.environ['KD_RECORD']}/rank_{rank}.jsonl", "a") as file:
                file.write(json.dumps(ids.tolist()) + "\n")
        if os.environ.get("KD_DIE") == f"{rank}:{self.calls}":
            once = os.environ.get("KD_DIE_ONCE")
            if once is None or not Path(once).exists():
                if once is not None:
                    Path(once).touch()
                os.kill(os.getpid(), signal.SIGKILL)


class RecordedEverything(Recorder, Everything):
    """`none`, recorded."""


class RecordedHistory(Recorder, History):
    """`history`, recorded."""


def build(options: Options, context: SiftContext) -> Everything | History:
    if options.history:
        return RecordedHistory(HistoryOptions(keep=0.5, anneal=0.0), context)
    return RecordedEverything(context)
