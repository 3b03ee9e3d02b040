"""Text to token ids and back: a Hugging Face tokenizer.json, one built from parts, and chat.

The heavy lifting is the `tokenizers` library's; this adds what an engine needs around it: end ids,
a stream that never shows half a character, and the model's chat template in a sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from kvstore.errors import ConfigError

MAX_PENDING_TOKENS = 16
"""Tokens a stream holds back at most while they end within a character."""

REPLACEMENT = "\ufffd"

GPT2_BPE = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K_BPE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: dict[str, tuple[str, ...]] = {
    "default": (GPT2_BPE,),
    "gpt-2": (GPT2_BPE,),
    "smollm": (r"\p{N}", GPT2_BPE),
    "llama-bpe": (_CL100K_BPE % "{1,3}",),
    "qwen2": (_CL100K_BPE % "",),
}
"""How text is split before merging, by GGUF's name for it (tokenizer.ggml.pre)."""


@dataclass(frozen=True)
class TokenizerFacts:
    """What a model folder or file says about its tokenizer besides the vocabulary."""

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False
    chat_template: str | None = None
    bos_token: str = ""
    eos_token: str = ""


class Tokenizer:
    """A tokenizer with its model's conventions. Reentrant: any thread may call it."""

    def __init__(self, inner: tokenizers.Tokenizer, facts: TokenizerFacts) -> None:
        self._inner = inner
        self.facts = facts
        self.eos_ids = facts.eos_ids
        self.bos_id = facts.bos_id
        self._template: jinja2.Template | None = None

    @property
    def vocab(self) -> int:
        """Ids run from 0 to vocab - 1."""
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of text.

        special: add what the model expects around a plain prompt (a first token, usually). A
        chat prompt carries its own: pass False. Names of special tokens within the text become
        those tokens either way.
        """
        ids: list[int] = self._inner.encode(text, add_special_tokens=special).ids
        if special and self.facts.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return ids

    def encode_spans(self, text: str, *, special: bool = True) -> tuple[list[int], list[int]]:
        """Token ids of text as `encode` gives them, and where in the text (in characters) each
        token ends. Of a character that several tokens make up, each ends where it does."""
        encoding = self._inner.encode(text, add_special_tokens=special)
        ids, ends = list(encoding.ids), [end for _, end in encoding.offsets]
        if special and self.facts.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids, ends = [self.bos_id, *ids], [0, *ends]
        return ids, ends

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of token ids; special: show special tokens by name instead of leaving them out."""
        return str(self._inner.decode(list(ids), skip_special_tokens=not special))

    def stream(self) -> TokenStream:
        """Turns tokens into text as they come."""
        return TokenStream(self)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, add_prompt: bool = True) -> str:
        """The prompt text of a conversation, by the model's own template.

        messages: [{"role": ..., "content": ...}, ...]; add_prompt: end with the assistant's turn
        opened.

        Raises:
            ConfigError: the model has no template, or the template refuses these messages.
        """
        if self.facts.chat_template is None:
            raise ConfigError("this model has no chat template; use plain completions with it")
        try:
            if self._template is None:
                self._template = _environment().from_string(self.facts.chat_template)
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_prompt,
                bos_token=self.facts.bos_token,
                eos_token=self.facts.eos_token,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ConfigError(
                f"the model's chat template refuses these messages: {error}"
            ) from error


class TokenStream:
    """Text of tokens one by one; a character split over tokens appears when it is whole.

    The text of a token can depend on the one before it, so a window of the last shown tokens is
    decoded with and without the new ones, and the difference is what is new.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0
        """How many of _ids are shown already; they stay as context."""

    def push(self, token: int) -> str:
        """The text that this token completes; may be empty."""
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[: self._shown])
        after = self._tokenizer.decode(self._ids)
        held = len(self._ids) - self._shown
        if after.endswith(REPLACEMENT) and held < MAX_PENDING_TOKENS:
            return ""
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return after[len(before) :]

    def finish(self) -> str:
        """What is still held back, as it is."""
        before = self._tokenizer.decode(self._ids[: self._shown])
        after = self._tokenizer.decode(self._ids)
        self._shown = len(self._ids)
        return after[len(before) :]


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment chat templates are written for; a template is foreign code: sandboxed."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def byte_level_bpe(
    tokens: Sequence[str],
    merges: Sequence[str],
    *,
    split: str,
    special: Sequence[int] = (),
    user_defined: Sequence[int] = (),
) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer from its parts.

    tokens: text of each id, in the byte-level alphabet; merges: "left right", best first; split:
    one of SPLITS; special, user_defined: ids that are never split; the special ones are left out
    of plain text.

    Raises:
        ConfigError: an unknown split.
    """
    if split not in SPLITS:
        raise ConfigError(
            f"tokenizer splitting {split!r} is not supported; supported are {', '.join(SPLITS)}"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    inner = tokenizers.Tokenizer(models.BPE(vocab, pairs, ignore_merges=split == "llama-bpe"))
    steps = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        for pattern in SPLITS[split]
    ]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level])
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(
        [AddedToken(tokens[index], normalized=False, special=True) for index in special]
    )
    inner.add_tokens(
        [AddedToken(tokens[index], normalized=False, special=False) for index in user_defined]
    )
    return inner


BYTE_SPECIALS = ("<|end|>", "<|im_start|>", "<|im_end|>")
BYTE_VOCAB = 256 + len(BYTE_SPECIALS)
BYTE_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """One token per byte, then BYTE_SPECIALS: for models that have no tokenizer of their own."""
    tokens = [*_byte_letters(), *BYTE_SPECIALS]
    inner = byte_level_bpe(
        tokens, (), split="default", special=range(256, 256 + len(BYTE_SPECIALS))
    )
    facts = TokenizerFacts(eos_ids=(256,), chat_template=BYTE_CHAT, eos_token=BYTE_SPECIALS[0])
    return Tokenizer(inner, facts)


def _byte_letters() -> list[str]:
    """Letter of each byte 0..255: printable bytes stand for themselves, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters: list[str] = []
    shifted = 0
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(0x100 + shifted))
            shifted += 1
    return letters
