"""Text to token ids and back. `from_meta` rebuilds the tokenizer of a data set or checkpoint."""

import json
import reprlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from steady import UserError


class Tokenizer(Protocol):
    """What every tokenizer offers. `meta()` is JSON; `end_of_text` is an id, or None.

    Where a token is a byte or a character, lists of Python's integers would take most of a data
    set's time: these tokenizers have `encode_array` too.
    """

    vocab_size: int
    end_of_text: int | None

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...
    def meta(self) -> dict[str, Any]: ...


def code_points(text: str) -> np.ndarray:
    """A text's characters as numbers."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


class CharTokenizer:
    """One token per character of a fixed alphabet."""

    end_of_text = None

    def __init__(self, alphabet: str):
        self.alphabet = alphabet
        self.vocab_size = len(alphabet)
        self.ids = {character: i for i, character in enumerate(alphabet)}
        self.table = np.full(max(map(ord, alphabet), default=0) + 2, -1)  # ids by code point
        self.table[code_points(alphabet)] = np.arange(len(alphabet))

    @classmethod
    def train(cls, text: str) -> "CharTokenizer":
        """The tokenizer whose alphabet is the characters of `text`, in code point order."""
        return cls("".join(sorted(set(text))))

    def encode(self, text: str) -> list[int]:
        """Raises UserError that names the characters outside the alphabet."""
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        ids = self.table.take(code_points(text), mode="clip")  # beyond the end: its last, -1
        if len(ids) and ids.min() < 0:
            unknown = "".join(sorted(set(text) - self.ids.keys()))
            raise UserError(
                f"the character tokenizer does not know {unknown!r}; "
                f"it was trained on these characters only: {self.alphabet!r}"
            )
        return ids

    def decode(self, ids: list[int]) -> str:
        return "".join(self.alphabet[i] for i in ids)

    def meta(self) -> dict[str, Any]:
        return {"tokenizer": "char", "alphabet": self.alphabet}


class ByteTokenizer:
    """One token per UTF-8 byte, and one more for the end of a text. Knows every character."""

    end_of_text = 256
    vocab_size = 257

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def meta(self) -> dict[str, Any]:
        return {"tokenizer": "byte"}


class GPT2Tokenizer:
    """GPT-2's byte-pair encoding, through tiktoken."""

    end_of_text = 50256
    vocab_size = 50257

    def __init__(self):
        try:
            import tiktoken

            self.encoding = tiktoken.get_encoding("gpt2")
        except ImportError:
            raise UserError("the gpt2 tokenizer needs tiktoken: pip install tiktoken") from None
        except (OSError, ValueError) as error:  # requests' errors are OSErrors
            raise UserError(
                "tiktoken could not load GPT-2's two vocabulary files (it downloads them at first "
                "use): connect once, or set TIKTOKEN_CACHE_DIR to a folder that holds them "
                f"({type(error).__name__})"
            ) from None

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def decode(self, ids: list[int]) -> str:
        return self.encoding.decode(ids)

    def meta(self) -> dict[str, Any]:
        return {"tokenizer": "gpt2"}


class HFTokenizer:
    """Any tokenizer in the format of Hugging Face's tokenizer.json, through `tokenizers`."""

    def __init__(self, content: str, end_of_text: int | None):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise UserError("this tokenizer needs tokenizers: pip install tokenizers") from None
        try:
            self.tokenizer = Tokenizer.from_str(content)
        except Exception as error:
            raise UserError(f"this is no tokenizer.json: {error}") from None
        self.tokenizer.no_truncation()  # many files ask for both, for a model's inputs
        self.tokenizer.no_padding()
        self.content, self.end_of_text = content, end_of_text
        self.vocab_size = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        try:
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # a vocabulary without a token for what it does not know
            raise UserError(
                f"the tokenizer does not know all of {reprlib.repr(text)}: {error}"
            ) from None

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def meta(self) -> dict[str, Any]:
        return {"tokenizer": "hf", "json": self.content, "end_of_text": self.end_of_text}


META_KEYS = ("tokenizer", "alphabet", "json", "end_of_text")  # what checkpoints keep of meta.json
META_VALUES = {  # what meta.json may say: in words, and as a check
    "tokenizer": ("char, byte, gpt2 or hf", lambda v: v in ("char", "byte", "gpt2", "hf")),
    "alphabet": ("a text, no character twice",
                 lambda v: isinstance(v, str) and 0 < len(set(v)) == len(v)),
    "json": ("a tokenizer.json as text", lambda v: isinstance(v, str)),
    "end_of_text": ("a token id or null",
                    lambda v: v is None or type(v) is int and 0 <= v < 2**32),
    "vocab_size": ("an integer from 1 to 2**32", lambda v: type(v) is int and 0 < v <= 2**32),
    "dtype": ("uint16 or uint32", lambda v: v in ("uint16", "uint32")),
    "unigram_entropy": ("a number", lambda v: type(v) in (int, float) and 0 <= v < 100),
    "tokens": ("an object with the counts of train and val", lambda v: isinstance(v, dict)),
}  # fmt: skip
NEEDED_KEY = {"char": "alphabet", "hf": "json"}  # by tokenizer


def find_folder(source: str, patterns: list[str]) -> Path:
    """The folder `source`, or the hub's repository of that name, its files of these patterns
    downloaded to the hub's cache.

    Raises UserError when there is neither.
    """
    if Path(source).is_dir():
        return Path(source)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(source, allow_patterns=patterns))
    except ImportError:
        raise UserError(f"no folder {source}; for the hub: pip install huggingface_hub") from None
    except Exception as error:  # the hub's library has many kinds; each has its reason
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{source} is neither a folder nor a model that the Hugging Face hub gives: {reason}"
        ) from None


