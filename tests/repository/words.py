"""Words that must not come back: each with the word to use instead (docs/concepts.md, glossary).

    python tests/repository/words.py [PATH ...]     counts, then every place

`PROSE` is about comments, docstrings, strings and documents; `NAMES` about the parts of identifiers
in the package (`start_spill` has the parts "start" and "spill").
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROSE = {
    r"(?<!lock )(?<!locks )\bheld\b": "cached, leased or queued; lock held",
    r"\basked for\b": "requested",
    r"\b(?:is|are) right\b": "say what to use: use X, X must be Y",
    r"\b(?:is|are) none\b": "is not a valid X",
    r"(?<!there )(?<!There )\b(?:is|are) no (?!longer|more\b|matter|effect)": "is not a X",
    r"\bof late\b": "recently",
    r"\bby (?:a )?mistake\b": "internal error",
    r"\b(?:lies|lie) (?:in|on|at|below|above|behind|there|elsewhere|where)\b": "is in, is at",
    r"\bfor good\b": "permanently",
    r"\bof (?:its|their|his|our) own\b": "its own X, a separate X",
    r"\b[Ww]hoever\b": "the reader, the caller",
    r"\b[Ss]omebody\b": "name the actor",
    r"(?<!register )\b[Ss]pill(?:s|ed|ing)?\b": "write to a tier",
    r"\b[Vv]erbs?\b": "operation",
    r"\b[Bb]rains?\b": "L2 manager",
    r"\b[Kk]eepers?\b": "index builder, reconciler",
    r"(?<!in-)(?<!in )\b[Ff]lights?\b": "in-flight load",
    r"\b[Tt]ickets?\b": "operation",
    r"\bgrants?\b(?! of)": "slot assignment",
    r"\b[Aa]skers?\b": "requester",
    r"\b[Gg]raves?\b": "tombstone",
    r"\bdull twins?\b": "in-memory reference implementation",
    r"\b[Ss]hel(?:f|ves)\b": "page pool",
    r"\b(?:the|this|its|a) desk\b": "shared client",
    r"\b(?:the|its|these|their) ears\b": "operation statistics",
    r"\bdials?\b": "tunable",
    r"\bknobs?\b": "configuration key",
    r"\b[Ll]andings?\b": "outcome",
    r"\bcatalogues?\b": "shared index, segment index",
    r"\border(?:s)? of eviction\b": "eviction policy",
    r"\bdamaged\b": "corrupt",
    r"\ball-or-none\b": "all or nothing",
}
"""Pattern -> what to write."""

NAMES = {
    "held": "cached, leased, queued",
    "lacks": "is_absent",
    "brain": "manager",
    "ticket": "operation",
    "tickets": "operations",
    "verb": "operation",
    "verbs": "operations",
    "spill": "tier_write",
    "spills": "tier_writes",
    "spilled": "written",
    "flight": "in_flight",
    "flights": "in_flight",
    "landing": "outcome",
    "landings": "outcomes",
    "keeper": "index_builder, reconciler",
    "ears": "op_stats",
    "shelf": "page_pool",
    "shelves": "page_pools",
    "desk": "shared_client",
    "grave": "tombstone",
    "graves": "tombstones",
    "bury": "write_tombstone",
    "dials": "tunables",
    "knob": "config_key",
    "knobs": "config_keys",
    "catalog": "shared_index, segment_index",
    "asker": "requester",
    "askers": "requesters",
    "asked": "lookup, requested",
    "grants": "slot_assignments",
}
"""Part of an identifier -> what to use. Parts that are two words ("in_flight") stay."""

ALLOWED_PARTS = "in_flight"
"""Two parts that are one word: taken out of an identifier before its parts are looked at."""

SUFFIXES = (".py", ".md", ".toml", ".yml", ".yaml", ".js", ".html")
HISTORY = ("CHANGELOG.md", "tests/repository/words.py", "tests/repository/test_words.py")
"""Files that must write the old words."""


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of text with their numbers: all of a document, comments and strings of a module."""
    text = path.read_text()
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), start=1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


def names_of(path: Path) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def parts_of(name: str) -> set[str]:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return set(words.replace(ALLOWED_PARTS, "").split("_"))


def old_words(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, what stands there, what to write."""
    for line, text in prose_of(path):
        for pattern, better in PROSE.items():
            for found in re.finditer(pattern, text):
                yield line, found[0], better
    if path.suffix == ".py" and path.is_relative_to(ROOT / "kvstore"):
        for line, name in names_of(path):
            for part in parts_of(name) & NAMES.keys():
                yield line, name, NAMES[part]


def texts(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            name = file.relative_to(ROOT).as_posix()
            if (file.suffix in SUFFIXES or file == path) and name not in HISTORY:
                yield file


def main(arguments: list[str]) -> int:
    paths = [Path(each).resolve() for each in arguments] or [ROOT / "kvstore", ROOT / "docs"]
    places = [
        (path.relative_to(ROOT), line, found, better)
        for path in texts(paths)
        for line, found, better in old_words(path)
    ]
    for word, count in Counter(found for _, _, found, _ in places).most_common():
        print(f"{count:5} {word}")
    for path, line, found, better in places:
        print(f"{path}:{line}: {found!r}: {better}")
    return bool(places)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
