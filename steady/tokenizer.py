"""Text to token ids and back. `from_meta` rebuilds the tokenizer of a data set or checkpoint."""

import hashlib
import itertools
import json
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from steady import UserError
from steady.folder import atomic_write, naming, require_file


class Tokenizer(Protocol):
    """The interface of all tokenizers. `from_meta` rebuilds one from its `meta()`, which is JSON.

    encode: may raise UserError for characters that the tokenizer does not know.
    encode_between: the ids of a piece of a text, which may depend on the text around it. Most give
    an array, because lists of Python integers would take most of the preparation time. (Your own
    tokenizer may leave this method out.)
    """

    vocab_size: int
    begin_of_text: int | None = None  # the id that every document and prompt begins with
    end_of_text: int | None  # the id after every document
    stop_tokens: list[int]  # ids that end a sample: end_of_text, and others of chat models

    def encode(self, text: str) -> list[int]:
        return np.asarray(self.encode_between("", text, "")).tolist()

    def encode_between(self, before: str, text: str, after: str) -> Sequence[int]: ...
    def decode(self, ids: list[int]) -> str: ...
    def meta(self) -> dict[str, Any]: ...


GPT2_FILES = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
PIECE = 2**18  # characters of a long text to tokenize at a time
BORDER = re.compile(r"(?<=\S)[ \t\r\n]|(?<=[。！？])(?=[^\W_])")  # few tokens cross these
ANYWHERE = re.compile("")  # for characters and bytes
NOWHERE = re.compile(r"(?!)")  # for tokens that depend on their place, or span several words
SEVERAL_WORDS = re.compile(r"[^\sĠĊĉ▁][\sĠĊĉ▁]+[^\sĠĊĉ▁]")  # tokens as vocabularies spell them
WINDOW = 2**11  # characters to look at on each side of a cut
CONTROL = re.compile(r"<.+>|\[.+\]")  # names of tokens that are no ordinary text


