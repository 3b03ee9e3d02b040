"""Wait until every part of the local stack answers, print one line, and wait for a signal.

    ready.py URLS.json      {"name": {"url": ..., "health": ...}, ...}

Exit 1 when a part does not answer within READY_LIMIT_S: the stack then stops.
"""

from __future__ import annotations

import json
import signal
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

READY_LIMIT_S = 240.0
TICK_S = 0.2


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except (OSError, ValueError):
        return False


def main(path: str) -> int:
    parts = json.loads(Path(path).read_text())
    missing = {name: part["health"] for name, part in parts.items() if part["health"]}
    end_s = time.monotonic() + READY_LIMIT_S
    while missing:
        missing = {name: url for name, url in missing.items() if not answers(url)}
        if missing and time.monotonic() > end_s:
            print(f"kvstore stack: no answer from {', '.join(sorted(missing))}", flush=True)
            return 1
        time.sleep(TICK_S)
    urls = {name: part["url"] for name, part in parts.items()}
    print(f"kvstore stack ready: {json.dumps(urls)}", flush=True)
    signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
