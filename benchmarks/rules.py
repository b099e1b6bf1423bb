"""Does each rule name what slows a run down, and does its advice help? Runs that are slowed down on purpose.

Run: python benchmarks/rules.py [--rounds 2] [--only NAME ...] [--record FOLDER]

Each case is a tiny run with one fault. Its findings must hold the case's rule. What that finding advises, one key and
one value, is then set, and both runs take turns. A row is one run. `measured` is what the fault is about:
milliseconds of a steady step, of an image, seconds of the start, or MiB of growth. Where the advice is a profile, it
is applied once and the fault is then removed by hand.

The machine is sampled ten times a second, and `MaxInitializationTime` speaks from 2 seconds on instead of 30, so that
runs of a few seconds are enough. Not here: a synchronizing loss and a starved GPU, which need a GPU.
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
from kd.host import cores
from kd.monitor import rules, system
from kd.monitor.timeline import read_rows

STEPS = 60


@dataclass(frozen=True)
class Case:
    """A fault, and the rule that must name it."""

    rule: str
    overrides: tuple[str, ...]
    measured: str = "step_ms"
    ranks: int = 1
    cured: tuple[str, ...] = ()
    """Where the advice is to look closer: what is then done by hand."""


SLOW = "data.kind=sabotage.source"
CASES = {
    "healthy": Case("", ("data.workers=1",)),
    "too_many_workers": Case("CPUBottleneck", ("data.workers=8",)),
    "no_workers": Case("Dataloader", ("data.workers=0",)),
    "slow_disk": Case("IOBottleneck", (SLOW, "data.sleep_ms=8", "data.workers=1")),
    "tiny_batch": Case("BatchSize", ("data.batch_size=1", "data.workers=1", "student.args.embed_dim=192"), "image_ms"),
    "sleeping_rank": Case("LoadBalancing", (SLOW, "data.sleep_ms=5", "data.rank=1", "data.workers=0"), ranks=2),
    "uneven_shards": Case("LoadBalancing", (SLOW, "data.again=6", "data.rank=1", "data.workers=1"), ranks=2),
    "stalls": Case("StepOutlier", (SLOW, "data.stall_ms=600", "data.workers=0")),
    "leak": Case(
        "GPUMemoryIncrease",
        ("losses=[{kind: sabotage.loss, leak_mib: 4}]", "data.workers=1"),
        "growth_mib",
        cured=("losses=[{kind: sabotage.loss}]",),
    ),
    "slow_start": Case(
        "MaxInitializationTime",
        ("data.batch_size=auto", "data.image_size=32", "run.steps=10", "data.workers=1"),
        "setup_s",
    ),
    "one_thread": Case("OverallSystemUsage", ("backend.threads=1", "data.workers=1")),
}


def photographs(folder: Path) -> Path:
    """Write JPEGs of noise, 400 x 300 pixels, which take milliseconds to decode."""
    random = np.random.default_rng(0)
    for split, count in (("train", 48), ("val", 4)):
        for label in ("apple", "fig", "pear"):
            (folder / split / label).mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 256, (300, 400, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / label / f"{i}.jpg", quality=85)
    return folder


def settings(photos: Path, runs: Path, name: str) -> dict[str, Any]:
    """Return the configuration that the faults are added to."""
    vit = {"patch_size": 8, "embed_dim": 64, "depth": 3, "num_heads": 2}
    return {
        "run": {"name": name, "folder": str(runs), "steps": STEPS, "every": {"log": 10, "evaluate": 10**6}},
        "data": {
            "kind": "imagefolder",
            "root": str(photos),
            "image_size": 64,
            "batch_size": 16,
            "augment": {"jitter": 0},
        },
        "student": {"model": "vit_tiny_patch16_224", "args": vit, "attention": "unfused", "compile": "off"},
        "losses": [{"kind": "ce"}],
        "backend": {"kind": "cpu", "precision": "fp32"},
    }


def run(config: dict[str, Any], overrides: tuple[str, ...], ranks: int) -> Path:
    """Train, and return the run folder."""
    if ranks == 1:
        return kd.train(config, *overrides).folder
    file = Path(config["run"]["folder"]) / f"{config['run']['name']}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    common = {"PYTHONPATH": paths, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "kd.cli.train", str(file), *overrides]
    started = [
        subprocess.Popen(
            command,
            env=os.environ | common | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL if rank else None,
        )
        for rank in range(ranks)
    ]
    if any([process.wait() for process in started]):
        raise SystemExit("a rank has failed")
    return Path(config["run"]["folder"]) / config["run"]["name"]


def value(folder: Path, what: str) -> float:
    """Return what a case measures, from the files of a run; a step is one of the last half."""
    rows = read_rows(folder / "timeline_0.jsonl")
    if what == "setup_s":
        return rows[0]["wall_ms"] / 1000
    steady = [row for row in rows if row["kind"] == "steady" and row["steps"]]
    steady = steady[len(steady) // 2 :]
    if what == "growth_mib":
        samples = [row["process_mib"] for row in read_rows(next(folder.glob("monitor_*.jsonl")))]
        quarter = max(1, len(samples) // 4)
        return statistics.median(samples[-quarter:]) - statistics.median(samples[quarter : 2 * quarter])
    apart = ("evaluation", "checkpoint", "setup", "profile")
    ms = sum(each for row in steady for name, each in row["ms"].items() if name not in apart)
    step = ms / sum(row["steps"] for row in steady)
    return step / int(kd.load_config(str(folder / "config.yaml")).data.batch_size) if what == "image_ms" else step


def keep(folder: Path, case: Case, target: Path) -> None:
    """Write what the rules saw, for the tests."""
    config = kd.load_config(str(folder / "config.yaml"))
    facts = {
        "cores": cores(),
        "local_ranks": case.ranks,
        "threads": config.backend.options.threads or max(1, cores() // case.ranks),
        "workers": config.data.workers,
        "batch_size": json.loads((folder / "manifest.json").read_text())["choices"].get("batch_size"),
        "store": config.data.store,
    }
    facts["batch_size"] = int(facts["batch_size"] or config.data.batch_size)
    timelines = {str(rank): read_rows(folder / f"timeline_{rank}.jsonl") for rank in range(case.ranks)}
    samples = [
        {
            name: each
            for name, each in row.items()
            if name in ("time", "cpu", "process_mib", "process_cpu", "workers_cpu", "workers_busy", "gpu")
        }
        for row in read_rows(next(folder.glob("monitor_*_0.jsonl")))[:60]
    ]
    content = {"rule": case.rule, "facts": facts, "timelines": timelines, "samples": samples}
    target.write_text(json.dumps(content) + "\n")


def main() -> None:
    """Slow down, diagnose, cure, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--record", type=Path, help="write what the rules saw of each case into this folder")
    parser.add_argument("--only", nargs="*", default=list(CASES))
    given = parser.parse_args()
    sys.path.insert(0, str(HERE))
    system.INTERVAL, rules.SETUP_SECONDS = 0.1, 2.0
    table: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        photos = photographs(Path(work) / "photos")
        for name in given.only:
            case, cure, found = CASES[name], (), ""
            for number in range(given.rounds):
                for cured in (False, True):
                    config = settings(photos, Path(work) / name, f"{'cured' if cured else 'slow'}_{number}")
                    more = cure if cured else ()
                    folder = run(config, (*case.overrides, *more), case.ranks)
                    if not cure:
                        findings = json.loads((folder / "findings.json").read_text())
                        found = " ".join(one["rule"] for one in findings)
                        if given.record:
                            keep(folder, case, given.record / f"{name}.json")
                        mine = next((one for one in findings if one["rule"] == case.rule), None)
                        if mine is None:
                            print(f"{name}: {case.rule or 'nothing'} expected, found: {found}")
                            break
                        print(f"{name}: {mine['evidence']}. {mine['advice']}")
                        cure = case.cured or (f"{mine['key']}={mine['value']}",)
                    measured = round(value(folder, case.measured), 3)
                    row = {"case": name, "rule": case.rule, "round": number, "cure": " ".join(more)}
                    table.append({**row, "what": case.measured, "measured": measured, "found": found})
    for name in given.only:
        mine = [row for row in table if row["case"] == name]
        slow, cured = (
            statistics.median([row["measured"] for row in mine if bool(row["cure"]) == c] or [0]) for c in (0, 1)
        )
        print(f"{name}: {CASES[name].measured} {slow:.2f} -> {cured:.2f}, ratio {slow / cured if cured else 0:.2f}")
    write("rules", " ".join(["python benchmarks/rules.py", *sys.argv[1:]]), table)


if __name__ == "__main__":
    main()
