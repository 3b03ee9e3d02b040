"""A tier with a server below it in a forked child: each call fails at once, and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fork_rig import IGNORE_FORK_WARNING, in_child

from kvstore.errors import TierError
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.tiers.base import Tier

if TYPE_CHECKING:
    from s3_rig import S3Server

pytestmark = pytest.mark.filterwarnings(IGNORE_FORK_WARNING)

BLOCK_BYTES = 50_000


@pytest.fixture
def redis_tier(tmp_path: Path) -> Iterator[Tier]:
    pytest.importorskip("redis")
    from redis_rig import Server, valkey_binary

    from kvstore.tiers import redis

    server = Server(tmp_path / "server", valkey_binary())
    tier = redis.open(redis.Config(url=f"redis://{server.address}"))
    yield tier
    tier.close()
    server.stop()


@pytest.fixture
def s3_tier(s3_server: S3Server) -> Iterator[Tier]:
    tier = s3_server.open(s3_server.new_bucket())
    yield tier
    tier.close()


@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_a_tier_in_a_child_lets_go(request: pytest.FixtureRequest, kind: str) -> None:
    tier: Tier = request.getfixturevalue(f"{kind}_tier")
    lock: Any = tier._calls._lock if kind == "redis" else tier._lock  # type: ignore[attr-defined]
    buffer = FrameBuffer(BLOCK_BYTES)
    key = key_of(1)
    tier.write(*buffer.fill(key, BLOCK_BYTES))
    calls: dict[str, Callable[[], Any]] = {
        "contains": lambda: tier.contains([key]),
        "read": lambda: tier.read(key, buffer.header, buffer.payload),
        "write": lambda: tier.write(*buffer.fill(key_of(2), BLOCK_BYTES)),
        "delete": lambda: tier.delete([key]),
        "usage": lambda: list(tier.usage()),
        "clear": tier.clear,
    }

    def use() -> dict[str, str]:
        said = {}
        for name, call in calls.items():
            with pytest.raises(TierError) as raised:
                call()
            said[name] = str(raised.value)
        tier.close()
        return said

    for number in range(3):
        with lock:
            said = in_child(use)
        assert all("fork" in each for each in said.values()), said
        # The parent's connections are not disturbed: no reply is missing, and none is another's.
        length = tier.read(key, buffer.header, buffer.payload)
        assert buffer.version_of(key, length) == 0
        tier.write(*buffer.fill(key_of(10 + number), BLOCK_BYTES))
    assert tier.contains([key, key_of(2), *map(key_of, range(10, 13))]) == [
        True, False, True, True, True,
    ]  # fmt: skip
