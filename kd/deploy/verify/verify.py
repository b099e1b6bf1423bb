"""`kd verify`: recompute the claims of an export from its files, run on its images.

The folder is untrusted. Its graphs run in processes with limits of time and memory;
networks come from timm, with weights from safetensors. `--trust` also runs model.pt2,
which is a pickle.
"""

import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kd.core.errors import DataError, KdError, ModelError, error_summary
from kd.core.evaluation import Task
from kd.core.options import option
from kd.core.text import markdown_table
from kd.deploy.export.claims import FILES, IMAGES, RUN, SECOND
from kd.deploy.export.receipt import licence_lines
from kd.deploy.export.signature import require_signature
from kd.deploy.serve import self_check
from kd.deploy.serve.model import Description, describe
from kd.deploy.verify.child import Sandboxes
from kd.deploy.verify.comparison import OPEN, RIGHT, WRONG, Claims, Row, row
from kd.deploy.verify.files import (
    check_graph_files,
    check_manifest,
    check_weights,
    present_files,
)
from kd.deploy.verify.graph_outputs import check_outputs, repeat_self_check
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
        return [*stated, markdown_table(rows), self.line]

    @property
    def line(self) -> str:
        """The numbers of claims by verdict, with the names of those not right."""
        counts = [f"{RIGHT}: {sum(row.verdict == RIGHT for row in self.rows)}"]
        for verdict in (WRONG, OPEN):
            names = [row.what for row in self.rows if row.verdict == verdict]
            named = f" ({', '.join(names)})" if names else ""
            counts.append(f"{verdict.lower()}: {len(names)}{named}")
        return "; ".join(counts)

    def require(self, strict: bool = False) -> None:
        """Refuse an export with a wrong claim; `strict`: or with an unchecked one."""
        failed = [
            row.what
            for row in self.rows
            if row.verdict == WRONG or (strict and row.verdict == OPEN)
        ]
        if failed:
            names = "; ".join(failed[:5])
            if len(failed) > 5:
                names += f" and {len(failed) - 5} more"
            kinds = "wrong or not checked" if strict else "wrong"
            wrong = f"{len(failed)} of {len(self.rows)} claims are {kinds}: {names}"
            raise NotVerifiedError("verify", wrong, "", "See the rows")


def verify(options: VerifyOptions) -> Verdict:
    """Recompute what an export claims."""
    folder = options.export
    file = folder / MANIFEST
    try:
        manifest = {}
        if file.is_file():
            manifest = read_json(file, "export", "", kind=UnreadableExport)
        # a run folder has a different manifest.json
        if not isinstance(manifest.get("files"), dict):
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
        claims = Claims(
            dict(manifest),
            folder,
            evidence_given={name for name, value in evidence if value},
        )
        with Sandboxes(options.trust) as sandboxes:
            _check(claims, manifest, options, sandboxes)
        return Verdict(manifest, claims.rows)
    except OSError as error:
        wrong = f"'{folder}' cannot be read ({error.strerror}: '{error.filename}')"
        raise UnreadableExport("export", wrong, "", "Make it readable") from error
    except DAMAGE as error:
        wrong = (
            f"'{folder}' has a damaged manifest.json, or one of an older kd"
            f" ({error_summary(error)})"
        )
        raise UnreadableExport(
            "export", wrong, "", "Export anew: kd-export RUN"
        ) from error


