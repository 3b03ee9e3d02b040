"""Which blocks of a LoRA adapter may be shared, depending on its folder and its changes."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_vllm_sides import ALL, BLOCK, MAX_WAIT_MS, Scheduling, bytes_of, chain, request

from kvstore.connectors.vllm.connector.lora import (
    ADAPTERS_MAX,
    CLOCK_SKEW_S,
    FILES_MAX,
    Adapters,
    Trust,
)

LIMIT_S = 20.0


@dataclass
class Lora:
    """The attributes of vLLM's LoRA request that are read."""

    lora_path: str
    lora_int_id: int = 1
    load_inplace: bool = False


def write(folder: Path, weights: bytes = b"weights", config: str = "{}") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(config)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


@pytest.fixture
def engine() -> Iterator[Callable[[], Adapters]]:
    """Engines that start now, after all files were written."""
    made: list[Adapters] = []

    def start() -> Adapters:
        made.append(Adapters(clock=lambda: time.time() + 2 * CLOCK_SKEW_S))
        return made[-1]

    yield start
    for each in made:
        each.close()


def ask(adapters: Adapters, lora: Lora) -> tuple[Trust, bytes]:
    """The first answer of a later step that is not READING."""
    end_s = time.monotonic() + LIMIT_S
    while True:
        adapters.end_step()
        trust, salt = adapters.salt(lora)
        if trust is not Trust.READING:
            return trust, salt
        assert time.monotonic() < end_s, "never read"


def known(adapters: Adapters, lora: Lora) -> bytes:
    trust, salt = ask(adapters, lora)
    assert trust is Trust.KNOWN
    return salt


def test_the_model_itself_needs_no_salt(engine: Callable[[], Adapters]) -> None:
    assert engine().salt(None) == (Trust.KNOWN, b"")


def test_engines_share_an_adapter_by_its_files(
    engine: Callable[[], Adapters], tmp_path: Path
) -> None:
    folder, copy = write(tmp_path / "one"), write(tmp_path / "copy")
    first = known(engine(), Lora(str(folder)))
    assert known(engine(), Lora(str(folder), 7)) == first
    assert known(engine(), Lora(str(copy))) == first, "vLLM's hashes tell the folders apart"
    write(folder, b"weight5")
    second = known(engine(), Lora(str(folder)))
    write(folder, b"weight5", '{"lora_alpha": 9}')
    assert len({first, second, known(engine(), Lora(str(folder)))}) == 3


def test_files_from_after_the_start_are_for_this_run_and_this_id(
    tmp_path: Path, engine: Callable[[], Adapters]
) -> None:
    folder = write(tmp_path / "one")
    early = [Adapters(clock=lambda: 0.0) for _ in range(2)]
    own = [known(each, Lora(str(folder))) for each in early]
    assert known(early[0], Lora(str(folder))) == own[0]
    assert (
        len({*own, known(early[0], Lora(str(folder), 2)), known(engine(), Lora(str(folder)))}) == 4
    )
    for each in early:
        each.close()