def cut_text(
    tokenizer: Tokenizer, chunks: Iterable[str], before: str = "", after: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Cut the text in `chunks` where that does not change its ids. Yields (before, piece,
    after): at least WINDOW characters of the text before the piece, and at most WINDOW after it.
    `before` begins at a border too, so that the words in it are those of the whole text.

    before, after: at least WINDOW characters of the text around it, if it is part of a longer one.
    """
    border = ANYWHERE if isinstance(tokenizer, CharTokenizer | ByteTokenizer) else BORDER
    if getattr(tokenizer, "depends_on_place", False):
        border = NOWHERE
    text, start, length = "", 0, PIECE  # text[start:] is left, and a cut is due after `length`
    for chunk in chunks:
        if start:
            text, start = text[start:], 0
        text += chunk  # in place: linear time if no chunk can be cut
        while len(text) >= start + length + WINDOW:
            middle = start + length
            found = border.search(text, middle, middle + WINDOW)
            if found is None:  # a long word, for example: look for a place after it
                length += WINDOW
                continue
            cut = found.start()
            yield before, text[start:cut], text[cut : cut + WINDOW]
            near = border.finditer(text, max(start, cut - 2 * WINDOW), cut - WINDOW)
            begin = max((found.start() for found in near), default=start)
            before, start, length = text[begin:cut], cut, PIECE
    yield before, text[start:], after


def code_points(text: str) -> np.ndarray:
    """A text's Unicode code points."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


class CharTokenizer(Tokenizer):
    """One token per character of a fixed alphabet, plus an end-of-text token as the last id if the
    data set has several documents (`ends`)."""

    def __init__(self, alphabet: str, ends: bool = False):
        self.alphabet = alphabet
        self.vocab_size = len(alphabet) + ends
        self.end_of_text = len(alphabet) if ends else None
        self.stop_tokens = [len(alphabet)] * ends
        self.table = np.full(max(map(ord, alphabet), default=0) + 2, -1)  # ids by code point
        self.table[code_points(alphabet)] = np.arange(len(alphabet))

    @classmethod
    def train(cls, text: str) -> "CharTokenizer":
        """The tokenizer whose alphabet is the characters of `text`, in code point order."""
        return cls("".join(sorted(set(text))))

    def encode_between(self, before: str, text: str, after: str) -> np.ndarray:
        ids = self.table.take(code_points(text), mode="clip")  # past the table's end: -1
        if len(ids) and ids.min() < 0:
            unknown = "".join(sorted({*text} - {*self.alphabet}))
            raise UserError(
                f"the character tokenizer does not know {reprlib.repr(unknown)}; "
                f"it was trained only on these characters: {self.alphabet!r}"
            )
        return ids

    def decode(self, ids: list[int]) -> str:
        return "".join(self.alphabet[i] for i in ids if i < len(self.alphabet))

    def meta(self) -> dict[str, Any]:
        ends = {} if self.end_of_text is None else {"end_of_text": self.end_of_text}
        return {"tokenizer": "char", "alphabet": self.alphabet} | ends


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte, plus an end-of-text token. It can encode every character."""

    end_of_text = 256
    stop_tokens = [256]
    vocab_size = 257

    def encode_between(self, before: str, text: str, after: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def meta(self) -> dict[str, Any]:
        return {"tokenizer": "byte"}


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-pair encoding, through tiktoken.

    special_tokens: encode <|endoftext|> in a text as the token, not as characters.
    """

    end_of_text = 50256
    stop_tokens = [50256]
    vocab_size = 50257

    def __init__(self, special_tokens: bool = False):
        self.special_tokens = special_tokens
        import tiktoken

        try:
            self.encoding = tiktoken.get_encoding("gpt2")
        except (OSError, ValueError) as error:  # requests' errors are OSErrors
            raise UserError(
                "tiktoken could not load GPT-2's two vocabulary files (it downloads them on first "
                "use): go online once, set TIKTOKEN_CACHE_DIR to a folder that holds them, or use "
                f"another tokenizer, such as byte ({type(error).__name__})"
            ) from None

    def encode_between(self, before: str, text: str, after: str) -> Sequence[int]:
        if self.special_tokens and "<|endoftext|>" in text:
            parts = [self.encode(part) for part in text.split("<|endoftext|>")]
            return parts[0] + [i for part in parts[1:] for i in (self.end_of_text, *part)]
        if len(text) < 2 * PIECE:
            # ids as an array: making lists, threads would wait for each other
            return self.encoding.encode_to_numpy(text, disallowed_special=())
        # tiktoken's own word search panics on half a million spaces or more (tiktoken#15)
        import regex  # a dependency of tiktoken

        words = regex.finditer(self.encoding._pat_str, text)
        return [i for word in words for i in self.encoding._encode_single_piece(word.group())]

    def decode(self, ids: list[int]) -> str:
        return self.encoding.decode(ids)

    def meta(self) -> dict[str, Any]:
        return {"tokenizer": "gpt2"} | ({"special_tokens": True} if self.special_tokens else {})


class HFTokenizer(Tokenizer):
    """Any tokenizer in the format of Hugging Face's tokenizer.json, through `tokenizers`.

    content: the text of that file. begin_of_text, end_of_text: ids or None. stop_tokens: more ids
    that end a sample. special_tokens: encode special tokens in a text as tokens, not characters.
    """

    def __init__(
        self,
        content: str,
        end_of_text: int | None = None,
        begin_of_text: int | None = None,
        stop_tokens: Sequence[int] = (),
        special_tokens: bool = False,
    ):
        self.tokenizer = plain_tokenizer(content)
        self.content, self.end_of_text, self.begin_of_text = content, end_of_text, begin_of_text
        ends = [] if end_of_text is None else [end_of_text]
        self.stop_tokens = list(dict.fromkeys([*ends, *stop_tokens]))
        self.special_tokens = special_tokens
        self.added = self.tokenizer.get_added_tokens_decoder()
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        if self.vocab_size > len(content):  # each token takes several characters
            raise UserError(
                f"this tokenizer.json has id {self.vocab_size - 1}, but {len(vocabulary)} tokens"
            )
        splitter = self.tokenizer.pre_tokenizer
        splits = splitter and len(splitter.pre_tokenize_str("a b")) > 1
        words = map(SEVERAL_WORDS.search, self.tokenizer.get_vocab(with_added_tokens=False))
        self.depends_on_place = '"FixedLength"' in content or not splits and any(words)
        # the byte fallback tokens that some models have: <0x00> to <0xFF>
        bytes_ = [vocabulary.get(f"<0x{i:02X}>") for i in range(256)]
        self.byte_ids = None if None in bytes_ else bytes_
        self.for_text = self.tokenizer
        if not special_tokens:  # encode their names as characters
            special = {id for id, token in self.added.items() if token.special}
            special |= {*self.stop_tokens} | {begin_of_text} - {None}
            self.for_text = plain_tokenizer(without_spellings(content, special - {*bytes_}))
            self.for_text.encode_special_tokens = True

    def unknown(self) -> int | None:
        """The id for text that the tokenizer does not know."""
        model = json.loads(self.content)["model"]
        return model.get("unk_id", self.tokenizer.token_to_id(model.get("unk_token") or ""))

    def encode_between(self, before: str, text: str, after: str) -> list[int]:
        encoding = self.encoding_of(self.for_text, before + text + after)
        if not before and not after:
            return encoding.ids
        starts = [start for start, _ in encoding.offsets]
        begin, end = len(before), len(before) + len(text)
        first = sum(start < begin for start in starts)  # not always sorted
        last = sum(start < end for start in starts) if after else len(starts)
        return encoding.ids[first:last]

    def encode_prompt(self, text: str) -> list[int]:
        """Like `encode`, but encodes special tokens in the text as tokens."""
        end = self.end_of_text
        name = "" if end is None else self.tokenizer.decode([end], skip_special_tokens=False)
        if name and name in text and end not in self.added and not self.makes(end, name):
            parts = [self.encode_prompt(part) for part in text.split(name)]
            return parts[0] + [id for part in parts[1:] for id in (end, *part)]
        return self.encoding_of(self.tokenizer, text).ids

    def makes(self, id: int, text: str) -> bool:
        """Whether `text` encodes to that id, among others."""
        try:
            return id in self.encode(text)
        except UserError:  # a vocabulary without an unknown token
            return False

    def encoding_of(self, tokenizer: Any, text: str) -> Any:
        try:
            # encode_batch releases Python's lock, encode does not
            return tokenizer.encode_batch([text], add_special_tokens=False)[0]
        except Exception as error:  # a vocabulary without an unknown token
            raise UserError(
                f"the tokenizer cannot encode all of {reprlib.repr(text)}: {error}"
            ) from None

    def decode(self, ids: list[int]) -> str:
        if self.byte_ids is not None:
            ids = self.fix_bytes(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def fix_bytes(self, ids: list[int]) -> list[int]:
        """Replace bytes that are not UTF-8, such as the start of a character, with the bytes of
        U+FFFD. `tokenizers` would drop all characters of such a run of bytes (LLamaSharp#265)."""
        value = {id: i for i, id in enumerate(self.byte_ids)}
        mended = []
        for is_byte, run in itertools.groupby(ids, value.__contains__):
            if is_byte:
                text = bytes(value[i] for i in run).decode("utf-8", errors="replace")
                run = (self.byte_ids[byte] for byte in text.encode("utf-8"))
            mended += run
        return mended

    def meta(self) -> dict[str, Any]:
        return {
            "tokenizer": "hf", "json": self.content, "end_of_text": self.end_of_text,
            "begin_of_text": self.begin_of_text, "stop_tokens": self.stop_tokens,
        } | ({"special_tokens": True} if self.special_tokens else {})  # fmt: skip


def plain_tokenizer(content: str) -> Any:
    """The tokenizer of a tokenizer.json, without truncation, padding and BPE dropout. Many files
    set them, for a model's inputs."""
    from tokenizers import Tokenizer

    with naming("this is not a tokenizer.json", Exception):
        tokenizer = Tokenizer.from_str(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    return tokenizer


def without_spellings(content: str, ids: set[int]) -> str:
    """A tokenizer.json in which no text encodes to the tokens `ids`. Some models (Unigram,
    WordLevel) have them in their vocabulary and would match them. Tokens that are ordinary text
    stay (such as a line feed that ends samples): the results of BPE merges, and names that are
    neither in brackets nor special.
    """
    tokenizer = json.loads(content)
    added, model = tokenizer.get("added_tokens") or [], tokenizer["model"]
    vocabulary, merges = model.get("vocab"), model.get("merges") or []
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in merges]
    suffix = model.get("end_of_word_suffix") or ""
    prefix = model.get("continuing_subword_prefix") or ""
    results = [pair[0] + pair[1].removeprefix(prefix) for pair in pairs]
    if isinstance(vocabulary, dict):
        names = {id: name for name, id in vocabulary.items() if id in ids}
    else:
        names = {id: vocabulary[id][0] for id in ids if id < len(vocabulary or ())}
    bare = {name: name.removesuffix(suffix).removeprefix(prefix) for name in names.values()}
    ordinary = {*results, *(name for name in bare if not CONTROL.fullmatch(bare[name]))}
    names = {id: name for id, name in names.items() if name not in ordinary}
    for token in added:
        control = token["special"] or CONTROL.fullmatch(token["content"])
        if token["id"] in ids and control and len(token["content"]) > 1:
            names[token["id"]] = token["content"]
        elif len(token["content"]) < 2:  # a line feed, for example, is ordinary text
            token["special"] = False
    # no text has these, even if a normalizer drops the NULs
    secret = hashlib.sha256(content.encode()).hexdigest()
    hidden = {name: f"\0{secret}{id}\0" for id, name in names.items()}
    if isinstance(vocabulary, dict):
        model["vocab"] = {hidden.get(name, name): id for name, id in vocabulary.items()}
    elif vocabulary:
        model["vocab"] = [[hidden.get(name, name), score] for name, score in vocabulary]
    if merges:  # they may spell an added token
        model["merges"] = [
            merge for merge, pair, result in zip(merges, pairs, results, strict=True)
            if not hidden.keys() & {*pair, result}
        ]  # fmt: skip
    if model.get("unk_token") in hidden:
        model["unk_token"] = hidden[model["unk_token"]]
    for token in added:
        token["content"] = hidden.get(token["content"], token["content"])
    tokenizer["post_processor"] = None  # it refers to the renamed tokens, and is not needed here
    return json.dumps(tokenizer)


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a prompt, which starts like the documents of the training set. Special tokens in
    the text are encoded as tokens, as in nanoGPT. An empty prompt is the begin-of-text token, or
    else the end-of-text token.

    Raises UserError for an empty prompt if there is neither.
    """
    end, begin = tokenizer.end_of_text, tokenizer.begin_of_text
    if isinstance(tokenizer, HFTokenizer):
        ids = tokenizer.encode_prompt(text)
    else:
        texts = text.split("<|endoftext|>") if end is not None else [text]
        parts = [tokenizer.encode(part) for part in texts]
        ids = parts[0] + [id for part in parts[1:] for id in (end, *part)]
    if begin is not None:
        # ordinary text, such as a line feed, can have the same id
        plain = isinstance(tokenizer, HFTokenizer) and not tokenizer.special_tokens
        ordinary = plain and tokenizer.makes(begin, text)
        ids = ids if ids[:1] == [begin] and not ordinary else [begin, *ids]
    if not ids and end is None:
        raise UserError("it is empty: give the model at least one character to continue")
    return ids or [end]


def train_bpe(texts: Iterable[str], vocab_size: int) -> HFTokenizer:
    """Train a byte-level BPE of `vocab_size` tokens, like GPT-2's, on `texts`. Token 0 is
    <|endoftext|>."""
    from tokenizers import ByteLevelBPETokenizer

    if not 257 <= vocab_size <= 2**20:
        raise UserError(f"bpe:{vocab_size} must be from 257 (bytes and end of text) to 2**20")
    tokenizer = ByteLevelBPETokenizer()
    settings = {"min_frequency": 0, "show_progress": False, "special_tokens": ["<|endoftext|>"]}
    # in pieces: it buffers 256 of them, and the time for a word is quadratic in its length
    pieces = (text[i : i + 2**13] for text in texts for i in range(0, len(text), 2**13))
    tokenizer.train_from_iterator(pieces, vocab_size, **settings)
    return HFTokenizer(tokenizer.to_str(), end_of_text=0)


TOKENIZER_VALUES = {  # the keys of meta.json that checkpoints keep, with checks of their values
    "tokenizer": lambda v: v in ("char", "byte", "gpt2", "hf"),
    "alphabet": lambda v: isinstance(v, str) and 0 < len(set(v)) == len(v),
    "json": lambda v: isinstance(v, str),
    "end_of_text": lambda v: v is None or is_count(v),
    "begin_of_text": lambda v: v is None or is_count(v),
    "stop_tokens": lambda v: isinstance(v, list) and all(map(is_count, v)),
    "special_tokens": lambda v: isinstance(v, bool),
}
DATA_VALUES = {  # its other keys
    "vocab_size": lambda v: is_count(v) and v > 0,
    "dtype": lambda v: v in ("uint16", "uint32"),
    "unigram_entropy": lambda v: type(v) in (int, float) and 0 <= v < 100,
    **{key: lambda v: isinstance(v, dict) and all(map(is_count, v.values()))
       for key in ("tokens", "bytes", "begins")},
}  # fmt: skip
ROLES = ("bos", "unk", "pad", "mask", "cls")  # tokens that end no text
PREFIX_CLASSES = ("GPT2", "Qwen2", "CodeGen", "GPTNeoX", "Roberta", "Bart")  # add no space
TEMPLATES = "additional_chat_templates"  # transformers' folder of named templates


def find_folder(source: str, patterns: list[str]) -> Path:
    """The folder `source`, or else the hub's cache folder with the repository `source`, of which
    files matching `patterns` are downloaded.

    Raises UserError if there is neither.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(source, allow_patterns=patterns))
    except Exception as error:  # the hub's library raises many types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{source} is neither a folder nor available on the Hugging Face hub: {reason}"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file. Raises UserError otherwise."""
    require_file(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not an object")
        return content
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def hf_tokenizer_meta(folder: Path) -> dict[str, Any]:
    """The `meta` for the tokenizer.json in `folder`; empty if there is none.

    The begin-of-text token is the one that transformers prepends, which is set by the tokenizer's
    template. (If add_bos_token in tokenizer_config.json disagrees, transformers 5 ignores it.) The
    end-of-text tokens may be in any of four files, depending on the folder's author. All of them
    end a sample, and the first one ends a document.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        return {}
    require_file(path)
    settings = read_json(folder / "tokenizer_config.json")
    with naming(str(path), OSError, ValueError):
        content = path.read_text(encoding="utf-8-sig")
        prefix = settings.get("add_prefix_space")
        kind = str(settings.get("tokenizer_class")).removesuffix("Fast").removesuffix("Tokenizer")
        if kind in PREFIX_CLASSES and prefix is None:
            prefix = False
        if isinstance(prefix, bool):  # transformers 4 obeys it; 5 only for these classes
            parts = read_json(path)
            words = parts.get("pre_tokenizer")
            differs = isinstance(words, dict) and words.get("add_prefix_space") is not prefix
            if differs and words.get("type") == "ByteLevel":
                words["add_prefix_space"] = prefix
                content = json.dumps(parts)
        tokenizer = HFTokenizer(content)
    vocabulary = tokenizer.tokenizer.get_vocab(with_added_tokens=True)
    special = read_json(folder / "special_tokens_map.json")
    require_all_tokens(folder, (settings, special), vocabulary)
    given: dict[str, list[int]] = {}  # the ids of each file
    for name in ("config.json", "generation_config.json"):
        found = read_json(folder / name).get("eos_token_id")
        given[name] = found if isinstance(found, list) else [] if found is None else [found]
        for id in given[name]:
            if type(id) is not int or id not in range(tokenizer.vocab_size):
                raise UserError(
                    f"{folder / name}: eos_token_id={reprlib.repr(id)} is not one of the "
                    f"tokenizer's {tokenizer.vocab_size} ids: correct it there, or set it to null"
                )
    ends = [id for ids in given.values() for id in ids]
    before, after = added_by_template(tokenizer, path)
    names = [spelling(content.get("eos_token")) for content in (settings, special)]
    named = [vocabulary[name] for name in names if name in vocabulary]
    # a config.json may have transformers' default ids, which this tokenizer gives to other tokens
    usable = {*tokenizer.tokenizer.get_added_tokens_decoder()}
    if named:
        roles = [content.get(f"{role}_token") for content in (settings, special) for role in ROLES]
        confirmed = {*given["generation_config.json"]}
        usable -= {vocabulary.get(spelling(token)) for token in roles} - confirmed
        usable |= confirmed if confirmed & {*named} else set()  # ordinary text too: a line feed
        usable = usable - {*before, tokenizer.unknown()} | {*named}
    else:  # files without added tokens may have </s> or [EOS] as a word
        usable |= {id for name, id in vocabulary.items() if CONTROL.fullmatch(name)}
        usable = usable or {*ends}
    if ends and (named or ends[0] not in usable):
        for id in dict.fromkeys(id for id in ends if id not in usable):
            print(
                f"note: eos_token_id={id} in {folder} is {tokenizer.tokenizer.id_to_token(id)!r}, "
                "which ends no text: ignored"
            )
        ends = [id for id in ends if id in usable]
    ends = [*ends, *named] if {*ends} & {*named} else [*named, *ends]
    ends = list(dict.fromkeys(ends)) or after[:1]
    return tokenizer.meta() | {
        "begin_of_text": before[0] if before else None,
        "end_of_text": ends[0] if ends else None, "stop_tokens": ends,
    }  # fmt: skip


def spelling(token: Any) -> str | None:
    """The text of a token in one of transformers' files, where it may be an object."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def as_text(value: Any) -> Any:
    """Replace tokens that are objects, which transformers rejects in some places, by their text."""
    return [*map(as_text, value)] if isinstance(value, list) else spelling(value) or value


NAMED_TOKENS = (  # the keys of tokenizer_config.json and special_tokens_map.json that add tokens
    "added_tokens_decoder", "additional_special_tokens", "extra_special_tokens",
    "model_specific_special_tokens", *(f"{role}_token" for role in (*ROLES, "eos", "sep")),
)  # fmt: skip


def require_all_tokens(
    folder: Path, contents: tuple[dict[str, Any], ...], vocabulary: dict[str, int]
) -> None:
    """Raises UserError if transformers would add tokens that tokenizer.json lacks, from
    added_tokens.json or from the `contents` of other files."""
    found = [*read_json(folder / "added_tokens.json")]
    for content in contents:
        for tokens in (content.get(key) for key in NAMED_TOKENS):
            if isinstance(tokens, dict) and "content" not in tokens:
                tokens = [*tokens.values()]
            found += tokens if isinstance(tokens, list) else [tokens]
    names = dict.fromkeys(map(spelling, found))
    if lacking := [name for name in names if name and name not in vocabulary]:
        raise UserError(
            f"{folder / 'tokenizer.json'} lacks {reprlib.repr(lacking)}, which other files of the "
            "folder add: load the tokenizer with transformers' AutoTokenizer, and save it with "
            "save_pretrained"
        )


def added_by_template(tokenizer: HFTokenizer, path: Path) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer's template puts before and after a text. Raises UserError that names
    `path` if there are several before it, or some inside."""
    for text in ("a", "1", ".", *itertools.islice(tokenizer.tokenizer.get_vocab(), 1000)):
        try:
            encoding = tokenizer.tokenizer.encode(text)
        except Exception:  # a vocabulary without an unknown token
            continue
        except BaseException as error:  # a Rust library's panic: the template lacks a token
            if isinstance(error, KeyboardInterrupt):
                raise
            raise UserError(f"{path} has an invalid template: {error}") from None
        ids, mask = encoding.ids, encoding.special_tokens_mask  # 1: added by the template
        if 0 in mask:
            first, last = mask.index(0), len(ids) - mask[::-1].index(0)
            nameless = [id for id in ids[:first] if not tokenizer.tokenizer.id_to_token(id)]
            if first > 1 or 1 in mask[first:last] or nameless:
                raise UserError(
                    f"{path} has a template that is not supported: {first} tokens before a text "
                    "instead of at most one, tokens inside it, or ids without a token"
                )
            return ids[:first], ids[last:]
    return [], []


def write_hf_tokenizer(
    meta: dict[str, Any], folder: Path, pretrained_files: dict[str, Any] | None = None
) -> list[str]:
    """Write the tokenizer of `meta` in the format of transformers' AutoTokenizer. Its template
    prepends the begin-of-text token if and only if data and prompts were made with it. Returns the
    names of the files.

    pretrained_files: contents of the pretrained tokenizer's tokenizer_config.json and similar
    files, by name without .json: chat template, unknown token, more special tokens.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    pretrained_files = pretrained_files or {}
    tokenizer = from_meta(meta)
    begin, end = tokenizer.begin_of_text, tokenizer.end_of_text
    if isinstance(tokenizer, HFTokenizer):
        written = plain_tokenizer(tokenizer.content)
        first = [] if begin is None else [begin]
        if written.encode("").ids != first:
            names = [written.id_to_token(id) for id in first]
            parts = [re.sub("[:$]", "_", name) for name in names]  # which have a meaning there
            written.post_processor = processors.TemplateProcessing(
                single=[*parts, "$A"], pair=[*parts, "$A", "$B:0"],
                special_tokens=[{"id": parts[0], "ids": first, "tokens": names}] if first else [],
            )  # fmt: skip
    elif isinstance(tokenizer, CharTokenizer):
        ids = {character: i for i, character in enumerate(tokenizer.alphabet)}
        written = tokenizers.Tokenizer(models.WordLevel(ids, unk_token=""))
        every = tokenizers.Regex(r"[\s\S]")
        written.pre_tokenizer = pre_tokenizers.Split(every, behavior="isolated")
        written.decoder = decoders.Fuse()
        if end is not None:
            written.add_special_tokens(["<|endoftext|>"])
    else:
        if isinstance(tokenizer, GPT2Tokenizer):
            from tiktoken.load import read_file_cached

            names = "encoder.json", "vocab.bpe"
            vocab, merges = (read_file_cached(f"{GPT2_FILES}/{name}").decode() for name in names)
            vocab, pairs = json.loads(vocab), [tuple(x.split()) for x in merges.splitlines()[1:]]
        else:  # GPT-2's characters for bytes: printable ones, or the next from U+0100 on
            shown = pre_tokenizers.ByteLevel.alphabet()
            hidden = [byte for byte in range(256) if chr(byte) not in shown]
            vocab = {chr(256 + hidden.index(i) if i in hidden else i): i for i in range(256)}
            pairs = []
        # it decodes incomplete characters too
        written = tokenizers.ByteLevelBPETokenizer(vocab, pairs)
        written.add_special_tokens(["<|endoftext|>"])
    left_out = ("auto_map", "backend", "is_local", "processor_class",
                "added_tokens_decoder",  # tokenizer.json has them, maybe with other flags
                "split_special_tokens")  # prompts are read with special tokens  # fmt: skip
    given = {"padding_side": "left"} | pretrained_files.get("tokenizer_config", {})
    settings = {key: as_text(value) for key, value in given.items() if key not in left_out}
    if isinstance(settings.get("extra_special_tokens"), list):  # transformers 4 rejects it
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",  # reads tokenizer.json unchanged
        "model_input_names": ["input_ids", "attention_mask"],  # models reject token_type_ids
        "clean_up_tokenization_spaces": False,  # sample.py does not
        "add_bos_token": begin is not None,
        "add_eos_token": False,
    }
    if end is not None:
        settings["eos_token"] = settings.get("eos_token") or written.id_to_token(end)
        if not pretrained_files.get("tokenizer_config"):  # like GPT-2, use one token for both
            settings["bos_token"] = settings["eos_token"]
    if begin is not None:
        settings["bos_token"] = written.id_to_token(begin)
    before = json.loads(written.to_str())["pre_tokenizer"] or {}
    if "add_prefix_space" in before:  # otherwise transformers 4 uses its own default
        settings["add_prefix_space"] = before["add_prefix_space"]
    files = {"tokenizer.json": written.to_str(pretty=True)}
    files["tokenizer_config.json"] = json.dumps(settings, indent=2) + "\n"
    if special := pretrained_files.get("special_tokens_map"):
        special = {key: as_text(value) for key, value in special.items()}
        files["special_tokens_map.json"] = json.dumps(special, indent=2) + "\n"
    for name, text in pretrained_files.get(TEMPLATES, {}).items():
        files[f"{TEMPLATES}/{name}.jinja"] = text
    if template := pretrained_files.get("chat_template"):
        files["chat_template.jinja"] = template
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        with atomic_write(folder / name) as file:
            file.write(text.encode())
    return list(files)


def load_tokenizer(name: str, special_tokens: bool = False) -> Tokenizer:
    """The tokenizer for a prepare script's --tokenizer: gpt2, byte, or hf:PATH_OR_HUB_ID."""
    if name.startswith("hf:") and name != "hf:":
        source = re.sub(r"(^|/)tokenizer\.json$", "", name[3:]) or "."
        folder = find_folder(source, ["*.json", "tokenizer.model"])
        meta, own = hf_tokenizer_meta(folder), read_json(folder / "meta.json")  # a data set's
        own = own if own.get("tokenizer") == "hf" else {}
        if meta and own.get("json", meta["json"]) != meta["json"]:
            raise UserError(f"{source}: tokenizer.json and meta.json have two tokenizers: move one")
        meta = meta or own
        if not meta.get("json"):
            raise UserError(
                f"{source} has no tokenizer.json: load an older format, with the "
                "tokenizer_config.json that names its class, with transformers' AutoTokenizer, and "
                "save it with save_pretrained (pip install transformers sentencepiece)"
            )
        check_meta(meta, source)
        if meta.get("end_of_text") is None:
            print(
                f"warning: no file of {source} has an end-of-text token: documents will not be "
                "separated, and samples will only end at their maximum length"
            )
        if drops_characters(tokenizer := from_meta(meta | {"special_tokens": special_tokens})):
            print(
                f"warning: {source} drops characters that are not in its vocabulary: they make no "
                "tokens, but bits per byte counts them"
            )
        return tokenizer
    if name not in ("gpt2", "byte"):
        raise UserError(
            f"unknown tokenizer={name!r}: use gpt2, byte or hf:PATH_OR_HUB_ID, or with "
            "data/text/prepare.py char, bpe:SIZE (bpe:8192) or run:FOLDER"
        )
    return from_meta({"tokenizer": name, "special_tokens": special_tokens})


def drops_characters(tokenizer: HFTokenizer) -> bool:
    """Whether the tokenizer is a BPE without an unknown token that lacks some bytes or works on
    characters. (By default `tokenizers` trains a byte-level BPE with its texts' bytes only.)"""
    from tokenizers import pre_tokenizers

    content = json.loads(tokenizer.content)
    if content["model"].get("type") != "BPE" or content["model"].get("unk_token"):
        return False
    if "'ByteLevel'" in str([content.get(key) for key in ("normalizer", "pre_tokenizer")]):
        vocabulary = tokenizer.tokenizer.get_vocab(with_added_tokens=True)
        return not vocabulary.keys() >= {*pre_tokenizers.ByteLevel.alphabet()}
    return not content["model"].get("byte_fallback") or tokenizer.byte_ids is None


def same_tokenizer(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two `meta()` give the same ids for the same documents."""
    keys = ("tokenizer", "alphabet", "begin_of_text", "end_of_text")
    one, other = ({"tokenizer": "gpt2"} | meta for meta in (one, other))  # as in `from_meta`
    # texts of JSON may differ in spaces: exports have line feeds
    jsons = [json.loads(meta.get("json", "null")) for meta in (one, other)]
    return jsons[0] == jsons[1] and all(one.get(key) == other.get(key) for key in keys)


def is_count(value: object) -> bool:
    """Whether it is a non-negative integer of a plausible size."""
    return type(value) is int and 0 <= value < 2**53


def check_meta(meta: dict[str, Any], source: str, whole: bool = False) -> None:
    """Raises UserError with `source` and the key if `meta` is not valid for meta.json.

    whole: if it has a tokenizer, require the vocabulary size and dtype too, which prepare.py
    writes. Otherwise a misspelled key would mean GPT-2's vocabulary, or 16 bits instead of 32.
    """
    whole = whole and bool(meta.keys() & {"tokenizer", "alphabet", "json"})
    needed = {"tokenizer", "vocab_size", "dtype"} if whole else set()
    kind = str(meta.get("tokenizer"))
    needed.add({"char": "alphabet", "hf": "json"}.get(kind))
    for key, holds in (TOKENIZER_VALUES | DATA_VALUES).items():
        if (key in meta or key in needed) and not holds(meta.get(key)):
            flaw = f"has no valid value: {reprlib.repr(meta[key])}" if key in meta else "is missing"
            raise UserError(f'{source}: "{key}" {flaw}: prepare the data set again')
    least = len(meta.get("alphabet", "")) or 1
    characters, size = least + (meta.get("end_of_text") is not None), meta.get("vocab_size", least)
    sizes = {"byte": 257, "gpt2": 50257, "char": characters, "hf": len(meta.get("json", ""))}
    most = sizes.get(kind, 2**32)
    if not least <= size <= most:
        raise UserError(
            f'{source}: "vocab_size" is {size}, but its tokenizer has {least} to {most} ids: '
            "prepare the data set again"
        )


def from_meta(meta: dict[str, Any]) -> Tokenizer:
    """The tokenizer of `meta` (a data set's meta.json, or a checkpoint's copy of it).

    The default is GPT-2's, for nanoGPT's bare .bin files.
    """
    name, special_tokens = meta.get("tokenizer", "gpt2"), meta.get("special_tokens", False)
    if name == "char":
        return CharTokenizer(meta["alphabet"], ends=meta.get("end_of_text") is not None)
    if name == "byte":
        return ByteTokenizer()
    if name == "gpt2":
        return GPT2Tokenizer(special_tokens)
    if name == "hf":
        return HFTokenizer(
            meta["json"], meta.get("end_of_text"), meta.get("begin_of_text"),
            meta.get("stop_tokens", []), special_tokens,
        )  # fmt: skip
    raise UserError(f"unknown tokenizer {name!r}: use char, byte, gpt2 or hf")
