"""Values that change from request to request: a time, an id, a number, anything else.

Each function takes two texts and the first place where they differ (`at`), and says what it sees
there, or None.
"""

from __future__ import annotations

import re
from typing import Final

from kvstore.analysis.diagnose.content import resync
from kvstore.analysis.diagnose.verdict import Verdict, shown

LOOK_BACK: Final = 80
"""A value that differs begins at most so far before its first different character."""
VALUE_CHARS: Final = 200
"""A longer difference is no value, but another text."""
ID_CHARS: Final = 8
"""Fewer letters and digits are a word or a number."""
SHOWN_BACK: Final = 24
"""How much of a value before its difference is shown."""

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

LAST = "Put it at the end of the prompt, behind everything that is shared"


def timestamp(a: str, b: str, at: int) -> Verdict | None:
    """A date, a time of day, or seconds since 1970."""
    for pattern in (_TIMESTAMP, _EPOCH):
        pair = _pair(pattern, a, b, at)
        if pair is not None:
            clock = ":" in pair[0] or pattern is _EPOCH
            rest = (
                ", or leave out the time of day and write the date only: it then changes once a day"
                if clock
                else ": with it in front every prompt is new each day"
            )
            return Verdict(
                "timestamp",
                f"a {'time' if clock else 'date'}: {shown(pair[0])} became {shown(pair[1])}",
                LAST + rest + ".",
            )
    return None


def identifier(a: str, b: str, at: int) -> Verdict | None:
    """A UUID, a hexadecimal digest, a request or session id."""
    pair = _pair(_WORD, a, b, at)
    if pair is None or not all(map(_looks_random, pair)):
        return None
    return Verdict(
        "id",
        f"an id: {shown(pair[0])} became {shown(pair[1])}",
        f"{LAST}, or leave it out of the prompt: the model seldom needs an id of the request, the "
        "session or the user.",
    )


def counter(a: str, b: str, at: int) -> Verdict | None:
    """A number: a turn, a page, a count of tokens left."""
    pair = _pair(_NUMBER, a, b, at)
    if pair is None:
        return None
    return Verdict(
        "counter",
        f"a number that changes: {shown(pair[0])} became {shown(pair[1])}",
        f"{LAST}, or leave the number out.",
    )


def value(a: str, b: str, at: int) -> Verdict | None:
    """Something short that differs within text that otherwise goes on alike: a name, a setting."""
    gap = resync(a, b, at)
    if gap is None or max(gap) > VALUE_CHARS or not all(gap):
        return None
    start = _word_start(a, at)
    return Verdict(
        "value",
        f"a value that differs: {shown(a[start : at + gap[0]])} became "
        f"{shown(b[start : at + gap[1]])}",
        f"{LAST}: what differs between users or requests comes last, what all have comes first.",
    )


def _pair(pattern: re.Pattern[str], a: str, b: str, at: int) -> tuple[str, str] | None:
    """The pattern's matches that begin at one place in both texts and hold the difference."""
    found_a, found_b = _around(pattern, a, at), _around(pattern, b, at)
    if found_a is None or found_b is None or found_a[0] != found_b[0]:
        return None
    return (found_a[1], found_b[1]) if found_a[1] != found_b[1] else None


def _around(pattern: re.Pattern[str], text: str, at: int) -> tuple[int, str] | None:
    """(start, text) of the match that the place lies in or ends."""
    # From a gap between words on, so that no match begins inside one.
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
    """Whether no person would write this word: a UUID, or letters and digits well mixed."""
    if _UUID.fullmatch(word):
        return True
    if len(word) < ID_CHARS:
        return False
    digits = sum(letter.isdigit() for letter in word)
    letters = sum(letter.isalpha() for letter in word)
    runs = len(re.findall(r"\d+", word))
    return digits >= 2 and letters >= 2 and (runs >= 2 or digits >= 4)


def _word_start(text: str, at: int) -> int:
    """Where the word that the place lies in begins."""
    start = at
    while start > max(0, at - SHOWN_BACK) and not text[start - 1].isspace():
        start -= 1
    return start
