"""Tokenizers: bytes, streams, chat templates, model folders, GGUF files."""

from __future__ import annotations

import json
from pathlib import Path

import naive_model as naive
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from kvstore.engine.gguf_file import GGUFFile
from kvstore.engine.hf_folder import HFFolder
from kvstore.engine.loader import load_tokenizer
from kvstore.engine.tokenizer import (
    BYTE_VOCAB,
    Tokenizer,
    TokenizerFacts,
    byte_level_bpe,
    byte_tokenizer,
)
from kvstore.errors import ConfigError

BYTES = byte_tokenizer()
CHAT = [{"role": "user", "content": "Hi"}]


def with_template(template: str) -> Tokenizer:
    return Tokenizer(
        byte_level_bpe(["a"], (), split="default"), TokenizerFacts(chat_template=template)
    )


@given(st.text())
def test_bytes_are_tokens(text: str) -> None:
    ids = BYTES.encode(text)
    if not any(name in text for name in ("<|end|>", "<|im_start|>", "<|im_end|>")):
        assert ids == list(text.encode())
    assert BYTES.decode(ids, special=True) == text


@given(st.text())
def test_spans_end_where_their_tokens_text_ends(text: str) -> None:
    ids, ends = BYTES.encode_spans(text)
    assert ids == BYTES.encode(text)
    assert ends == sorted(ends)
    assert len(ends) == len(ids)
    if not any(name in text for name in ("<|end|>", "<|im_start|>", "<|im_end|>")):
        assert [len(text[:end].encode()) for end in ends] == [
            len(text[: place + 1].encode())
            for place, letter in enumerate(text)
            for _ in letter.encode()
        ]


def test_special_tokens_are_whole_and_left_out_of_plain_text() -> None:
    ids = BYTES.encode("<|im_start|>a<|end|>")
    assert ids == [257, 97, 256]
    assert BYTES.decode(ids) == "a"
    assert BYTES.decode(ids, special=True) == "<|im_start|>a<|end|>"
    assert (BYTES.vocab, BYTES.eos_ids) == (BYTE_VOCAB, (256,))


@settings(deadline=None)
@given(st.text(max_size=60))
def test_a_stream_shows_whole_characters_and_loses_none(text: str) -> None:
    stream = BYTES.stream()
    shown = ""
    for token in text.encode():
        piece = stream.push(token)
        shown += piece
        assert text.startswith(shown)
    assert shown + stream.finish() == text


def test_a_stream_of_invalid_bytes_is_not_delayed_without_limit() -> None:
    stream = BYTES.stream()
    shown = "".join(stream.push(0xC3) for _ in range(100))
    assert len(shown) >= 80
    assert set(shown) == {"\ufffd"}
    assert stream.push(ord("x")).endswith("x")


def test_chat_follows_the_template() -> None:
    text = BYTES.chat(CHAT)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert BYTES.chat(CHAT, add_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "rejects .*: roles must alternate"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "rejects these messages"),
        ("{{ messages.append(1) }}", "rejects these messages"),
        ("{% for %}", "rejects these messages"),
        ("{{ messages[0].content + 1 }}", "rejects these messages"),
    ],
)
def test_a_failing_template_raises_one_line(template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        with_template(template).chat(CHAT)
    assert "\n" not in str(caught.value)


def test_a_missing_template_is_reported() -> None:
    plain = Tokenizer(byte_level_bpe(["a"], (), split="default"), TokenizerFacts())
    with pytest.raises(ConfigError, match="no chat template; use the completions API"):
        plain.chat(CHAT)


def test_an_unknown_splitting_is_rejected() -> None:
    with pytest.raises(ConfigError, match="splitting 'jais' is not supported; use one of def"):
        byte_level_bpe(["a"], (), split="jais")


def folder_with_tokenizer(folder: Path) -> Path:
    raw = naive.raw_config("llama")
    naive.write_folder(folder, {**raw, "eos_token_id": None}, naive.make_weights(raw, 1))
    letters = pre_tokenizers.ByteLevel.alphabet()
    inner = tokenizers.Tokenizer(
        models.BPE({"<s>": 0, "</s>": 1, **{c: i + 2 for i, c in enumerate(sorted(letters))}}, [])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    inner.enable_truncation(4)
    inner.enable_padding(length=4)
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "eos_token": {"content": "</s>"},
                "bos_token": "<s>",
                "chat_template": [
                    {"name": "tools", "template": "no"},
                    {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
                ],
            }
        )
    )
    return folder


