"""The shared traces, and the rates that were counted independently from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.analysis.simulate.formats import read_trace
from kvstore.analysis.simulate.levels import Level
from kvstore.analysis.simulate.replay import hit_rates
from kvstore.analysis.simulate.traces import TraceRequest

SHARED = Path(__file__).parents[2] / "shared"
MOONCAKE = "mooncake_conversation_trace.jsonl"
AGENTS = "lmcache_agents.jsonl"
RAG = "ragpulse.jsonl"


def conformance() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_shared("conformance/trace_hitrates.json").read_text())
    return found


def trace(name: str) -> list[TraceRequest]:
    """The requests of a trace; skips the test where the traces are not there."""
    return read_trace(_shared(f"traces/{name}"))


def rates(requests: list[TraceRequest], capacity: int | None, policy: str) -> tuple[float, float]:
    """Percent of prompt tokens that hit: of all requests, and of their second half."""
    return hit_rates(requests, Level(capacity, policy))


def _shared(path: str) -> Path:
    if not (SHARED / path).exists():
        pytest.skip(f"../shared/{path} is not here")
    return SHARED / path
