"""Detects texts with the same content in another form: reordered, rewritten, cut, extended.

Each function takes two texts and the position of the first difference (`at`). It returns a
diagnosis, or None if it does not apply.
"""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections import Counter
from typing import Any, Final

from kvstore.analysis.diagnose.content import PIECE_CHARS, find_continuation, pieces
from kvstore.analysis.diagnose.diagnosis import Diagnosis, shown

GAP_CHARS: Final = 12
"""Minimum length of added or removed text. Anything shorter is a value of another length."""
JSON_BACK: Final = 4000
"""Maximum characters before a difference at which its JSON can start."""
JSON_CHARS: Final = 200_000
JSON_STARTS: Final = 64
"""Number of brackets before a difference that are tried as the start of its JSON."""
SAME_CHARS: Final = 64
"""Characters that must agree, after normalization, for two texts to count as the same."""

_THINKING = re.compile(
    r"<(think|thinking|reasoning|analysis)>.*?</\1>\s*|<\|channel\|>analysis.*?<\|end\|>\s*",
    re.DOTALL,
)
_LIST = re.compile(r"[,;|]\s*")


def reordered(a: str, b: str, at: int) -> Diagnosis | None:
    """Detect the same documents, examples, tools or list items in another order."""
    first, second = _common_once(a, b, at)
    if len(first) >= 2 and first[0] != second[0]:
        return Diagnosis(
            "reordered",
            f"the same text in another order: {shown(first[0])} came first, now it is "
            f"{shown(second[0])}",
            "Sort retrieved or listed items by something stable, such as an id, not by rank or by "
            "order of arrival. The question can tell the model the rank.",
        )
    if _json_pair(a, b, at, lambda x, y: x != y and _sorted(x) == _sorted(y)) or _same_list(
        a, b, at
    ):
        return Diagnosis(
            "reordered",
            f"a list in another order: {shown(a[_line_start(a, at) :])} became "
            f"{shown(b[_line_start(b, at) :])}",
            "Sort the list before writing it: sets and mappings are unordered.",
        )
    return None


def rerendered(a: str, b: str, at: int) -> Diagnosis | None:
    """Detect history that was rendered differently from the first time."""
    keep = "Keep the text (or the token ids) that was sent and generated, and only append to it"
    for longer, other, words in ((a, b, "is missing from"), (b, a, "was added to")):
        thought = _THINKING.match(longer, _tag_start(longer, at))
        if thought and _goes_on(longer[thought.end() :], other[_tag_start(longer, at) :]):
            return Diagnosis(
                "rerendered",
                f"thinking {words} the history: {shown(thought[0])}",
                "The template drops the thinking of earlier turns, so a turn's KV does not match "
                f"the next one. {keep}, or keep the thinking in the template.",
            )
    if _json_pair(a, b, at, lambda x, y: x == y):
        return Diagnosis(
            "rerendered",
            "the same JSON with other whitespace or another order of keys",
            f"{keep}. Where JSON is generated again, sort its keys and fix its separators.",
        )
    window_a, window_b = a[at : at + 8 * SAME_CHARS], b[at : at + 8 * SAME_CHARS]
    if _blank_at(a, b, at) and _agree("".join(window_a.split()), "".join(window_b.split())):
        return Diagnosis(
            "rerendered",
            "only the whitespace differs: "
            f"{shown(window_a[:SAME_CHARS])} became {shown(window_b[:SAME_CHARS])}",
            f"A template trims or adds whitespace when it renders earlier turns. {keep}.",
        )
    start = max(0, at - PIECE_CHARS)
    plain_a, plain_b = _unescaped(a[start : at + 512]), _unescaped(b[start : at + 512])
    if a[at:] != b[at:] and _agree(plain_a, plain_b):
        return Diagnosis(
            "rerendered",
            f"the same characters in another encoding: {shown(window_a[:SAME_CHARS])} became "
            f"{shown(window_b[:SAME_CHARS])}",
            f"Escapes or Unicode normalization differ. {keep}.",
        )
    return None


def cut(a: str, b: str, at: int) -> Diagnosis | None:
    """Detect removed text: most often a window over the last turns."""
    found = find_continuation(b, a, at)
    if found is None or found - at < GAP_CHARS:
        return None
    return Diagnosis(
        "cut",
        f"{found - at:,} characters were removed here: {shown(a[at:found])}",
        "History: cut much and seldom (down to half, not turn by turn), because everything after "
        "a cut is recomputed. Documents: put the most common ones first.",
    )


