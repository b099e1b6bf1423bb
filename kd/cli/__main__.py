"""Run `kd NAME ...` as the command `kd-NAME ...`.

Launchers of modules (torchrun, mpirun) use `python -m kd`.
"""

import os
import sys
from collections.abc import Sequence

from kd import __version__
from kd.cli import launch, serving, training
from kd.cli.command import Parser, explain_keys, run_guarded
from kd.core.errors import ConfigError, did_you_mean

COMMANDS = {
    "init": training.init,
    "train": training.train,
    "teach": training.teach,
    "cache": training.cache,
    "sweep": training.sweep,
    "evaluate": training.evaluate,
    "parts": training.parts,
    "schema": training.schema,
    "export": serving.export,
    "serve": serving.serve,
    "predict": serving.predict,
    "verify": serving.verify,
    "report": training.report,
    "launch": launch.launch,
}
OVERVIEW = """usage: kd COMMAND ...

  init      look at a folder of images and write the configuration of a run
  train     distill a teacher into a student; the same command resumes a run
  teach     fit a teacher on the labels
  cache     compute and store the teacher's outputs
  sweep     train with many settings and find the best
  evaluate  score a run's student and teacher
  report    one HTML page about runs: curves, time, costs, confused photographs
  export    a run's student for timm, onnxruntime, OpenVINO, SageMaker
  serve     serve an export over HTTP
  predict   classify many images into one file
  verify    recompute every claim of an export's model card
  launch    jobs and endpoints on SageMaker
  parts     the losses, sifters, datasets, ... that a configuration can name
  schema    the JSON Schema of configurations, for editors

Each is a command of its own too: `kd train` is `kd-train`. `kd COMMAND -h` \
lists its options.
Begin: kd train vit_food     a small example, rendered on your machine
Keys:  kd help KEY           explains a key of a configuration, or all below it: \
kd help teacher.fit
Also:  kd --version
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first word names and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "_ARGCOMPLETE" in os.environ:
        return _complete(os.environ["COMP_LINE"].split(" "))
    if words[:1] == ["--version"]:
        print(f"kd {__version__}")
    elif words in (["-h"], ["--help"], ["help"]):
        print(OVERVIEW, end="")
    elif not words:
        print(OVERVIEW, end="", file=sys.stderr)
        return 2
    elif words[0] in COMMANDS:
        return COMMANDS[words[0]](words[1:])
    elif words[0] == "help" and words[1] in COMMANDS:
        return COMMANDS[words[1]](["--help"])
    else:
        return run_guarded(lambda: _help(words))
    return 0


def _help(words: list[str]) -> None:
    if words[0] != "help":
        near = did_you_mean(words[0], COMMANDS) or "See `kd help`"
        raise ConfigError(
            "kd",
            f"no command '{words[0]}'",
            f"Allowed: help, {', '.join(COMMANDS)}",
            near,
        )
    for key in words[1:]:
        print(explain_keys(key))


def _complete(words: list[str]) -> int:
    """Print completions of the last word for a shell with argcomplete."""
    if len(words) > 2 and words[1] in COMMANDS:
        os.environ["_ARGCOMPLETE"] = "2"  # number of words of the command
        return COMMANDS[words[1]]([])
    parser = Parser(prog="kd")
    parser.add_argument("command", choices=[*COMMANDS, "help"])
    return int(bool(parser.read([])))


if __name__ == "__main__":
    sys.exit(main())
