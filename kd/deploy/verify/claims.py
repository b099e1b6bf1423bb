"""What an export claims, what was found, and when a number is the one that is claimed."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kd.core.errors import ModelError
from kd.core.host import cores, processor
from kd.files.manifest import DIGITS
from kd.setup.recipe import flatten

HASH = 64  # digits of a sha256
RIGHT, WRONG, OPEN = "right", "WRONG", "not checked"
EXACT_SHARE, OTHER_SHARE = 0.002, 0.02
"""Share of the images that may get another answer than where they were counted, in float32 and in less: last bits
differ between processors, and int8 is rounded otherwise without VNNI. Of 49 images that is none."""
SLOWER, HOPELESS = 4.0, 100.0
"""Times the claimed milliseconds that are wrong, and that are wrong also where they say little: on another processor,
or beside other work, with which a server of 0.42 ms was seen at 39.5 ms. Chosen; less time is never wrong."""
ANY_SPEED = ("p99_ms", "images_per_second", "memory_mb")  # what else was on the machine decides them


class NotVerifiedError(ModelError):
    """Something that an export says of itself is not what was found."""

    exit_code = 3


class Row(NamedTuple):
    """One claim."""

    what: str
    claimed: str
    found: str
    verdict: str


@dataclass(slots=True)
class Claims:
    """What an export claims, and what was found."""

    manifest: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)

    def add(self, what: str, claimed: object, found: object, right: bool | None) -> None:
        texts = [f"{one:.5g}" if isinstance(one, float) else str(one) for one in (what, claimed, found)]
        texts = [text[:DIGITS] if len(text) == HASH else text for text in texts]
        what, claimed, found = ("".join(c if c.isprintable() else "?" for c in text)[:100] for text in texts)
        self.rows.append(Row(what, claimed, found, OPEN if right is None else RIGHT if right else WRONG))

    def same(self, what: str, claimed: object, found: object) -> None:
        self.add(what, claimed, found, claimed == found)

    def numbers(self, what: str, claimed: Any, found: Any, share: float, noisy: bool = False, **more: Any) -> None:
        """Compare JSON values, a row each. Of milliseconds more than `SLOWER` times as many prove little if `noisy`."""
        ends = more.get("ends", {})  # intervals, by row
        found = json.loads(json.dumps(found))  # as the manifest was written
        both = [{f"{what}{key and ': '}{key}": each for key, each in flatten(one).items()} for one in (claimed, found)]
        elsewhere = processor() != self.manifest["environment"]["machine"]["processor"]
        busy = noisy or elsewhere or os.getloadavg()[0] > cores()
        for key in [key for key in {**both[0], **both[1]} if not key.endswith(ANY_SPEED)]:
            old, new = (one.get(key, "nothing") for one in both)
            if old == new or isinstance(old, str | bool) or isinstance(new, str | bool):
                right: bool | None = old == new
            elif key.endswith("ms"):
                right = new <= SLOWER * old or (None if busy and new <= HOPELESS * old else False)
            elif key.endswith("max_difference"):
                right = new <= 3 * old + 1e-4
            elif isinstance(old, int) and isinstance(new, int):
                right = abs(old - new) <= int(share * max(old, new))
            else:
                right = abs(old - new) <= share * max(1.0, abs(new))
            interval = " ({:.4f} to {:.4f})".format(*ends[key]) if key in ends else ""
            self.add(key, old, f"{new:.5g}{interval}" if isinstance(new, float) else new, right)

    def require(self) -> None:
        """Refuse an export that says something wrong."""
        if wrong := [row.what for row in self.rows if row.verdict == WRONG]:
            named = "; ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
            told = f"{len(wrong)} of {len(self.rows)} claims are not what was found: {named}"
            raise NotVerifiedError("verify", told, "", "See the rows that say WRONG")
