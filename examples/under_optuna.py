"""kd inside an objective of Optuna's, for a space that kd-sweep cannot write: here keys
that depend on the loss.

Run: python examples/under_optuna.py CONFIG [TRIALS]        (pip install optuna)

All trials share the fitted teacher, the store of decoded images and the teacher's
cache, which depend on nothing that is searched here. Set `teacher.cache.views` in
CONFIG. The same command goes on: Optuna keeps its trials in a file.
"""

from __future__ import annotations

import sys

import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

import kd


def search(config: str, trials: int, *overrides: str) -> optuna.Study:
    """Run trials until that many have ended; return the study."""

    def objective(trial: optuna.Trial) -> float:
        rate = trial.suggest_float("lr", 1e-4, 1e-2, log=True)
        kind = trial.suggest_categorical("loss", ["kl", "dkd"])
        key = {"kl": "temperature", "dkd": "beta"}[kind]
        loss = f"losses=[{{kind: {kind}, {key}: {trial.suggest_float(key, 1.0, 8.0)}}}]"
        result = kd.train(
            config,
            f"run.name=optuna-{trial.number}",
            f"optimizer.lr={rate}",
            loss,
            *overrides,
        )
        # of the best checkpoint, on validation images: optimistic
        return result.metrics["accuracy"]

    storage = optuna.storages.JournalStorage(JournalFileBackend("optuna.log"))
    study = optuna.create_study(
        storage=storage, study_name="kd", direction="maximize", load_if_exists=True
    )
    complete = len(study.get_trials(states=(TrialState.COMPLETE,)))
    study.optimize(objective, max(0, trials - complete))
    return study


if __name__ == "__main__":
    study = search(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20)
    print(study.best_trial.number, study.best_value, study.best_params)
