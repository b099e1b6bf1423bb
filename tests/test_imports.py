"""Who may import whom (docs/design.md), how long a file may be, and that `import kd` stays light."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "kd").rglob("*.py"))

ORDER = tuple(
    [
        "core",
        "files",
        "models",
        "parts",
        "config",
        "data",
        "engine",
        "cluster",
        "setup",
        "study",
        "deploy",
        "jobs",
        "cli",
    ]
)
BELOW_SETUP = {"core", "files", "models", "parts.registry", "config", "data", "engine", "cluster"}
MAY_IMPORT = {
    "core": set(),
    "files": {"core"},
    "models": {"core", "files"},
    "parts": {"core", "files"},
    "config": {"core", "parts.registry"},
    "data": {"core", "files"},
    "engine": {"core", "files"},
    "cluster": {"core", "files", "data"},
    "setup": BELOW_SETUP,
    "study": BELOW_SETUP | {"setup", "parts.tasks"},
    "deploy": BELOW_SETUP | {"setup", "parts.tasks", "study"},
    "jobs": BELOW_SETUP | {"setup", "study", "deploy"},
    "cli": BELOW_SETUP | {"__version__", "setup", "study", "deploy", "jobs"},
    "sifting": {"core", "parts.sifters._window"},  # stands alone
    "__main__": {"cli"},
}
STRICTER = {  # rooms in a room that know less than it does
    "parts/networks/": {"core", "models", "parts.registry"},
    "deploy/serve/": {"core", "files", "deploy.shift"},
    "deploy/predict/": {"core", "files", "cluster.ray_cluster", "deploy.serve"},
    "jobs/progress/": {"core"},
    "study/audit/": {"core", "files"},
}
MAY_IMPORT_OUTSIDE = {
    "torch_xla": ("parts/backends/xla.py",),
    "smdistributed": ("parts/backends/smddp.py",),
    "accelerate": ("jobs/progress/trackers.py",),
    "timm": ("models/", "deploy/export/calibrate.py", "cluster/handler.py", "data/views.py"),
    "omegaconf": ("config/", "study/finished.py"),
    "safetensors": ("models/", "files/", "deploy/export/"),
    "boto3": ("cluster/",),
    "botocore": ("cluster/",),
    "fsspec": ("files/object_store.py",),
    "starlette": ("deploy/serve/",),
    "uvicorn": ("deploy/serve/",),
    "onnx": ("models/runtimes.py",),
    "onnxruntime": ("models/runtimes.py", "deploy/serve/inference.py"),
    "openvino": ("models/runtimes.py", "deploy/serve/inference.py", "deploy/export/int8.py"),
    "nncf": ("deploy/export/int8.py",),
    "ray": ("cluster/ray_cluster.py", "cluster/decoders.py", "deploy/predict/on_ray.py"),
    "psutil": ("engine/monitor/system.py",),
    "pynvml": ("engine/monitor/system.py",),
    "transformers": ("parts/networks/_towers.py",),
    "pickle": (),
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST, functions: bool = True) -> Iterator[str]:
    """Yield every module that a file imports, `if TYPE_CHECKING` too; without `functions`, when it is imported."""
    for node in ast.iter_child_nodes(tree):
        if not functions and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide what is imported"
            module = node.module or ""
            package = (ROOT / module.replace(".", "/")).is_dir()
            yield from (f"{module}.{alias.name}" if package else module for alias in node.names)
        else:
            yield from imports(node, functions)


def within(module: str, allowed: Iterable[str]) -> bool:
    return any(f"{module}.".startswith(f"{one}.") for one in allowed)


def wrong_imports(name: str, modules: Iterator[str]) -> list[str]:
    """Return what a file may not import."""
    path = name.removeprefix("kd/")
    room = path.partition("/")[0].removesuffix(".py")
    inner = next((folder for folder in STRICTER if path.startswith(folder)), "")
    may = STRICTER[inner] if inner else MAY_IMPORT[room]
    own = path.rpartition("/")[0].replace("/", ".")
    wrong = []
    for module in modules:
        top, _, rest = module.partition(".")
        if top == "kd":
            if room == "parts" and own != "parts":  # files of a part folder share only through a `_file`
                allowed = within(rest, may) or rest.startswith(f"{own}._") or own.startswith("parts.datasets._food")
            else:
                allowed = within(rest, may) or within(rest, [inner.strip("/").replace("/", ".") or room])
        else:
            allowed = path.startswith(MAY_IMPORT_OUTSIDE[top]) if top in MAY_IMPORT_OUTSIDE else True
            light = inner in ("deploy/serve/", "deploy/predict/")
            allowed = allowed and not (light and top in ("torch", "torchvision"))
        if not allowed:
            wrong.append(module)
    return wrong


def test_fourteen_rooms():
    names = {path.name for path in (ROOT / "kd").iterdir()} - {"__init__.py", "__main__.py", "py.typed", "__pycache__"}
    assert names <= {*ORDER, "sifting"}
    for i, room in enumerate(ORDER):
        below = [*ORDER[:i], "__version__"]
        assert all(within(one, below) for one in MAY_IMPORT[room]), room


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports(path):
    name = name_of(path)
    if name == "kd/__init__.py":
        allowed = ("__future__", "importlib", "os", "typing", "kd")  # kd under TYPE_CHECKING: its names are lazy
        assert all(within(module, allowed) for module in imports(ast.parse(path.read_text())))
    else:
        assert wrong_imports(name, imports(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("kd/setup/teacher.py", "from kd.jobs.teach import fit_teacher"),
        ("kd/parts/losses/kl.py", "from kd.parts.losses.ce import CE"),
        ("kd/parts/losses/kl.py", "from kd.parts.losses import ce"),
        ("kd/parts/losses/kl.py", "from kd.parts.tasks._logits import Logits"),
        ("kd/parts/losses/kl.py", "def f():\n    from kd.models import load"),
        ("kd/parts/losses/kl.py", "if TYPE_CHECKING:\n    from kd.models import load"),
        ("kd/engine/loop.py", "from kd.setup import build"),
        ("kd/engine/loop.py", "import timm.data"),
        ("kd/core/errors.py", "import kd.files.storage"),
        ("kd/config/load.py", "from kd.setup.build import build_run"),
        ("kd/data/loader.py", "from kd.engine.run import Run"),
        ("kd/setup/build.py", "from omegaconf import OmegaConf"),
        ("kd/jobs/train.py", "import kd.cli.training"),
        ("kd/jobs/progress/console.py", "from kd.jobs import train"),
        ("kd/files/storage.py", "import pickle"),
        ("kd/sifting/loader.py", "from kd.parts.sifters.none import Everything"),
        ("kd/sifting/loader.py", "from kd.engine import loop"),
        ("kd/sifting/frameworks.py", "from transformers import TrainerCallback"),
        ("kd/parts/sifters/relative.py", "from kd.sifting import SiftingDataloader"),
        ("kd/deploy/serve/app.py", "from kd.models import load"),
        ("kd/deploy/serve/inference.py", "import torch"),
        ("kd/deploy/predict/predict.py", "import torch"),
        ("kd/study/report/page.py", "from kd.deploy.serve import app"),
    ],
)
def test_the_rules_can_be_broken(name, source):
    assert len(wrong_imports(name, imports(ast.parse(source)))) == 1


def test_no_file_imports_itself_through_others():
    """Of two files that import each other one cannot be imported first."""
    modules = {name_of(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path for path in FILES}
    del modules["kd"]  # its names are found when they are asked for
    graph = {name: set(imports(ast.parse(path.read_text()), functions=False)) for name, path in modules.items()}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_budgets(path):
    text = path.read_text()
    name = name_of(path)
    # A table of drawings is data: its length says nothing about how hard it is to read.
    limit = 500 if name.startswith("kd/parts/datasets/_food") else 400
    assert len(text.splitlines()) <= limit, f"{name} is longer than {limit} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            doc = ast.get_docstring(node, clean=False)
            lines = (node.end_lineno or 0) - node.lineno + 1 - (len(doc.splitlines()) if doc else 0)
            assert lines <= 60, f"{name}:{node.lineno} {node.name} has {lines} lines beside its docstring"


def loaded_by(code: str) -> set[str]:
    """Run `code` in a fresh interpreter and return the modules it loaded beyond the interpreter's own."""
    script = f"import sys; before = set(sys.modules)\n{code}\nprint(*sorted(set(sys.modules) - before))"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(run.stdout.splitlines()[-1].split())


def test_import_kd_is_light():
    loaded = loaded_by("import kd; kd.__version__; kd.__all__")
    assert {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names == {"kd"}
    assert len(loaded) <= 60, sorted(loaded)  # 30 of the standard library on Python 3.11; torch brings 1,500


def test_errors_are_light():
    assert "torch" not in loaded_by("from kd import KdError")


def test_sifting_for_other_loops_is_light():
    loaded = loaded_by("import kd.sifting")
    assert not {"timm", "transformers", "lightning", "pytorch_lightning", "accelerate", "omegaconf"} & loaded


def test_commands_explain_themselves_without_timm():
    """`kd-train --help` reads the parts' options, for which torch is needed, but no model library."""
    loaded = loaded_by("import kd.cli.training")
    assert not {"torch", "timm", "accelerate"} & loaded
