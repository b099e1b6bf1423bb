"""An export's claims beside what was made again: one walk over both, a row for each
value.

The types in `kd.deploy.export.claims` say which values there are and how close they
must be. A key outside them is WRONG. A value that nothing made again is `not checked`.
So a claim is never right because it was forgotten.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
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

from kd.core.errors import ConfigError, DataError, KdError, error_summary
from kd.core.host import cores, package_versions, processor
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

RIGHT = "right"
WRONG = "WRONG"
OPEN = "not checked"
FLIPS = 0.002
"""Share of the images, plus one, whose prediction may differ from the export's: last
bits depend on processor and threads.
"""
OTHER_FLIPS = 0.02
"""The same on another machine, `not checked`: without VNNI int8 is rounded differently.
"""
TRAINED_FLIPS = 0.005
"""The same for the score from training, perhaps in bfloat16: of 2,000 images 20 change
their prediction, and gains and losses differ by 3 standard deviations of sqrt(20), 14.
"""
# Multiples of a claimed cost. Chosen; a lower cost is never wrong.
ALIKE = 1.5  # up to here it is right
SLOWER = 4.0  # above, it is wrong on the same idle processor
# above, it is wrong anywhere: beside other work a server of 0.42 ms was seen at 39.5 ms
HOPELESS = 100.0
# Ratios of a claimed and a found difference from PyTorch.
NEAR = 3.0  # up to here it is right
# up to here it is open elsewhere: without VNNI an int8 graph's difference is 4.9 times
# as large (`self_check_*.csv`)
OVERFLOWED = 10.0
ABSENT = "nothing"
NOTHING = "nothing here shows it"
GAP = "no such value"
HASH = 64  # digits of a sha256
KeyPath = tuple[str, ...]


class Row(NamedTuple):
    """One claim."""

    what: str
    claimed: str
    found: str
    verdict: str
    why: str = ""  # of `not checked`


@dataclass(slots=True)
class Claims:
    """The claims of an export, and the values that were made again.

    Both are trees of JSON, with those of other files under the files' names.
    """

    claimed: dict[str, Any]
    folder: Path = field(default_factory=Path)
    graphs: tuple[str, ...] = ()  # in the folder
    images: int = 0
    evidence_given: set[str] = field(default_factory=set)
    noisy: bool = False  # other work disturbed a server's clients
    # (evidence, values made from it)
    remade: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    # reasons of `not checked` by the begin of a key
    reasons: dict[str, str] = field(default_factory=dict)
    extra_rows: list[Row] = field(default_factory=list)  # that stand for no key
    # whether the export names another processor, kd, runtime or Pillow than those here
    elsewhere: bool = field(init=False)

    def __post_init__(self) -> None:
        here = package_versions("kd", "onnxruntime", "openvino", "pillow", "torch")
        machine = at(self.claimed, ("environment", "machine", "processor"))
        self.elsewhere = machine != processor() or any(
            at(self.claimed, ("environment", "packages", name)) != here[name]
            for name in here
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

    def add_evidence(self, evidence: str, tree: Mapping[str, Any]) -> None:
        """Add values that were made again, in JSON as in the manifest."""
        self.remade.append((evidence, json.loads(json.dumps(tree))))

    def refuse(self, name: str, wrong: str) -> None:
        self.extra_rows.append(row(name, "", wrong, False))

    def leave_open(self, name: str, claimed: str, why: str) -> None:
        self.extra_rows.append(row(name, claimed, "", None, why))

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Turn an unreadable file into a WRONG row, but raise errors about evidence."""
        try:
            yield
        except (DataError, ConfigError):
            raise
        except KdError as error:
            self.refuse(name, error.wrong)
        except (*DAMAGE, OSError, RuntimeError, SafetensorError) as error:
            self.refuse(name, f"cannot be read ({error_summary(error)})")

    @property
    def rows(self) -> list[Row]:
        """Return a row for each claim and for each missing one."""
        trees = [self.claimed, *(tree for _, tree in self.remade)]
        origins = self.row_origins(Manifest | Beside, trees)
        return [*self.extra_rows, *(self._row(*origin) for origin in origins)]

    def row_origins(
        self, kind: Any, trees: Sequence[Any], path: KeyPath = ()
    ) -> Iterator[tuple[KeyPath, Origin | None]]:
        """Yield the path of each row and its origin; None: no key that kd writes."""
        kind, origin = without_annotation(kind)
        if origin is not None:
            yield path, origin
            return
        inner = [tree for tree in trees if isinstance(tree, dict)]
        if len(inner) < len(trees):
            yield path, None
        for key in dict.fromkeys(key for tree in inner for key in tree):
            key_kind = self._key_type(kind, key)
            if key_kind is None:
                yield (*path, key), None
            else:
                values = [tree[key] for tree in inner if key in tree]
                yield from self.row_origins(key_kind, values, (*path, key))

    def _key_type(self, kind: Any, key: str) -> Any:
        """Return the type of a key's value; None: kd does not write the key."""
        if get_origin(kind) is not dict:
            return key_types(kind).get(key)
        key_kind, value_kind = get_args(kind)
        if key_kind is Graph and key not in self.graphs:
            return None
        if key_kind is Threads and not self._is_thread_count(key):
            return None
        if key_kind is TimmKey and key not in config_keys():
            return None
        return value_kind

    def _is_thread_count(self, key: str) -> bool:
        limit = at(self.claimed, ("environment", "machine", "cores"))
        return key.isdecimal() and isinstance(limit, int) and 0 < int(key[:9]) <= limit

    def _row(self, path: KeyPath, origin: Origin | None) -> Row:
        name = "/".join(path)
        claimed = at(self.claimed, path)
        if origin is None:
            wrong = "no key that kd writes for a file that is here"
            return row(name, claimed, wrong, False)
        values = [(evidence, at(tree, path)) for evidence, tree in self.remade]
        verdicts = [
            (evidence, value, self._verdict(origin, evidence, claimed, value))
            for evidence, value in values
            if value is not ABSENT
        ]
        wrong = [value for _, value, right in verdicts if right is False]
        if wrong and claimed is ABSENT and self.old:
            return row(name, claimed, wrong[0], None, "kd 0.3 did not say it")
        if wrong:
            return row(name, claimed, wrong[0], False)
        judged = [
            (value, right)
            for evidence, value, right in verdicts
            if evidence in origin.by
        ]
        confirmed = [value for value, right in judged if right]
        if confirmed:
            return row(name, claimed, confirmed[0], True)
        if judged:
            why = "another machine, or other work, may explain it"
            return row(name, claimed, judged[0][0], None, why)
        return row(name, claimed, "", None, self._open_reason(name, origin))

    def _open_reason(self, name: str, origin: Origin) -> str:
        """Return a recorded reason, or the evidence that would show a value."""
        begins = [begin for begin in self.reasons if name.startswith(begin)]
        if begins:
            return self.reasons[max(begins, key=len)]
        read = {FILES, *(evidence for evidence, _ in self.remade)}
        unread = [evidence for evidence in origin.by if evidence not in read]
        absent = [
            evidence for evidence in unread if evidence not in self.evidence_given
        ]
        if absent:
            return " or ".join(f"{evidence} shows it" for evidence in absent)
        return "not read, since something is wrong" if unread else NOTHING

    def _verdict(
        self, origin: Origin, evidence: str, claimed: Any, remade: Any
    ) -> bool | None:
        rule = RULES[origin.close] if evidence in (IMAGES, SECOND) else same
        verdicts = [
            _safely(rule, claimed_leaf, remade_leaf, self)
            for claimed_leaf, remade_leaf in _leaf_pairs(claimed, remade)
            # an export of kd 0.3 lacks some claims
            if claimed_leaf is not ABSENT or not self.old
        ]
        if False in verdicts:
            return False
        return None if None in verdicts else True


