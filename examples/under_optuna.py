"""kd under Optuna, by ask and tell: the search is Optuna's, each trial is a run of kd.

Run: python examples/under_optuna.py CONFIG [TRIALS]        (pip install optuna)

All trials share the fitted teacher, the store of decoded images and the teacher's cache, which depend on nothing that
is searched here. Set `teacher.cache.views` in CONFIG. A killed search goes on: Optuna keeps its trials in a file.
"""

from __future__ import annotations

import sys

import optuna
from optuna.trial import TrialState

import kd


def search(config: str, trials: int, *overrides: str) -> optuna.Study:
    """Run trials until there are so many; return the study."""
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend("optuna.log"))
    study = optuna.create_study(storage=storage, study_name="kd", direction="maximize", load_if_exists=True)
    while len(study.get_trials(states=(TrialState.COMPLETE,))) < trials:
        trial = study.ask()
        keys = {
            "optimizer.lr": trial.suggest_float("lr", 1e-4, 1e-2, log=True),
            "losses.0.temperature": trial.suggest_float("temperature", 1.0, 8.0),
        }
        chosen = [f"{key}={value}" for key, value in keys.items()]
        result = kd.train(config, f"run.name=optuna-{trial.number}", *chosen, *overrides)
        study.tell(trial, result.metrics["accuracy"])  # of the best checkpoint, on validation images: optimistic
    return study


if __name__ == "__main__":
    found = search(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20)
    print(found.best_trial.number, found.best_value, found.best_params)
