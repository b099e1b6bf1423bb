"""Run the commands around training.

They are kd-init, kd-train, kd-teach, kd-cache, kd-sweep, kd-evaluate, kd-report,
kd-parts and kd-schema.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kd.cli.command import (
    add_trust,
    explain_keys,
    import_quickly,
    load_config,
    new_parser,
    number,
    run_guarded,
    whole_number,
)
from kd.core.host import command_seconds
from kd.core.references import redact


def init(argv: Sequence[str] | None = None) -> int:
    """Write the configuration of a run: `kd-init FOLDER [--student-ms MS]`."""
    parser = new_parser(
        "kd-init",
        "Inspect a folder of images and this machine, and write a commented"
        " configuration.",
        "kd-init photos --student-ms 10 --student-mb 4",
        with_config=False,
    )
    add = parser.add_argument
    text = (
        "class folders, with train, val and test or without; images alone; or images"
        " and a table of labels"
    )
    add("folder", metavar="FOLDER", type=Path, help=text)
    text = (
        "most milliseconds per image: students are timed on this machine (--latency is"
        " the old name)"
    )
    names = ("--student-ms", "--latency")
    add(*names, dest="ms", metavar="MS", type=number("ms"), help=text)
    text = "most megabytes of the student in float32 (--mb is the old name)"
    add("--student-mb", "--mb", dest="mb", metavar="MB", type=number("mb"), help=text)
    text = (
        "pretrained weights: a name, a file, NAME=FILE or a folder (default: the"
        " largest in the hub's cache here)"
    )
    add("--teacher", dest="teacher_weights", metavar="WEIGHTS", default="", help=text)
    text = (
        "pretrained weights of the student, as for --teacher; given several times, MS"
        " and MB choose; given once, only kd-export checks MS and MB (default: with MS"
        " or MB, the largest within them in the hub's cache here; else random weights)"
    )
    add(
        "--student",
        dest="student_weights",
        metavar="WEIGHTS",
        action="append",
        default=[],
        help=text,
    )
    text = (
        "where to write, never over an existing file (default: FOLDER's name with"
        " .yaml)"
    )
    add("-o", dest="to", metavar="FILE", type=Path, help=text)
    options = parser.read(argv)

    def command() -> None:
        import_quickly("torch")
        from kd.jobs.init.init import init

        file, following = init(**vars(options))
        print(f"wrote {file}. Read it, then:", *following, sep="\n  ")

    return run_guarded(command)


def train(argv: Sequence[str] | None = None) -> int:
    """Distill a teacher into a student: `kd-train CONFIG [key=value ...]`."""
    parser = new_parser(
        "kd-train",
        "Distill a frozen teacher into a small student. The same command resumes a run"
        " that was interrupted.",
        "kd-train vit_food run.epochs=5 optimizer.lr=5e-4",
    )
    text = (
        "train nothing: validate the configuration, look for damaged and repeated"
        " images (a 5 s sample; =all: every image), time a few steps, and estimate"
        " time, memory and cost"
    )
    parser.add_argument(
        "--check", nargs="?", choices=("some", "all"), metavar="all", help=text
    )
    text = "do not score the test split; use it while comparing runs"
    parser.add_argument("--no-test", action="store_true", help=text)
    words = sys.argv[1:] if argv is None else argv
    # CONFIG may follow `--check`
    words = ["--check=some" if word == "--check" else word for word in words]
    options = parser.read(words)

    def command() -> None:
        settings = load_config(options)
        if options.check:
            from kd.jobs.forecast import forecast
            from kd.setup.recipe import resolve

            everything = options.check == "all"
            text = forecast(resolve(settings), options.config, everything=everything)
            print(redact(str(text)))
            return
        from kd.jobs.train import train

        split = "val" if options.no_test else "test"
        text = train(settings, command_seconds(), split).report
        if text:
            print("\n" + text)

    return run_guarded(command, resumable=True)


def teach(argv: Sequence[str] | None = None) -> int:
    """Fit the teacher of a configuration: `kd-teach CONFIG [key=value ...]`."""
    parser = new_parser(
        "kd-teach",
        "Fit the teacher (or teachers) of CONFIG on the labels, keep the best epoch,"
        " and print the folder. A teacher that was fitted from the same content is"
        " reused.",
        "kd-teach configs/vit_food101.yaml teacher.fit.epochs=10",
    )
    options = parser.read(argv)

    def command() -> None:
        settings = load_config(options)
        from kd.jobs.train import teach

        for folder in teach(settings, command_seconds()):
            print(folder)

    return run_guarded(command, resumable=True)


def cache(argv: Sequence[str] | None = None) -> int:
    """Compute the teacher's logits before training: `kd-cache CONFIG`."""
    parser = new_parser(
        "kd-cache",
        "Fill the teacher's cache of CONFIG ahead of training, on any number of ranks."
        " The same command resumes after an interruption.",
        "kd-cache configs/vit_food.yaml teacher.cache.views=4",
    )
    text = (
        "also write the outputs by file name, for teacher.kind=answers elsewhere"
        " (.safetensors)"
    )
    parser.add_argument("--export", metavar="FILE", default="", help=text)
    options = parser.read(argv)

    def command() -> None:
        settings = load_config(options)
        from kd.jobs.fill_cache import cache

        filled = cache(settings, options.export)
        print(
            f"cache: '{filled.folder}' holds {filled.records} records, {filled.missing}"
            f" are missing; the teacher ran on {filled.computed} images in"
            f" {filled.seconds:.1f} s"
        )
        if options.export:
            print(f"cache: wrote '{options.export}'")

    return run_guarded(command, resumable=True)


