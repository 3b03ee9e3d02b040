"""Texts that hold the same in another form: reordered, written anew, cut, added to.

Each function takes two texts and the first place where they differ (`at`), and says what it sees
there, or None.
"""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections import Counter
from typing import Any, Final

from kvstore.analysis.diagnose.content import PIECE_CHARS, goes_on_at, pieces
from kvstore.analysis.diagnose.verdict import Verdict, shown

GAP_CHARS: Final = 12
"""A shorter piece of text that was added or taken away is a value of another length."""
JSON_BACK: Final = 4000
"""How far before a difference the JSON it lies in may begin."""
JSON_CHARS: Final = 200_000
JSON_STARTS: Final = 64
"""How many brackets before a difference are tried as the beginning of its JSON."""
SAME_CHARS: Final = 64
"""So much must agree, when written alike, for two texts to say the same."""

_THINKING = re.compile(
    r"<(think|thinking|reasoning|analysis)>.*?</\1>\s*|<\|channel\|>analysis.*?<\|end\|>\s*",
    re.DOTALL,
)
_LIST = re.compile(r"[,;|]\s*")


def reordered(a: str, b: str, at: int) -> Verdict | None:
    """The same documents, examples, tools or list items in another order."""
    first, second = _common_once(a, b, at)
    if len(first) >= 2 and first[0] != second[0]:
        return Verdict(
            "reordered",
            f"the same pieces in another order: {shown(first[0])} came first, now it is "
            f"{shown(second[0])}",
            "Sort what is retrieved or listed by something stable (its id), not by rank or by the "
            "order it came in; the model may be told the rank in the question.",
        )
    if _json_pair(a, b, at, lambda x, y: x != y and _sorted(x) == _sorted(y)) or _same_list(
        a, b, at
    ):
        return Verdict(
            "reordered",
            f"a list in another order: {shown(a[_line_start(a, at) :])} became "
            f"{shown(b[_line_start(b, at) :])}",
            "Sort the list before it is written: sets and mappings have no order of their own.",
        )
    return None


def rerendered(a: str, b: str, at: int) -> Verdict | None:
    """History that was written into the prompt otherwise than the first time."""
    keep = "Keep the text (or the token ids) that was sent and generated, and append to it only"
    for longer, other, words in ((a, b, "is left out of"), (b, a, "was put into")):
        thought = _THINKING.match(longer, _tag_start(longer, at))
        if thought and _goes_on(longer[thought.end() :], other[_tag_start(longer, at) :]):
            return Verdict(
                "rerendered",
                f"thinking {words} the history: {shown(thought[0])}",
                "The template drops the thinking of earlier turns, so a turn's KV does not fit the "
                f"next one. {keep}, or let the template keep it.",
            )
    if _json_pair(a, b, at, lambda x, y: x == y):
        return Verdict(
            "rerendered",
            "the same JSON written otherwise (its spaces, or the order of its keys)",
            f"{keep}; where JSON is made anew, sort its keys and fix its separators.",
        )
    window_a, window_b = a[at : at + 8 * SAME_CHARS], b[at : at + 8 * SAME_CHARS]
    if _blank_at(a, b, at) and _agree("".join(window_a.split()), "".join(window_b.split())):
        return Verdict(
            "rerendered",
            "only the space differs: "
            f"{shown(window_a[:SAME_CHARS])} became {shown(window_b[:SAME_CHARS])}",
            f"A template trims or adds space when it writes earlier turns. {keep}.",
        )
    start = max(0, at - PIECE_CHARS)
    plain_a, plain_b = _unescaped(a[start : at + 512]), _unescaped(b[start : at + 512])
    if a[at:] != b[at:] and _agree(plain_a, plain_b):
        return Verdict(
            "rerendered",
            f"the same letters written otherwise: {shown(window_a[:SAME_CHARS])} became "
            f"{shown(window_b[:SAME_CHARS])}",
            f"Escapes or Unicode's two ways to write a letter differ. {keep}.",
        )
    return None


