"""The claims of an export by key: their evidence and tolerance, in `TABLE`.

A key outside the table is WRONG: kd does not write it. A claim without evidence is `not checked`. So a claim is never
right because it was forgotten.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from safetensors import SafetensorError

from kd.core.errors import ConfigError, DataError, KdError, named
from kd.core.host import cores, processor, versions
from kd.files.json_file import DAMAGE
from kd.files.manifest import DIGITS
from kd.models.timm_folder import config_keys

RIGHT, WRONG, OPEN = "right", "WRONG", "not checked"
MANIFEST, EXPORT, IMAGES, RUN = "manifest.json", "export", "--data", "--run"
"""Evidence of a claim: other numbers in the manifest, the files, the images, the run folder. Tolerances apply to
`IMAGES`, since another machine may round differently. All else must be equal."""
EXACT = ("model.onnx", "openvino.xml", "model.pt2")  # graphs that must equal PyTorch
FLIPS, OTHER_FLIPS = 0.002, 0.02
"""Share of the images, plus one, whose prediction may differ from the export's: last bits depend on processor and
threads, and int8 is rounded differently without VNNI. Values in between are `not checked`."""
TRAINED_FLIPS = 0.005
"""The same for the score from training, perhaps in bfloat16: of 2,000 images 20 change their prediction, and gains and
losses differ by 3 standard deviations of sqrt(20), 14."""
ALIKE, SLOWER, HOPELESS = 1.5, 4.0, 100.0
"""Multiples of the claimed cost that are right, that are wrong on the same idle processor, and that are wrong anywhere:
a server of 0.42 ms was seen at 39.5 ms beside other work. Chosen; a lower cost is never wrong."""
NEAR, OVERFLOWED = 3.0, 10.0  # largest ratio of claimed and found difference that is right; that is open elsewhere
ABSENT = "nothing"
HASH = 64  # digits of a sha256
Path = tuple[str, ...]
Rule = Callable[[Any, Any, "Claims"], bool | None]


class Row(NamedTuple):
    """One claim."""

    what: str
    claimed: str
    found: str
    verdict: str
    why: str = ""  # of `not checked`


class Claim(NamedTuple):
    """A line of the table: nested keys, evidence, tolerance and its reason."""

    keys: str  # separated by "/"; "|": one of; "*": any; GRAPH, THREADS: see `Claims.fits`; "**": all below
    shown: tuple[str, ...] = ()  # evidence; (): no evidence
    rule: Rule | None = None  # tolerance for `IMAGES`; None: equal
    why: str = ""


def _flips(share: float) -> Rule:
    def rule(claimed: Any, found: Any, known: "Claims") -> bool | None:
        off = abs(claimed - found) * (1 if isinstance(claimed, int) and isinstance(found, int) else known.images)
        if off <= 1 + share * known.images + 1e-6:
            return True
        return None if known.elsewhere and off <= 1 + OTHER_FLIPS * known.images else False

    return rule


def _near(claimed: Any, found: Any, known: "Claims") -> bool | None:
    off = abs(claimed - found) / max(1.0, abs(found))
    return True if off <= 1e-3 else None if known.elsewhere and off <= 0.1 else False


def _cost(claimed: Any, found: Any, known: "Claims") -> bool | None:
    times = found / claimed if claimed > 0 else float("inf")
    if times <= ALIKE and not known.elsewhere:
        return True
    return None if times <= (HOPELESS if known.busy else SLOWER) else False


def _eager(claimed: Any, found: Any, known: "Claims") -> bool | None:
    """Compare PyTorch's cost: a much too high claim flatters the graphs, or the machine was busy at the export."""
    if claimed > ALIKE * found:
        return None if claimed <= HOPELESS * found else False
    return _cost(claimed, found, known)


def _rate(claimed: Any, found: Any, known: "Claims") -> bool | None:
    return _cost(1 / claimed, 1 / found, known)


def _difference(claimed: Any, found: Any, known: "Claims") -> bool | None:
    """Compare largest differences from PyTorch: without VNNI an int8 graph's is 4.9 times as large (`self_check_*`)."""
    low, high = sorted((claimed, found))
    return True if high <= NEAR * low + 1e-4 else None if known.elsewhere and high <= OVERFLOWED * low else False