def sweep(argv: Sequence[str] | None = None) -> int:
    """Find the best settings: `kd-sweep CONFIG key=a,b,c ... [--trials N]`."""
    parser = new_parser(
        "kd-sweep",
        "Train CONFIG with all combinations of the values that keys list, or by a"
        " sampler of Optuna's, with one teacher, cache and store for all. The best is"
        " trained again with two other seeds. Different students (student.model=a,b)"
        " are also timed, and plotted by score and milliseconds. The same command"
        " resumes after an interruption; with --storage several hosts share the"
        " trials.",
        "kd-sweep vit_food losses.0.temperature=1,2,4"
        " 'optimizer.lr=loguniform(1e-4,1e-2)' --trials 20",
    )
    add = parser.add_argument
    text = (
        "number of trials, if a key has a range (uniform, loguniform, integers) or a"
        " sampler is named"
    )
    add("--trials", metavar="N", type=whole_number(1, 10**6), default=0, help=text)
    text = "grid, tpe, random, gp, cmaes, nsga2, ... (default: grid; with --trials tpe)"
    add("--sampler", metavar="NAME", default="", help=text)
    text = (
        "end hopeless trials early: median, percentile(25), successive_halving,"
        " hyperband, ... (default none)"
    )
    add("--pruner", metavar="NAME", default="none", help=text)
    text = (
        "database of the trials, such as sqlite:///sweep.db; run.folder is shared too"
        " (default: a journal there)"
    )
    add("--storage", metavar="URL", default="", help=text)
    add(
        "--by",
        metavar="SCORE",
        default="",
        help="deciding score (default: the task's first)",
    )
    text = (
        "search the Pareto front of scores and costs: accuracy,ms,mb (CPU time per"
        " image, size of the graph)"
    )
    add("--objectives", metavar="NAMES", default="", help=text)
    text = "parallel trials; each gets its share of the cores (default 1)"
    add("--jobs", metavar="N", type=whole_number(1, 999), default=1, help=text)
    options = vars(parser.read(argv))
    settings, overrides, _ = (
        options.pop(name) for name in ("config", "overrides", "help_keys")
    )

    def command() -> None:
        from kd.study.sweeps.sweep import sweep

        print(sweep(settings, *overrides, **options).text)

    return run_guarded(command, resumable=True)


def evaluate(argv: Sequence[str] | None = None) -> int:
    """Score student and teacher: `kd-evaluate RUN [key=value ...] [--audit]`."""
    parser = new_parser(
        "kd-evaluate",
        "Evaluate the best student of a run folder, its teacher and their agreement,"
        " with 95 % intervals.",
        "kd-evaluate runs/vit_food data.workers=2",
        with_config=False,
    )
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="a run folder")
    add(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="keys of the run's configuration to change",
    )
    text = "split: val (default), or test, which no choice used"
    add("--split", choices=("val", "test"), default="val", help=text)
    text = (
        "also list doubtful labels, and photographs in two splits that have similar"
        " outputs (RUN/audit)"
    )
    add("--audit", action="store_true", help=text)
    add_trust(parser)
    options = parser.read(argv)

    def command() -> None:
        from kd.jobs.evaluate import evaluate

        scored = evaluate(
            options.run, options.overrides, options.trust, options.split, options.audit
        )
        for name, value in {**scored.row, "images": scored.images}.items():
            text = str(value)
            if isinstance(value, float):
                text = f"{value:.4f}"
                if name in scored.samples:
                    low, high = scored.samples[name].interval()
                    text += f"  95 %: {low:.4f} to {high:.4f}"
            print(f"{name:20s} {text}")

    return run_guarded(command)


