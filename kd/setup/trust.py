"""Whether a run folder that somebody else may have written can be read: it runs no code, and shows no other images."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from kd import parts
from kd.config.schema import DataSection
from kd.errors import RunError
from kd.setup.data import Data, DataPlan
from kd.setup.recipe import StudentPlan, TeacherPlan

REMEDY = "Read the run's config.yaml, then add --trust if you would start that run yourself"


@dataclass(frozen=True, slots=True)
class Trust:
    """What a person vouches for who reads a run folder."""

    code: bool
    """`--trust`: what its configuration names may run."""
    images: bool
    """`--trust`, or the command line says where the images lie: they may be others than those of the run."""

    @classmethod
    def of(cls, trust: bool, overrides: Sequence[str], data: DataSection) -> Trust:
        """Return what `--trust` and the overrides `key=value` of a command say."""
        where = {"data", "data.kind", "data.labels", *(f"data.{field.name}" for field in fields(data.options))}
        return cls(trust, trust or any(text.partition("=")[0] in where for text in overrides))

    def check_teacher(self, plan: TeacherPlan) -> None:
        """Refuse to build a teacher that is code.

        Raises:
            RunError: naming the key.
        """
        for where, one in plan.members.items():
            facts = parts.facts("teachers", one.kind, one.options, f"{where}.kind")
            if facts.runs_code and not self.code:
                raise untrusted(f"{where}.kind", f"is '{one.kind}', so that '{one.model}' would run")

    def check_student(self, plan: StudentPlan) -> None:
        """Refuse to build a student that is code.

        Raises:
            RunError: naming the key.
        """
        section = plan.section
        facts = parts.facts("teachers", section.kind, section.options, "student.kind")
        if facts.runs_code and not self.code:
            raise untrusted("student.kind", f"is '{section.kind}', so that '{section.model}' would run")

    def check_folder(self, plan: DataPlan) -> None:
        """Refuse a folder of images with links out of it.

        Raises:
            RunError: naming the first.
        """
        section = plan.section
        root = parts.facts("datasets", section.kind, section.options, "data.kind").root
        if root and not self.code and (link := _link_out(os.path.expanduser(root))):
            raise untrusted("data.root", f"'{link}' is a link out of '{root}'")

    def check_images(self, data: Data, manifest: Mapping[str, Any]) -> None:
        """Refuse other images than those that the run recorded."""
        if not self.images and data.fingerprint != manifest.get("data"):
            wrong = "the images are not those that the run recorded (their content hash differs)"
            raise RunError("data", wrong, "", f"Name them on the command line (data.root=FOLDER). {REMEDY}")


def untrusted(where: str, wrong: str) -> RunError:
    """Return the error for what takes `--trust`."""
    return RunError(where, wrong, "Without --trust: kd's own parts, and the images in the run's own folder", REMEDY)


def named_module(values: Any, where: str = "") -> tuple[str, str]:
    """Return the first key of a configuration, interpolated, whose part is no part of kd, and that module; or ""s."""
    if isinstance(values, dict) and isinstance(kind := values.get("kind"), str) and _is_foreign(kind):
        return f"{where}.kind", kind
    pairs = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    found = (named_module(value, f"{where}.{key}" if where else str(key)) for key, value in pairs)
    return next((one for one in found if one[1]), ("", ""))


def _is_foreign(kind: str) -> bool:
    return "." in kind and not kind.startswith("kd.")


def _link_out(root: str) -> str:
    home = os.path.realpath(root)
    todo = [home]
    while todo:
        with suppress(OSError), os.scandir(todo.pop()) as entries:  # who lists the images says what is wrong
            for entry in entries:
                if entry.is_symlink():
                    if os.path.commonpath([home, os.path.realpath(entry.path)]) != home:
                        return entry.path
                elif entry.is_dir():
                    todo.append(entry.path)
    return ""
