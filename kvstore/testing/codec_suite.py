"""Conformance tests for codecs: a class of tests to derive from. Needs hypothesis."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codecs.base import Codec
from kvstore.errors import FrameInvalid

GUARD = b"\xa5" * 64


def block_strategy(largest: int) -> st.SearchStrategy[bytes]:
    """Return blocks of any length: noise, text-like and skewed ones, most of them longer than
    those hypothesis makes by itself."""
    shapes = st.tuples(st.integers(0, largest), st.integers(0, 2**32 - 1), st.integers(1, 256))
    return st.one_of(st.binary(max_size=200), st.builds(_made, shapes))


def _made(shape: tuple[int, int, int]) -> bytes:
    nbytes, seed, symbols = shape
    return np.random.default_rng(seed).integers(0, symbols, nbytes, np.uint8).tobytes()


class CodecSuite:
    """Tests of one codec. Override `codec`."""

    largest: ClassVar[int] = 300_000
    """Maximum length of the blocks, in bytes."""
    examples: ClassVar[int] = 80

    def codec(self) -> Codec:
        raise NotImplementedError

    def test_any_block_comes_back(self) -> None:
        codec = self.codec()

        @given(block_strategy(self.largest))
        @settings(max_examples=self.examples, deadline=None)
        def check(block: bytes) -> None:
            bound = codec.bound(len(block))
            target = bytearray(bound) + bytearray(GUARD)
            length = codec.encode(memoryview(block), memoryview(target)[:bound])
            assert 0 <= length <= bound
            assert target[bound:] == GUARD, "encode wrote beyond its bound"
            if length == 0:
                return
            back = bytearray(len(block)) + bytearray(GUARD)
            view = memoryview(back)[: len(block)]
            assert codec.decode(memoryview(target)[:length], view) == len(block)
            assert back[: len(block)] == block
            assert back[len(block) :] == GUARD, "decode wrote beyond the block"

        check()

    def test_a_target_of_any_length_is_respected(self) -> None:
        codec = self.codec()

        @given(block_strategy(20_000), st.integers(0, 25_000))
        @settings(max_examples=self.examples, deadline=None)
        def check(block: bytes, room: int) -> None:
            target = bytearray(room) + bytearray(GUARD)
            length = codec.encode(memoryview(block), memoryview(target)[:room])
            assert length <= room
            assert target[room:] == GUARD
            if length:
                back = bytearray(len(block))
                codec.decode(memoryview(target)[:length], memoryview(back))
                assert back == block

        check()

    def test_hostile_bytes_are_frame_invalid_or_a_block(self) -> None:
        """Corrupt data gives a block of the right length or FrameInvalid, and nothing else."""
        codec = self.codec()

        @given(st.data())
        @settings(max_examples=self.examples, deadline=None)
        def check(data: st.DataObject) -> None:
            block = data.draw(block_strategy(5000))
            bound = codec.bound(len(block))
            target = bytearray(bound)
            length = codec.encode(memoryview(block), memoryview(target))
            stored = target[:length]
            for at, value in data.draw(
                st.lists(st.tuples(st.integers(0, 100), st.integers(0, 255)), max_size=4)
            ):
                if at < len(stored):
                    stored[at] = value
            stored = stored[: data.draw(st.integers(0, len(stored)))]
            stored += data.draw(st.binary(max_size=20))
            self._decodes_or_rejects(codec, bytes(stored), data.draw(st.integers(0, 6000)))

        check()

    def test_noise_is_frame_invalid_or_a_block(self) -> None:
        codec = self.codec()

        @given(st.binary(max_size=400), st.integers(0, 500))
        @settings(max_examples=self.examples, deadline=None)
        def check(noise: bytes, room: int) -> None:
            self._decodes_or_rejects(codec, noise, room)

        check()

    def test_a_block_that_does_not_fit_is_rejected(self) -> None:
        codec = self.codec()
        block = bytes(9000)
        target = memoryview(bytearray(codec.bound(len(block))))
        length = codec.encode(memoryview(block), target)
        assert length > 0, "zeros must be compressible"
        with pytest.raises(FrameInvalid):
            codec.decode(target[:length], memoryview(bytearray(8999)))

    @staticmethod
    def _decodes_or_rejects(codec: Codec, stored: bytes, room: int) -> None:
        back = bytearray(room) + bytearray(GUARD)
        try:
            length = codec.decode(memoryview(stored), memoryview(back)[:room])
        except FrameInvalid:
            length = 0
        assert 0 <= length <= room
        assert back[room:] == GUARD, "decode wrote outside its target"
