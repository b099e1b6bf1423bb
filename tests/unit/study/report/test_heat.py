"""The heat map of a machine's load: its pixels, its table, its size."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from kd.parts.tasks import single_label
from kd.study.report.charts import FAINTEST
from kd.study.report.page import render
from kd.study.report.record import RunRecord
from kd.study.report.sections import COLUMNS

KB = 1000


def sample(second: float, cpu: list[float], **more) -> dict:
    return {"time": 1e9 + second, "cpu": cpu, "memory_mib": 9.0, "gpu": [], **more}


def page_of(samples: list[dict]) -> str:
    run = RunRecord(
        "heat", {}, {}, [], [], [], single_label.SCORES, monitor={"host_0": samples}
    )
    return render([run])


def loads(page: str) -> list[np.ndarray]:
    """Return the loads that each heat map's pixels show, percent; NaN: none."""
    maps = []
    for data in re.findall(r"data:image/png;base64,([^\"]+)", page):
        image = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA")
        opacity = np.asarray(image)[..., 3] / 255
        loaded = 100 * (opacity - FAINTEST) / (1 - FAINTEST)
        maps.append(np.where(opacity > 0, loaded, np.nan))
    return maps


def rows(page: str, name: str) -> list[list[str]]:
    """Return the rows of the table whose first column is `name`."""
    head = page.index(f">{name}</th>")
    table = page[head : page.index("</table>", head)]
    return [
        re.findall(r"<td[^>]*>(.*?)</td>", row)
        for row in table.split("<tr>")
        if "<td" in row
    ]


def test_one_busy_core_of_four_in_the_second_half():
    samples = [
        sample(i, [10.0, 20.0, 100.0 if i >= 30 else 0.0, 0.0]) for i in range(60)
    ]
    page = page_of(samples)
    (cells,) = loads(page)
    assert cells.shape == (4, 30)
    expected = np.zeros((4, 30))
    expected[0] = 10
    expected[1] = 20
    expected[2, 15:] = 100
    # 256 opacities; 30 columns of 59 seconds divide at 29.5
    assert cells == pytest.approx(expected, abs=0.3)
    assert rows(page, "core") == [
        ["0", "10 %", "10 %", "10 %"],
        ["1", "20 %", "20 %", "20 %"],
        ["2", "50 %", "0 %", "100 %"],
        ["3", "0 %", "0 %", "0 %"],
    ]
    assert "load of each core, 20.0 % in the mean" in page


def test_a_gap_between_two_starts_has_no_load():
    """A run of ten minutes goes on after ten more."""
    seconds = [*range(600), *range(1200, 1801)]
    (cells,) = loads(page_of([sample(i, [50.0, 50.0]) for i in seconds]))
    known = ~np.isnan(cells[0])
    assert known.mean() == pytest.approx(2 / 3, abs=2 / COLUMNS)
    assert cells[:, known] == pytest.approx(50, abs=0.3)
    middle = COLUMNS // 3 + 1
    assert not known[middle : 2 * COLUMNS // 3 - 1].any()


def test_192_cores_of_an_hour_are_a_bounded_image():
    """Noise, which no PNG makes smaller."""
    draws = np.random.default_rng(0).integers(0, 101, (3600, 192))
    samples = [sample(i, row) for i, row in enumerate(draws.astype(float).tolist())]
    page = page_of(samples)
    (cells,) = loads(page)
    assert cells.shape == (192, COLUMNS)
    assert cells.mean() == pytest.approx(50, abs=1)
    (data,) = re.findall(r"data:image/png;base64,([^\"]+)", page)
    assert len(data) < 52 * KB
    assert len(rows(page, "core")) == 192


def test_late_samples_leave_no_empty_cell():
    late = np.random.default_rng(0).uniform(0, 0.4, 50)
    (cells,) = loads(page_of([sample(i + late[i], [30.0]) for i in range(50)]))
    assert cells.shape == (1, 25)
    assert not np.isnan(cells).any()


def test_gpus_have_a_map_of_their_own():
    """A GPU that reports no load has none."""
    gpu = [{"utilization": 50.0}, {"utilization": 100.0}]
    cells, of_gpus = loads(page_of([sample(i, [1.0], gpu=gpu) for i in range(8)]))
    assert of_gpus == pytest.approx(np.array([[50] * 4, [100] * 4]), abs=0.3)
    assert cells.shape == (1, 4)
    silent = page_of([sample(i, [1.0], gpu=[{"power_w": 90.0}]) for i in range(8)])
    assert len(loads(silent)) == 1


def test_the_legend_has_the_colours_of_the_pixels():
    page = page_of([sample(i, [0.0, 100.0]) for i in range(8)])
    for color, text in (
        ("47 111 222 / 0.100", "0 %"),
        ("47 111 222 / 1.000", "100 %"),
    ):
        assert re.search(rf"rgb\({color}\)\"></i>{re.escape(text)}<", page)