def _check(
    claims: Claims,
    manifest: dict[str, Any],
    options: VerifyOptions,
    sandboxes: Sandboxes,
) -> None:
    folder = options.export
    listed = manifest["files"]
    files = present_files(folder, listed)
    claims.add_evidence(FILES, {"files": files})
    claims.graphs = tuple(
        name for name in registry.graphs() if "bytes" in files.get(name, {})
    )
    is_intact = all(files[name] == entry for name, entry in listed.items())
    _check_signature(claims, options, is_intact)
    if claims.old:
        _leave_out_texts(claims)
    if not all(listed.get(name) == entry for name, entry in files.items()):
        claims.add_evidence(FILES, {"checksum": checksum(manifest)})
        claims.reasons[""] = "nothing was read, since files are wrong"
        return
    readme = folder / "README.md"
    with claims.reading("manifest.json"):
        text = readme.read_text("utf-8", "replace") if readme.is_file() else ""
        check_manifest(claims, manifest, text)
    for name in ("config.json", "kd.json"):
        claims.claimed[name] = read_json(
            folder / name, "export", "", kind=UnreadableExport
        )
    lines = None
    task = None
    with claims.reading("images.csv"):
        lines = read_image_list(folder)
        claims.claimed["images.csv"] = {"choice": "the run's"}
    _require_images(options)
    second = _describe_pair(claims, options)
    network: Classifier | None = None
    with claims.reading("model.safetensors"):
        task = _claimed_task(claims)
        network = check_weights(claims, task)
    with claims.reading("graphs"):
        check_graph_files(claims, lines)
    is_readable = False
    with claims.reading("what kd-serve reads"):
        if not all(registry.graphs()[name].code for name in claims.graphs):
            describe(folder)
        is_readable = True
    if is_readable:
        with claims.reading(self_check.FILE):
            repeat_self_check(claims, sandboxes)
    if options.data and lines and task is not None and is_readable:
        with (
            tempfile.TemporaryDirectory() as copies,
            claims.reading("predictions on the images"),
        ):
            images = ListedImages.locate(options.data, lines, Path(copies, "shards"))
            check_outputs(claims, images, task, network, second, sandboxes)
    if options.run is not None:
        from kd.deploy.verify.run_folder import check_run  # imports that open runs

        check_run(claims, options.run, options.trust, lines)


def _check_signature(claims: Claims, options: VerifyOptions, is_intact: bool) -> None:
    """Add the row on who signed; a listed file that links to elsewhere is not read."""
    name = "signature"
    is_signed = (options.export / SIGNATURE).is_file()
    if options.signed_by is None and is_signed:
        claims.leave_open(name, SIGNATURE, "--signed-by shows whose")
    elif options.signed_by is None:
        claims.leave_open(name, "none", "consistent, not signed")
    elif not is_signed:
        claims.refuse(name, f"no {SIGNATURE}, which kd-export --sign writes")
    elif not is_intact:
        claims.refuse(name, f"files are not those of {MANIFEST}")
    else:
        with claims.reading(name):
            require_signature(options.export, options.signed_by)
            claims.extra_rows.append(row(name, SIGNATURE, "by this key", True))


def _leave_out_texts(claims: Claims) -> None:
    """Leave out texts of kd 0.3, which had other keys."""
    claims.leave_open("scores", "texts", "free text of kd 0.3")
    del claims.claimed["scores"]
    claims.claimed["chain"] = {
        key: value
        for key, value in claims.claimed["chain"].items()
        if key != "against_teacher"
    }


def _require_images(options: VerifyOptions) -> None:
    if options.data and not (options.export / "images.csv").is_file():
        wrong = (
            f"'{options.export}' has no images.csv, the list of the images behind its"
            " numbers, so nothing is compared"
        )
        raise DataError("--data", wrong, "", "Without --data they are not checked")


def _describe_pair(claims: Claims, options: VerifyOptions) -> Description | None:
    """Read the second export, if it is given."""
    folder = options.second
    if folder is None:
        return None
    if not options.data:
        raise DataError(
            "--second", "is compared on the images", "", "Name them: --data IMAGES"
        )
    if "cascade" not in claims.claimed:
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
        list(second.labels) != claims.labels
        or second.size != claims.claimed["input"]["size"]
    ):
        wrong = f"'{folder}' predicts other classes, or takes images of another size"
        raise DataError("--second", wrong, "The second export of this pair", "Name it")
    return second


def _claimed_task(claims: Claims) -> Task:
    problem_type = claims.claimed["config.json"].get("problem_type", "")
    for name in registry.names("tasks"):
        options = registry.default_options("tasks", name)
        task: Task = registry.build("tasks", name, options, "")
        if task.problem_type == problem_type:
            return task
    raise ModelError("export", "its task is not one of kd's", "", "Ask who wrote it")
