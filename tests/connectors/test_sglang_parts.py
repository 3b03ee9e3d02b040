"""Parts of the SGLang backend by themselves: settings, copies, calls, hits, hashes."""

from __future__ import annotations

import hashlib
import logging
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from fork_rig import IGNORE_FORK_WARNING, in_child
from hypothesis import given
from hypothesis import settings as given_settings
from hypothesis import strategies as st
from sglang_rig import HostMemory, config

from kvstore.connectors.sglang.calls import GuardedCalls
from kvstore.connectors.sglang.copies import Copies, Extents
from kvstore.connectors.sglang.model_identity import compute_dtype, model_of, revision_of
from kvstore.connectors.sglang.namespace import EXTENTS, HostPool, namespace_of
from kvstore.connectors.sglang.page_pool import hashes_of
from kvstore.connectors.sglang.restorable import kv_prefixes, trailing_lengths
from kvstore.connectors.sglang.settings import (
    MaxWaitSettings,
    backend_settings,
    check_parallel,
    check_version,
)
from kvstore.connectors.sglang.shared_client import SharedClient
from kvstore.errors import ConfigError
from kvstore.interface import BlockStore, Match, Operation

pytestmark = pytest.mark.filterwarnings(IGNORE_FORK_WARNING)

SGLANGS_OWN = {
    "backend_name": "kvstore",
    "module_path": "kvstore.connectors.sglang",
    "class_name": "KVStoreBackend",
    "interface_v1": 1,
}


