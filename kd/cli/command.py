"""Parse and run commands: one line for a user's error, a traceback for a bug."""

from __future__ import annotations

import argparse
import gc
import importlib
import io
import logging
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from kd.core import options
from kd.core.errors import (
    ConfigError,
    Interrupted,
    KdError,
    did_you_mean,
    error_with_line,
    last_foreign_line,
)
from kd.core.host import signals
from kd.core.options import field_docs
from kd.core.references import redact

if TYPE_CHECKING:
    from kd.config.schema import Config

Built = TypeVar("Built")
EXIT_OK = 0  # the command did its work
EXIT_BUG = 1  # as Python's after an exception
EXIT_USER = 2  # as argparse's
EXIT_INTERRUPTED = 130  # as a shell's after Ctrl-C


def run_guarded(command: Callable[[], None], resumable: bool = False) -> int:
    """Run a command and return its exit code; a `resumable` one handles signals."""
    # names of any alphabet, and files': as Python's own stderr
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    log = logging.getLogger("kd")
    lines = _Lines()
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    try:
        with signals.handled() if resumable else nullcontext():
            command()
    except (KdError, Interrupted) as error:
        rank = ""
        if os.environ.get("WORLD_SIZE", "1") != "1":
            rank = f"[rank {os.environ.get('RANK', '?')}] "
        texts = [rank + text for text in redact(str(error)).splitlines()]
        print("\n".join(texts), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted" + "; the same command resumes" * resumable, file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return EXIT_OK
    except Exception as error:
        return _report_exception(error)
    finally:
        log.removeHandler(lines)
    return EXIT_OK


def _report_exception(error: Exception) -> int:
    """Print whose fault an exception is, and return the exit code."""
    if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):
        # torch wants one
        text = f"TMPDIR: {error.strerror}. Set it to a folder that you may write."
        print(text, file=sys.stderr)
        return EXIT_USER
    print(redact(traceback.format_exc()), end="", file=sys.stderr)
    if last_foreign_line(error):
        text = f"this is an error of your own code, not of kd: {error_with_line(error)}"
        print(redact(text), file=sys.stderr)
        return EXIT_USER
    text = "this is a bug in kd; please report it with the lines above"
    print(text, file=sys.stderr)
    return EXIT_BUG


class _Lines(logging.Handler):
    """Print messages without a prefix: warnings to stderr, the rest to stdout."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        print(redact(record.getMessage()), file=stream, flush=True)


class Parser(argparse.ArgumentParser):
    """Parse as argparse does, with one line for a wrong call, and completion."""

    def error(self, message: str) -> NoReturn:
        example = ""
        if self.epilog:
            example = f" For example: {self.epilog.splitlines()[0].partition(': ')[2]}."
        # argparse appends this to optional arguments
        message = message.removesuffix(", key=value")
        message += "" if message.endswith("?") else "."
        self.exit(
            EXIT_USER, f"{self.prog}: {message}{example} Options: {self.prog} --help.\n"
        )

    def read(self, argv: Sequence[str] | None) -> argparse.Namespace:
        if "_ARGCOMPLETE" in os.environ:
            import argcomplete  # type: ignore[import-not-found]  # an extra

            argcomplete.autocomplete(self)
        self.words = list(sys.argv[1:] if argv is None else argv)
        return self.parse_intermixed_args(argv)


class ExplainKeys(argparse.Action):
    """Explain every key (with CONFIG, only of the kinds that it uses) and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        words = cast("Parser", parser).words
        paths = [word for word in words if word[:1] != "-" and "=" not in word]
        path = paths[0] if paths else ""
        parser.exit(run_guarded(lambda: print(explain_keys(path=path), flush=True)))


def from_options(
    cls: type[Built], options: argparse.Namespace, **values: object
) -> Built:
    """Build a dataclass from the options of the same names and from further values."""
    named = {
        field.name: getattr(options, field.name)
        for field in fields(cls)  # type: ignore[arg-type]
        if hasattr(options, field.name)
    }
    return cls(**{**named, **values})


def add_fields(parser: argparse.ArgumentParser, cls: type) -> None:
    """Add an option for each field that `kd.core.options.option` declares."""
    # a field's string and its default are the help
    docs = field_docs(cls)
    for field in fields(cls):
        if "option" not in field.metadata:
            continue
        option = field.metadata["option"]
        default = field.default
        text = docs[field.name].removesuffix(".").replace("%", "%%")
        if text[1:2].islower():
            text = text[:1].lower() + text[1:]
        name = option["flag"] or f"--{field.name.replace('_', '-')}"
        arguments: dict[str, Any] = {"dest": field.name, "default": default}
        if default is MISSING:
            name = field.name
            arguments = {}
        if isinstance(default, bool):
            action = argparse.BooleanOptionalAction if default else "store_true"
            arguments["action"] = action
            text += " (default: yes)" * default
        else:
            parse = option["parse"]
            arguments["metavar"] = option["metavar"]
            arguments["type"] = _type(parse) if parse else str
            if default not in (None, "", MISSING) and "(default" not in text:
                text += f" (default {default})"
        parser.add_argument(name, help=text, **arguments)


