"""Start exports on all ways to compute that this machine can be made to take: how far
the self-check's answers move.

    python benchmarks/self_check.py EXPORT... --old onnxruntime=FOLDER --old openvino=FOLDER --old pillow=FOLDER

Each start is `kd.load` in a process of its own. FOLDER: where `pip install --no-deps
--target FOLDER NAME==VERSION` put the oldest version that pyproject.toml allows.
OpenVINO takes the code paths of other processors by `DNNL_MAX_CPU_ISA`. onnxruntime has
no such variable: its library is copied, each CPUID instruction in it becomes an invalid
one, and a signal handler answers in its place without some units of the processor
(Linux on x86, with gcc and binutils).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _record import write
from kd.files.manifest import MANIFEST
from kd.parts import registry

CHILD = """
import ctypes, json, os, sys, time
if library := os.environ.get("MASK_LIBRARY"):
    ctypes.CDLL(library)
begin = time.process_time()
import kd
from kd.core.host import package_versions
from kd.deploy.serve import self_check
from kd.deploy.serve.model import read_verified
folder, file, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = kd.load(folder, file, threads, self_check=False)
without, verdict = time.process_time() - begin, "as at the export"
try:
    kd.load(folder, file, threads)
except kd.KdError as error:
    verdict = type(error).__name__
