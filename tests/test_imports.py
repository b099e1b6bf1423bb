"""Who may import whom (docs/design.md), how long a file may be, and that `import kd` stays light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "kd").rglob("*.py"))

VALUES = {
    "errors",
    "types",
    "seeds",
    "text",
    "scores",
    "intervals",
    "references",
    "host",
    "instances",
    "cluster",
    "files",
    "shift",
    "contracts",
    "evaluation",
}
PART_FOLDERS = {"losses", "sifters", "datasets", "teachers", "tasks", "backends"}
FLOOR = ("audit", "models", "data", "optim", "monitor", "progress", "engine", "artifacts", "tasks")
BELOW_SETUP = VALUES | {"parts", "config", *FLOOR}
SETUP = BELOW_SETUP | {"setup"}
MAY_IMPORT = {
    "errors": set(),
    "types": set(),
    "seeds": set(),
    "text": set(),
    "intervals": set(),
    "scores": {"intervals", "text"},
    "instances": set(),
    "references": set(),
    "host": {"references"},
    "cluster": {"errors", "host"},
    "files": {"errors"},
    "shift": set(),
    "contracts": {"errors", "scores", "types"},
    "evaluation": {"contracts", "intervals", "scores", "types"},
    "parts": {"errors", "types"},
    "config": {"contracts", "errors", "evaluation", "instances", "parts", "references", "types"},
    **dict.fromkeys(PART_FOLDERS, VALUES),
    "teachers": VALUES | {"models", "parts"},
    **dict.fromkeys(FLOOR, VALUES),
    "setup": BELOW_SETUP,
    "export": SETUP | {"serve.bench"},
    "jobs": SETUP | {"export"},
    "report": SETUP,
    "sweeps": SETUP | {"export.parity", "report.svg"},
    "sagemaker": VALUES,
    "api": SETUP | {"export", "jobs", "report"},
    "__main__": {"cli"},
    "cli": SETUP | {"__version__", "api", "export", "jobs", "predict", "report", "sagemaker", "serve", "sweeps"},
    "serve": {"errors", "files", "host", "shift"},
    "predict": {"cluster", "errors", "files", "host", "serve"},
    "sifting": {"errors", "seeds", "sifters._window"},
}
MAY_IMPORT_OUTSIDE = {
    "torch_xla": ("backends/xla.py",),
    "smdistributed": ("backends/smddp.py",),
    "accelerate": ("progress/trackers.py",),
    "timm": ("models/", "export/calibrate.py", "sagemaker/handler.py", "data/views.py"),
    "omegaconf": ("config/", "setup/finished.py"),
    "safetensors": ("models/", "artifacts/", "export/"),
    "boto3": ("sagemaker/",),
    "botocore": ("sagemaker/",),
    "fsspec": ("files/object_store.py",),
    "starlette": ("serve/",),
    "uvicorn": ("serve/",),
    "onnx": ("models/runtimes.py",),
    "onnxruntime": ("models/runtimes.py", "serve/model.py"),
    "openvino": ("models/runtimes.py", "serve/model.py", "export/int8.py"),
    "nncf": ("export/int8.py",),
    "ray": ("cluster.py", "data/decoders.py", "predict/hosts.py"),
    "psutil": ("monitor/system.py",),
    "pynvml": ("monitor/system.py",),
    "transformers": ("teachers/_towers.py",),
    "pickle": (),
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST, functions: bool = True) -> Iterator[str]:
    """Yield every module that a file imports, `if TYPE_CHECKING` left out; without `functions`, when it is imported."""
    for node in ast.iter_child_nodes(tree):
        if not functions and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide what is imported"
            module = node.module or ""
            package = module.startswith("kd") and module.count(".") < 2
            yield from (f"{module}.{alias.name}" if package else module for alias in node.names)
        else:
            yield from imports(node, functions)


def wrong_imports(name: str, modules: Iterator[str]) -> list[str]:
    """Return what a file may not import."""
    path = name.removeprefix("kd/")
    unit = path.partition("/")[0].removesuffix(".py")
    wrong = []
    for module in modules:
        top, _, rest = module.partition(".")
        if top == "kd":
            other, _, inner = rest.partition(".")
            own = other == unit and "/" in path
            may = own or other in MAY_IMPORT[unit] or rest in MAY_IMPORT[unit]
            allowed = inner.startswith("_") if own and unit in PART_FOLDERS else may
        else:
            allowed = path.startswith(MAY_IMPORT_OUTSIDE[top]) if top in MAY_IMPORT_OUTSIDE else True
            allowed = allowed and not (unit in ("serve", "predict") and top in ("torch", "torchvision"))
        if not allowed:
            wrong.append(module)
    return wrong


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports(path):
    name = name_of(path)
    if name == "kd/__init__.py":
        allowed = {"__future__", "importlib", "os", "typing"}
        assert set(imports(ast.parse(path.read_text()))) <= allowed
    else:
        assert wrong_imports(name, imports(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("kd/setup/teacher.py", "from kd.jobs.teach import fit_teacher"),
        ("kd/losses/kl.py", "from kd.losses.ce import CE"),
        ("kd/losses/kl.py", "from kd.losses import ce"),
        ("kd/losses/kl.py", "def f():\n    from kd.models import load"),
        ("kd/engine/loop.py", "from kd.setup import build"),
        ("kd/engine/loop.py", "import timm.data"),
        ("kd/errors.py", "import kd.types"),
        ("kd/config/load.py", "from kd.setup.build import build_run"),
        ("kd/data/loader.py", "from kd.engine.run import Run"),
        ("kd/setup/build.py", "from omegaconf import OmegaConf"),
        ("kd/jobs/train.py", "import kd.cli.training"),
        ("kd/files/storage.py", "import pickle"),
        ("kd/sifting/loader.py", "from kd.sifters.none import Everything"),
        ("kd/sifting/loader.py", "from kd.engine import loop"),
        ("kd/sifting/frameworks.py", "from transformers import TrainerCallback"),
        ("kd/sifters/relative.py", "from kd.sifting import SiftingDataloader"),
        ("kd/serve/app.py", "from kd.models import load"),
        ("kd/serve/model.py", "import torch"),
        ("kd/predict/run.py", "import torch"),
        ("kd/export/export.py", "from kd.serve import app"),
    ],
)
def test_the_rules_can_be_broken(name, source):
    assert len(wrong_imports(name, imports(ast.parse(source)))) == 1


def test_no_file_imports_itself_through_others():
    """Of two files that import each other one cannot be imported first."""
    modules = {name_of(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path for path in FILES}
    graph = {name: set(imports(ast.parse(path.read_text()), functions=False)) for name, path in modules.items()}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_budgets(path):
    text = path.read_text()
    name = name_of(path)
    # A table of drawings is data: its length says nothing about how hard it is to read.
    limit = 500 if name.startswith("kd/datasets/_food") else 400
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