# --------------------------------------------------------------------------------
# types


def without_annotation(kind: Any) -> tuple[Any, Origin | None]:
    """Return a type without annotation, and its origin; None: its keys have one."""
    return get_args(kind)[:2] if get_origin(kind) is Annotated else (kind, None)


@cache
def key_types(kind: Any) -> dict[str, Any]:
    """Return the types of a TypedDict's keys, or of those of several."""
    kinds = [kind] if is_typeddict(kind) else get_args(kind)
    types: dict[str, Any] = {}
    for typed_dict in kinds:
        types |= get_type_hints(typed_dict, include_extras=True)
    return types


# --------------------------------------------------------------------------------
# rules


Rule = Callable[[Any, Any, Claims], "bool | None"]


def _open_if(is_explained: bool) -> bool | None:
    """Return the verdict on a value that is not right: open, else wrong."""
    return None if is_explained else False


def same(claimed: Any, remade: Any, claims: Claims) -> bool:
    """Compare exactly, but for the last bits of a number."""
    if isinstance(claimed, float) and isinstance(remade, float):
        return claimed == remade or abs(claimed - remade) <= 1e-9 * max(
            abs(claimed), abs(remade)
        )
    return claimed == remade


def count(
    claimed: Any, remade: Any, claims: Claims, share: float = FLIPS
) -> bool | None:
    """Compare numbers of images, or shares of them."""
    error = abs(claimed - remade)
    if not (isinstance(claimed, int) and isinstance(remade, int)):
        error *= claims.images
    if error <= 1 + share * claims.images + 1e-6:
        return True
    return _open_if(claims.elsewhere and error <= 1 + OTHER_FLIPS * claims.images)


