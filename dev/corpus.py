"""Make the text that docs/results.md measures learning on: the same bytes on every machine.

    python dev/corpus.py
    python dev/peers.py --data=data/manuals

It is documentation and sources of the packages in dev/corpus.txt, pinned there by file and
checksum, from Python's package index: 0.8 GB to download. Nothing is installed, and no code of
theirs runs. Validation is on packages that are not trained on. A paragraph that occurred before is
left out, and so is a line from its third time on, since generated documentation repeats itself. The
texts keep their own licences: publish this recipe, not what it makes.
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
import urllib.request
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urljoin

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import steady

steady.start_script()

from tqdm import tqdm

from configurator import configure
from steady import UserError
from steady.prepare import write_dataset
from steady.tokenizer import load_tokenizer

out = "data/manuals"  # folder of the data set
cache = "data/manuals/packages"  # folder that the packages are kept in
listed = "dev/corpus.txt"  # file that lists them
tokenizer = "gpt2"  # gpt2, byte, hf:PATH_OR_HUB_ID

CRC32 = {"train": 1349654367, "val": 2403437595}  # of the files that come of dev/corpus.txt
INDEX_TYPE = "application/vnd.pypi.simple.v1+json"  # PEP 691
REPEATS = 2  # of a line
LONG = 40  # characters of a line or paragraph that is looked at for repeats
SKIPPED = re.compile(  # tests, translations, copies of other packages, lists of files
    r"(^|/)(tests?|testing|test_?data|locales?|translations|_?vendor(ed)?|node_modules)/"
    r"|\.(dist|egg)-info/|/(requirements[^/]*|SOURCES|CMakeLists)\.txt$",
    re.IGNORECASE,
)
PYTHON_STRING = re.compile(r'#[^\n]*|"""(.*?)"""|\'\'\'(.*?)\'\'\'|"(?:\\.|[^"\\\n])*"'
                           r"|'(?:\\.|[^'\\\n])*'", re.DOTALL)  # fmt: skip
TAG = re.compile(r"<[^<>]{1,400}>")


class Package(NamedTuple):
    """A line of the list: what is taken of a file, by PATTERN=KIND, the first that fits."""

    split: str
    name: str
    file: str
    sha256: str
    kinds: dict[str, str]


def packages() -> list[Package]:
    lines = (ROOT / listed).read_text(encoding="utf-8").splitlines()
    found = []
    for line in lines:
        if line and not line.startswith("#"):
            *fields, kinds = line.split(maxsplit=4)
            found.append(Package(*fields, dict(kind.split("=", 1) for kind in kinds.split())))
    return found


def download(package: Package, index: str) -> Path:
    """The package's file, with the right checksum, from the cache or the index."""
    path = ROOT / cache / package.file
    if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != package.sha256:
        page = urllib.request.Request(f"{index}/{package.name}/", headers={"Accept": INDEX_TYPE})
        try:
            with urllib.request.urlopen(page, timeout=60) as answer:
                base, files = answer.url, json.load(answer)["files"]
            url = next((f["url"] for f in files if f["filename"] == package.file), None)
            if url is None:
                raise UserError(f"the package index has no {package.file} any more")
            with urllib.request.urlopen(urljoin(base, url), timeout=600) as answer:
                content = answer.read()
        except OSError as error:
            raise UserError(f"{package.file} cannot be had from {index}: {error}") from None
        if hashlib.sha256(content).hexdigest() != package.sha256:
            raise UserError(f"{package.file} does not have the checksum in {listed}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".tmp").write_bytes(content)
        path.with_suffix(".tmp").rename(path)
    return path


def package_index() -> str:
    """Where pip looks for packages on this machine."""
    pip = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    index = (
        os.environ.get("PIP_INDEX_URL")
        or subprocess.run(pip, capture_output=True, text=True).stdout.strip()
    )
    if not index:
        from pip._internal.models.index import PyPI

        index = PyPI.simple_url
    return index.rstrip("/")


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files in an archive, in the order of the names."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                yield name, archive.read(name)
    else:
        with tarfile.open(path) as archive:
            contents = {m.name: archive.extractfile(m).read() for m in archive if m.isfile()}
        yield from sorted(contents.items())


def text_of(content: str, kind: str) -> str:
    """What is taken of a file: all of it, its docstrings, or the strings of some keys in JSON."""
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
    """Without tags and entities of HTML, a line for each of its lines."""
    lines = html.unescape(TAG.sub("\n", markup)).split("\n")
    return "\n".join(filter(None, (" ".join(line.split()) for line in lines)))


def without_repeats(text: str, lines: Counter[bytes], paragraphs: Counter[bytes]) -> str:
    """`text` without what has occurred before; counts what it has."""
    kept = []
    for paragraph in re.split(r"\n[ \t]*\n", text):
        new = [line.rstrip() for line in paragraph.split("\n") if often(line, lines) <= REPEATS]
        if any(new) and often(" ".join(new), paragraphs) == 1:
            kept.append("\n".join(new).strip("\n"))
    return "\n\n".join(kept)


def often(text: str, seen: Counter[bytes]) -> int:
    """How often `text`, without regard to its spaces, has occurred; short ones count once."""
    words = " ".join(text.split())
    if len(words) < LONG:
        return 1
    key = hashlib.blake2b(words.encode(), digest_size=8).digest()
    seen[key] += 1
    return seen[key]


def with_tabs(line: str) -> str:
    """GPT-2's tokenizer makes a token of every space in an indentation."""
    spaces = len(line) - len(line.lstrip(" "))
    return "\t" * (spaces // 4) + line[spaces - spaces % 4 :]


def documents(split: str) -> Iterator[str]:
    """The texts of a split's packages, one for each file."""
    for package in (p for p in packages() if p.split == split):
        for name, content in members(ROOT / cache / package.file):
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
seen_lines: Counter[bytes] = Counter()
seen_paragraphs: Counter[bytes] = Counter()
index = package_index()
for package in tqdm(packages(), "downloading", unit="package"):
    download(package, index)
splits = {split: documents(split) for split in ("train", "val")}
write_dataset(ROOT / out, load_tokenizer(tokenizer), splits)
found = json.loads((ROOT / out / "meta.json").read_text(encoding="utf-8"))["crc32"]
if (listed, tokenizer) == ("dev/corpus.txt", "gpt2") and found != CRC32:
    raise UserError(f"{out} is not what docs/results.md was measured on: {found}, not {CRC32}")
