"""Reading of GGUF files of Llama models: architecture, tokenizer, and weights dequantised slice by slice.

Owns: names and conventions of llama.cpp's converter, tokenizers built from tables. Does not know: other families.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.architecture import Architecture, RopeScaling, positive
from jaxrl_llm.models.files import layout
from jaxrl_llm.models.files.tokenizer import Tokenizer, fast_tokenizer_class
from jaxrl_llm.models.transformer import Model, Params


class Cut(NamedTuple):
    """Preparation of text for byte-level BPE: normalisation and the split into words.

    Attributes:
        pattern: regular expression of words, as in the models' tokenizer.json; "": GPT-2's pattern.
        digits_alone: split digits into single digits before the split into words.
        nfc: first combine letters and accents (Unicode's normal form C).
        whole_words: a word that is in the vocabulary becomes one token, even if no merges lead to it.
        begins: by default, the beginning token is put before a text. A file can override this.
    """

    pattern: str = ""
    digits_alone: bool = False
    nfc: bool = False
    whole_words: bool = False
    begins: bool = False


# Alternatives: contractions; words with at most one other character before them; digits, as many as {} allows; other
# characters; ends of lines; spaces.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{}| ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORDS += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
# The keys are the names in llama.cpp.
PRE_TOKENIZERS = {
    "gpt-2": Cut(),
    "smollm": Cut(digits_alone=True),
    "llama-bpe": Cut(_WORDS.replace("{}", "{1,3}"), whole_words=True, begins=True),
    "qwen2": Cut(_WORDS.replace("{}", ""), nfc=True),
}

# Chat template of models that were not trained with one: the contents of all messages, concatenated.
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

NAMES = {
    "embedding": "token_embd.weight",
    "blocks.attention_norm": "blk.{layer}.attn_norm.weight",
    "blocks.q": "blk.{layer}.attn_q.weight",
    "blocks.k": "blk.{layer}.attn_k.weight",
    "blocks.v": "blk.{layer}.attn_v.weight",
    "blocks.o": "blk.{layer}.attn_output.weight",
    "blocks.mlp_norm": "blk.{layer}.ffn_norm.weight",
    "blocks.gate": "blk.{layer}.ffn_gate.weight",
    "blocks.up": "blk.{layer}.ffn_up.weight",
    "blocks.down": "blk.{layer}.ffn_down.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
}


def read_architecture(path: str | Path) -> Architecture:
    """Return the architecture of the model in a GGUF file.

    Raises:
        ConfigError: an unreadable file, another architecture, or a rope variant that the model code does not support.
    """
    file = _open(path)
    get = file.get
    kind = get("general.architecture")
    if kind != "llama":
        raise ConfigError(f"{path}: general.architecture={kind!r} is not supported; supported: llama")
    # In llama.cpp, a factor without a type means linear scaling. The key was different until 2023.
    old_factor = file.metadata.get("llama.rope.scale_linear")
    factor = file.metadata.get("llama.rope.scaling.factor", old_factor)
    default_kind = "none" if factor is None else "linear"
    scaling_kind = file.metadata.get("llama.rope.scaling.type", default_kind)
    # GGUF stores Llama 3 scaling as a table of factors, from which its numbers cannot be read.
    if "rope_freqs.weight" in file.shapes or scaling_kind not in ("none", "linear"):
        raise ConfigError(f"{path}: scaled rope in GGUF is not supported; use the model's Hugging Face folder")
    if NAMES["embedding"] not in file.shapes:
        raise ConfigError(f"{path}: tensor {NAMES['embedding']} is missing")

    def checked(key: str, value: Any, **limits: Any) -> Any:
        return positive(path, f"llama.{key}", value, **limits)

    def required(key: str, **limits: Any) -> Any:
        return checked(key, get(f"llama.{key}"), **limits)

    def optional(key: str, default: Any, **limits: Any) -> Any:
        return checked(key, file.metadata.get(f"llama.{key}", default), **limits)

    width = required("embedding_length")
    num_heads = required("attention.head_count")
    head_size = optional("attention.key_length", width // num_heads)
    scaling = None
    if scaling_kind == "linear":
        numbers = {"factor": _decimal(checked("rope.scaling.factor", factor, whole=False))}
        scaling = RopeScaling("linear", tuple(numbers.items()))
    if file.metadata.get("llama.rope.dimension_count", head_size) != head_size:
        raise ConfigError(f"{path}: llama.rope.dimension_count must be the head size {head_size}")
    return Architecture(
        vocab_size=file.shapes[NAMES["embedding"]][0],
        width=width,
        num_layers=required("block_count", most=1000),
        num_heads=num_heads,
        num_kv_heads=optional("attention.head_count_kv", num_heads),
        head_size=head_size,
        ffn=required("feed_forward_length"),
        rope_theta=_decimal(optional("rope.freq_base", 1e4, whole=False)),
        rope_scaling=scaling,
        norm_eps=_decimal(required("attention.layer_norm_rms_epsilon", whole=False, most=1.0)),
        tied=NAMES["head"] not in file.shapes,
        max_positions=required("context_length"),
    )


def load_params(path: str | Path, model: Model, mesh: Mesh) -> Params:
    """Read and dequantise the parameters of a GGUF file directly onto their shards.

    Raises:
        ConfigError: a tensor is missing, unknown or of another shape, or its quantisation is not supported.
    """
    return layout.load(
        _open(path),
        NAMES,
        model.abstract_params(mesh),
        f"a model of the family {model.arch.family}",
    )


def check_weights(path: str | Path, model: Model, mesh: Mesh) -> None:
    """Raise the ``ConfigError`` of ``load_params`` about names and shapes. Only the file's header is read."""
    layout.check(
        _open(path),
        NAMES,
        model.abstract_params(mesh),
        f"a model of the family {model.arch.family}",
    )


def read_tokenizer(path: str | Path) -> Tokenizer:
    """Return the tokenizer in a GGUF file, with its chat template: byte-level BPE, or SentencePiece's BPE by scores.

    Raises:
        ConfigError: another kind of tokenizer, or tables that do not fit together.
    """
    file = _open(path)
    model = file.get("tokenizer.ggml.model")
    pre_tokenizer: Any = file.metadata.get("tokenizer.ggml.pre")
    is_supported = model == "llama" or (model == "gpt2" and pre_tokenizer in list(PRE_TOKENIZERS))
    if not is_supported:
        raise ConfigError(
            f"{path}: tokenizer.ggml.model={model!r} with tokenizer.ggml.pre={pre_tokenizer!r} is not supported; "
            f"supported: llama (SentencePiece), or gpt2 with {' or '.join(PRE_TOKENIZERS)}. Use the model's Hugging "
            "Face folder"
        )
    all_tokens = file.get("tokenizer.ggml.tokens")
    kinds = file.get("tokenizer.ggml.token_type")
    begins = _read_flag(file, "add_bos_token", model == "llama" or PRE_TOKENIZERS[pre_tokenizer].begins)
    space_first = _read_flag(file, "add_space_prefix", True)
    ends = _read_flag(file, "add_eos_token", False)
    try:
        # Drop unused tokens at the end, which are padding of the embedding. A folder's tokenizer does not list them.
        num_used = max(i for i, kind in enumerate(kinds, start=1) if kind != gguf.TokenType.UNUSED)
        tokens = all_tokens[:num_used]
        common = {
            "tokens": tokens,
            "special": _of_kind(all_tokens, kinds, gguf.TokenType.CONTROL),
            "plain": _of_kind(all_tokens, kinds, gguf.TokenType.USER_DEFINED),
            "begins": begins,
            "ends": ends,
            "chat_template": file.metadata.get("tokenizer.chat_template"),
            "bos": _token_with_role(file, tokens, "bos"),
            "eos": _token_with_role(file, tokens, "eos"),
            "pad": _token_with_role(file, tokens, "padding"),
        }
        if model == "llama":
            return make_scored_tokenizer(
                scores=file.get("tokenizer.ggml.scores")[:num_used],
                unknown=_token_with_role(file, tokens, "unknown"),
                space_first=space_first,
                **common,
            )
        merges = _merges(file, tokens)
        return make_bpe_tokenizer(merges=merges, pre_tokenizer=pre_tokenizer, **common)
    except ConfigError:
        raise
    except Exception as error:  # the package tokenizers raises plain Exceptions
        raise ConfigError(f"{path}: its tokenizer cannot be read ({error})") from error


def _read_flag(file: _File, key: str, default: bool) -> bool:
    """Return a setting of the tokenizer that must be true or false."""
    value = file.metadata.get(f"tokenizer.ggml.{key}", default)
    if type(value) is not bool:
        raise ConfigError(f"{file.path}: tokenizer.ggml.{key}={value!r:.60} must be true or false")
    return value


def _of_kind(tokens: list[str], kinds: list[int], kind: gguf.TokenType) -> list[str]:
    """Return the tokens of one kind."""
    return [token for token, token_kind in zip(tokens, kinds, strict=True) if token_kind == kind]


def _token_with_role(file: _File, tokens: list[str], role: str) -> str | None:
    """Return the text of the token with a role, such as "bos"; None if the file names none."""
    index = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
    return None if index is None else tokens[index]


def _merges(file: _File, tokens: list[str]) -> list[tuple[str, str]]:
    """Return the pairs of tokens that are merged.

    Raises:
        ValueError: a pair makes no token. The package tokenizers would panic.
    """
    merges = []
    known_tokens = set(tokens)
    for line in file.get("tokenizer.ggml.merges"):
        pair = tuple(line.split(" ", 1))
        if "".join(pair) not in known_tokens:
            raise ValueError(f"merge {pair!r:.60} makes no token")
        merges.append(pair)
    return merges


# Limit on the length of a list. The reader creates an object for each item, which takes memory.
MOST_ITEMS = 2**22


def make_bpe_tokenizer(
    *,
    tokens: list[str],
    merges: list[tuple[str, str]],
    pre_tokenizer: str,
    **common: Any,
) -> Tokenizer:
    """Return a byte-level BPE tokenizer built from its tables.

    Args:
        tokens: text of every id, with bytes written in GPT-2's alphabet.
        merges: pairs of tokens, most frequent first.
        pre_tokenizer: a key of ``PRE_TOKENIZERS``.
        common: arguments of ``_finished``.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    cut = PRE_TOKENIZERS[pre_tokenizer]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cut.whole_words))
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not cut.pattern)]
    if cut.pattern:
        steps.insert(0, pre_tokenizers.Split(Regex(cut.pattern), behavior="isolated"))
    if cut.digits_alone:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    core.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if cut.nfc:
        core.normalizer = normalizers.NFC()
    core.decoder = decoders.ByteLevel()
    return _finished(core, **common)


def make_scored_tokenizer(
    *,
    tokens: list[str],
    scores: list[float],
    unknown: str | None,
    space_first: bool,
    **common: Any,
) -> Tokenizer:
    """Return a tokenizer with SentencePiece's BPE.

    Of all neighbours that form a token, the pair whose token has the highest score is merged first.

    Args:
        tokens: text of every id, with spaces written as U+2581 and single bytes as "<0x0A>".
        scores: score of every token.
        unknown: the token for text without a token. None if the vocabulary has no such token, for example because all
            256 bytes are tokens.
        space_first: encode a text as if a space came before it.
        common: arguments of ``_finished``.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    ids = {token: i for i, token in enumerate(tokens)}

    def ids_of(pair: tuple[str, str]) -> list[int]:
        return [ids[half] for half in pair]

    merges: list[tuple[str, str]] = []
    # In a tie of scores, the lower id comes first.
    for token, _ in sorted(zip(tokens, scores, strict=True), key=lambda pair: -pair[1]):
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        known_pairs = [pair for pair in pairs if ids.keys() >= set(pair)]
        merges += sorted(known_pairs, key=ids_of)
    core = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=merges,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = "\u2581"
    core.normalizer = normalizers.Replace(" ", space)
    steps: list[Any] = [
        decoders.Replace(space, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if space_first:
        core.normalizer = normalizers.Sequence([normalizers.Prepend(space), core.normalizer])
        steps.append(decoders.Strip(" ", 1, 0))
    core.decoder = decoders.Sequence(steps)
    return _finished(core, unk=unknown, **common)


def _finished(
    core: Any,
    *,
    special: list[str],
    plain: Sequence[str] = (),
    begins: bool = False,
    ends: bool = False,
    chat_template: str | None = None,
    **roles: str | None,
) -> Tokenizer:
    """Register added tokens, add the tokens at the beginning and end of texts, and wrap the tokenizer.

    Args:
        special: added tokens that decoding leaves out.
        plain: added tokens that decoding shows.
        begins, ends: add the beginning token, or the end token, to every text.
        roles: the tokens bos, eos, pad and unk, or None.
    """
    fast_class = fast_tokenizer_class()
    from tokenizers import AddedToken, processors

    special_tokens = [AddedToken(token, special=True, normalized=False) for token in special]
    plain_tokens = [AddedToken(token, special=False, normalized=False) for token in plain]
    core.add_special_tokens(special_tokens)
    core.add_tokens(plain_tokens)
    before = [roles["bos"]] if begins else []
    after = [roles["eos"]] if ends else []
    if before or after:
        if None in [*before, *after]:
            raise ValueError("its texts begin or end with a token that the file does not name")
        core.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(token, core.token_to_id(token)) for token in {*before, *after}],
        )
    settings = {f"{role}_token": token for role, token in roles.items() if token is not None}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    fast = fast_class(tokenizer_object=core, clean_up_tokenization_spaces=False, **settings)
    return Tokenizer(fast)


def make_byte_tokenizer() -> Tokenizer:
    """Return a tokenizer of UTF-8 bytes, ids 0..255, with 256 = beginning, 257 = end, 258 = padding. Needs no files."""
    from tokenizers.pre_tokenizers import ByteLevel

    # GPT-2's alphabet: a printable byte is written as itself, any other byte as a letter from U+0100 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_in = {byte: chr(byte) for byte in printable}
    stand_in |= {byte: chr(256 + n) for n, byte in enumerate(others)}
    assert sorted(stand_in.values()) == sorted(ByteLevel.alphabet())
    byte_tokens = [stand_in[byte] for byte in range(256)]
    special = ["<|bos|>", "<|eos|>", "<|pad|>", "<|unused|>"]
    return make_bpe_tokenizer(
        tokens=[*byte_tokens, *special],
        merges=[],
        special=special,
        pre_tokenizer="gpt-2",
        chat_template=PLAIN_TEMPLATE,
        bos="<|bos|>",
        eos="<|eos|>",
        pad="<|pad|>",
    )


class _Reader(gguf.GGUFReader):
    """GGUF reader that is faster and checks sizes.

    The mapped file is a plain array, because slices of ``np.memmap`` cost 2 s for 150,000 tokens and merges. Sizes are
    checked, because a header can claim more data than the file has.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> np.ndarray:
        if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise ValueError("the file is shorter than its header declares")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == gguf.GGUFValueType.ARRAY:
            (num_items,) = self._get(orig_offs + 4, np.uint64)
            if num_items > MOST_ITEMS:
                raise ValueError(f"its header declares a list of more than {MOST_ITEMS} items")
        return super()._get_field_parts(orig_offs, raw_type)

    @property
    # The parent assigns an attribute. Only a property can convert the assigned value.
    def data(self) -> np.ndarray:  # pyrefly: ignore[bad-override-mutable-attribute]
        return self._data

    @data.setter
    def data(self, data: np.ndarray) -> None:
        self._data = data.view(np.ndarray)


class _File:
    def __init__(self, path: str):
        try:
            with np.errstate(over="raise"):  # raise an error if an offset overflows
                reader = _Reader(path)
            # Convert the reader's fields, which are many small arrays, to plain Python values.
            self.metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        except FileNotFoundError as error:
            raise ConfigError(f"{path}: no such file") from error
        except (OSError, ValueError, LookupError, RecursionError, ArithmeticError) as error:
            raise ConfigError(f"{path}: not a readable GGUF file ({error})") from error
        self.path = path
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, tensor in self._tensors.items():
            self.shapes[name] = tuple(int(size) for size in reversed(tensor.shape))

    def get(self, key: str) -> Any:
        if key not in self.metadata:
            raise ConfigError(f"{self.path}: metadata {key} is missing")
        return self.metadata[key]

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        tensor = self._tensors[name]
        part = _dequantise(self.path, tensor, index)
        heads = {
            "attn_q": "llama.attention.head_count",
            "attn_k": "llama.attention.head_count_kv",
        }
        module = name.split(".")[-2]
        if module not in heads:
            return part
        # llama.cpp rotates neighbouring rows and stores each head's rows interleaved. The rope of this package rotates
        # two halves.
        num_heads = self.metadata.get(heads[module], self.get(heads["attn_q"]))
        head_size = self.shapes[name][0] // num_heads
        pairs = part.reshape(-1, head_size // 2, 2, part.shape[1])
        return pairs.swapaxes(1, 2).reshape(part.shape)


def _dequantise(path: str, tensor: gguf.ReaderTensor, index: tuple[slice, ...]) -> np.ndarray:
    """Return a part of a tensor in float32. Only the quantisation blocks of this part are unpacked."""
    unreadable = ConfigError(f"{path}: tensor {tensor.name} is {tensor.tensor_type.name}, which cannot be read")
    if tensor.data.dtype.kind == "f":
        return tensor.data[index].astype(np.float32)
    if tensor.data.dtype != np.uint8:
        raise unreadable
    *rows, columns = index
    block, block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    first = columns.start // block
    last = -(-columns.stop // block)
    stored_columns = slice(first * block_bytes, last * block_bytes)
    raw = tensor.data[(*rows, stored_columns)]
    try:
        values = gguf.quants.dequantize(raw, tensor.tensor_type)
    except NotImplementedError as error:
        raise unreadable from error
    skipped = first * block
    return values[..., columns.start - skipped : columns.stop - skipped]


def _open(path: str | Path) -> _File:
    path = os.path.abspath(path)
    if not os.path.isfile(path):
        raise ConfigError(f"{path}: no such file")
    return _open_version(path, os.stat(path).st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _open_version(path: str, modified_ns: int) -> _File:
    """Open a file of a given modification time.

    The result is cached, because parsing the header takes a second. Architecture, tokenizer and weights all need it.
    """
    return _File(path)


def _decimal(value: float) -> float:
    """Return the shortest decimal number with the same float32 value: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
