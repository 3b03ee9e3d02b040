"""Long prompts of real text: Python's own reference manual, which every Python brings along."""

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
"""Topic a prompt begins with, and the question it ends with."""

PROMPTS_MAX: Final = len(OPENERS)


def make_prompts(count: int, chars: int) -> list[str]:
    """`count` prompts of about `chars` characters, no two of which begin alike.

    Raises:
        ConfigError: a count or a length outside what the manual can fill.
    """
    if not 1 <= count <= PROMPTS_MAX:
        raise ConfigError(f"{count} prompts; 1 to {PROMPTS_MAX} are right")
    if chars < 1:
        raise ConfigError(f"prompts of {chars} characters; at least 1 is right")
    return [_document(topic, chars) + f"\n\nQuestion: {ask}\nAnswer:" for topic, ask in OPENERS][
        :count
    ]


def _document(opener: str, chars: int) -> str:
    """Text of the manual from topic `opener` on, topic after topic, cut at a word."""
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
        raise ConfigError(f"a prompt of {chars} characters; the manual has {length}")
    text = "\n\n".join(parts)
    end = text.rfind(" ", 0, chars)
    return text[: end if end > 0 else chars]
