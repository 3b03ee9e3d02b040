"""Is the GPU path correct on this machine, and how fast is it?

    python bench/gpu_check.py [--json FILE] [--markdown FILE] [--budget-s 270] [--disk-folder DIR]
                              [--quick]

On one GPU, with torch, cupy and Triton installed and nothing to download, in under five minutes:

1. every kernel, launcher and path against the loops of `kernels.reference`, bit for bit;
2. GB/s from device to slots and back for 16 to 1,024 blocks of 2 MiB, by each path, beside a plain
   `cudaMemcpyAsync` of as many bytes of the same pinned memory;
3. an engine with random weights at the shape of Llama-3-8B over L2 and disk: equality of loaded KV,
   time to first token computed and loaded by prompt length, and the break-even length.

Without a GPU the script runs on the CPU at small sizes, and lists the parts that it skips. The exit
status is 1 if a check failed. Parts that exceed the budget are skipped and listed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from ttft import BLOCK_TOKENS, Rig

from kvstore.engine.loader import LoadedModel, random_model
from kvstore.kernels import BlockFormat, Copier, PoolLayout, reference
from kvstore.kernels.paths import COPY_ENGINE_FROM_BYTES, Direction
from kvstore.kernels.paths import Path as CopyPath
from kvstore.kernels.quantise import error_of
from kvstore.kernels.torch_copier import DeviceCopier, HostCopier
from kvstore.shm.slab import Slab

BLOCK_BYTES: Final = 2 << 20
ROUNDS: Final = 5
WANTED_SHARE: Final = 0.9
"""Fraction of the speed of a plain pinned copy that gathers and scatters must reach."""

DTYPES: Final = (torch.bfloat16, torch.float32, torch.float16)

Pool = Callable[[torch.device], PoolLayout]


@dataclass
class Report:
    """The results, in the order of the parts."""

    machine: dict[str, str]
    checks: list[dict[str, Any]] = field(default_factory=list)
    copies: list[dict[str, Any]] = field(default_factory=list)
    engine: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[dict[str, Any]]:
        return [check for check in self.checks if not check["ok"]]


# ---- 1: kernels against the loops ----

L, B, T, H, D = 3, 6, 4, 2, 64
PAGES: Final = [[4, 1], [0, 3], [5, -1]]


def random_values(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random values, the same on every device."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def pools(dtype: torch.dtype) -> dict[str, Pool]:
    """Pools with the layout of each engine, on a device."""

    def make(*shape: int) -> Callable[[torch.device], torch.Tensor]:
        return lambda device: random_values(*shape, dtype=dtype, device=device)

    ours, packed = make(L, 2, B, T, H, D), make(L, B, H, T, 2 * D)
    across, nhd = make(B, L, H, T, 2 * D), make(L, B, T, H, 2 * D)
    stacked, tokens = make(L, 2, B, T, H, D), make(L, 2, B * T, H, D)
    page_first, latent = make(2, B * T, L, H, D), make(L, B, 1, T, 72)
    return {
        "ours": lambda at: PoolLayout.reference(ours(at)),
        "vLLM LBHNC": lambda at: PoolLayout.vllm(packed(at).unbind(0), D),
        "vLLM LBHNC, K‖V": lambda at: PoolLayout.vllm(packed(at).unbind(0)),
        "vLLM LBNHC": lambda at: PoolLayout.vllm(nhd(at).transpose(2, 3).unbind(0), D),
        "vLLM BLHNC": lambda at: PoolLayout.vllm(across(at).transpose(0, 1).unbind(0), D),
        "vLLM stacked": lambda at: PoolLayout.stacked(stacked(at).unbind(0)),
        "SGLang device": lambda at: PoolLayout.token_lists(
            *zip(*(layer.unbind(0) for layer in tokens(at)), strict=True), page_tokens=T
        ),
        "SGLang page_first": lambda at: PoolLayout.sglang_host(
            page_first(at), "page_first", page_tokens=T
        ),
        "MLA": lambda at: PoolLayout.vllm(latent(at).unbind(0)),
    }


def copiers(
    pool: PoolLayout, form: BlockFormat, slab: Slab
) -> Iterator[tuple[str, Callable[[], Copier]]]:
    """Every copier for this pool on this machine."""
    if pool.device.type == "cpu":
        yield "numpy", lambda: HostCopier(pool, form)
        yield "torch", lambda: DeviceCopier(pool, form)
        return
    from kvstore.kernels.cuda_copier import CudaCopier
    from kvstore.kernels.cuda_device import CudaDevice
    from kvstore.kernels.launchers import CupyLauncher, Launcher, TritonLauncher

    def mapped(path: CopyPath, launcher: type[CupyLauncher] | type[TritonLauncher]) -> Copier:
        made: Launcher = launcher(pool.device)
        copier = CudaCopier(pool, form, path=path, device=CudaDevice(pool.device, made))
        copier.map_slab(slab)
        return copier

    yield "torch", lambda: DeviceCopier(pool, form)
    for launcher in (CupyLauncher, TritonLauncher):
        library = launcher.__name__.removesuffix("Launcher").lower()
        if importlib.util.find_spec(library) is None:
            continue
        paths = CopyPath if launcher is CupyLauncher else (CopyPath.KERNEL,)
        for path in paths:
            yield f"{library}, {path.value}", lambda p=path, of=launcher: mapped(p, of)


def sheets_bytes(pool: PoolLayout) -> list[bytes]:
    return [sheet.cpu().contiguous().view(torch.uint8).numpy().tobytes() for sheet in pool.sheets]


def check_kernels(report: Report, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    """Gather, scatter and scatter by layer, for every layout, storage, launcher and path."""
    slab = Slab.create(len(PAGES), 256 << 10)
    for dtype in dtypes:
        for name, make in pools(dtype).items():
            for storage in ("plain", "planes", "int8"):
                here = make(torch.device("cpu"))
                orders = ("LHTC",) if here.parts == 1 else ("LKTHD", "KTLHD")
                for order in orders:
                    form = BlockFormat(order, storage)
                    check_format(report, f"{name}, {dtype}, {form}", make, form, slab, device)
    slab.close()


def check_format(
    report: Report,
    name: str,
    make: Pool,
    form: BlockFormat,
    slab: Slab,
    device: torch.device,
) -> None:
    slots = [slab.view(slot) for slot in range(slab.slots)]
    before = [np.random.default_rng(slot).bytes(slab.slot_bytes) for slot in range(slab.slots)]
    here = make(torch.device("cpu"))
    wanted = [memoryview(bytearray(bits)) for bits in before]
    reference.gather(here, PAGES, wanted, form)
    gathered = [bytes(slot) for slot in wanted]
    reference.scatter(here, PAGES[::-1], wanted, form)
    scattered = sheets_bytes(here)
    there = make(device)
    for label, copier_of in copiers(there, form, slab):
        problems = []
        try:
            copier = copier_of()
            for by_layer in (False, True):
                for old, new in zip(there.sheets, make(device).sheets, strict=True):
                    old.copy_(new)
                for slot, bits in zip(slots, before, strict=True):
                    slot[:] = bits
                copier.mark().wait()
                copier.gather(PAGES, slots).wait()
                if [bytes(slot) for slot in slots] != gathered:
                    problems.append("gather")
                if by_layer:
                    events = copier.scatter_layers(PAGES[::-1], slots)
                else:
                    events = [copier.scatter(PAGES[::-1], slots)]
                events[-1].wait()
                if sheets_bytes(there) != scattered:
                    problems.append("scatter by layer" if by_layer else "scatter")
            copier.close()
        except Exception as error:  # an exception is a failed check, and the others continue
            problems.append(f"{type(error).__name__}: {error}")
        report.checks.append({"check": name, "copier": label, "ok": not problems, "what": problems})


def check_int8_error(report: Report) -> None:
    """The error of int8 storage on normally distributed values."""
    pool = random_values(2, 2, 4, 16, 8, 128, dtype=torch.bfloat16, device=torch.device("cpu"))
    form = BlockFormat("LKTHD", "int8")
    slot = memoryview(bytearray(form.block_bytes(PoolLayout.reference(pool), 4)))
    copier = HostCopier(pool, form)
    before = pool.clone()
    copier.gather([[0, 1, 2, 3]], [slot])
    copier.scatter([[0, 1, 2, 3]], [slot])
    report.summary["int8 error, bf16 normal values"] = str(error_of(before, pool))


# ---- 2: copy speed ----


def best_s(call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def measure_copies(report: Report, device: torch.device, deadline_s: float) -> None:
    """GB/s by number of blocks of 2 MiB: Llama-3-8B's KV of 16 tokens."""
    counts = (16, 32, 64, 128, 256, 512, 1024) if device.type == "cuda" else (4, 16)
    most = counts[-1]
    pool = torch.zeros(32, 2, most, 16, 8, 128, dtype=torch.bfloat16, device=device)
    layout = PoolLayout.reference(pool)
    slab = Slab.create(most, BLOCK_BYTES)
    order = np.random.default_rng(0).permutation(most)
    for label, copier_of in copiers(layout, BlockFormat(), slab):
        if label == "torch" and device.type == "cuda":
            continue
        copier = copier_of()
        for count in counts:
            if time.monotonic() > deadline_s:
                report.skipped.append(f"copies of {count} blocks by {label}: out of time")
                continue
            pages = [[int(page)] for page in order[:count]]
            slots = [slab.view(int(slot)) for slot in order[::-1][:count]]
            nbytes = count * BLOCK_BYTES
            plain = plain_gb_s(slab, pool, nbytes)
            row: dict[str, Any] = {"blocks": count, "copier": label}
            for direction, copy in (("D2H", copier.gather), ("H2D", copier.scatter)):
                copy(pages, slots).wait()
                rate = nbytes / best_s(lambda c=copy, p=pages, s=slots: c(p, s).wait()) / 1e9
                row[f"{direction}_gb_s"] = round(rate, 2)
                row[f"{direction}_plain_gb_s"] = round(plain[direction], 2)
                row[f"{direction}_fraction"] = round(rate / plain[direction], 3)
            report.copies.append(row)
        copier.close()
    slab.close()
    if device.type == "cuda":
        report.summary["paths"] = best_paths(report.copies)


