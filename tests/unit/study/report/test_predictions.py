"""Which validation images a report shows."""

from pieces import base

from kd import config
from kd.setup.data import open_sources
from kd.setup.recipe import resolve
from kd.study.report.predictions import _pictures


def test_pictures_are_those_on_which_the_models_differ_those_of_a_right_and_sure_teacher_first(
    photos, tmp_path
):
    data = open_sources(resolve(config.load(base(photos, tmp_path))).data)
    data.val.prepare()
    views = data.evaluation_views(data.val, on_corrupt="skip")
    classes = list(data.classes)
    stored = {
        "ids": [0, 1, 2, 3],
        "label": [0, 0, 0, 0],
        "student": [1, 0, 0, 1],
        "student_share": [0.5, 0.6, 0.7, 0.8],
    }
    both = {**stored, "teacher": [0, 0, 1, 0], "teacher_share": [0.6, 0.9, 0.99, 0.8]}
    pictures = _pictures(both, views, classes)
    assert [picture.name for picture in pictures] == [
        data.val.name(id) for id in (3, 0, 2)
    ]
    assert [
        (picture.truth, picture.teacher, picture.student) for picture in pictures[1:]
    ] == [
        (classes[0], classes[0], classes[1]),
        (classes[0], classes[1], classes[0]),
    ]
    assert [(picture.teacher_share, picture.student_share) for picture in pictures] == [
        (0.8, 0.8),
        (0.6, 0.5),
        (0.99, 0.7),
    ]
    assert _pictures(stored, views, classes) == []
