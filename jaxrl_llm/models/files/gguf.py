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
    stretch = file.metadata.get("llama.rope.scaling.factor", file.metadata.get("llama.rope.scale_linear"))
    scaled = file.metadata.get("llama.rope.scaling.type", "none" if stretch is None else "linear")
    # GGUF stores Llama 3 scaling as a table of factors, from which its numbers cannot be read.
    if "rope_freqs.weight" in file.shapes or scaled not in ("none", "linear"):
        raise ConfigError(f"{path}: scaled rope in GGUF is not supported; use the model's Hugging Face folder")
    if NAMES["embedding"] not in file.shapes:
        raise ConfigError(f"{path}: tensor {NAMES['embedding']} is missing")
    size = lambda key, value, **how: positive(path, f"llama.{key}", value, **how)
    given = lambda key, **how: size(key, get(f"llama.{key}"), **how)
    given_or = lambda key, other: size(key, file.metadata.get(f"llama.{key}", other))
    width, num_heads = given("embedding_length"), given("attention.head_count")
    head_size = given_or("attention.key_length", width // num_heads)
    scaling = None
    if scaled == "linear":
        scaling = RopeScaling(
            "linear",
            (("factor", _decimal(size("rope.scaling.factor", stretch, whole=False))),),
        )
    if file.metadata.get("llama.rope.dimension_count", head_size) != head_size:
        raise ConfigError(f"{path}: llama.rope.dimension_count must be the head size {head_size}")
    return Architecture(
        vocab_size=file.shapes[NAMES["embedding"]][0],
        width=width,
        num_layers=given("block_count", most=1000),
        num_heads=num_heads,
        num_kv_heads=given_or("attention.head_count_kv", num_heads),
        head_size=head_size,
        ffn=given("feed_forward_length"),
        rope_theta=_decimal(
            size(
                "rope.freq_base",
                file.metadata.get("llama.rope.freq_base", 1e4),
                whole=False,
            )
        ),
        rope_scaling=scaling,
        norm_eps=_decimal(given("attention.layer_norm_rms_epsilon", whole=False, most=1.0)),
        tied=NAMES["head"] not in file.shapes,
        max_positions=given("context_length"),
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
    asked = lambda key, other=None: file.metadata.get(f"tokenizer.ggml.{key}", other)
    model, pre = file.get("tokenizer.ggml.model"), asked("pre")
    if model != "llama" and (model != "gpt2" or pre not in list(PRE_TOKENIZERS)):
        raise ConfigError(
            f"{path}: tokenizer.ggml.model={model!r} with tokenizer.ggml.pre={pre!r} is not supported; supported: "
            f"llama (SentencePiece), or gpt2 with {' or '.join(PRE_TOKENIZERS)}. Use the model's Hugging Face folder"
        )
    tokens, types = (
        file.get("tokenizer.ggml.tokens"),
        file.get("tokenizer.ggml.token_type"),
    )
    usual = {
        "add_bos_token": model == "llama" or PRE_TOKENIZERS[pre].begins,
        "add_space_prefix": True,
    }
    flags = {key: asked(key, usual.get(key, False)) for key in (*usual, "add_eos_token")}
    for key, value in flags.items():
        if type(value) is not bool:
            raise ConfigError(f"{path}: tokenizer.ggml.{key}={value!r:.60} must be a bool")
    try:
        # Drop unused tokens at the end, which are padding of the embedding. A folder's tokenizer does not list them.
        num = max(i for i, kind in enumerate(types, start=1) if kind != gguf.TokenType.UNUSED)
        of = lambda wanted: [token for token, kind in zip(tokens, types, strict=True) if kind == wanted]
        role = lambda name: None if (i := asked(f"{name}_token_id")) is None else tokens[:num][i]
        common = {
            "tokens": tokens[:num],
            "special": of(gguf.TokenType.CONTROL),
            "plain": of(gguf.TokenType.USER_DEFINED),
            "begins": flags["add_bos_token"],
            "ends": flags["add_eos_token"],
            "chat_template": file.metadata.get("tokenizer.chat_template"),
            "bos": role("bos"),
            "eos": role("eos"),
            "pad": role("padding"),
        }
        if model == "llama":
            scores, first = (
                file.get("tokenizer.ggml.scores")[:num],
                flags["add_space_prefix"],
            )
            return make_scored_tokenizer(scores=scores, unknown=role("unknown"), space_first=first, **common)
        merges, known = (
            [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges")],
            set(tokens[:num]),
        )
        if wrong := [pair for pair in merges if "".join(pair) not in known]:
            # Check this first, because the library would panic.
            raise ValueError(f"merge {wrong[0]!r:.60} makes no token")
        return make_bpe_tokenizer(merges=merges, pre_tokenizer=pre, **common)
    except ConfigError:
        raise
    except Exception as error:  # the package tokenizers raises plain Exceptions
        raise ConfigError(f"{path}: its tokenizer cannot be read ({error})") from error


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

    ids, merges = {token: i for i, token in enumerate(tokens)}, []
    # In a tie of scores, the lower id comes first.
    for token, _ in sorted(zip(tokens, scores, strict=True), key=lambda pair: -pair[1]):
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [pair for pair in halves if ids.keys() >= set(pair)]
        merges += sorted(known, key=lambda pair: [ids[half] for half in pair])
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
    read: list[Any] = [
        decoders.Replace(space, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if space_first:
        core.normalizer = normalizers.Sequence([normalizers.Prepend(space), core.normalizer])
        read.append(decoders.Strip(" ", 1, 0))
    core.decoder = decoders.Sequence(read)
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

    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    around = [roles["bos"]] * begins, [roles["eos"]] * ends
    if begins or ends:
        if None in around[0] + around[1]:
            raise ValueError("its texts begin or end with a token that it does not name")
        core.post_processor = processors.TemplateProcessing(
            single=[*around[0], "$A", *around[1]],
            special_tokens=[(token, core.token_to_id(token)) for token in {*around[0], *around[1]}],
        )
    settings = {f"{role}_token": token for role, token in roles.items()} | {"chat_template": chat_template}
    settings = {key: value for key, value in settings.items() if value is not None}
    return Tokenizer(fast_class(tokenizer_object=core, clean_up_tokenization_spaces=False, **settings))


def make_byte_tokenizer() -> Tokenizer:
    """Return a tokenizer of UTF-8 bytes, ids 0..255, with 256 = beginning, 257 = end, 258 = padding. Needs no files."""
    from tokenizers.pre_tokenizers import ByteLevel

    # GPT-2's alphabet: a printable byte is written as itself, any other byte as a letter from U+0100 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_in = {byte: chr(byte) for byte in printable} | {b: chr(256 + n) for n, b in enumerate(others)}
    assert sorted(stand_in.values()) == sorted(ByteLevel.alphabet())
    special = bos, eos, pad, _ = "<|bos|>", "<|eos|>", "<|pad|>", "<|unused|>"
    return make_bpe_tokenizer(
        tokens=[*(stand_in[byte] for byte in range(256)), *special],
        merges=[],
        special=list(special),
        pre_tokenizer="gpt-2",
        chat_template=PLAIN_TEMPLATE,
        bos=bos,
        eos=eos,
        pad=pad,
    )


class _Reader(gguf.GGUFReader):
    """GGUF reader that is faster and checks sizes.

    The mapped file is a plain array, because slices of ``np.memmap`` cost 2 s for 150,000 tokens and merges. Sizes are
    checked, because a header can claim more data than the file has.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> np.ndarray:
        if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise ValueError("it ends before what its header says it has")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == gguf.GGUFValueType.ARRAY and self._get(orig_offs + 4, np.uint64)[0] > MOST_ITEMS:
            raise ValueError(f"it says that it has a list of more than {MOST_ITEMS} items")
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
        self.shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}

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
        head_size = self.shapes[name][0] // self.metadata.get(heads[module], self.get(heads["attn_q"]))
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
    first, last = columns.start // block, -(-columns.stop // block)
    raw = tensor.data[(*rows, slice(first * block_bytes, last * block_bytes))]
    try:
        values = gguf.quants.dequantize(raw, tensor.tensor_type)
    except NotImplementedError as error:
        raise unreadable from error
    return values[..., columns.start - first * block : columns.stop - first * block]


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
