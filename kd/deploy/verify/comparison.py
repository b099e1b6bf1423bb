"""An export's claims beside what was made again: one walk over both, a row for each
value.

The types in `kd.deploy.export.claims` say which values there are and how close they
must be. A key outside them is WRONG. A value that nothing made again is `not checked`.
So a claim is never right because it was forgotten.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import (
    Annotated,
    Any,
    NamedTuple,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from safetensors import SafetensorError

from kd.core.errors import ConfigError, DataError, KdError, named
from kd.core.host import cores, processor, versions
from kd.deploy.export.claims import (
    FILES,
    IMAGES,
    SECOND,
    Beside,
    Graph,
    Manifest,
    Origin,
    Threads,
    TimmKey,
)
from kd.files.json_file import DAMAGE
from kd.files.manifest import DIGITS
from kd.models.timm_folder import config_keys

RIGHT, WRONG, OPEN = "right", "WRONG", "not checked"
FLIPS, OTHER_FLIPS = 0.002, 0.02
"""Share of the images, plus one, whose prediction may differ from the export's: last
bits depend on processor and threads, and int8 is rounded differently without VNNI.
Values in between are `not checked`.
"""
TRAINED_FLIPS = 0.005
"""The same for the score from training, perhaps in bfloat16: of 2,000 images 20 change
their prediction, and gains and losses differ by 3 standard deviations of sqrt(20), 14.
"""
ALIKE, SLOWER, HOPELESS = 1.5, 4.0, 100.0
"""Multiples of the claimed cost that are right, that are wrong on the same idle
processor, and that are wrong anywhere: a server of 0.42 ms was seen at 39.5 ms beside
other work. Chosen; a lower cost is never wrong.
"""
NEAR, OVERFLOWED = 3.0, 10.0
"""Largest ratio of a claimed and a found difference from PyTorch that is right, and
that is open elsewhere: an int8 graph's is 4.9 times as large without VNNI
(`self_check_*.csv`).
"""
ABSENT, NOTHING, GAP = "nothing", "nothing here shows it", "no such value"
HASH = 64  # digits of a sha256
Path = tuple[str, ...]


class Row(NamedTuple):
    """One claim."""

    what: str
    claimed: str
    found: str
    verdict: str
    why: str = ""  # of `not checked`


@dataclass(slots=True)
class Claims:
    """The claims of an export, and the values that were made again: trees of JSON,
    other files' under their names.
    """

    claimed: dict[str, Any]
    folder: pathlib.Path = field(default_factory=pathlib.Path)
    graphs: tuple[str, ...] = ()  # in the folder
    images: int = 0
    given: set[str] = field(default_factory=set)  # evidence that was given
    noisy: bool = False  # other work disturbed a server's clients
    again: list[tuple[str, Mapping[str, Any]]] = field(
        default_factory=list
    )  # (evidence, values made from it)
    reasons: dict[str, str] = field(
        default_factory=dict
    )  # reasons of `not checked` by the begin of a key
    more: list[Row] = field(default_factory=list)  # that stand for no key

    elsewhere: bool = field(init=False)
    """Whether the export names another processor, kd, runtime or Pillow than those
    here.
    """

    def __post_init__(self) -> None:
        here = versions("kd", "onnxruntime", "openvino", "pillow", "torch")
        there = {
            name: at(self.claimed, ("environment", "packages", name)) for name in here
        }
        self.elsewhere = (
            here != there
            or at(self.claimed, ("environment", "machine", "processor")) != processor()
        )

    @property
    def old(self) -> bool:
        return self.claimed.get("format") == 1

    @property
    def labels(self) -> list[str]:
        """The classes in the order of the logits; empty for an embedding model."""
        names = at(self.claimed, ("config.json", "label_names"))
        return list(map(str, names)) if isinstance(names, list) else []

    @property
    def busy(self) -> bool:
        return self.noisy or self.elsewhere or os.getloadavg()[0] > cores()

    def show(self, evidence: str, tree: Mapping[str, Any]) -> None:
        """Add values that were made again."""
        self.again.append(
            (evidence, json.loads(json.dumps(tree)))
        )  # as in the manifest

    def refuse(self, what: str, wrong: str) -> None:
        self.more.append(row(what, "", wrong, False))

    def leave_open(self, what: str, claimed: str, why: str) -> None:
        self.more.append(row(what, claimed, "", None, why))

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Turn an unreadable file into a WRONG row. Errors about `--data` or `--run`
        are raised.
        """
        try:
            yield
        except (DataError, ConfigError):
            raise
        except KdError as error:
            self.refuse(what, error.wrong)
        except (*DAMAGE, OSError, RuntimeError, SafetensorError) as error:
            self.refuse(what, f"cannot be read ({named(error)})")

    @property
    def rows(self) -> list[Row]:
        """Return a row for each claim and for each missing one."""
        trees = [self.claimed, *(tree for _, tree in self.again)]
        return [
            *self.more,
            *(self._row(*place) for place in self.places(Manifest | Beside, trees)),
        ]

    def places(
        self, kind: Any, trees: Sequence[Any], path: Path = ()
    ) -> Iterator[tuple[Path, Origin | None]]:
        """Yield the path of each row, and from what its value can be made; None: no key
        that kd writes.
        """
        kind, made = without_annotation(kind)
        if made is not None:
            yield path, made
            return
        inner = [tree for tree in trees if isinstance(tree, dict)]
        if len(inner) < len(trees):
            yield path, None
        for key in dict.fromkeys(key for tree in inner for key in tree):
            below, values = (
                self.below(kind, key),
                [tree[key] for tree in inner if key in tree],
            )
            if below is None:
                yield (*path, key), None
            else:
                yield from self.places(below, values, (*path, key))

    def below(self, kind: Any, key: str) -> Any:
        """Return the type of a key; None: kd does not write it."""
        if get_origin(kind) is not dict:
            return keys_of(kind).get(key)
        names, values = get_args(kind)
        known = {
            Graph: self._is_graph,
            Threads: self._is_count,
            TimmKey: config_keys().__contains__,
        }
        return values if names is str or known[names](key) else None

    def _is_graph(self, key: str) -> bool:
        return key in self.graphs

    def _is_count(self, key: str) -> bool:
        most = at(self.claimed, ("environment", "machine", "cores"))
        return key.isdecimal() and isinstance(most, int) and 0 < int(key[:9]) <= most

    def _row(self, path: Path, made: Origin | None) -> Row:
        what, claimed = "/".join(path), at(self.claimed, path)
        if made is None:
            return row(
                what, claimed, "no key that kd writes for a file that is here", False
            )
        values = [(evidence, at(tree, path)) for evidence, tree in self.again]
        verdicts = [
            (evidence, value, self._judged(made, evidence, claimed, value))
            for evidence, value in values
            if value is not ABSENT
        ]
        for _, value, right in verdicts:
            if right is False:
                lacks = claimed is ABSENT and self.old
                return row(
                    what,
                    claimed,
                    value,
                    None if lacks else False,
                    "kd 0.3 did not say it" if lacks else "",
                )
        shown = [
            (value, right) for evidence, value, right in verdicts if evidence in made.by
        ]
        for value, right in shown:
            if right:
                return row(what, claimed, value, True)
        begin = max(
            (one for one in self.reasons if what.startswith(one)), key=len, default=None
        )
        why = self._missing(made) if begin is None else self.reasons[begin]
        why = "another machine, or other work, may explain it" if shown else why
        return row(what, claimed, shown[0][0] if shown else "", None, why)

    def _missing(self, made: Origin) -> str:
        """Return which evidence would show a value."""
        made_from = {evidence for evidence, _ in self.again}
        absent = [
            evidence
            for evidence in made.by
            if evidence != FILES and evidence not in made_from
        ]
        others = [evidence for evidence in absent if evidence not in self.given]
        if others:
            return " or ".join(f"{evidence} shows it" for evidence in others)
        return "not read, since something is wrong" if absent else NOTHING

    def _judged(
        self, made: Origin, evidence: str, claimed: Any, found: Any
    ) -> bool | None:
        rule = RULES[made.close] if evidence in (IMAGES, SECOND) else same
        # an export of kd 0.3 lacks some claims
        pairs = [
            (one, other)
            for one, other in _pairs(claimed, found)
            if one is not ABSENT or not self.old
        ]
        verdicts = [_safely(rule, one, other, self) for one, other in pairs]
        return False if False in verdicts else None if None in verdicts else True