def _tally(claimed: Any, found: Any, known: "Claims") -> bool | None:
    """Compare "BIN:IMAGES ..."; see `kd.deploy.shift.Reference`."""
    if not isinstance(found, str):
        return not isinstance(found, bool) and _flips(FLIPS)(round(claimed), round(found), known)
    one, other = (dict(re.findall(r"(\d+):(\d+)", text)) for text in (str(claimed), str(found)))
    off = sum(abs(int(one.get(key, 0)) - int(other.get(key, 0))) for key in {*one, *other})
    return _flips(2 * FLIPS)(off // 2, 0, known) if off else claimed == found


TABLE = (
    Claim("README.md", (EXPORT,)),
    Claim("checksum|format|version", (EXPORT,)),
    Claim("files/*/bytes|sha256", (EXPORT,)),
    Claim("name", (RUN,)),
    Claim("about/parameters|library", (EXPORT,)),
    Claim("about/labels", (IMAGES, RUN), None, "a class without an image may have any place"),
    Claim("about/model|losses|weights", (RUN,)),
    Claim("about/data/kind|hash", (RUN,)),
    Claim("input/name|layout|network_size", (EXPORT,)),
    Claim("input/size|crop|margin|bits", (IMAGES,), None, "Pillow of another version"),
    Claim("output/name|layout", (EXPORT,)),
    Claim("output/width", (IMAGES,)),
    Claim("output/space", (RUN,)),
    Claim("output/thresholds/**", (IMAGES,), _near),
    Claim("output/defer/stated/GRAPH/**", (IMAGES,), _near),
    Claim("output/defer/rule|threshold|chosen_on|labels/**", (IMAGES,), _near),
    Claim("parity/GRAPH/images|labelled", (EXPORT,)),
    Claim("parity/GRAPH/accuracy", (MANIFEST,)),
    Claim("parity/GRAPH/correct|same_top1|mAP|cosine|ece", (IMAGES,), _flips(FLIPS), "another processor"),
    Claim("parity/GRAPH/max_difference", (IMAGES,), _difference),
    Claim("parity/GRAPH/cpu_ms", (IMAGES,), _cost, "times vary"),
    Claim("eager_ms", (IMAGES,), _eager, "times vary"),
    Claim("variants/GRAPH/title|unit", (IMAGES,)),
    Claim("variants/GRAPH/images|score|agreement|cpu_ms", (MANIFEST,)),
    Claim("variants/GRAPH/runtime|precision|bytes", (EXPORT,)),
    Claim("variants/GRAPH/drop|interval", (MANIFEST, IMAGES), _flips(FLIPS)),
    Claim("variants/GRAPH/speed/THREADS/p50_ms|p99_ms|memory_mb", (IMAGES,), _cost, "times vary"),
    Claim("variants/GRAPH/speed/THREADS/images_per_second", (IMAGES,), _rate, "times vary"),
    Claim("pick", (MANIFEST,)),
    Claim("accepted/sentence|file", (MANIFEST,)),
    Claim("accepted/threads", (IMAGES,), None, "no time is measured"),
    Claim("accepted/found/mb", (EXPORT,)),
    Claim("accepted/found/drop|teacher-drop|ece", (MANIFEST,)),
    Claim("accepted/found/ms", (IMAGES,), _cost, "times vary"),
    Claim("cascade/**", (), None, "it needs the second export"),
    Claim("validation/GRAPH/**", (IMAGES,), _tally, "another processor"),
    Claim("calibration/images", (IMAGES,)),
    Claim("calibration/temperature|ece|calibrated_ece", (IMAGES,), _near, "more than 1,000 images, or none of a label"),
    Claim("environment/**", (), None, "of the machine that exported"),
    Claim("chain/teacher|answers/**", (RUN,)),
    Claim("chain/student/is|run|step|weights", (RUN,)),
    Claim("chain/student/exported", (EXPORT,)),
    Claim("chain/graphs/GRAPH", (EXPORT,)),
    Claim("licences/student", (), None, "who exports states it"),
    Claim("licences/*", (EXPORT, RUN), None, "the run does not know it"),
    Claim("scores/columns/**", (EXPORT,)),
    Claim("scores/split|images|evaluations", (RUN,)),
    Claim("scores/models/student/*/value", (IMAGES, RUN), _flips(TRAINED_FLIPS), "counted on other images"),
    Claim("scores/models/*/*/value|images|interval", (RUN,)),
    Claim("scores/differences|pair/**", (RUN,)),
    Claim("config.json/architecture|model_args/**", (IMAGES, RUN)),
    Claim("config.json/num_classes|num_features|global_pool|problem_type", (EXPORT, RUN)),
    Claim("config.json/label_names", (IMAGES, RUN), None, "a class without an image may have any place"),
    Claim("config.json/pretrained_cfg/input_size|crop_pct|crop_mode|interpolation", (EXPORT, RUN)),
    Claim("config.json/pretrained_cfg/mean|std", (IMAGES, RUN)),
    Claim("config.json/pretrained_cfg/CONFIG", (EXPORT, RUN), None, "not as this timm has it"),
    Claim("kd.json/run|step|digest|eval_crop", (RUN,)),
    Claim("kd.json/metrics/**", (RUN,)),
    Claim("kd.json/calibration/**", (MANIFEST,)),
    Claim("kd.json/kd", (), None, "of the machine that exported"),
    Claim("images.csv/times", (IMAGES,)),
    Claim("images.csv/labels", (IMAGES, RUN), None, "no folder is named as a class"),
    Claim("images.csv/choice", (RUN,), None, "an export may choose its images"),
    Claim("model.safetensors/format", (EXPORT,)),
    Claim("weights|self_check.npz/GRAPH", (EXPORT,)),
    Claim("self_check/GRAPH/ir|opset|least|allowed", (EXPORT,), None, "it does not run here"),
    Claim("self_check.npz/pixels", (EXPORT,), None, "no graph runs here"),
    Claim("self_check.npz/pictures", (EXPORT,), None, "of another kd, Pillow or processor"),
    Claim("random images/GRAPH", (IMAGES,)),
    Claim("random images/all others", (), None, "a trigger for one pattern would not be seen"),
)
OLD = (
    Claim("scores/value", (IMAGES,), _flips(TRAINED_FLIPS), "counted on other images"),
    Claim("scores/title|unit|lines|split|images", (), None, "free text of kd 0.3"),
    Claim("chain/against_teacher", (), None, "free text of kd 0.3"),
)
"""Keys of `format: 1`."""


@dataclass(slots=True)
class Claims:
    """Claims of an export and the recomputed values. Values are trees of JSON; other files' are nested under a name."""

    claimed: dict[str, Any]
    graphs: tuple[str, ...] = ()  # graphs in the folder
    images: int = 0
    noisy: bool = False  # other work disturbed a server's clients
    found: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # values by evidence
    reasons: dict[str, str] = field(default_factory=dict)  # reasons of `not checked` by key prefix
    broken: list[Row] = field(default_factory=list)

    elsewhere: bool = field(init=False)
    """Whether the export names another processor, kd, runtime or Pillow than those here."""

    def __post_init__(self) -> None:
        here = versions("kd", "onnxruntime", "openvino", "pillow", "torch")
        there = {name: _at(self.claimed, ("environment", "packages", name)) for name in here}
        self.elsewhere = here != there or _at(self.claimed, ("environment", "machine", "processor")) != processor()

    @property
    def old(self) -> bool:
        return self.claimed.get("format") == 1

    @property
    def labels(self) -> list[str]:
        """The classes in the order of the logits; empty for an embedding model."""
        found = _at(self.claimed, ("config.json", "label_names"))
        return list(map(str, found)) if isinstance(found, list) else []

    @property
    def busy(self) -> bool:
        return self.noisy or self.elsewhere or os.getloadavg()[0] > cores()

    def show(self, by: str, tree: Mapping[str, Any]) -> None:
        self.found.setdefault(by, []).append(json.loads(json.dumps(tree)))  # as in the manifest

    def refuse(self, what: str, wrong: str) -> None:
        self.broken.append(_row(what, "", wrong, False))

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Turn an unreadable file into a WRONG row. Errors about `--data` or `--run` are raised."""
        try:
            yield
        except (DataError, ConfigError):
            raise
        except KdError as error:
            self.refuse(what, error.wrong)
        except (*DAMAGE, OSError, RuntimeError, SafetensorError) as error:
            self.refuse(what, f"cannot be read ({named(error)})")

    def fits(self, word: str, key: str) -> bool:
        if word == "GRAPH":
            return key in self.graphs
        if word == "THREADS":
            most = _at(self.claimed, ("environment", "machine", "cores"))
            return key.isdecimal() and isinstance(most, int) and 0 < int(key[:9]) <= most
        if word == "CONFIG":
            return key in config_keys()
        return word == "*" or key in word.split("|")

    def claim(self, path: Path) -> tuple[Claim | None, bool]:
        """Return the line of the table for a path, and whether it covers everything below."""
        for one in (*TABLE, *(OLD if self.old else ())):
            *words, last = one.keys.split("/")
            whole = last == "**"
            words = words if whole else [*words, last]
            if len(words) == len(path) and all(map(self.fits, words, path)):
                return one, whole
        return None, False

    def above(self, path: Path) -> bool:
        """Return whether a line of the table has keys below a path."""
        lines = (one.keys.split("/") for one in TABLE)
        return any(len(words) > len(path) and all(map(self.fits, words, path)) for words in lines)

    def places(self, tree: Any, path: Path = ()) -> Iterator[Path]:
        """Yield the paths of rows: single values, and whole lines of the table."""
        leaf = not isinstance(tree, dict) or (not tree and not self.above(path))
        if path and (leaf or self.claim(path)[1]):
            yield path
        elif isinstance(tree, dict):
            for key in tree:
                yield from self.places(tree[key], (*path, str(key)))

    @property
    def rows(self) -> list[Row]:
        """Return a row for each claim and for each missing one."""
        trees = [self.claimed, *(tree for by in self.found.values() for tree in by)]
        return [*self.broken, *map(self._row, dict.fromkeys(path for tree in trees for path in self.places(tree)))]

    def _row(self, path: Path) -> Row:
        what, claimed, (claim, _) = "/".join(path), _at(self.claimed, path), self.claim(path)
        if claim is None:
            return _row(what, claimed, "no key that kd writes for a file that is here", False)
        seen = [(by, value) for by, trees in self.found.items() for tree in trees
                if (value := _at(tree, path)) is not ABSENT]  # fmt: skip
        verdicts = [(by, value, self._judged(claim, by, claimed, value)) for by, value in seen]
        for _, value, right in verdicts:
            if right is False:
                lacks = claimed is ABSENT and self.old
                return _row(what, claimed, value, None if lacks else False, "kd 0.3 did not say it" if lacks else "")
        shown = [(value, right) for by, value, right in verdicts if by in claim.shown]
        for value, right in shown:
            if right:
                return _row(what, claimed, value, True)
        absent = [by for by in claim.shown if by in (IMAGES, RUN) and by not in self.found]
        begin = max((one for one in self.reasons if what.startswith(one)), key=len, default="")
        why = self.reasons[begin] if begin else " or ".join(f"{by} shows it" for by in absent) or claim.why
        return _row(what, claimed, shown[0][0] if shown else "", None, why)

    def _judged(self, claim: Claim, by: str, claimed: Any, found: Any) -> bool | None:
        rule = claim.rule if by == IMAGES and claim.rule else _same
        # an export of kd 0.3 lacks some claims
        pairs = [(one, other) for one, other in _pairs(claimed, found) if one is not ABSENT or not self.old]
        verdicts = [_safely(rule, one, other, self) for one, other in pairs]
        return False if False in verdicts else None if None in verdicts else True


def _same(claimed: Any, found: Any, known: Claims) -> bool:
    if isinstance(claimed, float) and isinstance(found, float):
        return claimed == found or abs(claimed - found) <= 1e-9 * max(abs(claimed), abs(found))
    return claimed == found


def _safely(rule: Rule, claimed: Any, found: Any, known: Claims) -> bool | None:
    """Return the verdict; False if the value has a wrong type."""
    try:
        return rule(claimed, found, known) if not _same(claimed, found, known) else True
    except (ArithmeticError, TypeError, ValueError):
        return False


def _pairs(claimed: Any, found: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(claimed, dict) and isinstance(found, dict):
        for key in {**claimed, **found}:
            yield from _pairs(claimed.get(key, ABSENT), found.get(key, ABSENT))
    elif isinstance(claimed, list) and isinstance(found, list) and len(claimed) == len(found):
        for one, other in zip(claimed, found, strict=True):
            yield from _pairs(one, other)
    else:
        yield claimed, found


def _at(tree: Any, path: Path) -> Any:
    for key in path:
        if not isinstance(tree, dict) or key not in tree:
            return ABSENT
        tree = tree[key]
    return tree


def _row(what: str, claimed: object, found: object, right: bool | None, why: str = "") -> Row:
    texts = [f"{one:.5g}" if isinstance(one, float) else str(one) for one in (what, claimed, found)]
    texts = [text[:DIGITS] if len(text) == HASH else text for text in texts]
    texts = ["".join(c if c.isprintable() else "?" for c in text)[:100] for text in (*texts, why)]
    return Row(*texts[:3], OPEN if right is None else RIGHT if right else WRONG, "" if right else texts[3])