def plain_gb_s(slab: Slab, pool: torch.Tensor, nbytes: int) -> dict[str, float]:
    """Speed of a plain copy of `nbytes` between the slab and the pool's memory. On a device it is
    `cudaMemcpyAsync` with a registered slab."""
    flat = pool.view(-1).view(torch.uint8)[:nbytes]
    host = torch.frombuffer(slab.view(0).obj, dtype=torch.uint8)[:nbytes]

    def copy(into: torch.Tensor, source: torch.Tensor) -> None:
        into.copy_(source, non_blocking=True)
        if pool.device.type == "cuda":
            torch.cuda.current_stream(pool.device).synchronize()

    return {
        "D2H": nbytes / best_s(lambda: copy(host, flat)) / 1e9,
        "H2D": nbytes / best_s(lambda: copy(flat, host)) / 1e9,
    }


def best_paths(copies: list[dict[str, Any]]) -> dict[str, Any]:
    """For each direction, the size above which the copy engine is the faster path, and the smallest
    fraction of the plain copy's speed that the faster path reaches."""
    found: dict[str, Any] = {}
    for direction in Direction:
        key = f"{direction.value}_gb_s"
        by_count: dict[int, dict[str, float]] = {}
        for row in copies:
            by_count.setdefault(row["blocks"], {})[row["copier"]] = row[key]
        engine_from = None
        for count in sorted(by_count, reverse=True):
            best = max(by_count[count], key=lambda label: by_count[count][label])
            if CopyPath.COPY_ENGINE.value not in best:
                break
            engine_from = count * BLOCK_BYTES
        fractions = [
            max(row[f"{direction.value}_fraction"] for row in copies if row["blocks"] == count)
            for count in by_count
        ]
        found[direction.value] = {
            "copy engine from bytes": engine_from,
            "default": COPY_ENGINE_FROM_BYTES[direction],
            "smallest fraction of plain copy": min(fractions, default=0.0),
        }
    return found


