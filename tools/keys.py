"""Write docs/keys.md: every key of a configuration, as `kd help` explains it.

python tools/keys.py           # writes the page
python tools/keys.py --print   # prints it
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from kd.config.explain import explain

ROOT = Path(__file__).parents[1]
TITLE = """# Keys

Written by `python tools/keys.py` from what `kd help` prints. `kd help KEY` explains one key or all below it. Keys under
"kind: NAME" exist only for that part; own parts explain theirs by `kd help MODULE`.
"""


def page() -> str:
    """Return the page: a heading for each section, and one for each part in it."""
    lines = [TITLE]
    section = ""
    kind = ""
    rows = [
        (*row, *(re.findall(r"^\[kind: (\w+)\] ", row[3]) or [""])) for row in explain()
    ]
    order = {
        key: place
        for place, key in enumerate(dict.fromkeys(row[0].split(".")[0] for row in rows))
    }
    rows.sort(key=lambda row: (order[row[0].split(".")[0]], row[4]))
    explained: dict[str, str] = {}  # the key that a meaning is written at
    for key, _, _, meaning, part_kind in sorted(rows, key=lambda row: "[]" in row[0]):
        meaning = meaning.removeprefix(f"[kind: {part_kind}] ")
        of_kind = f" of {part_kind}" if part_kind else ""
        explained.setdefault(meaning, f"`{key}`{of_kind}")
    for key, allowed, default, meaning, part_kind in rows:
        if key.split(".")[0] != section:
            section = key.split(".")[0]
            kind = ""
            lines += [
                "",
                f"## {section.removesuffix('[]')}",
                "",
                "| key | allowed | default | |",
                "|---|---|---|---|",
            ]
        if part_kind != kind:
            kind = part_kind
            lines += [
                "",
                f"**kind: {kind}**",
                "",
                "| key | allowed | default | |",
                "|---|---|---|---|",
            ]
        meaning = meaning.removeprefix(f"[kind: {part_kind}] ")
        of_kind = f" of {part_kind}" if part_kind else ""
        if explained[meaning] != f"`{key}`{of_kind}":
            meaning = f"As {explained[meaning]}."
        cells = (
            f"`{key}`",
            allowed.removeprefix("Allowed: "),
            f"`{default}`" if default else "",
            meaning,
        )
        lines.append(
            f"| {' | '.join(text.replace('|', chr(92) + '|') for text in cells)} |"
        )
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def main() -> None:
    """Write or print the page."""
    if "--print" in sys.argv[1:]:
        print(page(), end="")
    else:
        (ROOT / "docs" / "keys.md").write_text(page())


if __name__ == "__main__":
    main()
