"""Run a command and restart it when it exits, like `restart: unless-stopped` in Compose.

    keep.py [--grace SECONDS] COMMAND [ARGUMENT ...]

SIGTERM and SIGINT are passed on and end both; a command that still runs SECONDS later is killed.
The command dies with this process, however this process ends. There are no more restarts after
RESTARTS exits, each within QUICK_S of its start, or after exit status 2 (a usage error, which a
restart would not fix).
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
USAGE_ERROR = 2
PR_SET_PDEATHSIG = 1

libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Supervisor:
    """Keeps one command running until a signal stops it."""

    def __init__(self, command: list[str], grace_s: float) -> None:
        self._command = command
        self._grace_s = grace_s
        self._signal = 0

    def run(self) -> int:
        """Returns the command's last exit status, after a signal or the last restart."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        quick = 0
        while True:
            start_s = time.monotonic()
            # A separate process group: a signal to this process's group does not reach the command.
            child = subprocess.Popen(
                self._command, start_new_session=True, preexec_fn=die_with_parent
            )
            status = self._wait(child)
            if self._signal:
                return status
            quick = quick + 1 if time.monotonic() - start_s < QUICK_S else 0
            print(f"keep: {self._command[0]} ended with status {status}", flush=True)
            if quick >= RESTARTS or status == USAGE_ERROR:
                return status or 1
            time.sleep(PAUSE_S)
            if self._signal:
                return status

    def _on_signal(self, number: int, frame: object) -> None:
        self._signal = number

    def _wait(self, child: subprocess.Popen[bytes]) -> int:
        """Wait until the child exits. Pass a signal on, and kill the child when time is up."""
        end_s = 0.0
        while True:
            try:
                return child.wait(0.1)
            except subprocess.TimeoutExpired:
                if not self._signal:
                    continue
            if not end_s:
                end_s = time.monotonic() + self._grace_s
                child.send_signal(self._signal)
            elif time.monotonic() > end_s:
                child.kill()


def main(words: list[str]) -> int:
    grace_s = GRACE_S
    if words[:1] == ["--grace"] and len(words) > 1:
        grace_s, words = float(words[1]), words[2:]
    if not words:
        print(__doc__, file=sys.stderr)
        return 2
    return Supervisor(words, grace_s).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
