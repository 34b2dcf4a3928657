"""Text to token ids and back. `from_meta` rebuilds the tokenizer of a data set or checkpoint."""

from typing import Any, Protocol


class Tokenizer(Protocol):
    """What every tokenizer offers. `meta()` is JSON; `end_of_text` is an id, or None."""

    vocab_size: int
    end_of_text: int | None

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...
    def meta(self) -> dict[str, Any]: ...


class CharTokenizer:
    """One token per character of a fixed alphabet."""

    end_of_text = None

    def __init__(self, alphabet: str):
        self.alphabet = alphabet
        self.vocab_size = len(alphabet)
        self.ids = {character: i for i, character in enumerate(alphabet)}

    @classmethod
    def train(cls, text: str) -> "CharTokenizer":
        """The tokenizer whose alphabet is the characters of `text`, in code point order."""
        return cls("".join(sorted(set(text))))

    def encode(self, text: str) -> list[int]:
        """Raises ValueError that names the characters outside the alphabet."""
        try:
            return [self.ids[character] for character in text]
        except KeyError:
            unknown = "".join(sorted(set(text) - self.ids.keys()))
            raise ValueError(
                f"the character tokenizer does not know {unknown!r}; "
                f"it was trained on these characters only: {self.alphabet!r}"
            ) from None

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
            raise ValueError("the gpt2 tokenizer needs tiktoken: pip install tiktoken") from None
        except (OSError, ValueError) as error:  # requests' errors are OSErrors
            raise ValueError(
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
    raise ValueError(f"unknown tokenizer {name!r}: known are char, byte and gpt2")