# ---- 3: an engine ----


def big_model(device: torch.device) -> LoadedModel:
    """Random weights at Llama-3-8B's shape with as many layers as fit; a small model on CPU."""
    if device.type == "cpu":
        return random_model(0, layers=4, hidden=256, heads=8, kv_heads=2, device="cpu")
    free_bytes, _ = torch.cuda.mem_get_info(device)
    layer_bytes = 2 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)
    fitting = int((free_bytes * 0.6 - 4 * 128_256 * 4096) // layer_bytes)
    return random_model(
        0,
        layers=max(1, min(32, fitting)),
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14336,
        vocab=128_256,
        max_positions=32_768,
        dtype="bfloat16",
        device=str(device),
        made_on_device=True,
    )


def measure_engine(report: Report, device: torch.device, folder: str, deadline_s: float) -> None:
    lengths = (256, 1024, 2048, 4096, 8192) if device.type == "cuda" else (128, 256)
    loaded = big_model(device)
    config = loaded.config
    report.summary["model"] = f"{config.layers} layers, hidden {config.hidden}, {device}"
    rig = Rig(loaded, max(lengths), torch.get_num_threads(), folder)
    rng = np.random.default_rng(1)
    rig.engine.generate([rng.integers(0, 256, 64).tolist()], max_tokens=2, cache_salt="warm up")
    for length in lengths:
        if time.monotonic() > deadline_s:
            report.skipped.append(f"engine, prompts of {length}: out of time")
            continue
        prompt = rng.integers(0, 256, length).tolist()
        rig.measure(prompt, f"warm {length}")
        times = rig.measure(prompt, f"timed {length}")
        row = {"prompt_tokens": length}
        row |= {f"{place}_ms": round(value, 2) for place, value in times.items()}
        for place in ("cold", "l2", "disk"):
            row[f"{place}_tokens_s"] = round(length / times[place] * 1e3)
        report.engine.append(row)
        check_kv(report, rig, loaded, prompt)
    rig.close()
    for place in ("l2", "disk"):
        faster = [
            row["prompt_tokens"] for row in report.engine if row[f"{place}_ms"] < row["cold_ms"]
        ]
        report.summary[f"break-even tokens, {place}"] = min(faster, default=None)


def check_kv(report: Report, rig: Rig, loaded: LoadedModel, prompt: list[int]) -> None:
    """Check that loaded KV equals the computed KV, byte for byte."""
    engine, salt = rig.engine, f"kept {len(prompt)}"
    full = (len(prompt) - 1) // BLOCK_TOKENS

    def kept() -> torch.Tensor:
        found = engine.cache.tree.match(np.array(prompt, dtype=np.int32), ("", salt))
        pages = torch.from_numpy(found.pages[:full].astype(np.int64))
        return engine.runner.pool.index_select(2, pages.to(engine.runner.pool.device)).cpu()

    engine.reset_prefix_cache()
    [first] = engine.generate([prompt], max_tokens=4, ignore_eos=True, cache_salt=salt)
    computed = kept()
    assert rig.store.flush(60.0)
    engine.reset_prefix_cache()
    engine.runner.pool.zero_()
    [second] = engine.generate([prompt], max_tokens=4, ignore_eos=True, cache_salt=salt)
    same = torch.equal(kept().view(torch.uint8), computed.view(torch.uint8))
    came = second.cached.get("l2", 0) == full * BLOCK_TOKENS
    what = [] if same else ["KV bytes differ"]
    what += [] if came else [f"cached {second.cached}"]
    if first.tokens != second.tokens:
        # The last page is computed in another batch shape, which may round otherwise in bf16.
        report.summary[f"tokens after a load of {len(prompt)}"] = "differ (see KV bytes)"
    name = f"engine, KV of {len(prompt)} tokens through L2"
    report.checks.append({"check": name, "copier": "engine", "ok": same and came, "what": what})


# ---- the report ----


def machine_of(device: torch.device) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "device": str(device)}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
    for library in ("cupy", "triton"):
        there = importlib.util.find_spec(library) is not None
        found[library] = importlib.import_module(library).__version__ if there else "absent"
    return found