def cut(a: str, b: str, at: int) -> Verdict | None:
    """A part in the middle was taken away: a window over the last turns, mostly."""
    found = goes_on_at(b, a, at)
    if found is None or found - at < GAP_CHARS:
        return None
    return Verdict(
        "cut",
        f"{found - at:,} characters were taken out here: {shown(a[at:found])}",
        "History: cut much at a time and seldom (down to half, not by one turn), for after each "
        "cut everything behind it is computed anew. Documents: those that most prompts have come "
        "first.",
    )


def inserted(a: str, b: str, at: int) -> Verdict | None:
    """Text was put in front of what was there before, or into it."""
    found = goes_on_at(a, b, at)
    if found is None or found - at < GAP_CHARS:
        return None
    return Verdict(
        "inserted",
        f"{found - at:,} characters were put {'in front' if at == 0 else 'in here'}: "
        f"{shown(b[at:found])}",
        "Append what is new (at the end, or with the last message) instead of putting it before "
        "what stays the same; of documents, those that most prompts have come first.",
    )


def replaced(a: str, b: str, at: int) -> Verdict | None:
    """Another text stands in front of text that is the same again."""
    theirs = set(pieces(a, at))
    again = next((piece for piece in pieces(b, at) if piece in theirs), None)
    if again is None:
        return None
    gone, new = (text.index(again, at) - at for text in (a, b))
    return Verdict(
        "replaced",
        f"{gone:,} characters gave way to {new:,} others, in front of what is the same again: "
        f"{shown(again)}",
        "Put what most requests have in front, and what only some have behind it.",
    )


def _common_once(a: str, b: str, at: int) -> tuple[list[str], list[str]]:
    """Pieces that each text has exactly once behind the difference: in the order of each."""
    start = min(_line_start(a, at), _line_start(b, at))
    counts = [Counter(pieces(text, start)) for text in (a, b)]
    both = {p for p, n in counts[0].items() if n == 1 and counts[1].get(p) == 1}
    return [p for p in counts[0] if p in both], [p for p in counts[1] if p in both]


def _same_list(a: str, b: str, at: int) -> bool:
    """The lines hold the same items of a list."""
    items = []
    for text in (a, b):
        start = _line_start(text, at)
        end = text.find("\n", at)
        line = text[start : end if end >= 0 else len(text)][:JSON_BACK]
        line = line.rpartition(": ")[2].rstrip(".")
        items.append([item.strip() for item in _LIST.split(line)])
    return len(items[0]) > 1 and items[0] != items[1] and sorted(items[0]) == sorted(items[1])


def _json_pair(a: str, b: str, at: int, alike: Any) -> bool:
    """Whether the difference lies in JSON, from one place on in both, that is `alike`."""
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
    """JSON with every list in one order."""
    if isinstance(value, list):
        return sorted((_sorted(item) for item in value), key=lambda item: json.dumps(item))
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return value


def _tag_start(text: str, at: int) -> int:
    """Where a tag that the difference lies in begins: `<` may be common to both."""
    found = text.rfind("<", max(0, at - 12), at + 1)
    return found if found >= 0 and ">" not in text[found:at] else at


def _goes_on(rest: str, other: str) -> bool:
    return _agree("".join(rest[: 4 * SAME_CHARS].split()), "".join(other[: 4 * SAME_CHARS].split()))


def _agree(a: str, b: str) -> bool:
    """Whether two texts say the same as far as is looked, and say enough to tell."""
    a, b = a[:SAME_CHARS], b[:SAME_CHARS]
    length = min(len(a), len(b))
    return length >= min(SAME_CHARS, PIECE_CHARS) and a[:length] == b[:length]


def _blank_at(a: str, b: str, at: int) -> bool:
    return a[at : at + 1].isspace() or b[at : at + 1].isspace()


def _unescaped(text: str) -> str:
    """A text without escapes, in one form of Unicode."""
    text = re.sub(r"\\u([0-9a-fA-F]{4})", lambda found: chr(int(found[1], 16)), text)
    return unicodedata.normalize("NFKC", html.unescape(text))


def _line_start(text: str, at: int) -> int:
    return text.rfind("\n", 0, at) + 1
