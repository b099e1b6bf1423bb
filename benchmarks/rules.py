"""Does each rule name what slows a run down, and does its advice help? Runs that are
slowed down on purpose.

Run: python benchmarks/rules.py [--rounds 2] [--only NAME ...] [--record FOLDER]

Each case is a tiny run with one fault. Its findings must hold the case's rule. What
that finding advises, one key and one value, is then set, and both runs take turns. A
row is one run. `measured` is mean milliseconds of a step after the first epoch.

The machine is sampled ten times a second, so that runs of a few seconds are enough. Not
here: a synchronizing loss and a starved GPU, which need a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

import kd
from _record import HERE, write
from kd.core.host import cores
from kd.files.storage import read_rows

STEPS = 90
PHOTOS = 160
"""Of each of three classes: 30 steps an epoch."""
KEPT = 24
"""Samples of the machine that a record has, about."""
SMALL = (96, 72)
MEDIUM = (320, 240)
LARGE = (640, 480)
"""Pixels of a photograph: a JPEG of noise takes 0.2, 1.5 or 6 ms to decode."""


@dataclass(frozen=True)
class Case:
    """A fault, and the rule that must name it."""

    rule: str
    overrides: tuple[str, ...]
    ranks: int = 1
    photos: tuple[int, int] = SMALL


INTERVAL = 0.1
RANK = f"""
import sys

from kd.cli.training import train as main
from kd.engine.monitor import system