def test_a_tokenizer_is_read_from_a_model_folder(tmp_path: Path) -> None:
    tokenizer = HFFolder(folder_with_tokenizer(tmp_path)).tokenizer()
    assert tokenizer is not None
    ids = tokenizer.encode("hello")
    assert ids[0] == 0
    assert len(ids) == 6
    assert tokenizer.encode("hello", special=False) == ids[1:]
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.eos_ids == (1,)
    assert tokenizer.chat(CHAT) == "<s>Hi"
    (tmp_path / "chat_template.jinja").write_text("from a separate file")
    (tmp_path / "tokenizer_config.json").unlink()
    again = HFFolder(tmp_path).tokenizer()
    assert again is not None
    assert again.chat(CHAT) == "from a separate file"


def test_a_tokenizer_is_read_without_a_model(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(tmp_path)
    assert found.encode_spans("abx") == ([0, 1, 2], [1, 2, 3])
    (tmp_path / "empty").mkdir()
    for wrong, words in (("empty", "no tokenizer"), ("none", "tokenizer.json or a .gguf")):
        with pytest.raises(ConfigError, match=words):
            load_tokenizer(tmp_path / wrong)


def test_a_folder_with_a_missing_or_corrupt_tokenizer(tmp_path: Path) -> None:
    raw = naive.raw_config("llama")
    naive.write_folder(tmp_path, raw, naive.make_weights(raw, 1))
    assert HFFolder(tmp_path).tokenizer() is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"cannot read .*tokenizer\.json as a tokenizer"):
        HFFolder(tmp_path).tokenizer()


def gguf_tokenizer(path: Path, **changes: object) -> Tokenizer | None:
    """Write a GGUF file with a few merges, a control token and a user-defined token."""
    raw = {**naive.raw_config("qwen3"), "num_hidden_layers": 1}
    tokens = ["<end>", *"helowrdĠ123", "he", "ll", "hell", "hello", "Ġw", "or", "12", "<mark>"]
    entries = {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "qwen2",
        "token_list": tokens,
        "token_types": [3, *[1] * (len(tokens) - 2), 4],
        "token_merges": ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "1 2"],
        "eos_token_id": 0,
        "bos_token_id": 0,
        "add_bos_token": True,
        **changes,
    }
    naive.write_gguf(path, raw, naive.make_weights(raw, 1), tokenizer=entries)
    return GGUFFile(path).tokenizer()


def test_a_tokenizer_is_read_from_a_gguf_file(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(tmp_path / "a.gguf")
    assert tokenizer is not None
    shown = [tokenizer.decode([token], special=True) for token in tokenizer.encode("hello world12")]
    # qwen2 splits every digit, so "1 2" never merges; llama-bpe keeps up to three digits together.
    assert shown == ["<end>", "hello", " w", "or", "l", "d", "1", "2"]
    other = gguf_tokenizer(tmp_path / "b.gguf", tokenizer_pre="llama-bpe", add_bos_token=False)
    assert other is not None
    shown = [other.decode([token], special=True) for token in other.encode("hello<mark>12<end>")]
    assert shown == ["hello", "<mark>", "12", "<end>"]
    assert other.decode(other.encode("hello<mark>12<end>")) == "hello<mark>12"
    assert other.eos_ids == (0,)


def test_an_unsupported_gguf_tokenizer_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer 'llama' is not supported in a GGUF file"):
        gguf_tokenizer(tmp_path / "a.gguf", tokenizer_model="llama")
    with pytest.raises(ConfigError, match="splitting 'viking' is not supported"):
        gguf_tokenizer(tmp_path / "b.gguf", tokenizer_pre="viking")
    assert gguf_tokenizer(tmp_path / "c.gguf", tokenizer_model="no_vocab") is None