def report(argv: Sequence[str] | None = None) -> int:
    """Report time, cost and results: `kd-report RUN... [--price] [key=value ...]`."""
    parser = new_parser(
        "kd-report",
        "Write one HTML file about a run, or about several side by side: findings,"
        " curves, time, load of the machine, sifting, and the classes and photographs"
        " on which the student is worse than its teacher.",
        "kd-report runs/vit_food runs/wttm --to compared.html",
        with_config=False,
    )
    add = parser.add_argument
    text = "run folders; also key=value, such as price.instance=NAME"
    add("runs", metavar="RUN", nargs="+", help=text)
    text = (
        "where to write the page (default: report.html in the first RUN), or the prices"
    )
    add("--to", metavar="FILE", type=Path, help=text)
    text = "print throughput, billable time, cost and saving only"
    add("--price", action="store_true", help=text)
    text = "validation images that both models predict; 0: all (default 2000)"
    add("--images", metavar="N", type=whole_number(0, 10**9), default=2000, help=text)
    add_trust(parser)
    options = parser.read(argv)
    overrides = [
        text for text in options.runs if "=" in text and not Path(text).is_dir()
    ]
    paths = [Path(text) for text in options.runs if text not in overrides]

    def command() -> None:
        from kd.core.errors import ConfigError
        from kd.core.text import markdown_table
        from kd.files.storage import write_text
        from kd.study.report import report as job

        if not paths:
            wrong = f"'{overrides[0]}' is no run folder, and there is no other"
            raise ConfigError(
                "RUN",
                wrong,
                "Run folders, then key=value",
                "Name one, such as runs/vit_food",
            )
        if options.price:
            text = markdown_table(job.prices(paths, overrides, options.trust))
            print(text)
            if options.to:
                write_text(options.to, text + "\n", "--to")
        else:
            page = job.report(
                paths, options.to, options.images, overrides, options.trust
            )
            print(page.summary)
            print(f"wrote {page.file} ({page.size / 2**20:.2f} MiB, self-contained)")

    return run_guarded(command)


def parts(argv: Sequence[str] | None = None) -> int:
    """List the losses, sifters, datasets and backends: `kd-parts [FOLDER]`."""
    parser = new_parser(
        "kd-parts",
        "List the parts that configurations name.",
        "kd-parts losses",
        with_config=False,
    )
    text = (
        "losses, sifters, ... (default: all), or your own part, such as"
        " mylab.losses.mse"
    )
    parser.add_argument("folder", nargs="?", metavar="FOLDER|MODULE", help=text)
    options = parser.read(argv)

    def command() -> None:
        from kd.core.errors import ConfigError, did_you_mean
        from kd.parts import registry

        name = options.folder
        if name and "." in name:
            module = registry.find("losses", name, "kd-parts")
            print(f"{name}: {registry.summary(module)}\n{explain_keys(name)}")
            return
        if name and name not in registry.FOLDERS:
            near = did_you_mean(name, registry.FOLDERS) or "Give none to see all"
            raise ConfigError(
                "kd-parts",
                f"no folder '{name}'",
                f"Allowed: {', '.join(registry.FOLDERS)}",
                near,
            )
        for folder in [name] if name else registry.FOLDERS:
            print(f"{folder}:")
            for kind, summary in registry.describe(folder):
                print(f"  {kind:14s} {summary}")

    return run_guarded(command)


def schema(argv: Sequence[str] | None = None) -> int:
    """Print the JSON Schema of configurations: `kd-schema [CONFIG]`."""
    summary = (
        "Print the JSON Schema of configurations, by which editors complete and check"
        " them."
    )
    parser = new_parser(
        "kd-schema", summary, "kd-schema > kd.schema.json", with_config=False
    )
    text = "a configuration whose parts from outside kd the schema describes too"
    parser.add_argument("config", nargs="?", metavar="CONFIG", help=text)
    options = parser.read(argv)

    def command() -> None:
        from kd import config
        from kd.config.json_schema import json_schema

        values = config.read(options.config) if options.config else None
        print(json.dumps(json_schema(values), indent=1))

    return run_guarded(command)
