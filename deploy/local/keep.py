"""Run a command, and start it again when it dies: what `restart: unless-stopped` does in Compose.

    keep.py [--grace SECONDS] COMMAND [ARGUMENT ...]

SIGTERM and SIGINT are handed on and end both; a command that is still there SECONDS later is
killed. The command dies with this process, however that ends. A command that dies RESTARTS times,
each time within QUICK_S of its start, is given up, and so is one that ends with status 2: that says
that it was called wrongly, and the next time would be no better.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import time

GRACE_S = 15.0
RESTARTS = 5
QUICK_S = 10.0
PAUSE_S = 0.5
MISTAKE = 2
PR_SET_PDEATHSIG = 1

libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Keeper:
    """One command, kept running until it is told to stop."""

    def __init__(self, command: list[str], grace_s: float) -> None:
        self._command = command
        self._grace_s = grace_s
        self._told = 0

    def run(self) -> int:
        """The exit status to end with: the command's, once it was told to stop or is given up."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._tell)
        quick = 0
        while True:
            start_s = time.monotonic()
            # A group of its own: who signals ours does not end it behind our back.
            child = subprocess.Popen(
                self._command, start_new_session=True, preexec_fn=die_with_parent
            )
            status = self._follow(child)
            if self._told:
                return status
            quick = quick + 1 if time.monotonic() - start_s < QUICK_S else 0
            print(f"keep: {self._command[0]} ended with status {status}", flush=True)
            if quick >= RESTARTS or status == MISTAKE:
                return status or 1
            time.sleep(PAUSE_S)
            if self._told:
                return status

    def _tell(self, number: int, frame: object) -> None:
        self._told = number

    def _follow(self, child: subprocess.Popen[bytes]) -> int:
        """Wait for the child's end; once told to stop, see to it."""
        end_s = 0.0
        while True:
            try:
                return child.wait(0.1)
            except subprocess.TimeoutExpired:
                if not self._told:
                    continue
            if not end_s:
                end_s = time.monotonic() + self._grace_s
                child.send_signal(self._told)
            elif time.monotonic() > end_s:
                child.kill()


def main(words: list[str]) -> int:
    grace_s = GRACE_S
    if words[:1] == ["--grace"] and len(words) > 1:
        grace_s, words = float(words[1]), words[2:]
    if not words:
        print(__doc__, file=sys.stderr)
        return 2
    return Keeper(words, grace_s).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
