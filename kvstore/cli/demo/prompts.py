"""Long prompts of real text: Python's reference manual, which is part of every Python."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Final

from kvstore.errors import ConfigError

OPENERS: Final = (
    ("class", "How does Python execute a class definition?"),
    ("import", "Which steps does the import statement take?"),
    ("with", "In which order are the methods of a context manager called?"),
    ("try", "When is the else clause of a try statement executed?"),
)
"""Topic at which a prompt starts, and its question at the end."""

PROMPTS_MAX: Final = len(OPENERS)


def make_prompts(count: int, chars: int) -> list[str]:
    """Return `count` prompts of about `chars` characters, each with a different beginning.

    Raises:
        ConfigError: `count` or `chars` is out of range.
    """
    if not 1 <= count <= PROMPTS_MAX:
        raise ConfigError(f"--prompts must be 1 to {PROMPTS_MAX} (got {count})")
    if chars < 1:
        raise ConfigError(f"prompts must have at least 1 character (got {chars})")
    return [_document(topic, chars) + f"\n\nQuestion: {ask}\nAnswer:" for topic, ask in OPENERS][
        :count
    ]


def _document(opener: str, chars: int) -> str:
    """Return text of the manual from topic `opener` on, cut at a word."""
    names = sorted(topics)
    start = names.index(opener)
    parts: list[str] = []
    length = 0
    for name in names[start:] + names[:start]:
        parts.append(topics[name].strip())
        length += len(parts[-1])
        if length >= chars:
            break
    else:
        raise ConfigError(f"prompts must have at most {length} characters (got {chars})")
    text = "\n\n".join(parts)
    end = text.rfind(" ", 0, chars)
    return text[: end if end > 0 else chars]