def hf_tokenizer_meta(folder: Path) -> dict[str, Any]:
    """What `from_meta` needs for the tokenizer.json in `folder`; empty if there is none."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return {}
    end_of_text = None
    if (folder / "config.json").exists():
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            end_of_text = config.get("eos_token_id")
        except (ValueError, AttributeError, RecursionError) as error:
            raise UserError(f"{folder / 'config.json'} cannot be read: {error}") from None
    if isinstance(end_of_text, list):  # several end a turn of a chat; the first ends a text
        end_of_text = end_of_text[0] if end_of_text else None
    try:
        tokenizer = HFTokenizer(path.read_text(encoding="utf-8"), end_of_text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if end_of_text is not None and end_of_text not in range(tokenizer.vocab_size):
        raise UserError(
            f"{folder / 'config.json'}: eos_token_id={end_of_text!r} is no id of the tokenizer's "
            f"{tokenizer.vocab_size}"
        )
    return tokenizer.meta()


def write_hf_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    """Write the tokenizer that `meta` describes as transformers' AutoTokenizer reads it."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    tokenizer = from_meta(meta)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if isinstance(tokenizer, HFTokenizer):
        written = tokenizer.tokenizer
    elif isinstance(tokenizer, CharTokenizer):
        written = tokenizers.Tokenizer(models.WordLevel(tokenizer.ids, unk_token=""))
        every = tokenizers.Regex(r"[\s\S]")
        written.pre_tokenizer = pre_tokenizers.Split(every, behavior="isolated")
        written.decoder = decoders.Fuse()
    else:  # bytes, and GPT-2's pairs of them, are written as printable characters
        printable = byte_characters()
        if isinstance(tokenizer, GPT2Tokenizer):
            ranks = tokenizer.encoding._mergeable_ranks
        else:
            ranks = {bytes([i]): i for i in range(256)}
        spelled = {token: "".join(printable[b] for b in token) for token in ranks}
        vocab = {spelled[token]: rank for token, rank in ranks.items()}
        merges = [tuple(spelled[part] for part in pair) for pair in byte_pairs(ranks)]
        written = tokenizers.Tokenizer(models.BPE(vocab, merges))
        written.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=bool(merges)
        )
        written.decoder = decoders.ByteLevel()
        written.add_special_tokens(["<|endoftext|>"])
    if tokenizer.end_of_text is not None:
        end = written.id_to_token(tokenizer.end_of_text)
        settings |= {"eos_token": end, "bos_token": end}
    written.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2) + "\n", encoding="utf-8"
    )


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in GPT-2's vocabulary: itself where it is
    one, else the next from U+0100 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


def byte_pairs(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The merges that made the tokens: each token's last pair under all earlier merges."""
    pairs = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            joined = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:], strict=False)]
            i = joined.index(min(joined))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            pairs.append((parts[0], parts[1]))
    return pairs


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that a prepare script's --tokenizer names: gpt2, byte, or hf:PATH_OR_HUB_ID."""
    if name.startswith("hf:") and name != "hf:":
        meta = hf_tokenizer_meta(find_folder(name[3:], ["*.json"]))
        if not meta:
            raise UserError(f"{name[3:]} has no tokenizer.json")
        return from_meta(meta)
    if name not in ("gpt2", "byte"):
        raise UserError(
            f"unknown tokenizer={name!r}: use gpt2, byte, hf:PATH_OR_HUB_ID, or for "
            "text of your own char"
        )
    return from_meta({"tokenizer": name})


def check_meta(meta: Any, source: str, whole: bool = False) -> None:
    """Raises UserError that names `source` and the key if `meta` is not what meta.json may be.

    whole: where it describes a tokenizer, it must describe the tokens too, as prepare.py's do.
    Else a misspelled key would be read as GPT-2's vocabulary, or 32 bits as 16.
    """
    if not isinstance(meta, dict):
        raise UserError(f"{source} must hold a JSON object, not a {type(meta).__name__}")
    whole = whole and bool(meta.keys() & {"tokenizer", "alphabet", "json"})
    needed = {"tokenizer", "vocab_size", "dtype"} if whole else set()
    for key, (words, holds) in META_VALUES.items():
        asked = key in meta or key in needed or key == NEEDED_KEY.get(meta.get("tokenizer"))
        if asked and not holds(meta.get(key)):
            found = reprlib.repr(meta[key]) if key in meta else "missing"
            raise UserError(
                f'{source}: "{key}" must be {words}, but is {found}: prepare the data set again'
            )
    size = len(meta.get("alphabet", ""))
    if size and meta.get("vocab_size", size) != size:
        raise UserError(
            f'{source}: "vocab_size" is {meta["vocab_size"]}, but "alphabet" has {size} '
            "characters: prepare the data set again"
        )


def from_meta(meta: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `meta` (a data set's meta.json, or a checkpoint's copy) describes.

    Without one it is GPT-2's: nanoGPT's bare .bin files hold its tokens.
    """
    name = meta.get("tokenizer", "gpt2")
    if name == "char":
        return CharTokenizer(meta["alphabet"])
    if name == "byte":
        return ByteTokenizer()
    if name == "gpt2":
        return GPT2Tokenizer()
    if name == "hf":
        return HFTokenizer(meta["json"], meta.get("end_of_text"))
    raise UserError(f"unknown tokenizer {name!r}: known are char, byte, gpt2 and hf")
