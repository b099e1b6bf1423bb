"""Phrases at which readers stop, and what to write instead. `tests/test_words.py` keeps
them out. They are searched in the pages, and in the strings and docstrings of kd/.
"""

from __future__ import annotations

import re

COUNTED = "(labels|image|picture|photograph|byte|row|line|number|view|request|core|point|step|second|minute|weight)s?|ms|MiB"
UNIT = "class|step|image|picture|photograph|epoch|pixel|core|rank|second|window|view|request|trial|weight|GPU|layer|part"
MODEL = "teacher|student|model|network|graph|endpoint|server|kd-serve"
PHRASES = {
    r"\b(nobody|somebody|whoever|anybody|someone|everybody)\b": (
        "the user, or the passive"
    ),
    r"\ba person\b": "the user, or the passive",
    r"\bso many\b": "the number, or the noun",
    r"\bis none\b": "there is no NOUN",
    r"\bof it\b": "the noun",
    r"\bthe same of\b": "the noun",
    r"\bone of the two\b": "X and Y are mutually exclusive",
    rf"\b({COUNTED}) an? ({UNIT})\b": "per",
    rf"\b({MODEL})s? (is |are |was |were )?(answer|ask)(s|ed)?\b": (
        "predict, run, return; is queried"
    ),
    rf"\b(ask|asks|asked|asking) (the |a |its |no )?({MODEL})": "query",
    r"\bwhat (was|is|were) (measured|found|run|tried|compared|asked|said|told)\b": (
        "the measured value; a noun"
    ),
    r"\b(which|that) (was|were) not (tried|run) on\b": "is untested on",
    r"\bis not there\b": "kd has no, kd does not",
    r"\bsays? of itself\b": "claims",
    r"\bat home\b": "under its own preprocessing",
    r"\bteaches nothing\b": "the effect",
    r"\bwhat leaves the house\b": "export, serving, prediction",
    r"\bhas \d[\d.]* %": "reaches",
    r"\bis wrong in silence\b": "wrong without a message",
    r"\bhas nothing (more )?to say\b": "is not needed",
}


def prose(text: str) -> str:
    """Return a page without code, links' targets and HTML, on one line."""
    text = re.sub(r"^```.*?^```$", " ", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|<[^>]*>", " ", text)
    return " ".join(text.split())


def faults(text: str) -> list[str]:
    """Return each phrase that is found, with its surroundings and the remedy."""
    matches = []
    for pattern, instead in PHRASES.items():
        for match in re.finditer(pattern, text, re.IGNORECASE):
            around = text[max(0, match.start() - 30) : match.end() + 20]
            matches.append(f"...{around}... Write: {instead}.")
    return matches
