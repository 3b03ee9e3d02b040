"""One engine with the connector, and one socket path at which sidecars start and stop. For every
fault of the sidecar, the output is that of a vLLM without kvstore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_model
from vllm_rig import ROUNDING, Engine, Sidecar, connector, tokens, wait_until

PROMPTS = [tokens(1, 200), tokens(1, 128) + tokens(2, 70), tokens(3, 333), tokens(4, 300)]
POOL = 64
ENOUGH = ("--l2", "64MiB", "--slot-bytes", "128KiB")


class FaultWorld:
    """The engine, the output of a plain vLLM, and the folder where sidecars listen.

    ranks: tensor-parallel ranks. extra: keys of the connector's configuration.
    """

    def __init__(self, folder: Path, engine: Engine, *, ranks: int = 1, **extra: Any) -> None:
        self.folder = folder
        self.model = folder / "llama"
        write_model(self.model, "llama", 1)
        self.socket = str(folder / "kv.sock")
        self.engine, self.ranks = engine, ranks
        self.sidecars: list[Sidecar] = []
        engine.start(self.model, num_gpu_blocks_override=POOL)
        # Rounding depends on how a prompt is split.
        self.expected = [
            (tokens_, pytest.approx(logprobs, abs=ROUNDING)) for tokens_, logprobs in self.outputs()
        ]
        engine.start(
            self.model,
            kv_transfer_config=connector(self.socket, **extra),
            num_gpu_blocks_override=POOL,
            tensor_parallel_size=ranks,
        )

    def outputs(self, *, together: bool = False) -> list[Any]:
        """Results of the prompts. vLLM's own prefix cache is empty at first."""
        assert self.engine.ask("reset")["reset"]
        results = self.engine.generate(PROMPTS, tokens=8, together=together)
        assert {result["finish"] for result in results} == {"length"}
        return told(results)

    def sidecar(self, *options: str, config: str = "") -> Sidecar:
        """A sidecar to which all of the engine's clients have connected."""
        made = Sidecar(self.folder, *(options or ENOUGH), config=config)
        self.sidecars.append(made)
        for side, count in (("scheduler", 1), ("worker", self.ranks)):
            wait_until(
                lambda side=side, count=count: (
                    self.engine.state()[side]["store_connected"] == count
                ),
                "connected",
            )
        return made

    def end_sidecars(self) -> None:
        """Kill the sidecars that a failed test left, also hung ones: they occupy the socket."""
        for sidecar in self.sidecars:
            if sidecar.running:
                sidecar.kill()
        self.sidecars.clear()

    def count(self, name: str) -> float:
        """One of the connector's counters in vLLM's metrics, summed over ranks."""
        metrics: dict[str, float] = self.engine.ask("metrics")["metrics"]
        return metrics.get(f"vllm:kvstore_{name}", 0)

    def load_under_way(self, sidecar: Sidecar) -> str:
        """Start a request for the first prompt, whose blocks the sidecar has; returns its name. The
        sidecar is suspended after the scheduler's side has leased the slots, before a worker
        requests them."""
        name = ""

        def slots_have_come() -> bool:
            nonlocal name
            ended = self.engine.ask("step", pause_s=0.02)["ended"] if name else True
            if ended:  # at first, and if the load ended before the check
                assert self.engine.ask("reset")["reset"]
                name = self.engine.ask("add", prompt=PROMPTS[0])["name"]
                return False
            return bool(self.engine.state()["scheduler"]["slots_leased"] == 6)

        wait_until(slots_have_come, "slots for a load")
        sidecar.suspend()
        self.engine.ask("step")
        state = self.engine.state()
        under_way = [state[side]["loads_under_way"] for side in ("scheduler", "worker")]
        assert under_way == [1, self.ranks]
        return name

    def ending(self) -> list[Any]:
        """Step until a request has ended; returns its result."""
        ended: list[Any] = []
        wait_until(
            lambda: ended.extend(self.engine.ask("step", pause_s=0.01)["ended"]) or ended,
            "the request ends",
        )
        return told(ended)

    def requests(self, count: int) -> list[dict[str, Any]]:
        """Requests for `pressed`; each four share a prefix."""
        shared = [tokens(20 + number, 96) for number in range(4)]
        return [
            {
                "id": f"r{number}",
                "prompt": shared[number % 4] + tokens(100 + number, 40 + 7 * number),
                "tokens": 40,
            }
            for number in range(count)
        ]

    def alone(self, requests: list[dict[str, Any]]) -> dict[str, list[int]]:
        """The output of each request when nothing else runs."""
        results = self.engine.generate([each["prompt"] for each in requests], tokens=40)
        return {each["id"]: one["tokens"] for each, one in zip(requests, results, strict=True)}

    def pressed(
        self, requests: list[dict[str, Any]], expected: dict[str, list[int]], rounds: int
    ) -> None:
        """Run all requests at once and abort every fifth at some step. vLLM preempts some. Each
        output is a prefix of the output when run alone, and nothing stays leased."""
        before = self.engine.ask("metrics")["metrics"].get("vllm:num_preemptions", 0)
        aborts = {f"r{number}": 3 + 9 * number for number in range(0, len(requests), 5)}
        for round_ in range(rounds):
            assert self.engine.ask("reset")["reset"]
            renamed = [{**each, "id": f"{each['id']}-{round_}"} for each in requests]
            names = {f"{name}-{round_}": step for name, step in aborts.items()}
            done = self.engine.ask("run", requests=renamed, aborts=names, within_s=120)["done"]
            found = {name.rpartition("-")[0]: each for name, each in done.items()}
            assert set(expected) - set(aborts) <= set(found)
            for name, each in found.items():
                full = expected[name]
                assert each["tokens"] == full[: len(each["tokens"])], name
                assert len(each["tokens"]) == len(full) or name in aborts
        assert self.engine.ask("metrics")["metrics"]["vllm:num_preemptions"] > before
        self.check_idle()

    def check_idle(self) -> None:
        assert self.engine.ask("settle")["requests"] == 0
        state = self.engine.state()
        assert state["free_blocks"] == state["blocks"] - 1, "all but vLLM's null block"
        assert state["scheduler"]["loads_under_way"] == state["scheduler"]["requests_waiting"] == 0
        assert state["worker"]["loads_under_way"] == state["worker"]["saves_under_way"] == 0

    def nothing_is_leased(self, sidecar: Sidecar) -> None:
        """Every lease is released, and the sidecar exits with 0."""
        wait_until(lambda: sidecar.stats()["l2"]["slots_leased"] == 0, "leases are released")
        assert sidecar.stop() == 0


def told(results: list[dict[str, Any]]) -> list[Any]:
    """Tokens and log-probabilities."""
    return [(each["tokens"], each["logprobs"]) for each in results]
