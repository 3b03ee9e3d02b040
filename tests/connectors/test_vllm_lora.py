"""Which blocks of a LoRA adapter may be shared, by what its folder is like and was."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_vllm_sides import ALL, BLOCK, DEADLINE_MS, Scheduling, bytes_of, chain, request

from kvstore.connectors.vllm.lora import ADAPTERS_MAX, CLOCKS_S, FILES_MAX, Adapters, Trust

LIMIT_S = 20.0


@dataclass
class Lora:
    """What is read of vLLM's request for an adapter."""

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
    """Engines that start now, after everything that lies there."""
    made: list[Adapters] = []

    def start() -> Adapters:
        made.append(Adapters(clock=lambda: time.time() + 2 * CLOCKS_S))
        return made[-1]

    yield start
    for each in made:
        each.close()


def ask(adapters: Adapters, lora: Lora) -> tuple[Trust, bytes]:
    """The answer of a later step, once it is one."""
    end_s = time.monotonic() + LIMIT_S
    while True:
        adapters.stepped()
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
    # For good: what the engine has of it is not to be found out. Under another id it is read anew.
    shutil.rmtree(folder, ignore_errors=True)
    write(folder)
    assert ask(adapters, lora)[0] is Trust.UNSURE
    known(adapters, Lora(str(folder), 2))


def test_within_a_step_the_answer_stays(engine: Callable[[], Adapters], tmp_path: Path) -> None:
    folder = write(tmp_path / "one")
    adapters, lora = engine(), Lora(str(folder))
    salt = known(adapters, lora)
    write(folder, b"weight5")
    assert adapters.salt(lora) == (Trust.KNOWN, salt)
    adapters.stepped()
    assert adapters.salt(lora)[0] in (Trust.UNSURE, Trust.READING)


def test_what_is_no_adapter_goes_without_the_store_until_it_is_one(
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


def test_a_folder_that_hangs_holds_up_no_step(
    engine: Callable[[], Adapters], tmp_path: Path
) -> None:
    """A config that is a pipe: whoever reads it waits for a writer."""
    folder = write(tmp_path / "one")
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")
    adapters, lora = engine(), Lora(str(folder))
    for _ in range(3):
        assert adapters.salt(lora)[0] is Trust.READING
        adapters.stepped()
    writer = threading.Thread(target=(folder / "adapter_config.json").write_text, args=["{}"])
    writer.start()
    known(adapters, lora)
    writer.join(LIMIT_S)


def test_adapters_known_have_a_bound(engine: Callable[[], Adapters]) -> None:
    adapters = engine()
    for number in range(1, ADAPTERS_MAX + 10):
        assert adapters.salt(Lora("/none", number, load_inplace=True))[0] is Trust.UNSURE
    assert len(adapters._known) == ADAPTERS_MAX


def test_a_requests_blocks_are_named_by_its_adapters_files(
    engine: Callable[[], Adapters], tmp_path: Path
) -> None:
    lora = Lora(str(write(tmp_path / "one")))
    rig = Scheduling(*ALL, adapters=engine())
    rig.hold(4)
    asked = request()
    asked.lora_request = lora
    while rig.side.match(asked, 0) is None:
        rig.plan()
    assert rig.side.match(asked, 0) == 0, "other blocks of the same names"
    rig.side.allocated(asked, range(5), 0)
    (save,) = rig.plan([("r", 4 * BLOCK)]).saves
    assert len(set(save.hashes)) == 4
    assert not set(save.hashes) & set(chain(4))
    for index, name in enumerate(save.hashes):
        rig.store.put(name, bytes_of(index), "l2")
    rig.side.finished(asked)
    assert rig.side.match(asked, 0) == 4 * BLOCK
    rig.side.finished(asked)
    # The files are others, and who knows which the engine has.
    write(tmp_path / "one", b"weight5")
    rig.plan()
    while rig.side.match(asked, 0) is None:
        rig.plan()
    assert rig.side.match(asked, 0) == 0
    rig.side.allocated(asked, range(5), 0)
    assert rig.plan([("r", 4 * BLOCK)]).saves == []
    rig.side.finished(asked)
    rig.store.check_idle()
    other = Scheduling(*ALL, adapters=engine())
    while other.side.match(asked, 0) is None:
        other.plan()
    other.side.allocated(asked, range(5), 0)
    (anew,) = other.plan([("r", 4 * BLOCK)]).saves
    assert not set(save.hashes) & set(anew.hashes)


def test_a_request_waits_for_its_adapters_folder_no_longer_than_for_its_blocks(
    engine: Callable[[], Adapters], tmp_path: Path
) -> None:
    folder = write(tmp_path / "one")
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")
    rig = Scheduling(*ALL, adapters=engine())
    asked = request()
    asked.lora_request = Lora(str(folder))
    assert rig.side.match(asked, 0) is None
    rig.clock.advance(DEADLINE_MS / 1e3)
    assert rig.side.match(asked, 0) == 0
    rig.side.allocated(asked, range(5), 0)
    assert rig.plan([("r", 4 * BLOCK)]).saves == []
    (folder / "adapter_config.json").open("w").close()
    saves = rig.plan([("r", 4 * BLOCK)]).saves
    while not saves:
        saves = rig.plan([("r", 4 * BLOCK)]).saves
    assert len(saves[0].hashes) == 4, "once it is known, all that is full is offered"
    rig.side.finished(asked)
