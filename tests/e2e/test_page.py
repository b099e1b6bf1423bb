"""The page at `/` in a real browser: choose a picture, drop one, see the answer, see why there is none."""

from __future__ import annotations

import base64
import re

import chromium
import pytest
from serving import Running

DROP = """
(async () => {
  const bytes = Uint8Array.from(atob("%s"), c => c.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], "dropped.jpg", {type: "image/jpeg"}));
  document.getElementById("drop").dispatchEvent(new DragEvent("drop", {dataTransfer: transfer, bubbles: true}));
})()
"""


@pytest.fixture
def page(tmp_path):
    if chromium.path() is None:
        pytest.skip("no chromium here: apt-get install chromium")
    with chromium.Page(tmp_path / "profile") as opened:
        yield opened


def test_a_picture_chosen_and_a_picture_dropped(exported, photos, page, tmp_path):
    picture = next((photos / "val/fig").glob("*.jpg"))
    with Running(exported) as server:
        expected = server.post(picture.read_bytes()).json["predictions"][0]
        page.open(f"http://127.0.0.1:{server.port}/")
        assert page.run("document.title") == "tiny"
        assert "3 classes" in page.run("document.querySelector('.about').textContent")
        page.choose("#file", picture)
        best = page.until("document.getElementById('best')?.textContent")
        assert best.startswith(f"{expected['label']} {100 * expected['score']:.1f} %")
        rows = page.run("[...document.querySelectorAll('li')].map(row => row.querySelector('progress').ariaLabel)")
        assert rows == [f"{entry['label']}: {100 * entry['score']:.1f} %" for entry in expected["top"]]

        other = next((photos / "val/pear").glob("*.jpg"))
        wanted = server.post(other.read_bytes()).json["predictions"][0]["label"]
        page.run(DROP % base64.b64encode(other.read_bytes()).decode())
        page.until(f"document.getElementById('best')?.textContent.startsWith('{wanted} ')")
        assert page.run("document.getElementById('shown').alt") == "The chosen picture: dropped.jpg"
        assert page.problems == []  # no script error, nothing that the content policy had to block

        (tmp_path / "no.png").write_bytes(b"no image")
        page.choose("#file", tmp_path / "no.png")
        told = page.until("document.querySelector('.bad')?.textContent")
        assert told == "This is not an image in one of the formats JPEG, PNG, WEBP."


def test_the_page_needs_nothing_from_elsewhere(exported):
    with Running(exported) as server:
        reply = server.get("/")
    text = reply.body.decode()
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "unsafe" not in reply.headers["content-security-policy"]
    assert not re.findall(r"(?:src|href)=\"(?!data:,)", text)
    assert "[[" not in text
