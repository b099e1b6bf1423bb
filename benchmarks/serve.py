"""The endpoint: cold start, load, overload, memory over time, and LitServe with the
same model.

Run: python benchmarks/serve.py [EXPORT] [--part load] [--seconds 8]     every part on its own takes about a minute

EXPORT is what `kd-export` wrote; without it, a ViT-Tiny of 224 px with random weights,
which says all about speed and nothing about accuracy. The picture is a synthetic JPEG
of 600 x 450. The load generator runs on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from _hostile import Hostile
from _load import (
    Answer,
    Server,
    closed_loop,
    exchange,
    kd_serve,
    open_loop,
    percentile,
    request,
    wait_ready,
)
from variants import picture, random_export

from _record import write

Rows = list[dict[str, Any]]
RATE = 3.0
HOSTILE = 0.1
"""Clients a second of the part `hostile`, and the share of them that is."""
TORCH = """
import io, sys, torch, timm
from PIL import Image
from timm.data import create_transform, resolve_data_config
model = timm.create_model("local-dir:" + sys.argv[1], pretrained=True).eval()
transform = create_transform(**resolve_data_config({}, model=model))
with torch.inference_mode():
    model(transform(Image.open(sys.argv[2]).convert("RGB"))[None]).softmax(-1)
"""
LITSERVE = """
import base64, io, sys
import litserve as ls, numpy as np, onnxruntime as ort
from pathlib import Path
from kd.deploy.serve.responses import predictions
from kd.deploy.serve.decoding import prepare
from kd.deploy.serve.limits import Limits
from kd.deploy.serve.model import describe
from kd.deploy.serve.model import load

class API(ls.LitAPI):
    def setup(self, device):
        self.told = describe(Path(sys.argv[1]))
        self.model, self.limits = load(self.told, int(sys.argv[3]), 1), Limits()
    def decode_request(self, request):
        return prepare(base64.b64decode(request["image"]), self.told.size, self.told.crop, self.limits).pixels
    def predict(self, pixels):
        return self.model.engine(pixels[None])
    def encode_response(self, logits):
        return {"predictions": predictions(logits, self.told.labels, 5)}

if __name__ == "__main__":
    server = ls.LitServer(API(), accelerator="cpu", workers_per_device=int(sys.argv[4]))
    server.run(host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False, log_level="warning")