@pytest.mark.parametrize("how", ["rewritten", "moved", "relinked", "gone", "inplace", "elsewhere"])
def test_files_that_change_end_the_adapters_use_of_the_store(
    engine: Callable[[], Adapters], tmp_path: Path, how: str
) -> None:
    folder, other = write(tmp_path / "one"), write(tmp_path / "two", b"weight5")
    link = tmp_path / "link"
    link.symlink_to(folder)
    adapters, lora = engine(), Lora(str(link))
    known(adapters, lora)
    times = (folder / "adapter_model.safetensors").stat()
    if how == "rewritten":
        (folder / "adapter_model.safetensors").write_bytes(b"weight5")
        os.utime(folder / "adapter_model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    elif how == "moved":
        shutil.rmtree(folder)
        other.rename(folder)
    elif how == "relinked":
        link.unlink()
        link.symlink_to(other)
    elif how == "gone":
        shutil.rmtree(folder)
    elif how == "inplace":
        assert ask(adapters, Lora(str(link), load_inplace=True))[0] is Trust.UNSURE
    else:
        assert ask(adapters, Lora(str(other)))[0] is Trust.UNSURE
    assert ask(adapters, lora)[0] is Trust.UNSURE
    # Permanent: the files that the engine has read are unknown. Another id is read again.
    shutil.rmtree(folder, ignore_errors=True)
    write(folder)
    assert ask(adapters, lora)[0] is Trust.UNSURE
    known(adapters, Lora(str(folder), 2))


def test_within_a_step_the_answer_does_not_change(
    engine: Callable[[], Adapters], tmp_path: Path
) -> None:
    folder = write(tmp_path / "one")
    adapters, lora = engine(), Lora(str(folder))
    salt = known(adapters, lora)
    write(folder, b"weight5")
    assert adapters.salt(lora) == (Trust.KNOWN, salt)
    adapters.end_step()
    assert adapters.salt(lora)[0] in (Trust.UNSURE, Trust.READING)


def test_an_invalid_adapter_does_not_use_the_store_until_it_is_valid(
    engine: Callable[[], Adapters], tmp_path: Path
) -> None:
    folder = tmp_path / "one"
    adapters, lora = engine(), Lora(str(folder))
    assert ask(adapters, lora)[0] is Trust.UNSURE
    folder.mkdir()
    assert ask(adapters, lora)[0] is Trust.UNSURE, "no weights"
    write(folder)
    for number in range(FILES_MAX):
        (folder / f"{number}.txt").touch()
    assert ask(adapters, lora)[0] is Trust.UNSURE, "too many files"
    for number in range(FILES_MAX):
        (folder / f"{number}.txt").unlink()
    known(adapters, lora)
    assert ask(adapters, Lora("no-such-owner/no-such-adapter", 2))[0] is Trust.UNSURE


def test_a_hanging_folder_does_not_delay_a_step(
    engine: Callable[[], Adapters], tmp_path: Path
) -> None:
    """The config is a pipe: a reader waits for a writer."""
    folder = write(tmp_path / "one")
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")
    adapters, lora = engine(), Lora(str(folder))
    for _ in range(3):
        assert adapters.salt(lora)[0] is Trust.READING
        adapters.end_step()
    writer = threading.Thread(target=(folder / "adapter_config.json").write_text, args=["{}"])
    writer.start()
    known(adapters, lora)
    writer.join(LIMIT_S)


def test_the_number_of_adapters_is_bounded(engine: Callable[[], Adapters]) -> None:
    adapters = engine()
    for number in range(1, ADAPTERS_MAX + 10):
        assert adapters.salt(Lora("/none", number, load_inplace=True))[0] is Trust.UNSURE
    assert len(adapters._adapters) == ADAPTERS_MAX


def test_block_hashes_depend_on_the_files_of_the_adapter(
    engine: Callable[[], Adapters], tmp_path: Path
) -> None:
    lora = Lora(str(write(tmp_path / "one")))
    rig = Scheduling(*ALL, adapters=engine())
    rig.put(4)
    req = request()
    req.lora_request = lora
    while rig.side.match(req, 0) is None:
        rig.next_step()
    assert rig.side.match(req, 0) == 0, "other blocks with the same vLLM hashes"
    rig.side.start_load(req, range(5), 0)
    (save,) = rig.next_step([("r", 4 * BLOCK)]).saves
    assert len(set(save.hashes)) == 4
    assert not set(save.hashes) & set(chain(4))
    for index, name in enumerate(save.hashes):
        rig.store.put(name, bytes_of(index), "l2")
    rig.side.finish_request(req)
    assert rig.side.match(req, 0) == 4 * BLOCK
    rig.side.finish_request(req)
    # The files have changed, so it is unknown which of them the engine has read.
    write(tmp_path / "one", b"weight5")
    rig.next_step()
    while rig.side.match(req, 0) is None:
        rig.next_step()
    assert rig.side.match(req, 0) == 0
    rig.side.start_load(req, range(5), 0)
    assert rig.next_step([("r", 4 * BLOCK)]).saves == []
    rig.side.finish_request(req)
    rig.store.check_idle()
    other = Scheduling(*ALL, adapters=engine())
    while other.side.match(req, 0) is None:
        other.next_step()
    other.side.start_load(req, range(5), 0)
    (anew,) = other.next_step([("r", 4 * BLOCK)]).saves
    assert not set(save.hashes) & set(anew.hashes)


def test_a_request_waits_for_its_adapters_folder_no_longer_than_for_its_blocks(
    engine: Callable[[], Adapters], tmp_path: Path
) -> None:
    folder = write(tmp_path / "one")
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")
    rig = Scheduling(*ALL, adapters=engine())
    req = request()
    req.lora_request = Lora(str(folder))
    assert rig.side.match(req, 0) is None
    rig.clock.advance(MAX_WAIT_MS / 1e3)
    assert rig.side.match(req, 0) == 0
    rig.side.start_load(req, range(5), 0)
    assert rig.next_step([("r", 4 * BLOCK)]).saves == []
    (folder / "adapter_config.json").open("w").close()
    saves = rig.next_step([("r", 4 * BLOCK)]).saves
    while not saves:
        saves = rig.next_step([("r", 4 * BLOCK)]).saves
    assert len(saves[0].hashes) == 4, "once the adapter is known, all full blocks are saved"
    rig.side.finish_request(req)