system.INTERVAL = {INTERVAL}
sys.exit(main())
"""
"""The program of a process."""
SLOW = "data.kind=sabotage.source"
ONE = "data.workers=1"
CASES = {
    "healthy": Case("", (ONE,)),
    "healthy_ranks": Case("", (ONE,), ranks=2),
    "too_many_workers": Case("CPUBottleneck", ("data.workers=8",), photos=MEDIUM),
    "no_workers": Case(
        "Dataloader", ("data.workers=0", "backend.threads=1"), photos=MEDIUM
    ),
    "decoding": Case("CPUBottleneck", (ONE,), photos=LARGE),
    "slow_disk": Case("IOBottleneck", (SLOW, "data.sleep_ms=8", ONE)),
    "sleeping_rank": Case(
        "LoadBalancing",
        (SLOW, "data.sleep_ms=5", "data.rank=1", "data.workers=0"),
        ranks=2,
    ),
    "uneven_shards": Case(
        "LoadBalancing",
        (SLOW, "data.again=3", "data.rank=1", ONE),
        ranks=2,
        photos=LARGE,
    ),
}


def photographs(folder: Path, size: tuple[int, int]) -> Path:
    """Write JPEGs of noise of so many pixels."""
    random = np.random.default_rng(0)
    for split, count in (("train", PHOTOS), ("val", 4)):
        for label in ("apple", "fig", "pear"):
            (folder / split / label).mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
                Image.fromarray(pixels).save(
                    folder / split / label / f"{i}.jpg", quality=85
                )
    return folder


def settings(photos: Path, runs: Path, name: str) -> dict[str, Any]:
    """Return the configuration that the faults are added to."""
    vit = {"patch_size": 8, "embed_dim": 64, "depth": 3, "num_heads": 2}
    return {
        "run": {
            "name": name,
            "folder": str(runs),
            "steps": STEPS,
            "every": {"log": 10, "evaluate": 10**6},
        },
        "data": {
            "kind": "imagefolder",
            "root": str(photos),
            "image_size": 64,
            "batch_size": 16,
            "augment": {"jitter": 0},
        },
        "student": {
            "model": "vit_tiny_patch16_224",
            "args": vit,
            "attention": "unfused",
            "compile": "off",
        },
        "losses": [{"kind": "ce"}],
        "backend": {"kind": "cpu", "precision": "fp32"},
    }


def run(config: dict[str, Any], overrides: tuple[str, ...], ranks: int) -> Path:
    """Train in processes of their own, whose memory and workers end with them, and
    return the run folder.
    """
    file = Path(config["run"]["folder"]) / f"{config['run']['name']}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(config))
    paths = os.pathsep.join(
        [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    )
    environment = os.environ | {"PYTHONPATH": paths}
    if ranks > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        environment |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "lo",
        }
        environment |= {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": "1",
        }
    command = [sys.executable, "-c", RANK, str(file), *overrides]
    started = [
        subprocess.Popen(
            command,
            env=environment
            | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}),
            stdout=subprocess.DEVNULL,
        )
        for rank in range(ranks)
    ]
    if any([process.wait() for process in started]):
        raise SystemExit("a rank has failed")
    return Path(config["run"]["folder"]) / config["run"]["name"]


def step_ms(folder: Path) -> float:
    """Return the mean milliseconds of a step after the first epoch, from the files of a
    run.
    """
    rows = read_rows(folder / "timeline_0.jsonl")
    steady = [row for row in rows if row["kind"] == "steady" and row["steps"]]
    steady = steady[len(steady) // 3 :]
    apart = ("evaluation", "checkpoint", "setup", "profile")
    steps = [
        sum(ms for name, ms in row["ms"].items() if name not in apart) / row["steps"]
        for row in steady
    ]
    return statistics.mean(steps)


def keep(folder: Path, case: Case, target: Path) -> None:
    """Write what the rules saw, thinned, for
    `tests/unit/engine/monitor/test_recorded.py`.
    """
    config = kd.load_config(str(folder / "config.yaml"))
    facts = {
        "cores": cores(),
        "local_ranks": case.ranks,
        "workers": config.data.workers,
        "store": config.data.store,
    }
    names = (
        "time",
        "step",
        "steps",
        "kind",
        "wall_ms",
        "median_ms",
        "ms",
        "loading_ms",
        "regions",
    )
    timelines = {
        rank: [
            {name: row[name] for name in names if name in row}
            for row in read_rows(folder / f"timeline_{rank}.jsonl")
        ]
        for rank in range(case.ranks)
    }
    begin = next(
        row["time"] - row["wall_ms"] / 1000
        for row in timelines[0]
        if row["kind"] == "steady"
    )
    samples = [
        row
        for row in read_rows(next(folder.glob("monitor_*_0.jsonl")))
        if row["time"] >= begin
    ]
    samples = samples[:: max(1, len(samples) // KEPT)]
    names = ("time", "cpu", "process_mib", "process_cpu", "workers_cpu", "gpu")
    samples = [{name: row[name] for name in names} for row in samples]
    target.write_text(
        json.dumps(
            {
                "rule": case.rule,
                "facts": facts,
                "timelines": timelines,
                "samples": samples,
            }
        )
        + "\n"
    )


def play(
    name: str, rounds: int, photos: Path, runs: Path, record: Path | None
) -> list[dict[str, Any]]:
    """Run a case as it is and with the advice of its first run, in turns, and return a
    row of each.
    """
    case = CASES[name]
    advice = ()
    table = []
    for number in range(rounds):
        for cured in (False, True) if case.rule else (False,):
            config = settings(photos, runs, f"{'cured' if cured else 'slow'}_{number}")
            folder = run(
                config, (*case.overrides, *(advice if cured else ())), case.ranks
            )
            findings = json.loads((folder / "findings.json").read_text())
            row = {
                "case": name,
                "rule": case.rule,
                "round": number,
                "advice": " ".join(advice) if cured else "",
            }
            row |= {"what": "step_ms", "measured": round(step_ms(folder), 3)}
            table.append(
                row | {"found": " ".join(finding["rule"] for finding in findings)}
            )
            print(" ".join(str(each) for each in table[-1].values()), flush=True)
            if cured or number:
                continue
            if record:
                keep(folder, case, record / f"{name}.json")
            for finding in findings:
                print(
                    f"  {finding['rule']}: {finding['evidence']}. {finding['advice']}",
                    flush=True,
                )
            mine = next(
                (finding for finding in findings if finding["rule"] == case.rule), None
            )
            if mine is None:
                return table
            advice = (f"{mine['key']}={mine['value']}",)
    return table


def main() -> None:
    """Slow down, diagnose, cure, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--record",
        type=Path,
        help="write what the rules saw of each case into this folder",
    )
    parser.add_argument("--only", nargs="*", default=list(CASES))
    options = parser.parse_args()
    sys.path.insert(0, str(HERE))
    table: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        photos: dict[tuple[int, int], Path] = {
            size: photographs(Path(work) / f"photos_{size[0]}", size)
            for size in (SMALL, MEDIUM, LARGE)
        }
        for name in options.only:
            table += play(
                name,
                options.rounds,
                photos[CASES[name].photos],
                Path(work) / name,
                options.record,
            )
    print(
        f"{'case':<18}{'rule':<24}{'found':<8}{'slow':>10}{'cured':>10}{'ratio':>8} "
        " advice"
    )
    for name in options.only:
        mine = [row for row in table if row["case"] == name]
        slow, cured = (
            [row for row in mine if bool(row["advice"]) == c] for c in (False, True)
        )
        hits = sum(
            (
                CASES[name].rule in row["found"].split()
                if CASES[name].rule
                else not row["found"]
            )
            for row in slow
        )
        before, after = (
            statistics.median([row["measured"] for row in rows] or [0.0])
            for rows in (slow, cured)
        )
        ratio = f"{before / after:.2f}" if after > 0 else "-"
        text = f"{name:<18}{CASES[name].rule:<24}{hits}/{len(slow):<6}"
        text += f"{before:>10.2f}{after:>10.2f}{ratio:>8}"
        print(text, cured[0]["advice"] if cured else "", sep="  ")
    write("rules", " ".join(["python benchmarks/rules.py", *sys.argv[1:]]), table)


if __name__ == "__main__":
    main()
