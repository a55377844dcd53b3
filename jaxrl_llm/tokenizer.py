"""Text to token ids and back: a Hugging Face fast tokenizer, or bytes.

Owns: chat templates, special tokens, which ids end a turn. Importing this module stays light: transformers
is imported when a tokenizer is made. Does not know: prompts of a task, batches, devices.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

from jaxrl_llm.config import ConfigError

Messages = list[dict[str, str]]

# How text is cut before byte-level BPE, by the name llama.cpp gives it. True: digits stand alone.
PRE_TOKENIZERS = {"gpt-2": False, "smollm": True}

# Tokens that end a turn in the chat templates of the Llama family, besides the tokenizer's own EOS.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>")

TEMPLATE_SECONDS = 10.0  # that a prompt may take
# A template for models that were never taught one: the contents, one after the other.
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class Tokenizer:
    """A fast tokenizer of transformers with the few verbs this project needs.

    Attributes:
        vocab_size: ids are below it; the model's table may be larger.
        eos_ids: every id that ends a completion.
        bos_id, pad_id: as the files say, None where they do not.
    """

    def __init__(self, fast: Any, eos_ids: tuple[int, ...] = ()):
        """``eos_ids``: further ids that end a completion (from a generation config)."""
        self._fast = fast
        self.bos_id: int | None = fast.bos_token_id
        self.pad_id: int | None = fast.pad_token_id
        vocabulary = fast.get_vocab()
        self.vocab_size: int = 1 + max((i for token, i in vocabulary.items() if token != fast.pad_token), default=0)
        template = str(fast.chat_template or "")
        turn_ends = [vocabulary[token] for token in END_OF_TURN if token in vocabulary and token in template]
        own = [] if fast.eos_token_id is None else [fast.eos_token_id]
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*own, *eos_ids, *turn_ends]))

    def encode_prompt(self, prompt: str | Messages, *, chat_template: bool, system_prompt: str) -> list[int]:
        """Token ids of a prompt, ready for a completion.

        Args:
            prompt: text, or messages with "role" and "content".
            chat_template: True wraps text as a user's message and renders the template up to the assistant's
                turn. False: the text is the prompt, with the special tokens the tokenizer puts at a start.
            system_prompt: a system message before a text prompt; "" leaves it to the template.

        Raises:
            ConfigError: messages, or a system prompt, without a chat template.
        """
        if not chat_template:
            return self._fast(_plain_text(prompt, system_prompt))["input_ids"]
        if not self._fast.chat_template:
            raise ConfigError("prompts.chat_template=True, but the model's tokenizer has no chat template")
        messages = _messages(prompt, system_prompt)
        try:
            return self.encode(self._rendered(messages))
        except Exception as error:  # templates raise jinja's errors, of a package we need not know
            raise ConfigError(
                f"the chat template refuses the messages {messages!r:.200}: {str(error) or error!r}"
            ) from error

    def _rendered(self, messages: Messages) -> str:
        """By the template, a program of the model's maker: a sandbox bounds what it reaches, this how long it runs."""

        def stop(*_: Any) -> None:
            raise TimeoutError(f"it runs for more than {TEMPLATE_SECONDS:g} s")

        render = functools.partial(self._fast.apply_chat_template, messages, add_generation_prompt=True, tokenize=False)
        if threading.current_thread() is not threading.main_thread():  # which alone has signals
            return render()
        handler, timer = signal.signal(signal.SIGALRM, stop), signal.setitimer(signal.ITIMER_REAL, TEMPLATE_SECONDS)
        try:
            return render()
        finally:
            signal.setitimer(signal.ITIMER_REAL, *timer)
            signal.signal(signal.SIGALRM, handler)

    def encode(self, text: str) -> list[int]:
        """Token ids of the text and nothing else."""
        return self._fast(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        """Text without special tokens."""
        return self._decode(ids, skip_special_tokens=True)

    def decode_raw(self, ids: list[int]) -> str:
        """Text with special tokens."""
        return self._decode(ids, skip_special_tokens=False)

    def _decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        # The clean-up deletes spaces before punctuation: the text would not be what was sampled.
        ids = [int(i) for i in ids]
        return self._fast.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files; ``load_tokenizer`` and transformers read them."""
        self._fast.save_pretrained(str(folder))
        path = Path(folder) / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["tokenizer_class"] = "PreTrainedTokenizerFast"  # transformers 5 writes a name that 4 does not know
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class ByteTokenizer:
    """The bytes of UTF-8 as ids 0..255, 256 = beginning, 257 = end; needs no files. See ``Tokenizer``."""

    vocab_size = 260
    bos_id, pad_id = 256, 258
    eos_ids = (257,)
    special = ("<|bos|>", "<|eos|>", "<|pad|>", "<|unused|>")  # ids 256..259

    def encode_prompt(self, prompt: str | Messages, *, chat_template: bool, system_prompt: str) -> list[int]:
        if not chat_template:
            return self.encode(_plain_text(prompt, system_prompt))
        return self.encode("".join(message["content"] for message in _messages(prompt, system_prompt)))

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def decode_raw(self, ids: list[int]) -> str:
        parts = (bytes([i]) if i < 256 else self.special[i - 256].encode() for i in ids if i < self.vocab_size)
        return b"".join(parts).decode("utf-8", errors="replace")

    def save(self, folder: str | Path) -> None:
        """Write the same map as a byte-level BPE without merges."""
        from tokenizers.pre_tokenizers import ByteLevel

        # GPT-2's printable stand-ins: bytes that print stand for themselves, the others follow from 256 on.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        stand_in = {byte: chr(byte) for byte in printable} | {b: chr(256 + n) for n, b in enumerate(others)}
        assert sorted(stand_in.values()) == sorted(ByteLevel.alphabet())
        bos, eos, pad, _ = self.special
        make_bpe_tokenizer(
            tokens=[*(stand_in[byte] for byte in range(256)), *self.special],
            merges=[],
            special=list(self.special),
            pre_tokenizer="gpt-2",
            chat_template=PLAIN_TEMPLATE,
            bos=bos,
            eos=eos,
            pad=pad,
        ).save(folder)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder; ids that end a turn also from its generation_config.json.

    Raises:
        ConfigError: no tokenizer.json, or it cannot be read.
    """
    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{folder / 'tokenizer.json'}: no such file (only fast tokenizers are read)")
    generation = folder / "generation_config.json"
    try:
        fast = _fast_class().from_pretrained(str(folder))
        eos = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id") if generation.is_file() else None
    except Exception as error:  # transformers and tokenizers raise many kinds, the latter plain Exception
        raise ConfigError(f"{folder}: its tokenizer cannot be read ({error})") from error
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(i) is int and 0 <= i < 2**31 for i in eos):
        raise ConfigError(f"{generation}: eos_token_id={eos!r:.60} must be a token id, or a list of them")
    return Tokenizer(fast, tuple(eos))


