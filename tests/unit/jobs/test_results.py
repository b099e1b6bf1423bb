"""What `kd.train` and `kd.distill` return: a repr of one screen, equal names. What a
teacher of another size costs.
"""

import torch

import kd
from kd import config
from kd.jobs.description import describe
from kd.jobs.forecast import forecast
from kd.setup.recipe import resolve

NAMES = ("student", "folder", "metrics", "export")


def test_a_run_has_a_repr_of_one_screen_and_its_student(settings):
    result = kd.train(config.load(settings, ["run.steps=2"]))
    text = repr(result)
    assert len(text) < 800
    assert str(result.folder) in text
    assert "accuracy" in text
    assert all(hasattr(result, name) for name in NAMES)
    size = settings["data"]["image_size"]
    logits = result.student.eval()(
        torch.zeros(1, 3, size, size, dtype=torch.uint8)
    ).logits
    assert logits.shape == (1, 3)


def test_a_teachers_other_input_size_is_reported_with_its_cost(settings):
    same_size_lines = describe(resolve(config.load(settings)))
    assert "its own" not in same_size_lines
    size = settings["data"]["image_size"]
    forecast_lines = forecast(
        resolve(config.load(settings, [f"data.image_size={size // 2}"]))
    )
    assert (
        f"it runs at its own {size} px on images of {size // 2} px: 4 times the"
        " arithmetic" in forecast_lines
    )
    assert "% of the distillation" in forecast_lines