begin = time.process_time()
arrays = self_check.read(read_verified(model.folder, self_check.FILE, model.files))
off = self_check.differences(arrays, file, model.engine, model.crop, model.margin, model.bits)
found = {"start_s": without, "check_s": time.process_time() - begin, "pixels": off.pixels, "logits": off.logits}
print(json.dumps({**found, "verdict": verdict, **package_versions("onnxruntime", "openvino", "pillow")}))
"""
MASK = r"""
#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
static unsigned ebx7 = ~0u, ecx7 = ~0u, edx7 = ~0u, eax71 = ~0u, ecx1 = ~0u;
static void answer(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    unsigned char *at = (unsigned char *)registers[REG_RIP];
    unsigned leaf = registers[REG_RAX], sub = registers[REG_RCX], a, b, c, d;
    if (at[0] != 0x0f || at[1] != 0x0b) { signal(SIGILL, SIG_DFL); return; }
    __cpuid_count(leaf, sub, a, b, c, d);
    if (leaf == 1) c &= ecx1;
    if (leaf == 7 && sub == 0) { b &= ebx7; c &= ecx7; d &= edx7; }
    if (leaf == 7 && sub == 1) a &= eax71;
    registers[REG_RAX] = a; registers[REG_RBX] = b; registers[REG_RCX] = c; registers[REG_RDX] = d;
    registers[REG_RIP] += 2;
}
__attribute__((constructor)) static void start(void) {
    const char *units = getenv("MASK_UNITS");
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = answer;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGILL, &action, 0);
    if (!units) return;
    ecx7 = ~(1u << 11); eax71 = ~(3u << 4);                        /* without VNNI and bfloat16 */
    if (!strcmp(units, "avx512")) return;
    ebx7 = ~(1u << 16 | 1u << 17 | 1u << 21 | 3u << 26 | 1u << 28 | 3u << 30);
    ecx7 = ~(1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14); edx7 = ~(1u << 22 | 3u << 24);
    if (strcmp(units, "sse")) return;
    ebx7 &= ~(1u << 5); ecx1 = ~(1u << 28 | 1u << 12);             /* without AVX2, AVX and FMA */
}
"""


def masked(folder: Path) -> dict[str, str]:
    """Write the signal handler and an onnxruntime that asks it; return the environment
    of a process with them.
    """
    spec = find_spec("onnxruntime")
    assert spec is not None
    assert spec.submodule_search_locations
    (folder / "mask.c").write_text(MASK)
    library = folder / "mask.so"
    subprocess.run(
        ["gcc", "-O1", "-shared", "-fPIC", "-o", library, folder / "mask.c"], check=True
    )
    shutil.copytree(spec.submodule_search_locations[0], folder / "onnxruntime")
    for path in (folder / "onnxruntime").rglob("*.so*"):
        disassembly = subprocess.run(
            ["objdump", "-d", "--no-show-raw-insn", path],
            capture_output=True,
            text=True,
        ).stdout
        places = [
            int(address, 16)
            for address in re.findall(
                r"^\s*([0-9a-f]+):\s+cpuid", disassembly, re.MULTILINE
            )
        ]
        lines = subprocess.run(
            ["readelf", "-lW", path], capture_output=True, text=True
        ).stdout.splitlines()
        sections = [
            [int(word, 16) for word in line.split()[1:5]]
            for line in lines
            if line.split()[:1] == ["LOAD"]
        ]
        content = bytearray(path.read_bytes())
        for place in places:
            offset = next(
                at + place - start
                for at, start, _, size in sections
                if start <= place < start + size
            )
            assert content[offset : offset + 2] == b"\x0f\xa2"
            content[offset : offset + 2] = b"\x0f\x0b"
        path.write_bytes(content)
    return {"PYTHONPATH": str(folder), "MASK_LIBRARY": str(library)}


def ways(
    runtime: str, old: dict[str, str], mask: dict[str, str]
) -> list[tuple[str, int, dict[str, str]]]:
    """Return name, threads and environment of each way."""
    chosen = [("as installed", threads, {}) for threads in (1, 1, 2, 3, 4, 6, 8)]
    chosen += [
        (f"oldest {name}", 1, {"PYTHONPATH": old[name]})
        for name in (runtime, "pillow")
        if name in old
    ]
    if runtime == "onnxruntime":
        chosen += [
            (f"processor with {units}", 1, {**mask, "MASK_UNITS": units})
            for units in ("avx512", "avx2", "sse")
        ]
    else:
        units = (
            "AVX2",
            "AVX2_VNNI",
            "AVX512_CORE",
            "AVX512_CORE_VNNI",
            "AVX512_CORE_BF16",
        )
        chosen += [
            (f"processor with {unit}", 1, {"DNNL_MAX_CPU_ISA": unit}) for unit in units
        ]
    return chosen


def start(
    export: Path, file: str, threads: int, variables: dict[str, str]
) -> dict[str, Any]:
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(
        entry for entry in (variables.get("PYTHONPATH"), root) if entry
    )
    environment = {
        **os.environ,
        **variables,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
    }
    argv = [sys.executable, "-c", CHILD, str(export), file, str(threads)]
    process = subprocess.run(argv, env=environment, capture_output=True, text=True)
    if process.returncode:
        lines = process.stderr.strip().splitlines()
        reason = (
            f"signal {-process.returncode}"
            if process.returncode < 0 or not lines
            else lines[-1]
        )
        return {"verdict": f"not run: {reason[:80]}"}
    return json.loads(process.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("exports", nargs="+", type=Path)
    parser.add_argument("--old", action="append", default=[], metavar="NAME=FOLDER")
    options = parser.parse_args()
    old = dict(text.split("=", 1) for text in options.old)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        mask = masked(Path(folder))
        for export in options.exports:
            manifest = json.loads((export / MANIFEST).read_text())
            for file, command in manifest["self_check"].items():
                runtime = registry.graphs()[file].runtime
                for way, threads, variables in ways(runtime, old, mask):
                    outcome = start(export, file, threads, variables)
                    row = {
                        "model": manifest["name"],
                        "file": file,
                        "way": way,
                        "threads": threads,
                    }
                    row |= {
                        "runtime": outcome.get(runtime, ""),
                        "pillow": outcome.get("pillow", ""),
                    }
                    row |= {
                        key: outcome.get(key, "")
                        for key in ("start_s", "check_s", "pixels", "logits")
                    }
                    rows.append(
                        row
                        | {"allowed": command["allowed"], "verdict": outcome["verdict"]}
                    )
                    print(rows[-1], time.strftime("%H:%M:%S"), flush=True)
    command = " ".join(["EXPORT...", *(f"--old {name}=FOLDER" for name in old)])
    write("self_check", f"python benchmarks/self_check.py {command}", rows)


if __name__ == "__main__":
    main()
