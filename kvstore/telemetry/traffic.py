"""Traffic labels: a client's word for its traffic ("chat", "rag"), one of the labels of metrics."""

from __future__ import annotations

import re
from typing import Any, Final

from kvstore.errors import ConfigError

OTHER: Final = "(other)"
"""Label of everything beyond the number of labels that get their own series."""

_TRAFFIC_LABEL = re.compile(r"[A-Za-z0-9_.:/-]{0,64}")


def check_traffic_label(label: Any) -> str:
    """Return a valid traffic label. Raises ConfigError for an invalid one."""
    if not isinstance(label, str) or not _TRAFFIC_LABEL.fullmatch(label):
        raise ConfigError(
            f"invalid traffic label {str(label)[:80]!r}: "
            "use at most 64 letters, digits and _ . : / -"
        )
    return label
