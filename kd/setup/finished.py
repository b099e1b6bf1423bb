"""Read a finished or interrupted run: its configuration, and whether it is trusted.

A run folder may be untrusted. Reading it runs no code that it names and shows only its
own images, unless the user passes `--trust`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from kd import config
from kd.config import Config
from kd.config.interpolate import resolve as interpolated
from kd.config.schema import DataSection
from kd.config.yaml_text import read_yaml
from kd.core.errors import KdError, RunError
from kd.files.run_dir import RunDir
from kd.parts import registry
from kd.setup.data import Data
from kd.setup.data_plan import DataPlan

REMEDY = (
    "Read the run's config.yaml, then add --trust if you would start that run yourself"
)

MAP_DATASET = "kd.data.map_dataset"  # `data.kind` of a run of `kd.distill`


def opened_run(path: Path, trust: bool = False) -> tuple[RunDir, Config]:
    """Open a finished or interrupted run folder for reading."""
    folder = RunDir(path)
    stored = folder.stored_config()
    if stored is None:
        remedy = "Point at runs/NAME, the folder that `kd-train` wrote"
        raise RunError(
            "run", f"'{path}' is not a run folder: it has no config.yaml", "", remedy
        )
    return folder, parse(folder.config_file, stored, trust)


def require_files(path: Path, data: DataSection) -> None:
    """Refuse a run of `kd.distill`, whose models and images are no files.

    The caller must build them again.
    """
    if data.kind == MAP_DATASET:
        wrong = (
            f"'{path}' was written by kd.distill: its models and images are Python"
            " objects"
        )
        allowed = (
            "kd-report reads it; the other commands read what kd-train wrote, with your"
            " network as "
        )
        remedy = (
            "Call kd.distill again with the same arguments and this folder, then"
            " result.metrics or result.export"
        )
        raise RunError("run", wrong, f"{allowed}student.kind=torch", remedy)


def parse(file: Path | str, text: str, trust: bool) -> Config:
    """Load a stored configuration."""
    key = module = ""
    try:
        content: Any = OmegaConf.to_container(OmegaConf.create(text))
        content = content if isinstance(content, dict) else {}
        if not trust:
            key, module = foreign_module(
                interpolated(read_yaml(content), [], here=False)
            )
        if not module:
            return config.load(content, here=False)
    except (
        YAMLError,
        OmegaConfBaseException,
        KdError,
        RecursionError,
        ValueError,
    ) as error:
        reason = "; ".join(" ".join(line.split()) for line in str(error).splitlines())
        remedy = "Restore it, or choose another run.name"
        raise RunError(
            "run.name", f"'{file}' is not the config of a run: {reason}", "", remedy
        ) from error
    raise untrusted(key, f"names the module '{module}', which '{file}' would import")


def needs_trust(path: Path, sections: Mapping[str, Any]) -> bool:
    """Return whether commands on a run need `--trust` to build its models.

    `sections`: the models by their config paths.
    """
    try:
        opened_run(path)
        Trust(code=False, images=False).check_models(sections)
    except RunError:
        return True
    return False


@dataclass(frozen=True, slots=True)
class Trust:
    """Hold the permissions of `--trust`."""

    code: bool  # `--trust`: code named in its configuration may run
    # `--trust`, or an override of the images' folder: other images than the run's are
    # allowed
    images: bool

    @classmethod
    def of(cls, trust: bool, overrides: Sequence[str], data: DataSection) -> Trust:
        """Return the permissions by a command's `--trust` and `key=value` overrides."""
        keys = ("data", "data.kind", "data.labels", "data.exclude")
        trusted = {*keys, *(f"data.{field.name}" for field in fields(data.options))}
        named = any(text.partition("=")[0] in trusted for text in overrides)
        return cls(trust, trust or named)

    def check_models(self, sections: Mapping[str, Any]) -> None:
        """Refuse to build models, by their config paths, that are code."""
        for config_path, section in sections.items():
            key = f"{config_path}.kind"
            facts = registry.facts("networks", section.kind, section.options, key)
            if facts.runs_code and not self.code:
                wrong = f"is '{section.kind}', so that '{section.model}' would run"
                raise untrusted(key, wrong)

    def check_folder(self, plan: DataPlan) -> None:
        """Refuse a folder of images with links to the outside."""
        root = registry.facts("datasets", plan.kind, plan.options, "data.kind").root
        if root and not self.code and (link := _outward_link(os.path.expanduser(root))):
            raise untrusted("data.root", f"'{link}' is a link out of '{root}'")

    def check_images(self, data: Data, manifest: Mapping[str, Any]) -> None:
        """Refuse images that differ from the recorded ones.

        A test split may be missing.
        """
        recorded_test = manifest.get("test", "")
        test = recorded_test if data.test is None else data.test.fingerprint
        recorded = (manifest.get("data"), recorded_test)
        if not self.images and (data.fingerprint, test) != recorded:
            wrong = (
                "the images are not those that the run recorded (their content hash"
                " differs)"
            )
            raise RunError(
                "data",
                wrong,
                "",
                f"Name them on the command line (data.root=FOLDER). {REMEDY}",
            )


def untrusted(config_path: str, wrong: str) -> RunError:
    """Return the error for an action that needs `--trust`."""
    return RunError(
        config_path,
        wrong,
        "Without --trust: kd's own parts, and the images in the run's own folder",
        REMEDY,
    )


def foreign_module(values: Any, config_path: str = "") -> tuple[str, str]:
    """Return the first key whose part is not kd's, and that module; or ("", "").

    `values` is an interpolated configuration.
    """
    kind = values.get("kind") if isinstance(values, dict) else None
    if isinstance(kind, str) and "." in kind and not kind.startswith("kd."):
        return f"{config_path}.kind", kind
    if isinstance(values, list):
        values = dict(enumerate(values))
    if isinstance(values, dict):
        for key, value in values.items():
            path = f"{config_path}.{key}" if config_path else str(key)
            place, module = foreign_module(value, path)
            if module:
                return place, module
    return "", ""


def _outward_link(root: str) -> str:
    home = os.path.realpath(root)
    todo = [home]
    while todo:
        # the listing reports the error
        with suppress(OSError), os.scandir(todo.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    if os.path.commonpath([home, os.path.realpath(entry.path)]) != home:
                        return entry.path
                elif entry.is_dir():
                    todo.append(entry.path)
    return ""