def test_sglangs_own_keys_are_left_alone() -> None:
    settings = backend_settings({**SGLANGS_OWN, "socket": "/run/kv.sock"})
    assert settings.socket == "/run/kv.sock"
    assert settings.threads >= 1


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        ({"sockt": "x"}, "unknown key 'hicache-storage-backend-extra-config.sockt'; did you mean"),
        ({"max_wait": {"cap": 1}}, "max_wait.cap"),
        ({"copy_threads": 1000}, "copy_threads"),
        (
            {"http": "localhost:8100"},
            "http = 'localhost:8100' is not a URL; use one like 'http://127.0.0.1:8100'",
        ),
    ],
)
def test_an_invalid_setting_is_one_line(extra: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as told:
        backend_settings({**SGLANGS_OWN, **extra})
    assert line in str(told.value)
    assert "\n" not in str(told.value)


def test_the_maximum_wait_grows_with_the_bytes_up_to_its_maximum() -> None:
    max_wait = MaxWaitSettings(base=100, per_gib=1000, max=600)
    assert max_wait.seconds_for(0) == pytest.approx(0.1)
    assert max_wait.seconds_for(1 << 28) == pytest.approx(0.35)
    assert max_wait.seconds_for(1 << 40) == pytest.approx(0.6)


def test_the_tested_release_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    check_version("0.5.23")
    assert not caplog.records


def test_a_later_release_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_version("0.5.24.post1")
    assert (
        "SGLang 0.5.24.post1 was not tested with kvstore; it was tested with 0.5.23" in caplog.text
    )


@pytest.mark.parametrize("version", ["0.5.22", "0.4.99", "0.6.0", "1.5.23", "nightly"])
def test_other_releases_are_rejected(version: str) -> None:
    with pytest.raises(ConfigError, match=f"SGLang {version} is not supported.*0.5.23"):
        check_version(version)


def test_context_parallel_decoding_is_rejected() -> None:
    check_parallel(config())
    with pytest.raises(ConfigError, match="decode-context parallelism of 2 is not supported"):
        check_parallel(config(dcp_size=2))
    with pytest.raises(ConfigError, match="tp_lcm_size = 8 is not supported"):
        check_parallel(config(should_split_heads=True, tp_lcm_size=8))


def test_keys_of_hex_are_their_bytes_and_others_their_digest() -> None:
    good = [hashlib.sha256(bytes([n])).hexdigest() for n in range(3)]
    assert hashes_of(good) == [bytes.fromhex(key) for key in good]
    odd = ["", "a", "x" * 64, "ab" * 31, "AB" * 32, "ab" * 32, "ab " * 21 + "a", "é", good[0]]
    hashes = hashes_of(odd)
    assert hashes[-1] == bytes.fromhex(good[0])
    assert len({len(each) for each in hashes}) == 1
    assert len(set(hashes)) == len(odd)
    # 128 digits in all, but not 64 in each: the keys must not be split at 64 digits.
    assert hashes_of(["a" * 60, "a" * 68]) == [
        hashlib.sha256(b"a" * 60).digest(),
        hashlib.sha256(b"a" * 68).digest(),
    ]
    assert hashes_of([]) == []


@st.composite
def pages(draw: st.DrawFn) -> tuple[int, list[list[tuple[int, int]]]]:
    """(bytes of memory, pages as offsets) that do not overlap; some regular, some not."""
    kind = draw(st.sampled_from(["regular", "ragged"]))
    count = draw(st.integers(1, 5))
    if kind == "regular":
        layers, each = draw(st.integers(1, 12)), draw(st.integers(1, 40))
        half = layers * count * each
        return 2 * half, [
            [
                (which * half + layer * count * each + page * each, each)
                for layer in range(layers)
                for which in (0, 1)
            ]
            for page in range(count)
        ]
    parts = draw(st.integers(1, 20))
    size = draw(st.lists(st.integers(1, 30), min_size=parts, max_size=parts))
    order = draw(st.permutations(range(parts)))
    offsets = np.cumsum([0, *size])[:-1]
    total = sum(size)
    return total * count, [
        [(page * total + int(offsets[part]), size[part]) for part in order] for page in range(count)
    ]


@given_settings(deadline=None)
@given(pages(), st.randoms(use_true_random=False))
def test_pages_and_slots_hold_the_same_bytes(
    case: tuple[int, list[list[tuple[int, int]]]], rng: random.Random
) -> None:
    nbytes, offsets = case
    memory = np.frombuffer(rng.randbytes(nbytes), dtype=np.uint8).copy()
    base = memory.ctypes.data
    extents: list[Extents] = [[(base + at, size) for at, size in page] for page in offsets]
    block = sum(size for _, size in offsets[0])
    slots = [memoryview(bytearray(b"\xee" * (block + 8))) for _ in offsets]
    copies = Copies(3)
    copies.to_slots(slots, extents)
    for slot, page in zip(slots, offsets, strict=True):
        assert bytes(slot[:block]) == b"".join(bytes(memory[at : at + n]) for at, n in page)
        assert bytes(slot[block:]) == b"\xee" * 8, "past the block"
    was = memory.copy()
    memory[:] = 0
    copies.to_host(slots, extents)
    copies.close()
    assert (memory == was).all(), "pages tile the memory, so every byte is back"


def test_a_call_returns_when_every_thread_has_copied() -> None:
    """The calling thread has much less to copy than the other threads."""
    sizes = [64] + [24 << 20] * 3
    memory = [
        np.random.default_rng(n).integers(0, 256, size, np.uint8) for n, size in enumerate(sizes)
    ]
    pages_: list[Extents] = [[(part.ctypes.data, part.nbytes)] for part in memory]
    slots = [memoryview(bytearray(size)) for size in sizes]
    copies = Copies(4)
    copies.to_slots(slots, pages_)
    ends = [slot[-1] for slot in slots]
    assert ends == [part[-1] for part in memory]
    for slot, part in zip(slots, memory, strict=True):
        assert slot == part.data
    copies.close()


class Polled:
    """A store that counts its polls."""

    def __init__(self) -> None:
        self.polls = 0

    def poll(self, timeout_s: float) -> list[Operation]:
        self.polls += 1
        return []

    def match(self, hashes: Sequence[bytes]) -> Match:
        return Match(1, hashes)


def test_no_thread_polls_for_an_update_that_another_one_has_received() -> None:
    """Another thread's poll returns the operation between the check and the poll: a thread that
    polled now would wait for the next update."""
    store = Polled()
    client = SharedClient(cast(BlockStore, store))
    checks = iter([False, True])
    assert client.wait(lambda: next(checks), time.monotonic() + 60)
    assert store.polls == 0


def test_an_exception_in_a_call_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    calls = GuardedCalls()

    def wrong() -> int:
        raise ValueError("whatever")

    assert calls.run("exists", lambda: 0, lambda: 7) == 7
    assert calls.run("exists", lambda: 0, wrong) == 0
    assert calls.run("exists", lambda: 0, wrong) == 0
    assert calls.errors == 2
    assert [record.message for record in caplog.records] == [
        "exists raised an exception; returning a miss (others are counted, not logged)"
    ]


def test_closing_waits_for_calls_under_way_and_rejects_others() -> None:
    calls, inside, go = GuardedCalls(), threading.Event(), threading.Event()

    def slow() -> int:
        inside.set()
        assert go.wait(60)
        return 1

    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(calls.run("get", int, slow)))
    thread.start()
    assert inside.wait(60)
    assert not calls.close(0.01), "a call is under way"
    assert calls.run("get", int, lambda: 1) == 0, "closed"
    go.set()
    assert calls.close(60.0)
    thread.join()
    assert answers == [1]


@given_settings(deadline=None)
@given(st.lists(st.booleans(), max_size=12), st.integers(1, 4))
def test_trailing_lengths(cached: list[bool], window: int) -> None:
    naive = [
        length
        for length in range(1, len(cached) + 1)
        if all(cached[max(0, length - window) : length])
    ]
    assert trailing_lengths(cached, window) == naive


def test_hits_of_several_pools_are_what_all_can_serve() -> None:
    hits = kv_prefixes("kv", 6)
    hits.restrict("indexer", range(1, 6))
    hits.restrict("mamba", [2, 4, 6])
    assert hits.lengths == [2, 4]
    assert hits.pages == 4
    assert hits.by_pool == {"kv": 6, "indexer": 5, "mamba": 6}
    hits.restrict("swa", [])
    assert hits.pages == 0
    assert "swa" not in hits.by_pool
    assert kv_prefixes("kv", 0).by_pool == {}


