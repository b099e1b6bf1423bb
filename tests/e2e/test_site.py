"""The documentation as a site: `make docs`, read from its folder without a server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import chromium
import pytest
from serving import ROOT

pytest.importorskip("zensical")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
# elements of the page and of the shadow roots in it, where the search has its field
ELEMENTS = """const elements = (root) => [...root.querySelectorAll("*")].flatMap(
    (element) => element.shadowRoot ? [element, ...elements(element.shadowRoot)] : [element]);"""
SEARCH = """(() => { ELEMENTS
    document.querySelector(".md-search__button").click();
    const field = elements(document).find(
        (element) => element.tagName === "INPUT" && element.placeholder === "Search");
    if (!field) return false;
    field.value = "WORDS";
    field.dispatchEvent(new Event("input", {bubbles: true, composed: true}));
    return true;
})()""".replace("ELEMENTS", ELEMENTS)
RESULTS = """(() => { ELEMENTS
    return elements(document).filter((element) => element.tagName === "A" && element.getRootNode() !== document)
        .map((element) => element.textContent).join("\\n");
})()""".replace("ELEMENTS", ELEMENTS)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    command = [sys.executable, str(ROOT / "tools" / "site.py"), str(folder)]
    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "site"


def test_the_references_have_every_command_part_and_public_name(site):
    import kd
    from kd.cli.__main__ import COMMANDS
    from kd.parts import registry

    pages = {
        page.stem: page.read_text() for page in (site / "reference").glob("*.html")
    }
    kinds = [
        kind for folder in registry.FOLDERS for kind, _ in registry.describe(folder)
    ]
    assert [
        name for name in COMMANDS if f'id="kd-{name}"' not in pages["commands"]
    ] == []
    assert [kind for kind in kinds if kind not in pages["parts"]] == []
    public = {*kd.__all__} - {"__version__"}
    assert [name for name in public if f"kd.{name}" not in pages["python"]] == []
    assert "Sifter" in pages["contracts"]


@pytest.mark.skipif(chromium.path() is None, reason="no Chromium")
@pytest.mark.parametrize("words", ["resume", "int8", "own weights"])
def test_the_search_works_from_the_folder_and_nothing_is_fetched(site, tmp_path, words):
    with chromium.Page(tmp_path, 1280) as page:
        page.open(f"file://{site}/index.html")
        page.until(SEARCH.replace("WORDS", words), seconds=60)
        found = f"{RESULTS}.toLowerCase().includes('{words.split()[-1]}')"
        page.until(found, seconds=60)
        assert not page.problems
        assert [url for url in page.requests if url.startswith("http")] == []
