"""The chooser picks what brings blocks back soonest, against media whose true costs are known."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import codecs
from kvstore.codecs.base import UNCOMPRESSED_ID
from kvstore.codecs.chooser import (
    AVERAGED_BLOCKS,
    MAX_NAMESPACES,
    MIN_GAIN,
    MIN_SAMPLES,
    RECHECK_BLOCKS,
    TRIAL_BLOCKS,
    Chooser,
    Cost,
)
from kvstore.errors import ConfigError

BLOCK = 2 << 20
PLANES = "zstd-planes/2"
BF16 = {
    UNCOMPRESSED_ID: (1.0, 10e9, 10e9),
    "zstd": (1.25, 800e6, 1.2e9),
    PLANES: (1.45, 650e6, 1.3e9),
}
"""Frame ID: (ratio, bytes per CPU second encoded, decoded)."""
FRAME_ID_OF = {"none": UNCOMPRESSED_ID, "zstd": "zstd", "byteshuffle-zstd": PLANES}
"""Kind, as statistics show it: frame ID."""


@dataclass
class World:
    """A medium of `total` bytes a second that gives `alone` to one reader, and codecs.

    Readers that all do the same: what they wait for at the bottleneck is part of their time.
    """

    total: float
    alone: float
    readers: int = 1
    cores: int = 64
    codecs: dict[str, tuple[float, float, float]] = field(default_factory=lambda: dict(BF16))
    noise: float = 0.0
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    def cost(self, name: str, *, write: bool = False) -> Cost:
        ratio, encode, decode = self.codecs[name]
        stored, codec_s = BLOCK / ratio, BLOCK / (encode if write else decode)
        tier_s, wait_s = stored / self.alone, codec_s
        cycle_s = self.readers * max(stored / self.total, codec_s / self.cores)
        if stored / self.total > codec_s / self.cores:
            tier_s = max(tier_s, cycle_s - codec_s)
        else:
            wait_s = max(wait_s, cycle_s - tier_s)
        tier_s *= 1 + self.dice.uniform(-self.noise, self.noise)
        return Cost(name, BLOCK, int(stored), tier_s, codec_s, tier_s + wait_s)

    def block_s(self, name: str) -> float:
        """The truth of a long run: its bottleneck."""
        ratio, _, decode = self.codecs[name]
        stored, cpu_s = BLOCK / ratio, BLOCK / decode
        one = stored / self.alone + cpu_s
        return max(stored / self.total, one / self.readers, cpu_s / self.cores)

    def live(self, chooser: Chooser, blocks: int, *, namespace: str = "n") -> Counter[str]:
        """Write blocks and read each of them once; the codecs that were given."""
        given: Counter[str] = Counter()
        for _ in range(blocks):
            name = chooser.choose(namespace, "bfloat16", raw_bytes=BLOCK).frame_id
            given[name] += 1
            chooser.record_write(namespace, self.cost(name, write=True), 1)
            chooser.record_read(namespace, self.cost(name), self.readers)
        return given


def settled(world: World, chooser: Chooser, blocks: int = 400) -> str:
    world.live(chooser, blocks)
    [shown] = chooser.stats().values()
    return FRAME_ID_OF[str(shown["name"])]


def test_what_usually_pays_is_the_answer_until_reads_are_measured() -> None:
    chooser = Chooser()
    given = Counter(chooser.choose("n", "bfloat16", raw_bytes=BLOCK).frame_id for _ in range(200))
    assert given == {
        UNCOMPRESSED_ID: TRIAL_BLOCKS,
        "zstd": TRIAL_BLOCKS,
        PLANES: 200 - 2 * TRIAL_BLOCKS,
    }
    world = World(total=100e9, alone=100e9)
    for _ in range(MIN_SAMPLES - 1):
        chooser.record_read("n", world.cost(PLANES), 1)
    assert chooser.choose("n", "bfloat16", raw_bytes=BLOCK).frame_id == PLANES
    chooser.record_read("n", world.cost(PLANES), 1)
    assert chooser.choose("n", "bfloat16", raw_bytes=BLOCK).frame_id == UNCOMPRESSED_ID


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "fp8_e4m3", "int8"])
def test_every_dtype_begins_with_its_default(dtype: str) -> None:
    chooser = Chooser()
    for _ in range(3 * TRIAL_BLOCKS):
        chooser.choose("n", dtype, raw_bytes=BLOCK)
    right = codecs.codec_for("auto", dtype).frame_id
    assert chooser.choose("n", dtype, raw_bytes=BLOCK).frame_id == right


@pytest.mark.parametrize(
    ("world", "right"),
    [
        (World(total=5e9, alone=5e9), UNCOMPRESSED_ID),
        (World(total=100e6, alone=100e6), PLANES),
        # One reader: 1.45 times fewer bytes of 1 GB/s do not pay for decoding at 1.3 GB/s.
        (World(total=1e9, alone=1e9), UNCOMPRESSED_ID),
        # Four readers wait for the same medium, and decode while others read.
        (World(total=1e9, alone=1e9, readers=4), PLANES),
        # A medium so fast that only the one core would be waited for.
        (World(total=3e9, alone=1e9, readers=4, cores=1), UNCOMPRESSED_ID),
        # Every reader gets the same, however many there are: its own sum decides.
        (World(total=8e9, alone=1e9, readers=8), UNCOMPRESSED_ID),
    ],
)
def test_the_codec_that_is_soonest_back_is_chosen(world: World, right: str) -> None:
    assert settled(world, Chooser(cores=world.cores)) == right


def test_blocks_that_repeat_themselves_get_plain_zstd() -> None:
    repeating = {**BF16, "zstd": (12.0, 1.5e9, 3e9)}
    assert settled(World(total=500e6, alone=500e6, codecs=repeating), Chooser()) == "zstd"


def test_blocks_that_no_codec_shrinks_are_kept_as_they_are() -> None:
    noise = {
        UNCOMPRESSED_ID: BF16[UNCOMPRESSED_ID],
        "zstd": (1.0, 5e9, 10e9),
        PLANES: (1.0, 2e9, 10e9),
    }
    world = World(total=100e6, alone=100e6, codecs=noise)
    chooser = Chooser()
    world.live(chooser, 100)
    [shown] = chooser.stats().values()
    assert shown["ratio"] == 1.0


@given(
    total=st.floats(20e6, 20e9),
    share=st.floats(0.2, 1.0),
    readers=st.integers(1, 8),
    cores=st.integers(1, 8),
    ratio=st.floats(1.0, 3.0),
    decode=st.floats(100e6, 5e9),
)
@settings(max_examples=150, deadline=None)
def test_the_choice_is_near_the_best_there_is(
    total: float, share: float, readers: int, cores: int, ratio: float, decode: float
) -> None:
    """Reads alone now and then show what one reader gets; the rest is found from the mix."""
    known = {**BF16, PLANES: (ratio, 650e6, decode)}
    alone = max(total * share, total / readers)
    world = World(total=total, alone=alone, cores=cores, codecs=known)
    chooser = Chooser(cores=cores)
    world.live(chooser, 40)
    world.readers = readers
    world.live(chooser, 6 * AVERAGED_BLOCKS)
    [shown] = chooser.stats().values()
    times = {name: world.block_s(name) for name in known}
    # What the medium gives to all at once is seen only while it is what they wait for.
    slack = (1 - MIN_GAIN) * 0.8
    assert min(times.values()) >= times[FRAME_ID_OF[str(shown["name"])]] * slack


def test_noise_does_not_make_it_change_its_mind() -> None:
    """Both bring a block back as soon: what is chosen stays."""
    near = {**BF16, PLANES: (1.45, 650e6, 2.44e9)}
    world = World(total=1e9, alone=1e9, codecs=near, noise=0.5)
    chooser = Chooser()
    world.live(chooser, 3000)
    [shown] = chooser.stats().values()
    assert int(shown["changed"]) <= 1


@pytest.mark.parametrize(
    ("gain", "right"), [(MIN_GAIN / 2, PLANES), (MIN_GAIN * 1.5, UNCOMPRESSED_ID)]
)
def test_a_change_needs_a_gain(gain: float, right: str) -> None:
    """From what usually pays to identity, which is sooner by this much."""
    world = World(total=1e9, alone=1e9)
    raw_s = 1 / 1e9 + 1 / 10e9
    decode_s = raw_s / (1 - gain) - 1 / 1.45 / 1e9
    world.codecs[PLANES] = (1.45, 650e6, 1 / decode_s)
    assert settled(world, Chooser()) == right


def test_a_medium_that_changes_is_followed() -> None:
    world = World(total=5e9, alone=5e9)
    chooser = Chooser()
    assert settled(world, chooser) == UNCOMPRESSED_ID
    world.total = world.alone = 50e6
    assert settled(world, chooser, 4 * AVERAGED_BLOCKS) == PLANES
    world.total = world.alone = 5e9
    assert settled(world, chooser, 8 * AVERAGED_BLOCKS) == UNCOMPRESSED_ID


def test_blocks_that_change_are_noticed_by_the_rare_check() -> None:
    """Identity was right; from now on the blocks shrink a hundred times."""
    world = World(total=1e9, alone=1e9)
    chooser = Chooser()
    assert settled(world, chooser) == UNCOMPRESSED_ID
    world.codecs["zstd"] = (100.0, 5e9, 10e9)
    assert settled(world, chooser, 12 * RECHECK_BLOCKS) == "zstd"


def test_looking_at_others_is_rare() -> None:
    world = World(total=5e9, alone=5e9)
    chooser = Chooser()
    world.live(chooser, 1000)
    given = world.live(chooser, 10 * RECHECK_BLOCKS)
    assert sum(given.values()) - given[UNCOMPRESSED_ID] == 10
    assert given["zstd"] == given[PLANES] == 5


def test_encoding_counts_only_while_writes_cannot_keep_up() -> None:
    world = World(total=100e6, alone=100e6)
    chooser = Chooser()
    assert settled(world, chooser) == PLANES
    quick = World(total=5e9, alone=5e9)
    for _ in range(3 * AVERAGED_BLOCKS):
        chooser.record_write("n", quick.cost(UNCOMPRESSED_ID, write=True), 1)
    crowded = [
        chooser.choose("n", "bfloat16", raw_bytes=BLOCK, backlogged=True).frame_id
        for _ in range(600)
    ]
    assert set(crowded) == {UNCOMPRESSED_ID}
    assert chooser.choose("n", "bfloat16", raw_bytes=BLOCK).frame_id == PLANES


def test_crowded_writes_to_a_slow_medium_are_encoded() -> None:
    world = World(total=50e6, alone=50e6)
    chooser = Chooser()
    world.live(chooser, 50)
    assert chooser.choose("n", "bfloat16", raw_bytes=BLOCK, backlogged=True).frame_id == PLANES


def test_before_a_write_is_measured_a_crowd_changes_nothing() -> None:
    chooser = Chooser()
    for _ in range(3 * TRIAL_BLOCKS):
        chooser.choose("n", "bfloat16", raw_bytes=BLOCK)
    assert chooser.choose("n", "bfloat16", raw_bytes=BLOCK, backlogged=True).frame_id == PLANES


def test_namespaces_are_apart_and_share_the_medium() -> None:
    world = World(total=100e6, alone=100e6)
    chooser = Chooser()
    assert settled(world, chooser) == PLANES
    flat = World(total=100e6, alone=100e6, codecs=dict.fromkeys(BF16, (1.0, 5e9, 1e9)))
    flat.codecs[UNCOMPRESSED_ID] = BF16[UNCOMPRESSED_ID]
    flat.live(chooser, 100, namespace="flat")
    shown = chooser.stats()
    assert (shown["n"]["ratio"], shown["flat"]["ratio"]) == (pytest.approx(1.45, 0.01), 1.0)
    assert shown["n"]["read_rate"] == shown["flat"]["read_rate"] == pytest.approx(100e6, 0.01)


def test_a_kind_that_is_named_is_never_left() -> None:
    world = World(total=100e9, alone=100e9)
    chooser = Chooser("byteshuffle-zstd")
    assert set(world.live(chooser, 300)) == {PLANES}
    assert not chooser.prefers_uncompressed("n")
    assert Chooser("none").prefers_uncompressed("any")
    with pytest.raises(ConfigError, match="zstd"):
        Chooser("zsdt")


def test_whether_blocks_lie_as_they_are_follows_the_choice() -> None:
    world = World(total=5e9, alone=5e9)
    chooser = Chooser()
    assert not chooser.prefers_uncompressed("n")
    assert settled(world, chooser) == UNCOMPRESSED_ID
    assert chooser.prefers_uncompressed("n")


def test_statistics_show_rates_and_the_first_digits_of_the_namespace() -> None:
    world = World(total=100e6, alone=100e6)
    chooser = Chooser()
    world.live(chooser, 50, namespace="0123456789abcdef")
    shown = chooser.stats()["01234567"]
    assert shown["name"] == "byteshuffle-zstd"
    assert shown["encode_rate"] == pytest.approx(650e6, 0.01)
    assert shown["decode_rate"] == pytest.approx(1.3e9, 0.01)
    assert shown["changed"] == 0


def test_namespaces_are_bounded() -> None:
    chooser = Chooser()
    for number in range(MAX_NAMESPACES + 50):
        chooser.choose(f"{number:08x}", "int8", raw_bytes=BLOCK)
    assert len(chooser.stats()) == MAX_NAMESPACES


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["next", "crowded", "wrote", "read"]),
            st.sampled_from([UNCOMPRESSED_ID, "zstd", PLANES, "zstd-planes/4", "else"]),
            st.integers(1, 1 << 30),
            st.integers(1, 1 << 30),
            st.floats(0, 1e3),
            st.floats(0, 1e3),
            st.floats(0, 1e3),
            st.floats(1, 64),
        ),
        max_size=60,
    )
)
@settings(max_examples=150, deadline=None)
def test_any_history_has_an_answer(
    history: list[tuple[str, str, int, int, float, float, float, float]],
) -> None:
    chooser = Chooser(cores=2)
    for what, name, raw, stored, tier_s, codec_s, move_s, sharing in history:
        cost = Cost(name, raw, stored, tier_s, codec_s, move_s)
        if what == "wrote":
            chooser.record_write("n", cost, sharing)
        elif what == "read":
            chooser.record_read("n", cost, sharing)
        else:
            crowded = what == "crowded"
            given = chooser.choose("n", "bfloat16", raw_bytes=raw, backlogged=crowded)
            assert given.frame_id in BF16
    chooser.stats()
