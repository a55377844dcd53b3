"""GGUF files with a tokenizer, written from a tokenizer.json as llama.cpp's converter does."""

import json

import gguf
from gguf import TokenType


def write_tokenizer(path, core, *, pre=None, roles=None, chat_template=None, padding=0, **flags):
    """Write a GGUF file without tensors, with the tokenizer of ``core``, the object in a tokenizer.json.

    Args:
        pre: the name of how text is cut, for byte-level BPE; None: SentencePiece, whose scores are made from the
            order of its merges.
        roles: the tokens that are bos, eos, pad and unk.
        padding: number of unused rows at the end of the embedding.
        flags: metadata of ``tokenizer.ggml``, true or false.
    """
    model = core["model"]
    added = {token["id"]: token for token in core["added_tokens"]}
    text_of = {i: text for text, i in model["vocab"].items()} | {i: token["content"] for i, token in added.items()}
    tokens = [text_of[i] for i in range(len(text_of))]
    kinds = [_kind(text, added.get(i), model, pre) for i, text in enumerate(tokens)]
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama" if pre is None else "gpt2")
    writer.add_tokenizer_pre(pre or "default")
    writer.add_token_list(tokens + [f"[PAD{i}]" for i in range(padding)])
    writer.add_token_types(kinds + [TokenType.UNUSED] * padding)
    if pre is None:
        rank = {text: i for i, text in enumerate(dict.fromkeys(map("".join, merges)))}
        writer.add_token_scores([-float(rank.get(text, i)) for i, text in enumerate(tokens)] + [0.0] * padding)
    else:
        writer.add_token_merges(list(map(" ".join, merges)))
    for role, text in (roles or {}).items():
        getattr(writer, f"add_{role}_token_id")(tokens.index(text))
    for key, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _kind(text, added, model, pre):
    if text == model["unk_token"]:
        return TokenType.UNKNOWN
    if added:
        return TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    return TokenType.BYTE if pre is None and text.startswith("<0x") else TokenType.NORMAL


def read_core(path):
    return json.loads(path.read_text(encoding="utf-8"))
