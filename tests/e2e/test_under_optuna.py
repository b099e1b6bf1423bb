"""kd under Optuna: trials share one teacher and one cache, and a search that is called
again goes on.
"""

import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("optuna", reason="optuna is not installed: pip install 'kd[dev]'")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::Warning:optuna")
def test_a_search_shares_its_teacher_and_goes_on(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "under_optuna", raising=False)
    from under_optuna import search

    tiny = {
        "model": "vit_tiny_patch16_224",
        "args": {"patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2},
    }
    Path("searched.yaml").write_text(
        yaml.safe_dump(
            {
                "run": {"epochs": 1},
                "data": {
                    "kind": "imagefolder",
                    "root": str(photos),
                    "image_size": 16,
                    "batch_size": 8,
                    "workers": 0,
                },
                "teacher": {
                    **tiny,
                    "fit": {"epochs": 1},
                    "min_accuracy": 0.0,
                    "cache": {"views": 1},
                },
                "student": tiny,
                "losses": [{"kind": "kl"}],
                "backend": {"threads": 1},
            }
        )
    )
    assert len(search("searched.yaml", 2).trials) == 2
    study = search("searched.yaml", 3)
    assert [trial.number for trial in study.trials] == [0, 1, 2]
    assert len({trial.params["lr"] for trial in study.trials}) == 3
    assert all(
        (tmp_path / "runs" / f"optuna-{number}" / "manifest.json").is_file()
        for number in range(3)
    )
    assert len(list((tmp_path / "runs" / "teachers").glob("*/export"))) == 1
    assert study.best_value == max(trial.value for trial in study.trials)
