"""Try kd's reliability at length: faults, kills, damaged files, hostile clients, many
ranks; one table, one CSV.

    python tools/soak.py                 # all groups, about 20 minutes on two cores
    python tools/soak.py fuzz scale      # some of them: a table, no CSV

Each group is a pytest process. A test that tries many cases records their number
(`record_property("tried", n)`); any other test is one case. A failed test is one case
lost. So is a process that did not end by itself or left no report, and a group whose
tests were all skipped or expected to fail. Exit code 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BUDGET = 20 * 60.0
"""Seconds for all groups; what has not ended by then is lost."""
FUZZ = "KD_FUZZ"


class Group(NamedTuple):
    """Tests that run in one pytest process."""

    tests: tuple[str, ...]
    environment: dict[str, str] = {}


GROUPS = {
    "fuzz": Group(("tests/soak/test_fuzz.py",), {FUZZ: "300"}),
    "scale": Group(("tests/soak/test_scale.py",), {"KD_SOAK": "1"}),
    "disk": Group(("tests/unit/files",)),
    "data": Group(
        (
            "tests/unit/parts/datasets/test_away.py",
            "tests/unit/data/test_workers.py",
            "tests/unit/data/test_store.py",
        )
    ),
    "cache": Group(
        ("tests/unit/models/test_cache.py", "tests/unit/engine/test_cached.py")
    ),
    "numbers": Group(
        ("tests/unit/engine/test_loop.py", "tests/unit/engine/test_nonfinite.py"),
    ),
    "identity": Group(("tests/unit/setup/test_identity.py",)),
    "endpoint-fuzz": Group(("tests/e2e/test_serve_fuzz.py",), {FUZZ: "1000"}),
    "endpoint-attacks": Group(("tests/e2e/test_serve_attacks.py",)),
    "ranks": Group(
        (
            "tests/distributed/test_same_start.py",
            "tests/distributed/test_shared_work.py",
            "tests/distributed/test_skipped_steps.py",
        )
    ),
    "strangers": Group(
        ("tests/e2e/test_trust.py", "tests/unit/deploy/predict/test_predict.py")
    ),
    "storage": Group(("tests/distributed/test_failing_storage.py",), {"KD_SOAK": "1"}),
    "kills": Group(
        ("tests/distributed/test_signals.py", "tests/distributed/test_resume.py")
    ),
}
"""In order: short ones first."""


def properties(case: ElementTree.Element) -> dict[str, str]:
    """Return what a test recorded of itself."""
    return {
        element.get("name", ""): element.get("value", "")
        for element in case.iter("property")
    }


def row(
    group: str, tried: int, lost: int, skipped: int, seconds: float, mib: object = ""
) -> dict[str, Any]:
    """Return one row of the table."""
    counts = {
        "tried": tried,
        "survived": tried - lost,
        "lost": lost,
        "skipped": skipped,
    }
    return {"group": group, **counts, "seconds": round(seconds, 1), "mib": mib}


def count_cases(
    group: str, report: Path, code: int, seconds: float
) -> list[dict[str, Any]]:
    """Return the row of a group, then one for each test that measured its memory.

    Args:
        group: name.
        report: JUnit XML of its pytest process; absent if that was killed.
        code: exit code of the process.
        seconds: that it took.
    """
    # by test: one that fails in its teardown too is reported twice
    tried: dict[str, int] = {}
    skipped = 0
    measured = []
    failed = set()
    for case in ElementTree.parse(report).iter("testcase") if report.is_file() else ():
        name = f"{case.get('classname')}.{case.get('name')}"
        facts = properties(case)
        if case.find("skipped") is not None:
            skipped += 1
            continue
        tried[name] = max(tried.get(name, 1), int(facts.get("tried", 1)))
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(name)
        elif "mib" in facts:
            label = f"{group}: {case.get('name')}"
            measured.append(
                row(label, tried[name], 0, 0, float(facts["seconds"]), facts["mib"])
            )
    count = sum(tried.values())
    lost = len(failed)
    # killed, out of time, left without a report, or nothing was tried
    if not lost and (code or not count):
        count += 1
        lost = 1
    return [row(group, count, lost, skipped, seconds), *measured]


def run(name: str, group: Group, time_limit: float) -> list[dict[str, Any]]:
    """Run a group for at most `time_limit` seconds and return its rows."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"]
        # xunit2 has no properties of a test
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1"]
        environment = {**os.environ, **group.environment}
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
        )
        # thousands of inputs take longer than the suite's deadline for one test
        if group.environment:
            command.append(f"--timeout={max(time_limit, 1):.0f}")
        command += group.tests
        start = time.monotonic()
        print(
            f"--- {name}: {' '.join(group.tests)} {group.environment or ''}", flush=True
        )
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, start_new_session=True
        )
        try:
            code = process.wait(max(time_limit, 1))
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its ranks and servers too
                process.wait()
        return count_cases(name, report, code, time.monotonic() - start)


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as aligned text."""
    lines = [
        list(rows[0]),
        *([str(value) for value in row.values()] for row in rows),
    ]
    widths = [
        max(len(line[column]) for line in lines) for column in range(len(lines[0]))
    ]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def main() -> int:
    """Run the groups and print the table; write the CSV if all of them ran."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; none: all"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=BUDGET / 60,
        help="for all groups, where others compute too",
    )
    args = parser.parse_args()
    names = args.groups or list(GROUPS)
    if unknown := set(names) - GROUPS.keys():
        parser.error(
            f"no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}"
        )
    end = time.monotonic() + 60 * args.minutes
    rows = []
    group_rows = []
    for name in names:
        new_rows = run(name, GROUPS[name], end - time.monotonic())
        rows.extend(new_rows)
        group_rows.append(new_rows[0])
    total = {
        key: sum(group_row[key] for group_row in group_rows)
        for key in ("tried", "lost", "skipped", "seconds")
    }
    rows.append(row("all", **total))
    print(table(rows))
    if set(names) == GROUPS.keys():
        sys.path.insert(0, str(ROOT / "benchmarks"))
        import _record

        _record.write(
            "reliability", " ".join(["python tools/soak.py", *sys.argv[1:]]), rows
        )
    return 1 if total["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