def table(rows: list[dict[str, Any]]) -> str:
    heads = list(rows[0])
    lines = [
        heads,
        ["---"] * len(heads),
        *[[str(row.get(head, "")) for head in heads] for row in rows],
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown(report: Report) -> str:
    failed = report.failed
    parts = ["## GPU check", ", ".join(f"{key} {value}" for key, value in report.machine.items())]
    parts.append(f"Checks: {len(report.checks)}, failed: {len(failed)}.")
    parts += [f"- FAILED {row['check']} by {row['copier']}: {row['what']}" for row in failed]
    parts += [table(rows) for rows in (report.copies, report.engine) if rows]
    parts += [f"- {key}: {value}" for key, value in report.summary.items()]
    parts += [f"- skipped: {line}" for line in report.skipped]
    return "\n\n".join(parts) + "\n"


def guarded(report: Report, part: str, call: Callable[[], None]) -> None:
    """Run a part. An exception is a failed check, and the other parts still run."""
    try:
        call()
    except Exception as error:
        what = [f"{type(error).__name__}: {error}"]
        report.checks.append({"check": part, "copier": "whole part", "ok": False, "what": what})


def run(options: argparse.Namespace) -> Report:
    start_s = time.monotonic()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    report = Report(machine_of(device))
    if device.type == "cpu":
        report.skipped.append("no CUDA device: kernels, paths, pinned copies and the 8B shape")
    torch.set_num_threads(1)
    with torch.no_grad():
        dtypes = DTYPES[:1] if options.quick else DTYPES
        guarded(report, "kernels", lambda: check_kernels(report, device, dtypes))
        check_int8_error(report)
        end_s = start_s + options.budget_s * 0.5
        guarded(report, "copies", lambda: measure_copies(report, device, end_s))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        with tempfile.TemporaryDirectory(dir=options.disk_folder) as folder:
            end_s = start_s + options.budget_s * 0.8
            guarded(report, "engine", lambda: measure_engine(report, device, folder, end_s))
    report.summary["seconds"] = round(time.monotonic() - start_s, 1)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    parser.add_argument(
        "--budget-s", type=float, default=270.0, help="time budget of all parts, in seconds"
    )
    parser.add_argument("--quick", action="store_true", help="test one dtype instead of three")
    parser.add_argument("--disk-folder", help="folder in which the disk tier's folder is created")
    options = parser.parse_args()
    report = run(options)
    text = markdown(report)
    print(text)
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(report), indent=1, default=str) + "\n")
    if options.markdown is not None:
        options.markdown.write_text(text)
    sys.exit(1 if report.failed else 0)


if __name__ == "__main__":
    main()
