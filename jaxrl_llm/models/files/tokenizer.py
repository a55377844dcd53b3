"""Conversion between text and token ids by a Hugging Face fast tokenizer.

This module is fast to import, because transformers is imported only when a tokenizer is made.

Owns: chat templates, special tokens, which ids end a turn. Does not know: prompts of a task, batches, devices.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.files import hybrids, templates
from jaxrl_llm.runtime import json_lines

Messages = list[dict[str, str]]

# Tokens that end a turn in chat templates, in addition to the tokenizer's own EOS.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")
IMAGE = "<image_soft_token>"  # a token of Gemma; Gemma's models for text only have no embedding for it

# Valid text has no halves of surrogate pairs. While a template is rendered, such halves replace the characters of
# special tokens in a user's text, so that this text stays plain text.
_HALF_PAIR = re.compile("[\ud800-\udfff]")


def _byte_letters() -> dict[str, int]:
    """Return GPT-2's alphabet of bytes: printable bytes are their own letters, the others follow from U+0100 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(0xA1, 0xAC + 1),
        *range(0xAE, 0xFF + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF_LETTER = _byte_letters()
SPELLED_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """A fast tokenizer of transformers with the few methods that this project needs.

    Attributes:
        vocab_size: all ids are smaller than this number. The model's embedding table may be larger.
        eos_ids: every id that ends a completion.
        end_id: the id with which the chat template ends an answer, else the tokenizer's EOS; None if there is none.
        bos_id, pad_id: ids from the tokenizer's files; None if the files have none.
        byte_ids: the single-byte tokens of SentencePiece's byte fallback; empty for other tokenizers.
    """

    def __init__(self, fast: Any, eos_ids: tuple[int, ...] = ()):
        """Wrap the tokenizer ``fast``. ``eos_ids`` are further ids that end a completion (from a generation config)."""
        self._fast = fast
        fast("")  # resets truncation and padding from the tokenizer's file, before threads share the tokenizer
        self.bos_id: int | None = fast.bos_token_id
        self.pad_id: int | None = fast.pad_token_id
        vocabulary = fast.get_vocab()
        used_ids = [i for token, i in vocabulary.items() if token not in (fast.pad_token, IMAGE)]
        self.vocab_size: int = 1 + max(used_ids, default=0)
        byte_ids = [vocabulary.get(f"<0x{byte:02X}>") for byte in range(256)]
        self.byte_ids: frozenset[int] = frozenset(i for i in byte_ids if i is not None)
        template = str(fast.chat_template)
        turn_ends = _turn_ends(vocabulary, template)
        own_ends = [] if fast.eos_token_id is None else [fast.eos_token_id]
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*own_ends, *eos_ids, *turn_ends]))
        self.end_id: int | None = next(iter([*turn_ends, *self.eos_ids]), None)
        # If an end token in a generation config is not a special token, its text stays plain text. An export lists stop
        # tokens there, and a run treats them as text.
        special_ends = {*own_ends, *turn_ends}
        self._special = {}
        for i, token in fast.added_tokens_decoder.items():
            if token.special or i in special_ends:
                self._special[i] = token
        # In addition to end_id, every end token in the template ends a turn. Llama 3.1's <|eom_id|> is in the template,
        # Qwen's <|endoftext|> is not.
        self._turn_ends = {self.end_id}
        for i in self.eos_ids:
            if i in self._special and self._special[i].content in template:
                self._turn_ends.add(i)
        contents: list[str] = [token.content for token in self._special.values()]
        texts = sorted(contents, key=len, reverse=True)
        special_pattern = "|".join(re.escape(text) for text in texts)
        self._looks_special = re.compile(special_pattern or "(?!)")
        characters = dict.fromkeys("".join(texts))
        self._halves = {ord(character): 0xD800 + n for n, character in enumerate(characters)}

    def ending_at(self, stop_tokens: Sequence[str]) -> Tokenizer:
        """Return a copy for which ``sampling.stop_tokens`` also end a completion.

        Raises:
            ConfigError: a stop token is not exactly one token.
        """
        other = copy.copy(self)
        for text in stop_tokens:
            ids = self.encode(text, special_tokens=True)
            if len(ids) != 1:
                raise ConfigError(
                    f"sampling.stop_tokens={tuple(stop_tokens)!r:.200} must each be one token: {text!r:.200} is "
                    f"{len(ids)} tokens of the model's"
                )
            other.eos_ids = tuple(dict.fromkeys([*other.eos_ids, *ids]))
        return other

    def renamed_by(self, other: Tokenizer) -> str:
        """Describe the first added token of either tokenizer whose id has another text in ``other``; "" = none.

        Reserved and unused tokens are ignored.
        """
        added_ids = {*self._fast.added_tokens_decoder, *other._fast.added_tokens_decoder}
        for i in sorted(added_ids):
            if i >= self.vocab_size:
                break
            own_text = self._fast.convert_ids_to_tokens(i)
            other_text = other._fast.convert_ids_to_tokens(i)
            if own_text is None or own_text == other_text:
                continue
            is_unused = re.search("reserved|unused", own_text)  # no text contains reserved tokens
            if not is_unused:
                return f"id {i} is {own_text!r:.60} to the one and {other_text!r:.60} to the other"
        return ""

    def encode_prompts(
        self,
        prompts: list[str | Messages],
        *,
        chat_template: bool,
        system_prompt: str,
        special_tokens: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[list[int]]:
        """Return the token ids of prompts, up to the beginning of the completion.

        Args:
            prompts: texts, or messages with "role", "content", and "tool_calls" if the template supports them.
            chat_template: True: a text becomes a user's message, and the template is rendered up to the assistant's
                turn. False: the text is the prompt, after the special tokens that the tokenizer puts at the start.
            system_prompt: system message of prompts that have none. "": the template may add its default.
            special_tokens: True: texts of special tokens in the prompts become special tokens. False: they stay plain
                text, and only the template's special tokens are special.
            chat_template_kwargs: further arguments of the template, such as ``enable_thinking`` or ``tools``.

        Raises:
            ConfigError: messages, a system prompt or template arguments without a chat template, or an error of the
                template.
        """
        hide = _checked if special_tokens else self._hide
        if not chat_template:
            template_settings = {"system_prompt": system_prompt, "chat_template_kwargs": chat_template_kwargs}
            _check_plain_prompts(prompts, template_settings)
            texts = [hide(prompt) for prompt in prompts if isinstance(prompt, str)]
            encoded = self._encode(texts, at_start=True)
            return [self._with_one_bos(ids) for ids in encoded]
        if not self._fast.chat_template:
            raise ConfigError(
                "prompts.chat_template=True needs a chat template, and the tokenizer has none: set "
                "prompts.chat_template=False, or give --nochat_template"
            )
        kwargs = templates.checked_kwargs(chat_template_kwargs or {}, self._fast.chat_template, hide)
        texts = []
        for prompt in prompts:
            messages = templates.map_texts(hide, _messages_of(prompt, system_prompt))
            try:
                texts.append(templates.rendered(self._fast, messages, kwargs))
            except Exception as error:  # jinja's errors, from a package that is not imported here
                reason = str(error) or error
                raise ConfigError(f"the chat template refuses the messages {prompt!r:.200}: {reason!r}") from error
        return self._encode(texts, at_start=False)

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        """Return the ids with one BOS token if they begin with two, because the text already has one."""
        return ids[1:] if ids[:2] == [self.bos_id] * 2 else ids

    def encode_prompt(self, prompt: str | Messages, **encoding: Any) -> list[int]:
        """Return the token ids of one prompt; see ``encode_prompts``."""
        return self.encode_prompts([prompt], **encoding)[0]

    def encode_answer(self, messages: Messages, last: int | None = None, **encoding: Any) -> list[int]:
        """Return the token ids of ``messages`` after a turn of the model.

        Args:
            messages: the messages between two turns of the model.
            last: the last token of the model's turn; None = a token that ends a turn.
            encoding: the other arguments of ``encode_prompts``.
        """
        hide = _checked if encoding["special_tokens"] else self._hide
        messages = [{**message, "content": hide(message["content"])} for message in messages]
        text = "\n".join(message["content"] for message in messages)
        if encoding["chat_template"]:
            own_ends = [self._special[i].content for i in self.eos_ids if i in self._special]
            ends = [*END_OF_TURN, *own_ends]
            kwargs = templates.checked_kwargs(encoding["chat_template_kwargs"], self._fast.chat_template, self._hide)
            other = None if last in (None, *self._turn_ends) else self._fast.decode([last])
            text = templates.between_turns(self._fast, messages, kwargs, ends, other)
        return self._encode([text], at_start=False)[0]

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Return the token ids of the text, without tokens at its start.

        Args:
            special_tokens: True: texts of special tokens become special tokens. False: they stay plain text.
        """
        hidden = _checked(text) if special_tokens else self._hide(text)
        return self._encode([hidden], at_start=False)[0]

    def _encode(self, texts: list[str], *, at_start: bool) -> list[list[int]]:
        """Return the token ids of texts in which ``_hide`` may have replaced special tokens."""
        without_hidden = [_HALF_PAIR.sub("", text) for text in texts]
        encoded = self._fast(without_hidden, add_special_tokens=at_start)["input_ids"]
        for row, text in enumerate(texts):
            if _HALF_PAIR.search(text):
                encoded[row] = self._spell(text, at_start)
        return encoded

    def _hide(self, text: str) -> str:
        """Return the text with halves of surrogate pairs in place of the characters of special tokens."""

        def hidden(match: re.Match[str]) -> str:
            return match[0].translate(self._halves)

        return self._looks_special.sub(hidden, _checked(text))

    def _spell(self, text: str, at_start: bool) -> list[int]:
        """Return the token ids of a text. Hidden special tokens are encoded as plain text."""
        core, sign, special_of_signed = self._speller
        characters = {half: character for character, half in self._halves.items()}
        signed = self._looks_special.sub(sign + r"\g<0>", text)
        ids = core.encode(signed.translate(characters), add_special_tokens=at_start).ids
        special_ids = [i for i in ids if i in self._special and i != self._fast.unk_token_id]
        num_at_start = core.num_special_tokens_to_add(False) if at_start else 0
        if len(special_ids) > num_at_start:
            token = self._special[special_ids[-1]].content
            raise ConfigError(f"the tokenizer cannot spell {token!r}; prompts.special_tokens=True leaves it a token")
        return [special_of_signed.get(i, i) for i in ids]

    @functools.cached_property
    def _speller(self) -> tuple[Any, str, dict[int, int]]:
        """Return a tokenizer that encodes the texts of special tokens as plain text, unless a sign precedes them.

        Returns:
            The tokenizer; the sign, a random string that no text can predict; and a map from the ids of signed special
            tokens to the ids of the special tokens.
        """
        core = copy.deepcopy(self._fast.backend_tokenizer)
        sign = secrets.token_hex(16)
        core.encode_special_tokens = True
        core.add_special_tokens([token.content for token in self._special.values()])
        special_of_signed = {}
        for i, token in self._special.items():
            signed_text = sign + token.content
            settings = token.__getstate__() | {"content": signed_text, "special": False}
            core.add_tokens([type(token)(**settings)])
            special_of_signed[core.token_to_id(signed_text)] = i
        return core, sign, special_of_signed

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids without special tokens and ends of turns."""
        # No clean-up: it deletes spaces before punctuation, so the text would differ from the sampled text.
        ids = [int(i) for i in ids if i not in self._special]
        return self._fast.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    @functools.cached_property
    def longest_token(self) -> int:
        """Return the number of characters of the longest token in the spelling of the tokenizer's file."""
        lengths = [len(token) for token in self._fast.get_vocab()]
        return max(lengths, default=1)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token's text, which may be a part of a character.

        Byte-level tokenizers write each byte as one letter. SentencePiece writes bytes as <0xE2> and a space as U+2581.
        """
        spelled = self._fast.convert_ids_to_tokens(int(token)) or ""
        if token in self._fast.added_tokens_decoder:
            return spelled.encode()
        if self._spells_bytes:
            return bytes(BYTE_OF_LETTER[letter] for letter in spelled if letter in BYTE_OF_LETTER)
        byte = SPELLED_BYTE.fullmatch(spelled)
        if byte:
            return bytes([int(byte[1], 16)])
        return spelled.replace("\u2581", " ").encode()

    @functools.cached_property
    def _spells_bytes(self) -> bool:
        """Return whether the tokenizer writes each byte of a text as one letter (GPT-2's alphabet)."""
        decoder = json.loads(self._fast.backend_tokenizer.to_str())["decoder"]
        return "ByteLevel" in str(decoder)  # it can be the only decoder, or one decoder of a sequence

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files; ``load_tokenizer`` and transformers read them."""
        self._fast.save_pretrained(str(folder))
        path = Path(folder) / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["tokenizer_class"] = "PreTrainedTokenizerFast"  # version 5 writes a name that version 4 does not know
        text = json_lines.written(config, indent=2, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")


def _turn_ends(vocabulary: Mapping[str, int], template: str) -> list[int]:
    """Return the ids of the tokens of END_OF_TURN that the chat template uses."""
    if "<|return|>" in vocabulary:  # in GPT-OSS, <|end|> ends one of several messages
        return []
    return [vocabulary[end] for end in END_OF_TURN if end in vocabulary and end in template]


def _check_plain_prompts(prompts: Sequence[str | Messages], template_settings: Mapping[str, Any]) -> None:
    """Check that prompts without a chat template are texts, and that no setting of a template is set.

    Raises:
        ConfigError: a prompt has messages, or a setting is not empty.
    """
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ConfigError("prompts.chat_template=False must be True for a prompt of messages")
    for name, value in template_settings.items():
        if value:
            raise ConfigError(f"prompts.{name}={value!r:.200} needs prompts.chat_template=True; it is False")


def _messages_of(prompt: str | Messages, system_prompt: str) -> Messages:
    """Return the messages of a prompt. ``system_prompt`` is added if there is no system message."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    has_system = any(message["role"] in ("system", "developer") for message in messages)
    if has_system or not system_prompt:
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Return the tokenizer of a Hugging Face folder.

    Ids that end a completion are also read from generation_config.json and config.json.

    Raises:
        ConfigError: no tokenizer.json, or it cannot be read.
    """
    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{folder / 'tokenizer.json'}: no such file (only fast tokenizers are read)")
    paths = [folder / "generation_config.json", folder / "config.json"]
    ends_by_path = {}
    try:
        fast = fast_tokenizer_class().from_pretrained(str(folder))
        for path in paths:
            if path.is_file():
                config = json.loads(path.read_text(encoding="utf-8"))
                ends_by_path[path] = hybrids.ends_of(config)
    except Exception as error:  # many kinds of errors; the package tokenizers raises plain Exceptions
        raise ConfigError(f"{folder}: its tokenizer cannot be read ({error})") from error
    eos_ids: list[int] = []
    for path, ends in ends_by_path.items():
        eos_ids += _checked_ends(path, ends)
    return Tokenizer(fast, tuple(eos_ids))


def _checked_ends(path: Path, ends: Any) -> list[int]:
    """Return ``eos_token_id`` of a file as a list.

    Raises:
        ConfigError: the value is set, but it is not a token id or a list of token ids.
    """
    if ends is None:
        return []
    ids = ends if isinstance(ends, list) else [ends]
    if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise ConfigError(f"{path}: eos_token_id={ids!r:.60} must be a token id, or a list of them")
    return ids


def fast_tokenizer_class() -> type:
    # Set before the first import of transformers. Otherwise a forked reward worker prints a warning at every start, and
    # transformers without torch prints advice to install torch.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast


def _checked(text: str) -> str:
    half = _HALF_PAIR.search(text)
    if half:
        raise ConfigError(f"{text!r:.60} has half a surrogate pair, {half[0]!r} at {half.start()}, which is not text")
    return text
