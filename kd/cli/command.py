"""Shared by all commands: parser, exit codes, one line for a user's error and a
traceback for a bug.
"""

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
EXIT_OK, EXIT_BUG, EXIT_USER, EXIT_INTERRUPTED = (
    0,
    1,
    2,
    130,
)  # 2 is argparse's, 130 a shell's after Ctrl-C


def guarded(command: Callable[[], None], resumable: bool = False) -> int:
    """Run a command and return its exit code; a `resumable` one writes a checkpoint on
    SIGTERM and SIGINT.
    """
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # names of any alphabet, and files': as Python's own stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    log, lines = logging.getLogger("kd"), _Lines()
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    try:
        with signals.handled() if resumable else nullcontext():
            command()
    except (KdError, Interrupted) as error:
        rank = (
            f"[rank {os.environ.get('RANK', '?')}] "
            if os.environ.get("WORLD_SIZE", "1") != "1"
            else ""
        )
        print(
            "\n".join(rank + line for line in redact(str(error)).splitlines()),
            file=sys.stderr,
        )
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted" + "; the same command resumes" * resumable, file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return EXIT_OK
    except Exception as error:
        if isinstance(error, FileNotFoundError) and "temporary directory" in str(
            error
        ):  # torch wants one
            print(
                f"TMPDIR: {error.strerror}. Set it to a folder that you may write.",
                file=sys.stderr,
            )
            return EXIT_USER
        print(redact(traceback.format_exc()), end="", file=sys.stderr)
        if last_foreign_line(error):
            print(
                redact(
                    f"this is an error of your own code, not of kd: {error_with_line(error)}"
                ),
                file=sys.stderr,
            )
            return EXIT_USER
        print(
            "this is a bug in kd; please report it with the lines above",
            file=sys.stderr,
        )
        return EXIT_BUG
    finally:
        log.removeHandler(lines)
    return EXIT_OK


class _Lines(logging.Handler):
    """Print messages without a prefix: warnings to stderr, the rest to stdout."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        print(redact(record.getMessage()), file=stream, flush=True)


class Parser(argparse.ArgumentParser):
    """argparse's parser, with one line for a wrong call, and argcomplete's completion
    if the shell has it.
    """

    def error(self, message: str) -> NoReturn:
        example = (
            f" For example: {self.epilog.splitlines()[0].partition(': ')[2]}."
            if self.epilog
            else ""
        )
        message = message.removesuffix(
            ", key=value"
        )  # argparse appends this to optional arguments
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

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> None:
        words = (
            word
            for word in cast("Parser", parser).words
            if word[:1] != "-" and "=" not in word
        )
        parser.exit(guarded(lambda: print(explained(path=next(words, "")), flush=True)))


def taken(cls: type[Built], given: argparse.Namespace, **others: object) -> Built:
    """Build a dataclass from the parsed options of the same names and from further
    values.
    """
    named = {
        field.name: getattr(given, field.name)
        for field in fields(cls)  # type: ignore[arg-type]
        if hasattr(given, field.name)
    }
    return cls(**{**named, **others})


def add_fields(parser: argparse.ArgumentParser, cls: type) -> None:
    """Add an option for each field that `kd.core.options.option` declares; its string
    and default are the help.
    """
    docs = field_docs(cls)
    for one in fields(cls):
        if "option" not in one.metadata:
            continue
        metavar, parse, flag = (
            one.metadata["option"][key] for key in ("metavar", "parse", "flag")
        )
        name, default = flag or f"--{one.name.replace('_', '-')}", one.default
        text = docs[one.name].removesuffix(".").replace("%", "%%")
        text = text[:1].lower() + text[1:] if text[1:2].islower() else text
        more: dict[str, Any] = {"dest": one.name, "default": default}
        if default is MISSING:
            parser.add_argument(
                one.name,
                metavar=metavar,
                type=_type(parse) if parse else str,
                help=text,
            )
            continue
        if isinstance(default, bool):
            more["action"] = argparse.BooleanOptionalAction if default else "store_true"
            text += " (default: yes)" * default
        else:
            more |= {"metavar": metavar, "type": _type(parse) if parse else str}
            text += (
                f" (default {default})"
                if default not in (None, "") and "(default" not in text
                else ""
            )
        parser.add_argument(name, help=text, **more)


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
    """Return the type of an option that is a number above 0, with or without
    its unit.
    """
    return _type(lambda text: options.parse_positive(text.lower().removesuffix(unit)))


def explained(prefix: str = "", path: str = "") -> str:
    """Describe the keys below a dotted prefix, or all keys that end with a word,
    grouped by kind.

    `path`: a configuration; only keys of the kinds that it uses are explained.
    """
    from kd.config.explain import (
        explain,
        explain_part,
        kinds_of,
    )  # kd-serve does not need its imports
    from kd.config.load import read

    rows = explain(re.sub(r"\.[0-9]+(?=[.[]|$)|\[[0-9]+\]", "[]", prefix))
    rows = rows or [row for row in explain() if row[0].rpartition(".")[2] == prefix]
    about = [
        f"kind: {prefix} in {section}: {summary}"
        for section, summary in explain_part(prefix)
    ]
    rows += (
        [row for row in explain() if row[3].startswith(f"[kind: {prefix}] ")]
        if about
        else []
    )
    if not (rows or about):
        near = (
            did_you_mean(prefix, [row[0] for row in explain()])
            or "See `kd-train --help-keys`"
        )
        raise ConfigError(prefix, "no such key", "", near)
    groups: dict[
        str, dict[str, list[str]]
    ] = {}  # by section and kind, in the order of the sections
    for key, allowed, default, meaning in rows:
        default = "" if default == "required" else f", default {default}"
        match = re.fullmatch(r"(?s)(?:\[kind: (\w+)\] )?(.*)", meaning)
        assert match is not None
        kind, meaning = match.groups("")
        text = textwrap.fill(
            meaning, 110, initial_indent="      ", subsequent_indent="      "
        )
        lines = groups.setdefault(key.split(".")[0], {}).setdefault(
            kind, [f"kind: {kind}"] if kind else []
        )
        lines += [f"  {key}  ({allowed.removeprefix('Allowed: ')}{default})", text]
    used = kinds_of(read(path)) if path else {}
    for section, kinds in used.items():
        groups[section] = {
            kind: lines
            for kind, lines in groups.get(section, {}).items()
            if kind in {"", *kinds}
        }
    return "\n".join(
        [
            *about,
            *(
                line
                for kinds in groups.values()
                for kind in sorted(kinds)
                for line in kinds[kind]
            ),
        ]
    )


def new_parser(
    command: str, summary: str, example: str, with_config: bool = True
) -> Parser:
    """Build the parser of a command. `with_config` adds CONFIG, `key=value` and
    `--help-keys`.
    """
    keys = (
        "\nkeys:    kd help KEY explains one, or all below it: kd help teacher.fit"
        if with_config
        else ""
    )
    shape = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog=command,
        description=summary,
        epilog=f"example: {example}{keys}",
        formatter_class=shape,
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
    """Load the configuration of a command whose parser has CONFIG and `key=value`, and
    import torch.
    """
    import_quickly("torch")
    from kd import config

    settings = config.load(options.config, options.overrides)
    import_quickly("timm")
    return settings


def import_quickly(package: str) -> None:
    """Import a large package (once) with the garbage collector off, and exempt its
    objects from collection.

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