# --------------------------------------------------------------------------------
# types


def without_annotation(kind: Any) -> tuple[Any, Origin | None]:
    """Return a type without its annotation, and from what its values can be made; None:
    its keys say it.
    """
    return get_args(kind)[:2] if get_origin(kind) is Annotated else (kind, None)


@cache
def keys_of(kind: Any) -> dict[str, Any]:
    """Return the types of a TypedDict's keys, or of those of several."""
    kinds = [kind] if is_typeddict(kind) else get_args(kind)
    return {
        key: value
        for one in kinds
        for key, value in get_type_hints(one, include_extras=True).items()
    }


# --------------------------------------------------------------------------------
# rules


Rule = Callable[[Any, Any, Claims], "bool | None"]


def same(claimed: Any, found: Any, known: Claims) -> bool:
    """Compare exactly, but for the last bits of a number."""
    if isinstance(claimed, float) and isinstance(found, float):
        return claimed == found or abs(claimed - found) <= 1e-9 * max(
            abs(claimed), abs(found)
        )
    return claimed == found


def count(claimed: Any, found: Any, known: Claims, share: float = FLIPS) -> bool | None:
    """Compare numbers of images, or shares of them."""
    off = abs(claimed - found) * (
        1 if isinstance(claimed, int) and isinstance(found, int) else known.images
    )
    if off <= 1 + share * known.images + 1e-6:
        return True
    return None if known.elsewhere and off <= 1 + OTHER_FLIPS * known.images else False