def _type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a type for argparse, which shows only the text of ArgumentTypeError."""

    def typed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return typed


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """Return the type of an option that is a whole number from `low` to `high`."""
    return _type(options.whole_number(low, high))


def number(unit: str) -> Callable[[str], float]:
    """Return the type of an option, a number above 0 with or without its unit."""
    return _type(lambda text: options.parse_positive(text.lower().removesuffix(unit)))


def explain_keys(prefix: str = "", path: str = "") -> str:
    """Describe the keys below a dotted prefix, or all that name a word, by kind.

    `path`: a configuration; only keys of the kinds that it uses are explained.
    """
    # kd-serve does not need these imports
    from kd.config.explain import explain, explain_part, kinds_of
    from kd.config.load import read

    rows = explain(re.sub(r"\.[0-9]+(?=[.[]|$)|\[[0-9]+\]", "[]", prefix))
    rows = rows or [row for row in explain() if row[0].rpartition(".")[2] == prefix]
    about = [
        f"kind: {prefix} in {section}: {summary}"
        for section, summary in explain_part(prefix)
    ]
    if about:
        rows += [row for row in explain() if row[3].startswith(f"[kind: {prefix}] ")]
    if not (rows or about):  # a word of names or meanings, such as wandb
        word = re.compile(rf"\b{re.escape(prefix)}\b", re.IGNORECASE)
        # `batch size` is in data.batch_size
        rows = [
            row
            for row in explain()
            if word.search(f"{re.sub('[._]', ' ', row[0])} {row[3]}")
        ]
    if not (rows or about):
        near = did_you_mean(prefix, [row[0] for row in explain()])
        remedy = near or "See `kd-train --help-keys`"
        raise ConfigError(prefix, "no such key", "", remedy)
    # by section and kind, in the order of the sections
    groups: dict[str, dict[str, list[str]]] = {}
    for key, allowed, default, meaning in rows:
        default = "" if default == "required" else f", default {default}"
        match = re.fullmatch(r"(?s)(?:\[kind: (\w+)\] )?(.*)", meaning)
        assert match is not None
        kind, meaning = match.groups("")
        text = textwrap.fill(
            meaning, 110, initial_indent="      ", subsequent_indent="      "
        )
        by_kind = groups.setdefault(key.split(".")[0], {})
        lines = by_kind.setdefault(kind, [f"kind: {kind}"] if kind else [])
        lines += [f"  {key}  ({allowed.removeprefix('Allowed: ')}{default})", text]
    if path:
        for section, kinds in kinds_of(read(path)).items():
            by_kind = groups.get(section, {})
            groups[section] = {
                kind: by_kind[kind] for kind in by_kind if kind in {"", *kinds}
            }
    texts = [*about]
    for by_kind in groups.values():
        for kind in sorted(by_kind):
            texts += by_kind[kind]
    return "\n".join(texts)


def new_parser(
    command: str, summary: str, example: str, with_config: bool = True
) -> Parser:
    """Build the parser of a command."""
    # `with_config` adds CONFIG, `key=value` and `--help-keys`
    epilog = f"example: {example}"
    if with_config:
        epilog += (
            "\nkeys:    kd help KEY explains one, or all below it: kd help teacher.fit"
        )
    parser = Parser(
        prog=command,
        description=summary,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if with_config:
        parser.add_argument(
            "--help-keys",
            nargs=0,
            action=ExplainKeys,
            help="explain every key, of CONFIG's kinds if it is given; exit",
        )
        parser.add_argument(
            "config",
            metavar="CONFIG",
            help="a YAML file, or the name of one of kd's own",
        )
        parser.add_argument(
            "overrides", metavar="key=value", nargs="*", help="keys to change"
        )
    return parser


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add `--trust` to a command that reads run folders."""
    text = (
        "import code and read paths named in the run's config.yaml; only for runs that"
        " you trust"
    )
    parser.add_argument("--trust", action="store_true", help=text)


def load_config(options: argparse.Namespace) -> Config:
    """Load the configuration of a command with CONFIG, and import torch and timm."""
    import_quickly("torch")
    from kd import config

    settings = config.load(options.config, options.overrides)
    import_quickly("timm")
    return settings


def import_quickly(package: str) -> None:
    """Import a large package without garbage collection, now and later.

    torch creates half a million objects and no garbage. Python's collector would scan
    them repeatedly, and again at exit: 1 of 4.4 CPU seconds. Triton's objects (timm
    imports it) must be collected at exit, else its binding lists them on stderr.
    """
    if package in sys.modules or not gc.isenabled():
        return
    gc.disable()
    try:
        importlib.import_module(package)
        if "triton" not in sys.modules:
            gc.freeze()
    finally:
        gc.enable()
