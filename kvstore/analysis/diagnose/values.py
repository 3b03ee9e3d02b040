"""Detects values that change from request to request: a time, an id, a number, or others.

Each function takes two texts and the position of the first difference (`at`). It returns a
diagnosis, or None if it does not apply.
"""

from __future__ import annotations

import re
from typing import Final

from kvstore.analysis.diagnose.content import resync
from kvstore.analysis.diagnose.diagnosis import Diagnosis, shown

LOOK_BACK: Final = 80
"""Maximum characters before the first difference at which a changed value can start."""
VALUE_CHARS: Final = 200
"""Maximum length of a changed value. A longer difference is another text."""
ID_CHARS: Final = 8
"""Minimum length of an id. Anything shorter is a word or a number."""
SHOWN_BACK: Final = 24
"""Characters of a value shown before the difference."""

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?"
    r"|Sept?(?:ember)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\b\.?"
)
_WEEKDAY = (
    r"(?:Mon(?:day)?|Tue(?:s(?:day)?)?|Wed(?:nesday)?|Thu(?:rs(?:day)?)?|Fri(?:day)?"
    r"|Sat(?:urday)?|Sun(?:day)?)\b"
)
_DAY = rf"(?:{_WEEKDAY},?\s+)?"
_DATE = (
    rf"(?:\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|\d{{1,2}}[-/.]\d{{1,2}}[-/.]\d{{4}}"
    rf"|{_DAY}{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?(?:,?\s+\d{{4}})?"
    rf"|{_DAY}\d{{1,2}}\.?\s+{_MONTH}(?:,?\s+\d{{4}})?)"
)
_TIME = (
    r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[AaPp]\.?[Mm]\b\.?)?"
    r"(?:\s?(?:Z|UTC|GMT)\b|[+-]\d{2}:?\d{2})?"
)
_TIMESTAMP = re.compile(
    rf"(?<![\w:]){_DATE}(?:(?:T|,?\s+(?:at\s+)?){_TIME})?|(?<![\w:]){_TIME}|(?<!\w){_WEEKDAY}"
)
_EPOCH = re.compile(r"(?<![\w.])1\d{9}(?:\d{3}|\d{6}|\d{9}|\.\d+)?(?![\w])")
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w])|\d+")
_WORD = re.compile(r"[A-Za-z0-9_\-]+")
_UUID = re.compile(r"[0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}")

LAST = "Put it at the end of the prompt, after all shared text"


def timestamp(a: str, b: str, at: int) -> Diagnosis | None:
    """Detect a date, a time of day, or seconds since 1970."""
    for pattern in (_TIMESTAMP, _EPOCH):
        pair = _pair(pattern, a, b, at)
        if pair is not None:
            clock = ":" in pair[0] or pattern is _EPOCH
            rest = (
                ", or write only the date without the time: it then changes once a day"
                if clock
                else ": at the start it makes every prompt new each day"
            )
            return Diagnosis(
                "timestamp",
                f"a {'time' if clock else 'date'}: {shown(pair[0])} became {shown(pair[1])}",
                LAST + rest + ".",
            )
    return None


def identifier(a: str, b: str, at: int) -> Diagnosis | None:
    """Detect a UUID, a hexadecimal digest, a request or session id."""
    pair = _pair(_WORD, a, b, at)
    if pair is None or not all(map(_looks_random, pair)):
        return None
    return Diagnosis(
        "id",
        f"an id: {shown(pair[0])} became {shown(pair[1])}",
        f"{LAST}, or remove it: the model rarely needs the id of a request, session or user.",
    )


def counter(a: str, b: str, at: int) -> Diagnosis | None:
    """Detect a number: a turn, a page, a count of remaining tokens."""
    pair = _pair(_NUMBER, a, b, at)
    if pair is None:
        return None
    return Diagnosis(
        "counter",
        f"a number that changed: {shown(pair[0])} became {shown(pair[1])}",
        f"{LAST}, or remove it.",
    )


def value(a: str, b: str, at: int) -> Diagnosis | None:
    """Detect a short difference in otherwise equal text: a name, a setting."""
    gap = resync(a, b, at)
    if gap is None or max(gap) > VALUE_CHARS or not all(gap):
        return None
    start = _word_start(a, at)
    return Diagnosis(
        "value",
        f"a value that changed: {shown(a[start : at + gap[0]])} became "
        f"{shown(b[start : at + gap[1]])}",
        f"{LAST}: put common text first, and text that differs by user or request last.",
    )


def _pair(pattern: re.Pattern[str], a: str, b: str, at: int) -> tuple[str, str] | None:
    """Return the two matches that start at the same place and contain the difference."""
    found_a, found_b = _around(pattern, a, at), _around(pattern, b, at)
    if found_a is None or found_b is None or found_a[0] != found_b[0]:
        return None
    return (found_a[1], found_b[1]) if found_a[1] != found_b[1] else None


def _around(pattern: re.Pattern[str], text: str, at: int) -> tuple[int, str] | None:
    """Return (start, text) of the match that contains the position or ends there."""
    # Start at a gap between words, so that no match begins inside a word.
    start = max(0, at - LOOK_BACK)
    while start > 0 and not text[start - 1].isspace() and start > at - 2 * LOOK_BACK:
        start -= 1
    for found in pattern.finditer(text, start, at + LOOK_BACK):
        if found.start() <= at <= found.end() and found.end() > found.start():
            return found.start(), found[0]
        if found.start() > at:
            break
    return None


def _looks_random(word: str) -> bool:
    """Return whether a word looks random: a UUID, or letters and digits mixed."""
    if _UUID.fullmatch(word):
        return True
    if len(word) < ID_CHARS:
        return False
    digits = sum(letter.isdigit() for letter in word)
    letters = sum(letter.isalpha() for letter in word)
    runs = len(re.findall(r"\d+", word))
    return digits >= 2 and letters >= 2 and (runs >= 2 or digits >= 4)


def _word_start(text: str, at: int) -> int:
    """Return the start of the word at this position."""
    start = at
    while start > max(0, at - SHOWN_BACK) and not text[start - 1].isspace():
        start -= 1
    return start
