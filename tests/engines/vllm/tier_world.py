"""vLLM's own offloading with KVStoreTier below it: a sidecar with a disk, and two engines."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

from tiny_models import write_model
from vllm_rig import (
    BLOCK,
    LIMIT_S,
    PATIENT_TIER,
    Engine,
    Sidecar,
    full_blocks,
    our_tier,
    tier,
    tokens,
    wait_until,
)

HOST_BYTES = 16 << 20
HASH = {"prefix_caching_hash_algo": "sha256_cbor"}


class TierWorld:
    """See the module."""

    def __init__(self, folder: Path, engines: tuple[Engine, Engine]) -> None:
        self.folder = folder
        self.models = {family: folder / family for family in ("llama", "gemma3_text", "qwen3")}
        for seed, (family, path) in enumerate(self.models.items()):
            write_model(path, family, seed)
        self.sidecar = Sidecar(
            folder, "--l2", "128MiB", "--slot-bytes", "256KiB", "--disk", str(folder / "disk")
        )
        self.a, self.b = engines

    def plain(self, engine: Engine, batch: list[list[int]], **arguments: Any) -> list[Any]:
        """The results of a vLLM without kvstore."""
        engine.start(self.models["llama"], num_gpu_blocks_override=1024, **HASH)
        return engine.generate(batch, **arguments)

    def start(
        self,
        engine: Engine,
        model: str | Path = "llama",
        table: Any = None,
        offloading: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        """table: of KVStoreTier. offloading: more of vLLM's configuration. arguments: of vLLM."""
        table = table or our_tier(self.sidecar.socket, **PATIENT_TIER)
        engine.start(
            self.models.get(str(model)) or Path(model),
            kv_transfer_config=tier(HOST_BYTES, table, **(offloading or {})),
            **{
                "disable_hybrid_kv_cache_manager": False,
                "num_gpu_blocks_override": 1024,
                **HASH,
                **arguments,
            },
        )

    def only_disk(self) -> None:
        """Write all blocks to disk and clear L2."""
        only_below(self.sidecar)

    def disk_reads(self) -> int:
        return int(self.sidecar.stats()["tiers"]["disk"]["reads"])

    def end(self) -> None:
        for engine in (self.a, self.b):
            engine.ask("stop")
        if self.sidecar.running:
            assert self.sidecar.stop() == 0, "leases were not released"


def only_below(sidecar: Sidecar) -> None:
    """Write a sidecar's blocks to the tiers below L2, and clear L2."""
    for path in ("/v1/flush", "/v1/clear?tier=l2"):
        request = urllib.request.Request(f"{sidecar.url}{path}", method="POST")
        urllib.request.urlopen(request, timeout=LIMIT_S).close()


def prompts(family: int, count: int) -> list[list[int]]:
    """Pairs that share a prefix."""
    made = []
    for number in range(count):
        shared = tokens(5000 * family + number, 64 + 32 * (number % 5))
        made.append(shared + tokens(5000 * family + 1000 + number, 70 + number))
        made.append(shared + tokens(5000 * family + 2000 + number, 7 * number))
    return made


def exact(batch: list[list[int]], block: int = BLOCK) -> list[int]:
    """Tokens of each prompt's full offloaded blocks: vLLM's offloading also loads the last one, and
    then computes the last token again."""
    return [len(prompt) // block * block for prompt in batch]


def of_vllm(batch: list[list[int]]) -> list[int]:
    """Tokens of each prompt in vLLM's own cache when it was empty at first: those that the second
    of two prompts shares with the first."""
    shared = []
    for one, other in zip(batch[::2], batch[1::2], strict=True):
        blocks = range(0, full_blocks(other) + 1, BLOCK)
        shared += [0, max(stop for stop in blocks if one[:stop] == other[:stop])]
    return shared


def settled(engine: Engine) -> None:
    assert engine.ask("settle")["requests"] == 0


def counts(engine: Engine) -> dict[str, Any]:
    """The counts of the tier."""
    stats: dict[str, Any] = engine.ask("tier")["stats"]
    return stats


def connected(engine: Engine) -> None:
    wait_until(lambda: counts(engine)["store_connected"], "connected")
