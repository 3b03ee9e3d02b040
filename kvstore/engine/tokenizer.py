"""Text to token ids and back: Hugging Face tokenizer.json, tokenizers built from parts, and chat.

The `tokenizers` library does the work. This module adds end ids, a stream that never shows half a
character, and the model's chat template in a sandbox.
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
"""Maximum tokens that a stream keeps back while they end inside a character."""

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
"""Regular expressions that split text before merging, by GGUF's name (tokenizer.ggml.pre)."""


@dataclass(frozen=True)
class TokenizerFacts:
    """Settings of a tokenizer besides its vocabulary, from a model folder or file."""

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False
    chat_template: str | None = None
    bos_token: str = ""
    eos_token: str = ""


class Tokenizer:
    """A tokenizer with its model's conventions. Reentrant: any thread can call it."""

    def __init__(self, inner: tokenizers.Tokenizer, facts: TokenizerFacts) -> None:
        self._inner = inner
        self.facts = facts
        self.eos_ids = facts.eos_ids
        self.bos_id = facts.bos_id
        self._template: jinja2.Template | None = None

    @property
    def vocab(self) -> int:
        """Number of ids. They are 0 to vocab - 1."""
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of text.

        special: add the tokens that the model expects around a plain prompt, usually a first token.
            Pass False for a chat prompt, which has its own. Names of special tokens in the text
            become those tokens in both cases.
        """
        ids: list[int] = self._inner.encode(text, add_special_tokens=special).ids
        if special and self.facts.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return ids

    def encode_spans(self, text: str, *, special: bool = True) -> tuple[list[int], list[int]]:
        """Return token ids as `encode` does, and the end of each token in the text, in characters.

        If several tokens form one character, each ends where the character ends.
        """
        encoding = self._inner.encode(text, add_special_tokens=special)
        ids, ends = list(encoding.ids), [end for _, end in encoding.offsets]
        if special and self.facts.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids, ends = [self.bos_id, *ids], [0, *ends]
        return ids, ends

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of token ids. special: show special tokens by name, not omit them."""
        return str(self._inner.decode(list(ids), skip_special_tokens=not special))

    def stream(self) -> TokenStream:
        """Return a stream that turns tokens into text."""
        return TokenStream(self)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, add_prompt: bool = True) -> str:
        """Return the prompt text of a conversation, by the model's template.

        messages: [{"role": ..., "content": ...}, ...]. add_prompt: end with the start of the
        assistant's turn.

        Raises:
            ConfigError: the model has no template, or the template rejects these messages.
        """
        if self.facts.chat_template is None:
            raise ConfigError("this model has no chat template; use the completions API")
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
                f"the model's chat template rejects these messages: {error}"
            ) from error


class TokenStream:
    """Turns tokens into text one by one. A character of several tokens appears when complete.

    The text of a token can depend on the one before it. So a window of the last shown tokens is
    decoded with and without the new ones, and the difference is the new text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0
        """Number of _ids that are shown already. They stay as context."""

    def push(self, token: int) -> str:
        """Return the text that this token completes. Can be empty."""
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[: self._shown])
        after = self._tokenizer.decode(self._ids)
        pending = len(self._ids) - self._shown
        if after.endswith(REPLACEMENT) and pending < MAX_PENDING_TOKENS:
            return ""
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return after[len(before) :]

    def finish(self) -> str:
        """Return the pending text, even if incomplete."""
        before = self._tokenizer.decode(self._ids[: self._shown])
        after = self._tokenizer.decode(self._ids)
        self._shown = len(self._ids)
        return after[len(before) :]


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the environment of chat templates. Templates are foreign code, so it is a sandbox."""

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
    """Build a byte-level BPE tokenizer.

    tokens: text of each id, in the byte-level alphabet. merges: "left right", best first. split:
    one of SPLITS. special, user_defined: ids that are never split. Plain text omits special ones.

    Raises:
        ConfigError: the split is unknown.
    """
    if split not in SPLITS:
        raise ConfigError(
            f"tokenizer splitting {split!r} is not supported; use one of {', '.join(SPLITS)}"
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
    """Return a tokenizer with one token per byte, then BYTE_SPECIALS, for models without one."""
    tokens = [*_byte_letters(), *BYTE_SPECIALS]
    inner = byte_level_bpe(
        tokens, (), split="default", special=range(256, 256 + len(BYTE_SPECIALS))
    )
    facts = TokenizerFacts(eos_ids=(256,), chat_template=BYTE_CHAT, eos_token=BYTE_SPECIALS[0])
    return Tokenizer(inner, facts)


def _byte_letters() -> list[str]:
    """Return the letter of each byte: printable bytes are unchanged, others from U+0100 on."""
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
