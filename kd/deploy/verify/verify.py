"""`kd verify`: recompute the claims of an export, by running its files on the images
that were used at the export.

The folder is untrusted. Its graphs run in processes with limits of time and memory;
networks come from timm, with weights from safetensors. `--trust` also runs model.pt2,
which is a pickle.
"""

import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kd.core.errors import DataError, KdError, ModelError, named
from kd.core.evaluation import Task
from kd.core.options import option
from kd.core.text import table
from kd.deploy.export.claims import FILES, IMAGES, RUN, SECOND
from kd.deploy.export.receipt import licence_lines
from kd.deploy.export.signature import require_signature
from kd.deploy.serve import self_check
from kd.deploy.serve.model import Description, describe
from kd.deploy.verify.comparison import OPEN, RIGHT, WRONG, Claims, Row, row
from kd.deploy.verify.files import present_files, show_graphs, show_manifest, show_weights
from kd.deploy.verify.graph_outputs import show_outputs, show_self_check
from kd.deploy.verify.images import ListedImages, read_image_list
from kd.files.json_file import DAMAGE, read_json
from kd.files.manifest import MANIFEST, SIGNATURE, checksum
from kd.models.classifier import Classifier
from kd.parts import registry
from kd.setup.provenance import chain_lines

MOST_SHOWN = 100  # characters of a value in the table


class NotVerifiedError(KdError):
    """A claim was not reproduced or, with --strict, could not be checked."""

    exit_code = 1


class UnreadableExport(ModelError):
    """The folder is no export, or its manifest cannot be read."""

    exit_code = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions:
    """Options of kd-verify."""

    export: Path = option(metavar="EXPORT", parse=Path)
    """folder written by kd-export"""
    data: str = option("", "IMAGES")
    """folder, list, shards or URL with the images used at the export; others are
    ignored
    """
    run: Path | None = option(None, "RUN", Path)
    """its run folder: teacher, data, scores and the choice of images are
    compared too
    """
    second: Path | None = option(None, "EXPORT", Path)
    """the second export of a pair that --accept chose"""
    signed_by: Path | None = option(None, "KEY", Path)
    """public key (PEM) of who should have signed the export; needs kd[sign]"""
    strict: bool = option(False)
    """also fail if a claim is not checked"""
    json: bool = option(False)
    """print JSON"""
    trust: bool = option(False)
    """also run model.pt2, which is a pickle, and code that the run's
    config.yaml names
    """


@dataclass(frozen=True, slots=True)
class Verdict:
    """Findings on an export."""

    manifest: dict[str, Any]
    rows: list[Row]

    @property
    def lines(self) -> list[str]:
        """The claimed chain and licences, a table of findings, and the last line."""
        stated: list[str] = []
        with suppress(*DAMAGE):  # a row reports that
            stated = [
                *chain_lines(self.manifest),
                "",
                *licence_lines(self.manifest),
                "",
            ]
        rows = [
            {key: text[:MOST_SHOWN] for key, text in row._asdict().items()}
            for row in self.rows
        ]
        return [*stated, table(rows), self.line]

    @property
    def line(self) -> str:
        """The last line: the numbers of right, wrong and unchecked claims, with the
        names of the latter two.
        """
        counts = {
            verdict: [row.what for row in self.rows if row.verdict == verdict]
            for verdict in (WRONG, OPEN)
        }
        right = len(self.rows) - sum(map(len, counts.values()))
        told = [f"{verdict.lower()}: {len(names)}" + (f" ({', '.join(names)})" if names else "")
                for verdict, names in counts.items()]  # fmt: skip
        return "; ".join([f"{RIGHT}: {right}", *told])

    def require(self, strict: bool = False) -> None:
        """Refuse an export with a wrong claim; `strict`: or with an unchecked one."""
        failed = [
            row.what
            for row in self.rows
            if row.verdict == WRONG or (strict and row.verdict == OPEN)
        ]
        if failed:
            named = "; ".join(failed[:5]) + (
                f" and {len(failed) - 5} more" if len(failed) > 5 else ""
            )
            kinds = "wrong or not checked" if strict else "wrong"
            wrong = f"{len(failed)} of {len(self.rows)} claims are {kinds}: {named}"
            raise NotVerifiedError("verify", wrong, "", "See the rows")


def verify(options: VerifyOptions) -> Verdict:
    """Recompute what an export claims."""
    folder, file = options.export, options.export / MANIFEST
    try:
        manifest = (
            read_json(file, "export", "", kind=UnreadableExport)
            if file.is_file()
            else {}
        )
        if not isinstance(
            manifest.get("files"), dict
        ):  # a run folder has a different manifest.json
            wrong = (
                f"'{folder}' is not an export: {MANIFEST} is missing or describes"
                " something else"
            )
            raise UnreadableExport(
                "export", wrong, "", "Name the folder that kd-export wrote"
            )
        evidence = (
            (IMAGES, options.data),
            (RUN, options.run),
            (SECOND, options.second),
        )
        known = Claims(
            dict(manifest), folder, given={name for name, value in evidence if value}
        )
        _look(known, manifest, options)
        return Verdict(manifest, known.rows)
    except OSError as error:
        wrong = f"'{folder}' cannot be read ({error.strerror}: '{error.filename}')"
        raise UnreadableExport("export", wrong, "", "Make it readable") from error
    except DAMAGE as error:
        wrong = (
            f"'{folder}' has a damaged manifest.json, or one of an older kd"
            f" ({named(error)})"
        )
        raise UnreadableExport(
            "export", wrong, "", "Export anew: kd-export RUN"
        ) from error


