"""Who may import whom (docs/design.md), how long a file may be, and that `import kd`
stays light.
"""

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "kd").rglob("*.py"))

BELOW_SETUP = {
    "core",
    "files",
    "models",
    "parts.registry",
    "config",
    "data",
    "engine",
    "cluster",
}
MAY_IMPORT = {
    "core": set(),
    "files": {"core"},
    "models": {"core", "files"},
    "parts": {"core", "files"},
    "config": {"core", "parts.registry"},
    "data": {"core", "files"},
    "engine": {"core", "files"},
    "cluster": {"core", "files", "parts.registry", "data"},
    "setup": BELOW_SETUP,
    "study": BELOW_SETUP | {"setup", "parts.tasks"},
    "deploy": BELOW_SETUP | {"setup", "parts.tasks"},
    "jobs": BELOW_SETUP | {"setup", "study", "deploy"},
    "cli": BELOW_SETUP | {"__version__", "setup", "study", "deploy", "jobs"},
    "sifting": {"core", "parts.sifters._window"},  # stands alone
    "__main__": {"cli"},
}
ORDER = tuple(MAY_IMPORT)[:13]
STRICTER = {  # rooms in a room that know less than it does
    "parts/networks/": {"core", "models", "parts.registry"},
    "parts/exporters/": {"core", "models.runtimes"},
    "deploy/serve/": {"core", "files", "parts.registry", "deploy.shift"},
    "deploy/predict/": {"core", "files", "deploy.serve"},
    "jobs/progress/": {"core"},
    "study/audit/": {"core", "files"},
}
MAY_IMPORT_OUTSIDE = {
    "torch_xla": ("parts/backends/xla.py",),
    "smdistributed": ("parts/backends/smddp.py",),
    "accelerate": ("jobs/progress/trackers.py",),
    "timm": (
        "models/",
        "deploy/export/calibrate.py",
        "data/views.py",
        "setup/build.py",
    ),
    "omegaconf": ("config/", "setup/finished.py"),
    "safetensors": ("models/", "files/", "deploy/export/", "deploy/verify/"),
    "boto3": ("cluster/",),
    "botocore": ("cluster/",),
    "fsspec": ("files/object_store.py",),
    "starlette": ("deploy/serve/",),
    "granian": ("deploy/serve/server.py",),
    "python_multipart": ("deploy/serve/bodies.py",),
    "prometheus_client": ("deploy/serve/metrics.py",),
    "onnx": ("models/runtimes.py",),
    "onnxruntime": ("models/runtimes.py", "parts/exporters/onnxruntime.py"),
    "openvino": ("models/runtimes.py", "parts/exporters/openvino.py"),
    "nncf": ("parts/exporters/openvino.py",),
    "executorch": ("parts/exporters/executorch.py",),
    "ray": ("cluster/ray_cluster.py", "cluster/decoders.py"),
    "optuna": ("study/sweeps/",),
    "psutil": ("engine/monitor/system.py", "core/host.py"),
    "pynvml": ("engine/monitor/system.py",),
    "transformers": ("parts/networks/_towers.py",),
    "jinja2": ("files/templates.py",),
    "vl_convert": ("study/report/charts.py",),
    "pickle": (),
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def trees() -> dict[str, ast.Module]:
    return {name_of(path): ast.parse(path.read_text()) for path in FILES}


def imports(tree: ast.AST, functions: bool = True) -> Iterator[str]:
    """Yield every module that a file imports; without `functions`, at its import."""
    for node in ast.iter_child_nodes(tree):
        if not functions and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide what is imported"
            module = node.module or ""
            package = (ROOT / module.replace(".", "/")).is_dir()
            yield from (
                f"{module}.{alias.name}" if package else module for alias in node.names
            )
        else:
            yield from imports(node, functions)


def within(module: str, allowed: Iterable[str]) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in allowed)


def wrong_imports(name: str, modules: Iterator[str]) -> list[str]:
    """Return what a file may not import."""
    path = name.removeprefix("kd/")
    room = path.partition("/")[0].removesuffix(".py")
    inner = next((folder for folder in STRICTER if path.startswith(folder)), "")
    may = STRICTER[inner] if inner else MAY_IMPORT[room]
    package = path.rpartition("/")[0].replace("/", ".")
    wrong = []
    for module in modules:
        top, _, below = module.partition(".")
        if top == "kd":
            # files of a part folder share only through a `_file`
            if room == "parts" and package != "parts":
                allowed = within(below, may) or below.startswith(f"{package}._")
            else:
                allowed = within(below, may) or within(
                    below, [inner.strip("/").replace("/", ".") or room]
                )
        else:
            allowed = path.startswith(MAY_IMPORT_OUTSIDE.get(top, ""))
            light = inner in ("deploy/serve/", "deploy/predict/")
            allowed = allowed and not (light and top in ("torch", "torchvision"))
        if not allowed:
            wrong.append(module)
    return wrong


def test_fourteen_rooms():
    names = {path.name for path in (ROOT / "kd").iterdir()} - {
        "__init__.py",
        "__main__.py",
        "py.typed",
        "__pycache__",
    }
    assert names <= {*ORDER, "sifting"}
    for i, room in enumerate(ORDER):
        below = [*ORDER[:i], "__version__"]
        assert all(within(module, below) for module in MAY_IMPORT[room]), room