def make_bpe_tokenizer(
    *,
    tokens: list[str],
    merges: list[tuple[str, str]],
    special: list[str],
    pre_tokenizer: str,
    chat_template: str | None,
    bos: str | None,
    eos: str | None,
    pad: str | None,
) -> Tokenizer:
    """A byte-level BPE tokenizer from its tables.

    Args:
        tokens: text of every id, bytes written with GPT-2's stand-ins.
        merges: pairs of tokens, most frequent first.
        special: those of ``tokens`` that text is never encoded to by merging.
        pre_tokenizer: a key of ``PRE_TOKENIZERS``.
    """
    fast_class = _fast_class()
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Core

    core = Core(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if PRE_TOKENIZERS[pre_tokenizer]:
        byte_level = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    core.pre_tokenizer = byte_level
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    settings = {"bos_token": bos, "eos_token": eos, "pad_token": pad, "chat_template": chat_template}
    settings = {key: value for key, value in settings.items() if value is not None}
    return Tokenizer(fast_class(tokenizer_object=core, clean_up_tokenization_spaces=False, **settings))


def _fast_class() -> type:
    # Before the first import. A forked reward worker would otherwise print a warning at every start, and
    # without torch transformers advises to install it.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast


def _plain_text(prompt: str | Messages, system_prompt: str) -> str:
    if not isinstance(prompt, str):
        raise ConfigError("a prompt of messages needs prompts.chat_template=True; it is False")
    if system_prompt:
        raise ConfigError(f"prompts.system_prompt={system_prompt!r} needs prompts.chat_template=True; it is False")
    return prompt


def _messages(prompt: str | Messages, system_prompt: str) -> Messages:
    if not isinstance(prompt, str):
        return prompt
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": prompt}]