def points(claimed: Any, found: Any, known: Claims) -> bool | None:
    """Compare hundredths of a share."""
    return count(claimed / 100, found / 100, known)


def number(claimed: Any, found: Any, known: Claims) -> bool | None:
    """Compare numbers that are fitted."""
    off = abs(claimed - found) / max(1.0, abs(found))
    return True if off <= 1e-3 else None if known.elsewhere and off <= 0.1 else False


def difference(claimed: Any, found: Any, known: Claims) -> bool | None:
    """Compare largest differences from PyTorch."""
    low, high = sorted((claimed, found))
    return (
        True
        if high <= NEAR * low + 1e-4
        else None
        if known.elsewhere and high <= OVERFLOWED * low
        else False
    )


def cost(claimed: Any, found: Any, known: Claims) -> bool | None:
    """Compare times and memory, which other work makes larger."""
    times = found / claimed if claimed > 0 else float("inf")
    if times <= ALIKE and not known.elsewhere:
        return True
    return None if times <= (HOPELESS if known.busy else SLOWER) else False


def rate(claimed: Any, found: Any, known: Claims) -> bool | None:
    """Compare images per second."""
    return cost(1 / claimed, 1 / found, known)


def reference_cost(claimed: Any, found: Any, known: Claims) -> bool | None:
    """Compare PyTorch's cost: a much too high claim flatters the graphs, or the machine
    was busy at the export.
    """
    if claimed > ALIKE * found:
        return None if claimed <= HOPELESS * found else False
    return cost(claimed, found, known)


def tally(claimed: Any, found: Any, known: Claims) -> bool | None:
    """Compare "BIN:IMAGES ..."; see `kd.deploy.shift.Reference`."""
    if not isinstance(found, str):
        return not isinstance(found, bool) and count(
            round(claimed), round(found), known
        )
    first, second = (
        dict(re.findall(r"(\d+):(\d+)", text)) for text in (str(claimed), str(found))
    )
    off = sum(
        abs(int(first.get(key, 0)) - int(second.get(key, 0)))
        for key in {*first, *second}
    )
    return count(off // 2, 0, known, 2 * FLIPS) if off else claimed == found


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (count, points, number, difference, cost, rate, tally)
}
RULES |= {
    "equal": same,
    "reference_cost": reference_cost,
    "score": partial(count, share=TRAINED_FLIPS),
}


def _safely(rule: Rule, claimed: Any, found: Any, known: Claims) -> bool | None:
    """Return the verdict; False if the value has a wrong type."""
    try:
        return rule(claimed, found, known) if not same(claimed, found, known) else True
    except (ArithmeticError, TypeError, ValueError):
        return False


def _pairs(claimed: Any, found: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the single values of two trees, side by side."""
    if isinstance(claimed, dict) and isinstance(found, dict):
        for key in {**claimed, **found}:
            yield from _pairs(claimed.get(key, ABSENT), found.get(key, ABSENT))
    elif (
        isinstance(claimed, list)
        and isinstance(found, list)
        and len(claimed) == len(found)
    ):
        for pair in zip(claimed, found, strict=True):
            yield from _pairs(*pair)
    else:
        yield claimed, found


def at(tree: Any, path: Path) -> Any:
    """Return the value at a path, or ABSENT."""
    for key in path:
        if not isinstance(tree, dict) or key not in tree:
            return ABSENT
        tree = tree[key]
    return tree


def with_gaps(claimed: Any, made: Any) -> Any:
    """Return a tree that was made whole, with GAP for claimed values that it lacks:
    they are wrong.
    """
    if isinstance(claimed, dict) and isinstance(made, dict):
        return {
            key: with_gaps(claimed.get(key), made.get(key, {}))
            for key in {**claimed, **made}
        }
    return GAP if made == {} else made


def row(
    what: str, claimed: object, found: object, right: bool | None, why: str = ""
) -> Row:
    """Return a row of printable texts; `right` None: not checked."""
    texts = [
        f"{one:.5g}" if isinstance(one, float) else str(one)
        for one in (what, claimed, found)
    ]
    texts = [text[:DIGITS] if len(text) == HASH else text for text in texts]
    texts = [
        "".join(c if c.isprintable() else "?" for c in text) for text in (*texts, why)
    ]
    return Row(
        *texts[:3],
        OPEN if right is None else RIGHT if right else WRONG,
        "" if right else texts[3],
    )
