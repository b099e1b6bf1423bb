"""Build the documentation as a site: pages, references of keys, commands, parts, Python.

    python tools/site.py FOLDER     # FOLDER/site/index.html; FOLDER/source: its pages

The pages are those of the repository, unchanged, with every file that they link to. The
references are written from what the commands print and from docstrings. A link or a
name that leads nowhere ends the build.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kd.cli.__main__ import COMMANDS, OVERVIEW
from kd.parts import registry

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "tools" / "site.yml"
LINK = re.compile(r"\]\(([^)#\s]+)|\bsrc=\"([^\"]+)\"")
# what the theme would fetch so that its search works from a folder
SHIM = "https://unpkg.com/iframe-worker/shim"
# headings of the Python reference and the names below them
PYTHON = {
    "Train": ("kd.train", "kd.jobs.api.result.Result", "kd.distill", "kd.Distilled"),
    "Sweep, configure, measure": (
        "kd.sweep",
        "kd.load_config",
        "kd.Config",
        "kd.region",
    ),
    "Use an export": ("kd.load", "kd.deploy.serve.model.LoadedGraph"),
    "Errors": ("kd.KdError", "kd.BadImage"),
    "In your own training loop": (
        "kd.Distiller",
        "kd.engine.criterion.Criterion",
        "kd.setup.student.loss_term",
        "kd.core.types.SiftContext",
    ),
}


def linked_files(page: Path) -> Iterator[Path]:
    """Yield the files of the repository that a page links to."""
    for groups in LINK.findall(page.read_text()):
        target = (page.parent / "".join(groups)).resolve()
        if target.is_file() and target.is_relative_to(ROOT):
            yield target


def copy_pages(folder: Path) -> None:
    """Copy the pages of the navigation, and all that they link to, into a folder."""
    named = re.findall(r"(?:docs/|benchmarks/)?[\w-]+\.md", CONFIG.read_text())
    waiting = [ROOT / name for name in named if (ROOT / name).is_file()]
    copied = set[Path]()
    while waiting:
        path = waiting.pop()
        if path in copied:
            continue
        copied.add(path)
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
        if path.suffix == ".md":
            waiting += linked_files(path)


def help_text(name: str) -> str:
    """Return what `kd NAME --help` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        COMMANDS[name](["--help"])
    return printed.getvalue()


def commands_page() -> str:
    """Return the page of all commands, with their options."""
    blocks = [f"# Commands\n\n```text\n{OVERVIEW}```"]
    blocks += [f"## kd-{name}\n\n```text\n{help_text(name)}```" for name in COMMANDS]
    return "\n\n".join(blocks) + "\n"


def parts_page() -> str:
    """Return the page of all parts that a configuration can name."""
    blocks = [
        "# Parts\n\n`kind:` of a section names one of these, or a module of yours."
    ]
    for folder in registry.FOLDERS:
        blocks.append(f"## {folder}\n\n| kind | |\n|---|---|")
        for name, summary in registry.describe(folder):
            blocks[-1] += f"\n| `{name}` | {summary.replace('|', chr(92) + '|')} |"
    return "\n\n".join(blocks) + "\n"


def python_page() -> str:
    """Return the page of the public names."""
    blocks = ["# Python\n\n`import kd` has the names that begin with `kd.` alone."]
    for title, names in PYTHON.items():
        blocks.append(f"## {title}")
        blocks += map(documented, names)
    blocks.append("## Sift batches in the loop of another library\n\n::: kd.sifting")
    return "\n\n".join(blocks) + "\n"


def documented(name: str) -> str:
    """Return the directive that documents a name, where it is defined."""
    home, _, attribute = name.rpartition(".")
    defined = getattr(importlib.import_module(home), attribute)
    place = f"{defined.__module__}.{defined.__qualname__}"
    title = name if home == "kd" else attribute
    return (
        f"::: {place}\n    options:\n      heading: {title}\n      toc_label: {title}"
    )


def contracts_page() -> str:
    """Return the page of the protocols that own parts follow."""
    options = "    options:\n      show_root_heading: false"
    about = "A part is one file; [contributing](../CONTRIBUTING.md) has an example."
    return f"# Own parts\n\n{about}\n\n::: kd.core.contracts\n{options}\n"


def build(folder: Path) -> None:
    """Write FOLDER/source, then FOLDER/site from it.

    Raises:
        SystemExit: with the builder's exit code, if anything was warned of.
    """
    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    copy_pages(source)
    references = source / "reference"
    references.mkdir()
    for name, page in (
        ("commands", commands_page()),
        ("parts", parts_page()),
        ("python", python_page()),
        ("contracts", contracts_page()),
    ):
        (references / f"{name}.md").write_text(page)
    config = folder / "mkdocs.yml"
    config.write_text(CONFIG.read_text().replace("paths: [.]", f"paths: [{ROOT}]"))
    command = [sys.executable, "-m", "zensical", "build", "--strict", "-f", str(config)]
    if code := subprocess.run(command, check=False).returncode:
        raise SystemExit(code)
    site = folder / "site"
    shutil.copy(ROOT / "tools" / "file_worker.js", site / "assets")
    for page in site.rglob("*.html"):
        up = "../" * (len(page.relative_to(site).parts) - 1)
        page.write_text(page.read_text().replace(SHIM, f"{up}assets/file_worker.js"))


if __name__ == "__main__":
    build(Path(sys.argv[1] if sys.argv[1:] else ROOT / "build"))
