"""The page at `/` in a real browser: choose a picture, drop one, see the answer, see
why there is none.
"""

from __future__ import annotations

import base64
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

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


def test_a_picture_is_chosen_or_dropped(exported, photos, page, tmp_path):
    picture = next((photos / "val/fig").glob("*.jpg"))
    with Running(exported) as server:
        expected = server.post(picture.read_bytes()).json["predictions"][0]
        page.open(f"http://127.0.0.1:{server.port}/")
        assert page.run("document.title") == "tiny"
        assert "3 classes" in page.run("document.querySelector('.about').textContent")
        page.choose("#file", picture)
        best = page.until("document.getElementById('best')?.textContent")
        assert best.startswith(f"{expected['label']} {100 * expected['score']:.1f} %")
        rows = page.run(
            "[...document.querySelectorAll('li')].map(row =>"
            " row.querySelector('progress').ariaLabel)"
        )
        assert rows == [
            f"{entry['label']}: {100 * entry['score']:.1f} %"
            for entry in expected["top"]
        ]

        pear = next((photos / "val/pear").glob("*.jpg"))
        label = server.post(pear.read_bytes()).json["predictions"][0]["label"]
        page.run(DROP % base64.b64encode(pear.read_bytes()).decode())
        page.until(
            f"document.getElementById('best')?.textContent.startsWith('{label} ')"
        )
        assert (
            page.run("document.getElementById('shown').alt")
            == "The chosen picture: dropped.jpg"
        )
        assert (
            page.problems == []
        )  # no script error, nothing that the content policy had to block

        (tmp_path / "no.png").write_bytes(b"no image")
        page.choose("#file", tmp_path / "no.png")
        message = page.until("document.querySelector('.bad')?.textContent")
        assert message.startswith(
            "This is not an image in one of the formats JPEG, PNG, WEBP"
        )


class Below(BaseHTTPRequestHandler):
    """A proxy that serves a server below `/models/food`, and nothing at its root."""

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if not self.path.startswith("/models/food"):
            self.send_error(404)
            return
        kind = {"content_type": self.headers["content-type"]} if body else {}
        reply = self.server.behind.call(
            self.command,
            self.path.removeprefix("/models/food") or "/",
            body or None,
            **kind,
        )
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(reply.body)

    do_POST = do_GET

    def log_message(self, *args: object) -> None: ...


@pytest.mark.parametrize("path", ["/models/food", "/models/food/"])
def test_the_page_works_behind_a_path(exported, photos, page, path):
    """Before, it asked `/invocations` at the root of the proxy, and its curl line
    lacked the path.
    """
    with (
        Running(exported) as server,
        ThreadingHTTPServer(("127.0.0.1", 0), Below) as proxy,
    ):
        proxy.behind = server
        Thread(target=proxy.serve_forever, daemon=True).start()
        root = f"http://127.0.0.1:{proxy.server_port}"
        page.open(root + path)
        assert page.run("document.getElementById('curl').textContent").endswith(
            f" {root}/models/food/invocations"
        )
        page.choose("#file", next((photos / "val/fig").glob("*.jpg")))
        assert "fig" in page.until("document.getElementById('best')?.textContent")
        assert page.problems == []
        proxy.shutdown()


def test_the_page_needs_nothing_from_elsewhere(exported):
    with Running(exported) as server:
        reply = server.get("/")
    text = reply.body.decode()
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "unsafe" not in reply.headers["content-security-policy"]
    headers = {
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    assert headers.items() <= reply.headers.items()
    assert not re.findall(r"(?:src|href)=\"(?!data:,)", text)
    assert "[[" not in text