def _look(known: Claims, manifest: dict[str, Any], options: VerifyOptions) -> None:
    folder = options.export
    found = present_files(folder, manifest["files"])
    known.show(FILES, {"files": found})
    known.graphs = tuple(
        name for name in registry.graphs() if "bytes" in found.get(name, {})
    )
    intact = all(found[name] == file for name, file in manifest["files"].items())
    _show_signature(known, options, intact)
    if known.old:
        _leave_out_texts(known)
    if not all(manifest["files"].get(name) == file for name, file in found.items()):
        known.show(FILES, {"checksum": checksum(manifest)})
        known.reasons[""] = "nothing was read, since files are wrong"
        return
    readme = folder / "README.md"
    with known.reading("manifest.json"):
        show_manifest(
            known,
            manifest,
            readme.read_text("utf-8", "replace") if readme.is_file() else "",
        )
    for name in ("config.json", "kd.json"):
        known.claimed[name] = read_json(
            folder / name, "export", "", kind=UnreadableExport
        )
    lines, task = None, None
    with known.reading("images.csv"):
        lines = read_image_list(folder)
        known.claimed["images.csv"] = {"choice": "the run's"}
    _require_images(options)
    second = _second(known, options)
    network: Classifier | None = None
    with known.reading("model.safetensors"):
        task = _task(known)
        network = show_weights(known, task)
    with known.reading("graphs"):
        show_graphs(known, lines)
    served = False
    with known.reading("what kd-serve reads"):
        served = all(registry.graphs()[name].code for name in known.graphs) or bool(
            describe(folder)
        )
    if served:
        with known.reading(self_check.FILE):
            show_self_check(known)
    if options.data and lines and task is not None and served:
        with (
            tempfile.TemporaryDirectory() as copies,
            known.reading("predictions on the images"),
        ):
            shown = ListedImages.among(options.data, lines, Path(copies, "shards"))
            show_outputs(known, shown, task, network, options.trust, second)
    if options.run is not None:
        from kd.deploy.verify.run_folder import show_run  # imports that open runs

        show_run(known, options.run, options.trust, lines)


def _show_signature(known: Claims, options: VerifyOptions, intact: bool) -> None:
    """Add the row on who signed; a listed file that is a link to elsewhere is
    not read.
    """
    signed = (options.export / SIGNATURE).is_file()
    if options.signed_by is None:
        why = "--signed-by shows whose" if signed else "consistent, not signed"
        known.leave_open("signature", SIGNATURE if signed else "none", why)
    elif signed and not intact:
        known.refuse("signature", f"files are not those of {MANIFEST}")
    elif signed:
        with known.reading("signature"):
            require_signature(options.export, options.signed_by)
            known.more.append(row("signature", SIGNATURE, "by this key", True))
    else:
        known.refuse("signature", f"no {SIGNATURE}, which kd-export --sign writes")


def _leave_out_texts(known: Claims) -> None:
    """Leave out texts of kd 0.3, which had other keys."""
    known.leave_open("scores", "texts", "free text of kd 0.3")
    del known.claimed["scores"]
    known.claimed["chain"] = {
        k: v for k, v in known.claimed["chain"].items() if k != "against_teacher"
    }


def _require_images(options: VerifyOptions) -> None:
    if options.data and not (options.export / "images.csv").is_file():
        wrong = (
            f"'{options.export}' has no images.csv, the list of the images behind its"
            " numbers, so nothing is compared"
        )
        raise DataError("--data", wrong, "", "Without --data they are not checked")


def _second(known: Claims, options: VerifyOptions) -> Description | None:
    """Read the second export, if it is given."""
    folder = options.second
    if folder is None:
        return None
    if not options.data:
        raise DataError(
            "--second", "is compared on the images", "", "Name them: --data IMAGES"
        )
    if "cascade" not in known.claimed:
        wrong = f"'{options.export}' claims nothing of a pair"
        raise DataError(
            "--second",
            wrong,
            "An export of `kd-export --accept LIMITS --second EXPORT`",
            "Leave it out",
        )
    try:
        second = describe(folder)
    except ModelError as error:
        raise DataError("--second", error.wrong, error.allowed, error.remedy) from error
    if (
        list(second.labels) != known.labels
        or second.size != known.claimed["input"]["size"]
    ):
        wrong = f"'{folder}' predicts other classes, or takes images of another size"
        raise DataError("--second", wrong, "The second export of this pair", "Name it")
    return second


def _task(known: Claims) -> Task:
    own = (
        registry.build("tasks", one, registry.default_options("tasks", one), "")
        for one in registry.names("tasks")
    )
    task = next(
        (
            one
            for one in own
            if one.problem_type == known.claimed["config.json"].get("problem_type", "")
        ),
        None,
    )
    if task is None:
        raise ModelError(
            "export", "its task is not one of kd's", "", "Ask who wrote it"
        )
    return task
