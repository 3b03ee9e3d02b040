"""`BlockStore` over the node's sidecar: the hands in an engine's process.

No verb waits for the sidecar. What is asked goes out without blocking; one reader thread fills in
the tickets as updates come and feeds `poll`. When the sidecar is away, every verb answers at once
with a done ticket that holds nothing; the reader dials again in the background.

What ends a ticket early:
- the connection ends: at once, with `fault`;
- the sidecar is silent for `reply_limit_s` although a ticket waits (a hung process; a slow tier
  does not count, the sidecar answers pings meanwhile): all waiting tickets end with `fault`, and
  new ones at once, until it speaks again.

Whatever the sidecar grants to a ticket after that is given back when the ticket is: release goes
the same ordered way as the request, and a commit names how many grants were seen. So late answers
leak nothing and publish nothing.

The safety rule of `protocol` holds: a link is closed and its slab unmapped only when no ticket
names slots of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvstore.blocks.key import Namespace
from kvstore.errors import ConfigError, TierUnavailable
from kvstore.interface import Load, Match, Save, SlotBuffer, Ticket
from kvstore.ipc.protocol import (
    MAX_HASHES,
    MAX_TICKETS,
    MOVED_MAX,
    Malformed,
    Verb,
    check_number,
    pack,
)
from kvstore.ipc.sidecar_connection import MAX_OUTBOUND_BYTES, NO_SLAB, SHOWN, Link, dial, grow
from kvstore.telemetry.histogram import check_route

log = logging.getLogger(__name__)

REPLY_LIMIT_S: Final = 2.0
"""Silence after which the sidecar counts as hung."""
HELLO_LIMIT_S: Final = 5.0
BACKOFF_FIRST_S: Final = 0.05
BACKOFF_CAP_S: Final = 1.0
COUNTS: Final = ("links", "asked", "unasked", "known", "given_up", "hangs")
CLOSE_LIMIT_S: Final = 1.0
"""How long `close` lets the sidecar read what was sent before."""


class _Entry:
    """An outstanding ticket and the link it was asked on (None: it was never asked)."""

    __slots__ = ("link", "ticket")

    def __init__(self, ticket: Ticket, link: Link | None) -> None:
        self.ticket = ticket
        self.link = link


class Client:
    """One engine's connection to the sidecar. Implements `verbs.BlockStore`.

    socket_path: the sidecar's Unix socket.
    token: names the tenant, where the sidecar asks for one.
    name: for the sidecar's statistics and log. route: what its traffic is counted as there.
    reply_limit_s: silence after which the sidecar counts as hung.
    wait_ready_s: how long the constructor waits for a sidecar that is not there yet. It never
        raises for an absent one: the engine goes on without.

    Raises:
        ConfigError: a sidecar refuses this client (namespace, token, version); no such route.
    """

    def __init__(
        self,
        socket_path: str,
        namespace: Namespace,
        *,
        token: str | None = None,
        name: str = "",
        route: str = "",
        reply_limit_s: float = REPLY_LIMIT_S,
        wait_ready_s: float = 0.0,
    ) -> None:
        self._path = socket_path
        self._namespace = namespace
        self._token = token
        self._name = name
        self._route = check_route(route)
        self._reply_limit_s = reply_limit_s
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._entries: dict[int, _Entry] = {}
        self._moved: dict[int, Ticket] = {}
        self._link: Link | None = None
        self._away = f"no sidecar at {socket_path} yet"
        self._closing = threading.Event()
        self._last_number = 0
        self._last_pong = 0
        self._counts = dict.fromkeys(COUNTS, 0)
        first = self._first_dial(wait_ready_s)
        self._reader = threading.Thread(
            target=self._run, args=(first,), name="kvstore-reader", daemon=True
        )
        self._reader.start()

    # What the engine calls.

    @property
    def namespace(self) -> Namespace:
        return self._namespace

    @property
    def slab(self) -> SlotBuffer | None:
        link = self._link
        return link.slab if link is not None else None

    @property
    def connected(self) -> bool:
        """A sidecar is there and speaks."""
        link = self._link
        return link is not None and not link.hung

    def slab_of(self, ticket: Load | Save) -> SlotBuffer:
        """The slab of this ticket's slots; mapped until the ticket is handed back."""
        entry = self._entries.get(ticket.ticket_id)
        assert entry is not None, "a ticket that was handed back"
        return entry.link.slab if entry.link is not None else NO_SLAB

    def match(self, hashes: Sequence[bytes]) -> Match:
        ticket = Match(self._number(), hashes)
        link = self._link
        known = None if link is None or self._why_not() else link.known(hashes)
        if known is None:
            self._ask(Verb.MATCH, ticket)
            return ticket
        ticket.tiers.extend([SHOWN] * known)
        self.note(lambda: ticket.hashes)
        with self._changed:
            self._end(ticket, "")
        return ticket

    def lacks(self, name: bytes) -> bool:
        """Whether this block is nowhere, for certain and without asking; False says nothing."""
        link = self._link
        return link is not None and not link.hung and link.lacks(name)

    def known(self, joined: bytes, size: int) -> int | None:
        """`states`, as the length of a run of hashes of `size` bytes each, joined; or None."""
        link = self._link
        return None if link is None or link.hung else link.known_of(joined, size)

    def states(self, hashes: Sequence[bytes]) -> list[bool | None]:
        """For each block whether it is held, as far as that is certain without asking; or None."""
        link = self._link
        return [None] * len(hashes) if link is None or link.hung else link.states(hashes)

    def note(self, run: Callable[[], Sequence[bytes]]) -> None:
        """Have the sidecar hear, with the next verb, of a run that was asked for without it."""
        self._counts["known"] += 1
        if (link := self._link) is not None:
            link.note(run)

    def load(self, hashes: Sequence[bytes]) -> Load:
        ticket = Load(self._number(), hashes)
        self._ask(Verb.LOAD, ticket)
        return ticket

    def save(self, hashes: Sequence[bytes]) -> Save:
        ticket = Save(self._number(), hashes)
        self._ask(Verb.SAVE, ticket)
        return ticket

    def commit(self, save: Save) -> None:
        self._hand_back(save, pack(Verb.COMMIT, save.ticket_id, len(save.grants)), commits=True)

    def release(self, ticket: Load | Save) -> None:
        self._hand_back(ticket, pack(Verb.RELEASE, ticket.ticket_id))

    def poll(self, timeout_s: float = 0.0) -> list[Ticket]:
        with self._changed:
            if not self._moved and timeout_s > 0:
                self._changed.wait_for(lambda: self._moved, timeout_s)
            moved = list(self._moved.values())
            self._moved.clear()
        return moved

    def sync(self, timeout_s: float) -> bool:
        """Wait until the sidecar has handled everything sent so far; False when it did not.

        The one call here that waits; for tests and for orderly hand-over between engines.
        """
        number = self._number()
        with self._changed:
            link = self._link
            if link is None:
                return False
            link.send(pack(Verb.PING, number))
            return self._changed.wait_for(
                lambda: self._last_pong >= number or self._link is not link, timeout_s
            ) and (self._last_pong >= number)

    def stats(self) -> dict[str, Any]:
        with self._lock:
            link = self._link
            return {
                **self._counts,
                "connected": link is not None,
                "hung": link is not None and link.hung,
                "outstanding": len(self._entries),
                "outbound_bytes": link.outbound_bytes if link is not None else 0,
                "away": "" if link is not None else self._away,
            }

    def close(self) -> None:
        """Hand back every lease and end the threads. The caller has no copy running."""
        if self._closing.is_set():
            return
        with self._changed:
            self._closing.set()
            link = self._link
            links = {entry.link for entry in self._entries.values() if entry.link is not None}
            self._entries.clear()
            self._moved.clear()
        if link is not None:
            # The sidecar answers a BYE by hanging up; until then it reads what was sent before.
            link.send(pack(Verb.BYE))
            self._reader.join(CLOSE_LIMIT_S)
            link.stop_reading()
        self._reader.join()
        links |= {each for each in (link, self._link) if each is not None}
        self._link = None
        for each in links:
            each.holders = 0
            each.finish()
        for each in links:
            each.join(CLOSE_LIMIT_S)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        link = self._link
        state = self._away if link is None else "hung" if link.hung else repr(link.slab)
        return f"Client({self._path}: {state}, {len(self._entries)} outstanding)"

    # Asking and handing back.

    def _number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _ask(self, verb: Verb, ticket: Ticket) -> None:
        with self._changed:
            fault = self._why_not()
            link = None if fault else self._link
            self._counts["unasked" if link is None else "asked"] += 1
            if link is not None or not isinstance(ticket, Match):
                self._entries[ticket.ticket_id] = _Entry(ticket, link)
            if link is None:
                self._end(ticket, fault)
                return
            if not isinstance(ticket, Match):
                link.holders += 1
            if link.waiting_since_s is None:
                link.waiting_since_s = time.monotonic()
        link.send(link.noted() + pack(verb, ticket.ticket_id, ticket.hashes[:MAX_HASHES]))

    def _why_not(self) -> str:
        """Why nothing can be asked now; empty when it can."""
        link = self._link
        if self._closing.is_set():
            return "the client is closed"
        if link is None:
            return self._away
        if link.hung:
            return f"the sidecar has been silent for more than {self._reply_limit_s:g} s"
        if link.outbound_bytes > MAX_OUTBOUND_BYTES:
            return "the sidecar does not read what it is asked"
        if len(self._entries) >= MAX_TICKETS:
            return f"{MAX_TICKETS} tickets are outstanding already"
        return ""

    def _hand_back(self, ticket: Load | Save, message: bytes, commits: bool = False) -> None:
        with self._lock:
            if self._closing.is_set():
                return
            entry = self._entries.pop(ticket.ticket_id, None)
            assert entry is not None, "a ticket handed back twice"
            self._moved.pop(ticket.ticket_id, None)
            link = entry.link
            if link is None:
                return
            link.holders -= 1
            link.unheard = self._last_number if commits else link.unheard
            over = not link.alive and link.holders == 0
        if over:
            link.finish()
        elif link.alive:
            link.send(message)

    def _end(self, ticket: Ticket, fault: str) -> None:
        """End a ticket that will hear no more. Under the lock."""
        if isinstance(ticket, Save):
            ticket.dropped = len(ticket.hashes) - len(ticket.grants)
        ticket.fault = fault
        ticket.done = True
        self._moved[ticket.ticket_id] = ticket
        if len(self._moved) > MOVED_MAX:
            del self._moved[next(iter(self._moved))]
        self._changed.notify_all()

    def _give_up(self, link: Link, fault: str) -> None:
        """End every ticket that still waits for this link. Under the lock."""
        for number, entry in list(self._entries.items()):
            if entry.link is link and not entry.ticket.done:
                self._counts["given_up"] += 1
                self._end(entry.ticket, fault)
                if isinstance(entry.ticket, Match):
                    del self._entries[number]
        link.waiting_since_s = None

    # The reader thread.

    def _first_dial(self, wait_ready_s: float) -> Link | None:
        deadline_s = time.monotonic() + wait_ready_s
        while True:
            try:
                return self._dial()
            except TierUnavailable as error:
                self._away = str(error)
            if time.monotonic() >= deadline_s:
                return None
            time.sleep(BACKOFF_FIRST_S)

    def _dial(self) -> Link:
        link = dial(
            self._path,
            self._namespace,
            self._token,
            self._name,
            route=self._route,
            limit_s=min(HELLO_LIMIT_S, self._reply_limit_s),
            tick_s=self._reply_limit_s / 4,
        )
        with self._changed:
            self._link = link
            self._counts["links"] += 1
            self._changed.notify_all()
        return link

    def _run(self, link: Link | None) -> None:
        backoff_s = BACKOFF_FIRST_S
        while not self._closing.is_set():
            if link is None:
                self._closing.wait(backoff_s)
                backoff_s = min(2 * backoff_s, BACKOFF_CAP_S)
                link = self._redial()
                continue
            backoff_s = BACKOFF_FIRST_S
            reason = self._listen(link)
            self._lost(link, reason)
            link = None

    def _redial(self) -> Link | None:
        if self._closing.is_set():
            return None
        try:
            return self._dial()
        except (TierUnavailable, ConfigError) as error:
            if isinstance(error, ConfigError) and self._away != str(error):
                log.error("%s", error)
            self._away = str(error)
            return None

    def _listen(self, link: Link) -> str:
        """Read updates until the stream ends; returns why it did."""
        while True:
            try:
                message = link.receiver.read()
                if message is None:
                    return "the sidecar hung up"
                self._heard(link, message)
            except TimeoutError:
                self._look_at_the_clock(link)
            except (OSError, Malformed, TypeError, ValueError, IndexError) as error:
                return f"the connection to the sidecar broke: {error}"

    def _heard(self, link: Link, message: list[Any]) -> None:
        with self._changed:
            link.hung = link.pinged = False
            link.waiting_since_s = time.monotonic()
            if message[0] == Verb.UPDATE:
                entry = self._entries.get(message[1])
                if entry is not None and entry.link is link and not entry.ticket.done:
                    self._update(entry.ticket, message, link)
            elif message[0] == Verb.PONG:
                self._last_pong = max(self._last_pong, check_number(message[1]))
                self._changed.notify_all()
            if link.unheard is not None and check_number(message[1]) > link.unheard:
                link.unheard = None

    def _update(self, ticket: Ticket, message: list[Any], link: Link) -> None:
        """Let one ticket grow by what an update says. Under the lock; `done` is written last."""
        _, number, done, fault, *rest = message
        grow(ticket, rest, link)
        ticket.fault = fault
        ticket.done = bool(done)
        if done and isinstance(ticket, Match):
            del self._entries[number]
        self._moved[number] = ticket
        self._changed.notify_all()

    def _look_at_the_clock(self, link: Link) -> None:
        """Nothing has come for a tick: ask whether the sidecar lives; give up when it is time."""
        link.send(link.noted())
        with self._changed:
            waiting = any(
                entry.link is link and not entry.ticket.done for entry in self._entries.values()
            )
            if not waiting or link.waiting_since_s is None:
                link.waiting_since_s = None
                return
            silent_s = time.monotonic() - link.waiting_since_s
            if silent_s >= self._reply_limit_s:
                link.hung = True
                self._counts["hangs"] += 1
                log.warning("the sidecar at %s is silent; going on without it", self._path)
                self._give_up(link, f"no answer from the sidecar for {self._reply_limit_s:g} s")
                return
            ping = not link.pinged and silent_s >= self._reply_limit_s / 2
            link.pinged = link.pinged or ping
        if ping:
            link.send(pack(Verb.PING, 0))

    def _lost(self, link: Link, reason: str) -> None:
        """The stream has ended: end its tickets, and the link too when nobody needs its slab."""
        with self._changed:
            self._link = None
            self._away = reason
            link.alive = False
            if self._closing.is_set():
                return  # close() finishes it
            log.warning("lost the sidecar at %s: %s", self._path, reason)
            self._give_up(link, reason)
            over = link.holders == 0
            self._changed.notify_all()
        if over:
            link.finish()