def inserted(a: str, b: str, at: int) -> Diagnosis | None:
    """Detect text that was added in front or in the middle."""
    found = find_continuation(a, b, at)
    if found is None or found - at < GAP_CHARS:
        return None
    return Diagnosis(
        "inserted",
        f"{found - at:,} characters were {'put in front' if at == 0 else 'inserted here'}: "
        f"{shown(b[at:found])}",
        "Append new text (at the end, or with the last message) instead of putting it before text "
        "that stays the same. Of documents, put the most common ones first.",
    )


def replaced(a: str, b: str, at: int) -> Diagnosis | None:
    """Detect different text in front of text that is the same again."""
    theirs = set(pieces(a, at))
    again = next((piece for piece in pieces(b, at) if piece in theirs), None)
    if again is None:
        return None
    gone, new = (text.index(again, at) - at for text in (a, b))
    return Diagnosis(
        "replaced",
        f"{gone:,} characters were replaced by {new:,} others, followed by the same text: "
        f"{shown(again)}",
        "Put text that most requests have first, and text that only some have after it.",
    )


def _common_once(a: str, b: str, at: int) -> tuple[list[str], list[str]]:
    """Return the pieces that both texts have exactly once after the difference, in each order."""
    start = min(_line_start(a, at), _line_start(b, at))
    counts = [Counter(pieces(text, start)) for text in (a, b)]
    both = {p for p, n in counts[0].items() if n == 1 and counts[1].get(p) == 1}
    return [p for p in counts[0] if p in both], [p for p in counts[1] if p in both]


def _same_list(a: str, b: str, at: int) -> bool:
    """Return whether the lines have the same items of a list."""
    items = []
    for text in (a, b):
        start = _line_start(text, at)
        end = text.find("\n", at)
        line = text[start : end if end >= 0 else len(text)][:JSON_BACK]
        line = line.rpartition(": ")[2].rstrip(".")
        items.append([item.strip() for item in _LIST.split(line)])
    return len(items[0]) > 1 and items[0] != items[1] and sorted(items[0]) == sorted(items[1])


def _json_pair(a: str, b: str, at: int, alike: Any) -> bool:
    """Return whether the difference is inside JSON values of both texts that are `alike`."""
    decoder = json.JSONDecoder()
    starts = [
        place
        for place in range(max(0, at - JSON_BACK), min(at, len(a), len(b)))
        if a[place] in "[{"
    ]
    for place in starts[:64]:
        try:
            value_a, end_a = decoder.raw_decode(a[place : place + JSON_CHARS])
            value_b, end_b = decoder.raw_decode(b[place : place + JSON_CHARS])
        except (ValueError, RecursionError):
            continue
        if place + min(end_a, end_b) >= at and alike(value_a, value_b):
            return True
    return False


def _sorted(value: Any) -> Any:
    """Return JSON with every list sorted."""
    if isinstance(value, list):
        return sorted((_sorted(item) for item in value), key=lambda item: json.dumps(item))
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return value


def _tag_start(text: str, at: int) -> int:
    """Return the start of a tag with the difference: both texts can have its `<`."""
    found = text.rfind("<", max(0, at - 12), at + 1)
    return found if found >= 0 and ">" not in text[found:at] else at


def _goes_on(rest: str, other: str) -> bool:
    return _agree("".join(rest[: 4 * SAME_CHARS].split()), "".join(other[: 4 * SAME_CHARS].split()))


def _agree(a: str, b: str) -> bool:
    """Return whether two texts are equal in their first characters, and long enough to tell."""
    a, b = a[:SAME_CHARS], b[:SAME_CHARS]
    length = min(len(a), len(b))
    return length >= min(SAME_CHARS, PIECE_CHARS) and a[:length] == b[:length]


def _blank_at(a: str, b: str, at: int) -> bool:
    return a[at : at + 1].isspace() or b[at : at + 1].isspace()


def _unescaped(text: str) -> str:
    """Return a text without escapes, in one Unicode normal form."""
    text = re.sub(r"\\u([0-9a-fA-F]{4})", lambda found: chr(int(found[1], 16)), text)
    return unicodedata.normalize("NFKC", html.unescape(text))


def _line_start(text: str, at: int) -> int:
    return text.rfind("\n", 0, at) + 1