"""


def cold(folder: Path, seconds: float) -> Rows:
    """From the start of a process to its first answer: wall, CPU and peak memory, in
    turns.
    """
    rows = []
    with tempfile.NamedTemporaryFile(suffix=".jpg") as file:
        file.write(picture())
        file.flush()
        for turn in range(4):
            for server_name in ("kd-serve", "torch+timm"):
                start = time.perf_counter()
                if server_name == "kd-serve":
                    server = kd_serve(folder)
                    asyncio.run(
                        closed_loop(
                            server.url,
                            request(server.url, picture(), "image/jpeg"),
                            1,
                            0.001,
                        )
                    )
                    wall = time.perf_counter() - start
                    cpu = server.cpu_seconds()
                    memory = server.resident_mb(True)
                    server.stop()
                else:
                    process = subprocess.Popen(
                        [sys.executable, "-c", TORCH, str(folder), file.name]
                    )
                    _, status, usage = os.wait4(process.pid, 0)
                    process.returncode = status
                    wall = time.perf_counter() - start
                    cpu = usage.ru_utime + usage.ru_stime
                    memory = usage.ru_maxrss / 1024
                if turn:  # the first reads the files from the disk
                    rows.append(
                        {
                            "part": "cold",
                            "which": server_name,
                            "wall_s": wall,
                            "cpu_s": cpu,
                            "peak_mb": memory,
                        }
                    )
    for key in ("wall_s", "cpu_s", "peak_mb"):
        ours, theirs = (
            statistics.median(r[key] for r in rows if r["which"] == w)
            for w in ("kd-serve", "torch+timm")
        )
        print(
            f"cold: {key:8s} kd-serve {ours:8.2f}, torch+timm {theirs:8.2f}, ratio"
            f" {ours / theirs:.3f}"
        )
    return rows


def summary(answers: list[Answer], seconds: float) -> dict[str, Any]:
    """Return rates, percentiles and statuses."""
    good = [answer.took for answer in answers if answer.status == 200]
    return {
        "requests": len(answers),
        "ok": len(good),
        "busy": sum(answer.status == 503 for answer in answers),
        "other": sum(answer.status not in (200, 503) for answer in answers),
        "rps": len(good) / seconds,
        "p50_ms": 1000 * percentile(good, 0.5) if good else float("nan"),
        "p99_ms": 1000 * percentile(good, 0.99) if good else float("nan"),
    }


def print_row(name: str, row: dict[str, Any]) -> None:
    """Print a summary."""
    numbers = {
        key: f"{v:.2f}" if isinstance(v, float) else v
        for key, v in row.items()
        if key not in ("part", "which")
    }
    print(
        f"{row['part']}: {name:26s}"
        f" {', '.join(f'{key} {value}' for key, value in numbers.items())}"
    )


def driven(
    section: str,
    name: str,
    server: Server,
    message: bytes,
    clients: int,
    seconds: float,
) -> dict[str, Any]:
    """Drive a server in a closed loop and return a row."""
    asyncio.run(closed_loop(server.url, message, clients, 0.5))
    cpu = server.cpu_seconds()
    answers = asyncio.run(closed_loop(server.url, message, clients, seconds))
    row: dict[str, Any] = {
        "part": section,
        "which": name,
        "clients": clients,
        **summary(answers, seconds),
    }
    row["cpu_ms_per_request"] = 1000 * (server.cpu_seconds() - cpu) / max(1, row["ok"])
    row["resident_mb"] = server.resident_mb()
    print_row(name, row)
    return row


def load(folder: Path, seconds: float) -> Rows:
    """One and eight clients with either division of the cores, then the highest Poisson
    rate within 3x the median.
    """
    cores = len(os.sched_getaffinity(0))
    rows = []
    for slots in (1, cores):
        server = kd_serve(folder, "--slots", str(slots))
        message = request(server.url, picture(), "image/jpeg")
        for clients in (1, 8):
            name = f"{slots} slots x {cores // slots} threads"
            rows.append(driven("load", name, server, message, clients, seconds / 2))
        server.stop()
    server = kd_serve(folder)
    message = request(server.url, picture(), "image/jpeg")
    single = driven("load", "default", server, message, 1, seconds / 2)
    capacity = driven("load", "default", server, message, 8, seconds / 2)["rps"]
    low = 0.0
    high = 1.0
    for _ in range(5):
        share = (low + high) / 2
        answers = asyncio.run(open_loop(server.url, message, share * capacity, seconds))
        row: dict[str, Any] = {
            "part": "load",
            "which": "poisson",
            **summary(answers, seconds),
        }
        row["offered_rps"] = share * capacity
        row["held"] = (
            row["p99_ms"] <= 3 * single["p50_ms"] and row["ok"] == row["requests"]
        )
        low, high = (share, high) if row["held"] else (low, share)
        print_row(f"poisson at {share:.2f} of capacity", row)
        rows.append(row)
    server.stop()
    print(
        f"load: p99 <= 3 x {single['p50_ms']:.1f} ms up to {low * capacity:.1f} of"
        f" {capacity:.1f} requests/s"
    )
    return [*rows, single]


def overload(folder: Path, seconds: float) -> Rows:
    """Ten times the capacity: answers at capacity, 503 beyond, and afterwards as
    before.
    """
    server = kd_serve(folder)
    message = request(server.url, picture(), "image/jpeg")
    before = driven("overload", "capacity", server, message, 8, seconds / 2)
    answers = asyncio.run(open_loop(server.url, message, 10 * before["rps"], seconds))
    row: dict[str, Any] = {
        "part": "overload",
        "which": "10x",
        **summary(answers, seconds),
    }
    row["resident_mb"] = server.resident_mb()
    print_row("10x", row)
    after = driven("overload", "after", server, message, 8, seconds / 2)
    server.stop()
    return [before, row, after]


def soak(folder: Path, seconds: float) -> Rows:
    """Memory over time under eight clients; two thirds good pictures, the rest cut and
    random bytes.
    """
    server = kd_serve(folder)
    photo = picture()
    rows = []
    start = time.perf_counter()
    messages = [
        request(server.url, body, "image/jpeg")
        for body in (photo, photo[: len(photo) // 2], os.urandom(9999))
    ]
    while time.perf_counter() - start < seconds:
        count = 0
        for message, share in zip(messages, (4, 1, 1), strict=True):
            count += len(
                asyncio.run(closed_loop(server.url, message, 8, share * seconds / 120))
            )
        row = {
            "part": "soak",
            "second": time.perf_counter() - start,
            "resident_mb": server.resident_mb(),
        }
        rows.append({**row, "requests": count})
    server.stop()
    half = len(rows) // 2
    first, last = (
        statistics.median(r["resident_mb"] for r in section)
        for section in (rows[half // 2 : half], rows[half:])
    )
    print(
        f"soak: {sum(r['requests'] for r in rows)} requests, {first:.1f} MB before"
        f" half-time, {last:.1f} MB after"
    )
    return rows


async def _mixed(
    url: str, message: bytes, hostile: Hostile, rate: float, seconds: float
) -> dict[str, Any]:
    """Send requests at Poisson times, every tenth client a hostile one; ask for the
    health once a second.
    """
    start = time.perf_counter()
    due = 0.0
    tasks = set()
    pings = []
    health = b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n"
    answers: list[Answer] = []

    async def ask(sent: bytes) -> Answer:
        begin = time.perf_counter()
        status = 0
        try:
            pair = await asyncio.open_connection(
                urlsplit(url).hostname, urlsplit(url).port
            )
            status = await exchange(*pair, sent)
            pair[1].close()
        except (OSError, asyncio.IncompleteReadError):
            pass
        return Answer(begin - start, time.perf_counter() - begin, status)

    async def good() -> None:
        answers.append(await ask(message))

    async def pinging() -> None:
        while True:
            pings.append(await ask(health))
            await asyncio.sleep(1)

    pinger = asyncio.ensure_future(pinging())
    hostiles = 0
    while (due := due + hostile.rng.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
        bad = hostile.rng.random() < HOSTILE
        hostiles += bad
        task = asyncio.ensure_future(hostile.client() if bad else good())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    pinger.cancel()
    row = summary(answers, time.perf_counter() - start)
    slowest = 1000 * max(ping.took for ping in pings)
    failed = sum(ping.status != 200 for ping in pings)
    return {
        **row,
        "hostile": hostiles,
        "pings": len(pings),
        "pings_failed": failed,
        "slowest_ping_ms": slowest,
    }


def hostile(folder: Path, seconds: float) -> Rows:
    """Memory over time under few clients of which a tenth is hostile; a row a minute,
    at most 60.
    """
    server = kd_serve(folder)
    start = time.perf_counter()
    rows = []
    clients = Hostile(server.url, picture())
    message = request(server.url, picture(), "image/jpeg")
    minute = min(60.0, seconds)
    while time.perf_counter() - start < seconds:
        row = asyncio.run(_mixed(server.url, message, clients, RATE, minute))
        serving = {
            "part": "hostile",
            "second": time.perf_counter() - start,
            "resident_mb": server.resident_mb(),
        }
        rows.append({**serving, **row})
        print_row("hostile", rows[-1])
    with urllib.request.urlopen(
        server.url.replace("/invocations", "/metrics"), timeout=30
    ) as page:
        errors = [
            line for line in page.read().decode().splitlines() if 'status="500"' in line
        ]
    server.stop()
    quarter = max(1, len(rows) // 4)
    first, last = (
        statistics.median(r["resident_mb"] for r in quarter_of_rows)
        for quarter_of_rows in (rows[:quarter], rows[-quarter:])
    )
    print(
        f"hostile: {clients.count}; answered with 500: {errors or 'none'}; exit code"
        f" {server.process.returncode}"
    )
    print(
        f"hostile: {first:.1f} MB in the first quarter, {last:.1f} MB in the last,"
        f" after {rows[-1]['second']:.0f} s"
    )
    return rows


def litserve(folder: Path, seconds: float) -> Rows:
    """The picked file, and model.onnx, here; the picked file in LitServe: the same
    pixels and JSON body, in turns.
    """
    cores = len(os.sched_getaffinity(0))
    body = json.dumps({"image": base64.b64encode(picture()).decode()}).encode()
    rows = []
    port = 18765
    with tempfile.TemporaryDirectory() as temporary:
        script = Path(temporary) / "lit.py"
        script.write_text(LITSERVE)
        for turn in range(2):
            for name in (
                "kd-serve",
                "kd-serve model.onnx",
                "litserve 1 worker",
                "litserve worker a core",
            ):
                if name.startswith("kd-serve"):
                    server = kd_serve(
                        folder,
                        *(["--file", "model.onnx"] if "model.onnx" in name else []),
                    )
                else:
                    workers = 1 if "1" in name else cores
                    port += 1
                    argv = [
                        sys.executable,
                        str(script),
                        str(folder),
                        str(port),
                        str(cores // workers),
                        str(workers),
                    ]
                    process = subprocess.Popen(
                        argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                    )
                    server = Server(process, f"http://127.0.0.1:{port}/predict")
                    wait_ready(f"http://127.0.0.1:{port}/health", process)
                message = request(server.url, body, "application/json")
                for clients in (1, 8):
                    row = driven(
                        "litserve", name, server, message, clients, seconds / 2
                    )
                    rows.append({**row, "turn": turn})
                server.stop()
    return rows


PARTS = {
    "cold": cold,
    "load": load,
    "overload": overload,
    "soak": soak,
    "hostile": hostile,
    "litserve": litserve,
}


def main() -> None:
    """Measure and write one CSV a part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("export", nargs="?", type=Path, help="an export folder")
    parser.add_argument(
        "--part",
        action="append",
        choices=sorted(PARTS),
        help="default: all but hostile and litserve",
    )
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="of each measurement"
    )
    parser.add_argument(
        "--model", default="vit_tiny_patch16_224", help="without EXPORT"
    )
    parser.add_argument("--size", type=int, default=224, help="without EXPORT")
    parser.add_argument("--dry", action="store_true", help="write no CSV")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.export or random_export(
            Path(temporary), options.model, options.size
        )
        for section in options.part or [
            name for name in PARTS if name not in ("hostile", "litserve")
        ]:
            rows = PARTS[section](folder, options.seconds)
            keys = list(dict.fromkeys(key for row in rows for key in row))
            if not options.dry:
                write(
                    f"serve_{section}",
                    " ".join(["python benchmarks/serve.py", *sys.argv[1:]]),
                    [{key: row.get(key, "") for key in keys} for row in rows],
                )


if __name__ == "__main__":
    main()
