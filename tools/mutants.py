"""How many small mistakes in the code the tests notice: mutmut's mutants of the files
where a wrong number is born.

    make mutants                                 300 mutants drawn by seed 0, hours; the same command resumes
    make mutants MUTANTS="--files kd/core/intervals.py --count 50"

mutmut (https://github.com/boxed/mutmut) makes the mutants, runs the tests that call the
mutated function in forked processes, and keeps every result in the working folder. This
file draws the sample and prints the table. A mutant that changes nothing a user can see
is listed with its reason in tools/mutants.txt and is counted apart.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = (
    "kd/core/intervals.py",
    "kd/core/scores.py",
    "kd/deploy/export/calibrate.py",
    "kd/deploy/export/parity.py",
    "kd/deploy/export/variants.py",
    "kd/deploy/serve/app.py",
    "kd/engine/*.py",
    "kd/files/*.py",
    "kd/models/cache.py",
    "kd/parts/losses/*.py",
    "kd/parts/sifters/*.py",
    "kd/setup/recipe.py",
    "kd/study/report/predictions.py",
    "kd/study/report/summary.py",
)
TESTS = (  # in one process: neither worlds of ranks nor servers
    "tests/unit",
    "tests/reference",
    "tests/contracts",
    "tests/e2e/test_report.py",
    "tests/e2e/test_report_numbers.py",
)
NAMING = (
    "tests/unit/engine/test_update.py::test_the_host_waits_for_the_device_at_known_points_only",
)
"""Tests that hold names of functions, which mutmut changes."""
KNOWN = Path(__file__).with_suffix(".txt")
NOTICED = {1, 3, -11, -9, 24, -24, 36, 152, 255}
"""mutmut's exit codes for a failing test, a crash, and too much time."""
MISSED = {0, 5, 33}
"""mutmut's exit codes where all tests pass, or no test calls the function."""


def prepare(work: Path, files: list[str], tests: list[str]) -> None:
    """Copy the tracked files, as changed, and write mutmut's configuration beside."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy2(ROOT / name, work / name)
    config = {
        "source_paths": ["kd"],
        "only_mutate": files,
        "also_copy": [
            path.name
            for path in sorted(work.iterdir())
            if path.name not in ("kd", "mutants", "tests")
        ],
        "pytest_add_cli_args": [
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow",
            *(f"--deselect={test}" for test in NAMING),
        ],
        "pytest_add_cli_args_test_selection": tests,
        # torch's threads do not survive a plain fork
        "process_isolation": "forkserver",
        "use_git_change_detection": False,
        # else it keeps the output of tests that fail without a mutant to itself
        "debug": True,
    }
    values = "\n".join(f"{key} = {json.dumps(value)}" for key, value in config.items())
    text = (ROOT / "pyproject.toml").read_text() + f"\n[tool.mutmut]\n{values}\n"
    (work / "pyproject.toml").write_text(text)


def results(work: Path) -> dict[str, int | None]:
    """Return the exit code of each mutant by name; None: it did not run yet."""
    codes: dict[str, int | None] = {}
    for file in sorted((work / "mutants").rglob("*.py.meta")):
        codes |= json.loads(file.read_text())["exit_code_by_key"]
    return codes


def sample(names: list[str], count: int, seed: int) -> list[str]:
    """Draw mutants; a larger sample holds the smaller, so that a run can be extended."""
    order = sorted(names)
    random.Random(seed).shuffle(order)
    return order[:count]


def equivalents(file: Path = KNOWN) -> dict[str, str]:
    """Return the reason of each mutant that is listed as equivalent, by name."""
    lines = file.read_text().splitlines() if file.is_file() else []
    pairs = [
        line.split(maxsplit=1)
        for line in lines
        if line.strip() and not line.startswith("#")
    ]
    return {name: reason for name, reason in pairs}


def table(
    codes: dict[str, int | None], drawn: list[str], equal: dict[str, str]
) -> list[str]:
    """Return the result as lines: each missed mutant, then the counts."""
    missed = []
    counts = Counter[str]()
    for name in drawn:
        code = codes.get(name)
        if code in NOTICED:
            counts["noticed"] += 1
        elif code not in MISSED:
            counts["not run"] += 1
        elif name in equal:
            counts["equivalent"] += 1
        else:
            counts["missed"] += 1
            missed.append(name)
    ran = counts["noticed"] + counts["missed"]
    share = f"{100 * counts['noticed'] / ran:.1f} % noticed" if ran else "none ran"
    lines = [
        f"missed: {name}{' (no test calls it)' if codes[name] in (5, 33) else ''}"
        for name in missed
    ]
    text = ", ".join(
        f"{counts[kind]} {kind}"
        for kind in ("noticed", "missed", "equivalent", "not run")
    )
    return [*lines, f"{len(drawn)} mutants: {text}: {share}"]


def ending(log: Path, lines: int = 30) -> str:
    """Return the end of what mutmut and its tests wrote, without its progress bars."""
    text = log.read_text(errors="replace").replace("\r", "\n").splitlines()
    messages = [line for line in text if line.strip() and line[0] not in "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"]
    return "\n".join([f"The end of {log}:", *messages[-lines:]])


def main(argv: list[str] | None = None) -> int:
    """Run the sample and print what the tests missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "runs" / "mutants",
        help="folder that keeps the results",
    )
    parser.add_argument(
        "--files", nargs="+", default=list(FILES), help="files to mutate, as patterns"
    )
    parser.add_argument(
        "--tests",
        nargs="+",
        default=list(TESTS),
        help="folders of tests that may notice",
    )
    parser.add_argument("--count", type=int, default=300, help="mutants in the sample")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument(
        "--children", type=int, default=2, help="mutants that run at the same time"
    )
    options = parser.parse_args(argv)
    work = options.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    prepare(work, options.files, options.tests)
    command = [sys.executable, "-m", "mutmut", "run"]
    command += ["--max-children", str(options.children)]
    log = work / "tests.log"

    def run(*names: str) -> int:
        with log.open("a") as out:
            return subprocess.run(
                [*command, *names], cwd=work, stdout=out, stderr=subprocess.STDOUT
            ).returncode

    # mutmut makes all mutants, learns which test calls what, and stops at an unknown name
    if not results(work):
        run("unknown")
    if not results(work):
        print(f"mutmut made no mutants. {ending(log)}", file=sys.stderr)
        return 1
    drawn = sample([*results(work)], options.count, options.seed)
    # before each batch mutmut runs all tests without a mutant; after it the results are
    # on disk
    while batch := [name for name in drawn if results(work)[name] is None][:60]:
        if run(*batch):
            print(f"mutmut failed. {ending(log)}", file=sys.stderr)
            return 1
        print("\n".join(table(results(work), drawn, equivalents())))
    print("\n".join(table(results(work), drawn, equivalents())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