def test_pages_of_one_dtype_that_two_dtypes_computed_differ() -> None:
    def layout(dtype: torch.dtype, computed: str) -> str:
        host = HostPool(HostMemory(4, dtype=dtype), "kv")
        return namespace_of(
            host, config(), EXTENTS, model="m", revision="r", compute_dtype=computed
        ).layout

    assert layout(torch.bfloat16, "bfloat16") == layout(torch.bfloat16, "")
    fp8 = torch.float8_e4m3fn
    for dtype in (torch.bfloat16, fp8):
        assert len({layout(dtype, name) for name in ("", "float16", "float32")}) == 3
    assert layout(fp8, "bfloat16").endswith(";computed=bfloat16")


def test_the_computing_dtype_is_as_sglang_resolved_it_or_the_argument() -> None:
    resolved = SimpleNamespace(dtype=torch.bfloat16)
    assert compute_dtype(SimpleNamespace(dtype="auto", _model_config=resolved)) == "bfloat16"
    assert compute_dtype(SimpleNamespace(dtype="half")) == "float16"
    assert compute_dtype(SimpleNamespace(dtype="auto")) == compute_dtype(None) == ""


def test_names_of_model_and_weights(tmp_path: Any) -> None:
    said = backend_settings({"model": "org/m", "revision": "r7"})
    silent = backend_settings({})
    assert model_of(said, config()) == "org/m"
    assert model_of(silent, config(model_name="/data/llama/")) == "llama"
    assert model_of(silent, config(model_name=None)) == ""
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    args = SimpleNamespace(model_path=str(tmp_path), dtype="bfloat16", quantization=None)
    first = revision_of(silent, args)
    assert revision_of(said, SimpleNamespace(model_path=str(tmp_path))) == "r7"
    assert revision_of(said, args).startswith("r7-"), "the dtype is set"
    assert revision_of(silent, None) == ""
    assert revision_of(silent, SimpleNamespace(**{**vars(args), "dtype": "float16"})) != first
    (tmp_path / "model.safetensors").write_bytes(bytes(999) + b"\1")
    changed = revision_of(silent, args)
    assert changed != first
    (tmp_path / "config.json").write_text('{"rope_theta": 5e5}')
    assert revision_of(silent, args) != changed


def test_weights_without_identity_need_a_revision(tmp_path: Path) -> None:
    """A folder without weights, weights of a process or an object store, a branch that moves."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "model.safetensors").write_bytes(bytes(1000))
    full = str(tmp_path / "full")
    unlike: list[dict[str, Any]] = [
        {"model_path": str(tmp_path)},
        {"model_path": full, "load_format": "remote_instance"},
        {"model_path": full, "load_format": "npcache"},
        {"model_path": "s3://bucket/model"},
        {"model_path": "org/model", "download_dir": full},
        {"model_path": "org/model", "download_dir": full, "revision": "v1.0"},
    ]
    for over in unlike:
        with pytest.raises(ConfigError, match='set "revision"') as caught:
            revision_of(backend_settings({}), SimpleNamespace(**over))
        assert "\n" not in str(caught.value)
        found = revision_of(backend_settings({"revision": "r7"}), SimpleNamespace(**over))
        assert found.partition("-")[0] == "r7"
    commit = "0123456789abcdef" * 2 + "01234567"
    named = SimpleNamespace(model_path="org/model", download_dir=full, revision=commit)
    assert revision_of(backend_settings({}), named).startswith(f"{commit[:16]}-")


def test_a_model_of_the_hub_is_its_commit_unless_it_was_edited(tmp_path: Path) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    repository = tmp_path / "models--org--model"
    snapshot = repository / "snapshots" / commit
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    config, weights = b"{}", bytes(1000)
    names = {
        "config.json": (config, hashlib.sha1(b"blob %d\0" % len(config) + config).hexdigest()),
        "model.safetensors": (weights, hashlib.sha256(weights).hexdigest()),
    }
    for name, (content, digest) in names.items():
        (repository / "blobs" / digest).write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{digest}")
    main = SimpleNamespace(model_path="org/model", download_dir=str(tmp_path))
    silent = backend_settings({})
    assert revision_of(silent, main).startswith(f"{commit[:16]}-")
    for name, (content, _) in names.items():
        (snapshot / name).write_bytes(content + b" ")
        assert not revision_of(silent, main).startswith(commit[:16]), name
        (snapshot / name).write_bytes(content)
    assert revision_of(silent, main).startswith(f"{commit[:16]}-")


def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    calls, client = GuardedCalls(), SharedClient(cast(BlockStore, Polled()))

    def use() -> list[object]:
        missed = calls.run("x", lambda: "miss", lambda: "called")
        client.match(())
        polled = client.wait(lambda: False, time.monotonic() + 0.1)
        return [missed, calls.close(60.0), polled]

    client._is_polling = True
    with calls._changed, client._call_lock, client._turns:
        assert in_child(use) == ["miss", True, False]
    assert calls.run("x", lambda: "miss", lambda: "called") == "called"