def test_imports():
    names = (
        "__future__",
        "importlib",
        "os",
        "typing",
        "kd",
    )  # kd under TYPE_CHECKING: its names are lazy
    wrong = {
        path: wrong_imports(path, imports(tree))
        for path, tree in trees().items()
        if path != "kd/__init__.py"
    }
    assert {path: modules for path, modules in wrong.items() if modules} == {}
    assert all(within(module, names) for module in imports(trees()["kd/__init__.py"]))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("kd/setup/build_teacher.py", "from kd.jobs.train import fit_teacher"),
        ("kd/parts/losses/kl.py", "from kd.parts.losses.ce import CE"),
        ("kd/parts/losses/kl.py", "from kd.parts.losses import ce"),
        ("kd/parts/losses/kl.py", "from kd.parts.tasks._logits import Logits"),
        (
            "kd/parts/losses/kl.py",
            "def f():\n    from kd.models import load_classifier",
        ),
        (
            "kd/parts/losses/kl.py",
            "if TYPE_CHECKING:\n    from kd.models import load_classifier",
        ),
        ("kd/engine/loop.py", "from kd.setup import build"),
        ("kd/engine/loop.py", "import timm.data"),
        ("kd/core/errors.py", "import kd.files.storage"),
        ("kd/config/load.py", "from kd.setup.build import build_run"),
        ("kd/data/loader.py", "from kd.engine.run import Run"),
        ("kd/setup/build.py", "from omegaconf import OmegaConf"),
        ("kd/jobs/train.py", "import kd.cli.training"),
        ("kd/jobs/progress/console.py", "from kd.jobs import train"),
        ("kd/files/storage.py", "import pickle"),
        ("kd/sifting/dataloader.py", "from kd.parts.sifters.none import Everything"),
        ("kd/sifting/dataloader.py", "from kd.engine import loop"),
        ("kd/sifting/frameworks.py", "from transformers import TrainerCallback"),
        ("kd/parts/sifters/relative.py", "from kd.sifting import SiftingDataloader"),
        ("kd/deploy/serve/app.py", "from kd.models import load_classifier"),
        ("kd/deploy/serve/model.py", "import torch"),
        ("kd/deploy/predict/predict.py", "import torch"),
        ("kd/study/report/page.py", "from kd.deploy.serve import app"),
    ],
)
def test_the_rules_can_be_broken(name, source):
    assert len(wrong_imports(name, imports(ast.parse(source)))) == 1


def test_no_file_imports_itself_through_others():
    """Of two files that import each other one cannot be imported first."""
    modules = {
        name_of(path)
        .removesuffix(".py")
        .replace("/", ".")
        .removesuffix(".__init__"): path
        for path in FILES
    }
    del modules["kd"]  # its names are found when they are asked for
    graph = {
        name: set(imports(ast.parse(path.read_text()), functions=False))
        for name, path in modules.items()
    }
    TopologicalSorter(graph).prepare()


LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(path):
    """Return the line of each token but layout, comments and docstrings."""
    tree = trees()[name_of(path)]
    docstrings = {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    with tokenize.open(path) as file:
        tokens = list(tokenize.generate_tokens(file.readline))
    return [
        token.start[0]
        for token in tokens
        if token.type not in LAYOUT
        and not (token.type == tokenize.STRING and token.start[0] in docstrings)
    ]


def test_files_and_functions_are_short():
    """No formatter changes the number of tokens; lines are free."""
    long = {}
    for path in FILES:
        name = name_of(path)
        lines = code_lines(path)
        if len(lines) > 3_500:
            long[name] = len(lines)
        for node in ast.walk(trees()[name]):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                last = node.end_lineno or node.lineno
                count = sum(node.lineno <= line <= last for line in lines)
                if count > 500:
                    long[f"{name}:{node.lineno} {node.name}"] = count
    assert long == {}, "a file has 3,500 tokens at most, a function 500"


def definitions(*kinds: type[ast.AST]) -> Iterator[tuple[str, Any]]:
    for name, tree in trees().items():
        yield from ((name, node) for node in ast.walk(tree) if isinstance(node, kinds))


def test_a_class_name_means_one_thing():
    """`Options` is what every part has."""
    names = Counter(
        node.name for _, node in definitions(ast.ClassDef) if node.name != "Options"
    )
    assert len([name for name, count in names.items() if count > 1]) <= 8


def test_a_file_name_stands_once():
    """A file is called after what it does, so that its name alone identifies it."""
    names = Counter(
        path.name for path in FILES if path.name not in ("__init__.py", "__main__.py")
    )
    assert [name for name, count in names.items() if count > 1] == []


DEVICES = re.compile(r"""["']xla["']|device\.type (==|!=|in|not in) """)
DEVICES_ELSEWHERE = {
    "kd/parts/sifters/_window.py": (
        1
    ),  # MPS lacks float64; kd.sifting works in loops without a backend of kd
    "kd/sifting/loss.py": 1,  # another's loop: the generator of its GPU
    "kd/sifting/timing.py": 1,  # another's loop: its GPU is waited for
    "kd/study/report/predictions.py": (
        1
    ),  # a report has no backend: it takes a GPU where there is one
}


def test_devices_are_known_below_their_parts():
    """What others must know of a device stands in `BackendFacts`."""
    counts = Counter(
        name_of(path) for path in FILES for _ in DEVICES.finditer(path.read_text())
    )
    assert {
        name: count for name, count in counts.items() if "parts/backends" not in name
    } == DEVICES_ELSEWHERE


def test_few_functions_take_many_arguments():
    names = [
        f"{name} {node.name}"
        for name, node in definitions(ast.FunctionDef, ast.AsyncFunctionDef)
        if sum(
            argument.arg not in ("self", "cls")
            for argument in [*node.args.args, *node.args.kwonlyargs]
        )
        >= 7
    ]
    assert len(names) <= 8, names


def constants(source: str) -> Iterator[tuple[str, bool]]:
    """Yield a module's numeric constants, and whether a text is beside each."""
    lines = source.splitlines()
    body = ast.parse(source).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not isinstance(
            node.value, (ast.Constant, ast.Tuple, ast.BinOp, ast.UnaryOp)
        ):
            continue
        nodes = [*ast.walk(node.value)]
        if any(isinstance(inner, ast.Call) for inner in nodes):
            continue  # computed from others
        numbers = [inner for inner in nodes if isinstance(inner, ast.Constant)]
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [
            inner.id
            for target in targets
            for inner in ast.walk(target)
            if isinstance(inner, ast.Name)
        ]
        if all(name.isupper() for name in names) and any(
            type(number.value) in (int, float) for number in numbers
        ):
            below = isinstance(after, ast.Expr) and isinstance(
                after.value, ast.Constant
            )
            beside = any(
                "#" in line for line in lines[node.lineno - 1 : node.end_lineno]
            )
            yield names[0], below or beside or lines[node.lineno - 2].startswith("#")


def test_each_constant_has_its_reason():
    without = [
        (name_of(path), name)
        for path in FILES
        for name, text in constants(path.read_text())
        if not text
    ]
    assert without == []
    assert list(constants("A = 3\nB = 4  # why\nC = 5\n'why'\n")) == [
        ("A", False),
        ("B", True),
        ("C", True),
    ]


def loaded_by(code: str) -> set[str]:
    """Run `code` in a fresh interpreter, and return the modules that it loaded."""
    script = (
        f"import sys; before = set(sys.modules)\n{code}\nprint(*sorted(set(sys.modules)"
        " - before))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(run.stdout.splitlines()[-1].split())


def test_import_kd_is_light():
    loaded = loaded_by("import kd; kd.__version__; kd.__all__")
    assert {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names == {
        "kd"
    }
    assert len(loaded) <= 60, sorted(
        loaded
    )  # 30 of the standard library on Python 3.11; torch brings 1,500


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is no package
        return False


def test_scripts_in_texts_import_names_that_exist():
    """Neither pyright nor a formatter looks into a text that a test runs elsewhere."""
    pattern = re.compile(r"^from (kd[\w.]*) import (?:\(([^)]*)\)|([\w, ]+))", re.M)
    wrong = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for module, several, line in pattern.findall(path.read_text()):
            for imported in (several or line).split(","):
                name = imported.split(" as ")[0].strip()
                known = hasattr(importlib.import_module(module), name)
                if name and not known and not is_module(f"{module}.{name}"):
                    wrong.append(f"{path.name}: {module}.{name}")
    assert not wrong


def test_the_tests_import_kd_before_torch():
    """Else OpenMP's threads spin, and two busy cores take four times the CPU time."""
    names = [*imports(ast.parse((ROOT / "tests/conftest.py").read_text()))]
    assert names.index("kd") < min(names.index("torch"), names.index("pieces"))


def test_exporters_are_light():
    """kd-serve loads a graph without torch."""
    loaded = loaded_by(
        "from kd.parts import registry; [registry.exporter(file) for file in"
        " registry.graphs()]"
    )
    assert (
        not {"torch", "onnxruntime", "openvino", "onnx", "nncf", "executorch"} & loaded
    )


def test_the_end_of_a_run_draws_nothing():
    """kd-train's summary is text: no template, and no library of charts."""
    loaded = loaded_by(
        "import kd.jobs.train, kd.study.report.record, kd.study.report.summary"
    )
    assert not {"vl_convert", "kd.files.templates"} & loaded


def test_errors_are_light():
    assert "torch" not in loaded_by("from kd import KdError")


def test_sifting_for_other_loops_is_light():
    loaded = loaded_by("import kd.sifting")
    assert (
        not {
            "timm",
            "transformers",
            "lightning",
            "pytorch_lightning",
            "accelerate",
            "omegaconf",
        }
        & loaded
    )


def test_commands_explain_themselves_without_timm():
    """`kd-train --help` reads the parts' options, without a model library."""
    loaded = loaded_by("import kd.cli.training")
    assert not {"torch", "timm", "accelerate"} & loaded