def points(claimed: Any, remade: Any, claims: Claims) -> bool | None:
    """Compare hundredths of a share."""
    return count(claimed / 100, remade / 100, claims)


def number(claimed: Any, remade: Any, claims: Claims) -> bool | None:
    """Compare numbers that are fitted."""
    error = abs(claimed - remade) / max(1.0, abs(remade))
    return error <= 1e-3 or _open_if(claims.elsewhere and error <= 0.1)


def difference(claimed: Any, remade: Any, claims: Claims) -> bool | None:
    """Compare largest differences from PyTorch."""
    low, high = sorted((claimed, remade))
    is_near = high <= NEAR * low + 1e-4
    return is_near or _open_if(claims.elsewhere and high <= OVERFLOWED * low)


def cost(claimed: Any, remade: Any, claims: Claims) -> bool | None:
    """Compare times and memory, which other work makes larger."""
    times = remade / claimed if claimed > 0 else float("inf")
    if times <= ALIKE and not claims.elsewhere:
        return True
    return _open_if(times <= (HOPELESS if claims.busy else SLOWER))


def rate(claimed: Any, remade: Any, claims: Claims) -> bool | None:
    """Compare images per second."""
    return cost(1 / claimed, 1 / remade, claims)


def reference_cost(claimed: Any, remade: Any, claims: Claims) -> bool | None:
    """Compare PyTorch's cost, where a claim that is too high flatters the graphs.

    The machine may have been busy at the export.
    """
    if claimed > ALIKE * remade:
        return _open_if(claimed <= HOPELESS * remade)
    return cost(claimed, remade, claims)


def tally(claimed: Any, remade: Any, claims: Claims) -> bool | None:
    """Compare "BIN:IMAGES ..."; see `kd.deploy.shift.Reference`."""
    if not isinstance(remade, str):
        return not isinstance(remade, bool) and count(
            round(claimed), round(remade), claims
        )
    first, second = (
        dict(re.findall(r"(\d+):(\d+)", text)) for text in (str(claimed), str(remade))
    )
    moved = sum(
        abs(int(first.get(key, 0)) - int(second.get(key, 0)))
        for key in {*first, *second}
    )
    return count(moved // 2, 0, claims, 2 * FLIPS) if moved else claimed == remade


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (count, points, number, difference, cost, rate, tally)
}
RULES |= {
    "equal": same,
    "reference_cost": reference_cost,
    "score": partial(count, share=TRAINED_FLIPS),
}


def _safely(rule: Rule, claimed: Any, remade: Any, claims: Claims) -> bool | None:
    """Return the verdict; False if the value has a wrong type."""
    try:
        return same(claimed, remade, claims) or rule(claimed, remade, claims)
    except (ArithmeticError, TypeError, ValueError):
        return False


def _leaf_pairs(claimed: Any, remade: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the single values of two trees, side by side."""
    if isinstance(claimed, dict) and isinstance(remade, dict):
        for key in {**claimed, **remade}:
            yield from _leaf_pairs(claimed.get(key, ABSENT), remade.get(key, ABSENT))
    elif (
        isinstance(claimed, list)
        and isinstance(remade, list)
        and len(claimed) == len(remade)
    ):
        for pair in zip(claimed, remade, strict=True):
            yield from _leaf_pairs(*pair)
    else:
        yield claimed, remade


def at(tree: Any, path: KeyPath) -> Any:
    """Return the value at a path, or ABSENT."""
    for key in path:
        if not isinstance(tree, dict) or key not in tree:
            return ABSENT
        tree = tree[key]
    return tree


def mark_gaps(claimed: Any, remade: Any) -> Any:
    """Return a remade tree with GAP, which is wrong, for claimed values it lacks."""
    if isinstance(claimed, dict) and isinstance(remade, dict):
        return {
            key: mark_gaps(claimed.get(key), remade.get(key, {}))
            for key in {**claimed, **remade}
        }
    return GAP if remade == {} else remade


def row(
    name: str, claimed: object, remade: object, right: bool | None, why: str = ""
) -> Row:
    """Return a row of printable texts; `right` None: not checked."""
    verdict = RIGHT if right else WRONG
    if right is None:
        verdict = OPEN
    return Row(
        _table_text(name),
        _table_text(claimed),
        _table_text(remade),
        verdict,
        "" if right else _printable(why),
    )


def _table_text(value: object) -> str:
    text = f"{value:.5g}" if isinstance(value, float) else str(value)
    return _printable(text[:DIGITS] if len(text) == HASH else text)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
