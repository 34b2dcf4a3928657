"""dev/corpus.py: a corpus from a package index, here a local one."""

import hashlib
import http.server
import io
import json
import tarfile
import threading
import zipfile

import numpy as np
import pytest
from conftest import ROOT

LONG = "This sentence has more than forty characters, so repeats are looked for."
SOURCE = f'"""{LONG}"""\n\n\ndef f():\n        return 1  # {LONG} Twice.\n\n{LONG}\n'
FILES = {
    "a-1/docs/index.rst": 3 * f"{LONG}\n\n{LONG}\n\nA paragraph of its own, {'long ' * 20}.\n",
    "a-1/a.py": SOURCE,
    "a-1/tests/test_a.py": f"# {LONG} Of a test.\n" * 9,
    "a-1/latin.rst": b"\xe9" * 300,
    "a-1/greek.rst": "\u03b1" * 300,
}
DOCUMENTED = f"<p>{LONG}</p><p>Of a service &amp; more.</p>{LONG} Of a service, too."
MODEL = {"operations": [{"documentation": DOCUMENTED}, {"other": "not taken, whatever there is"}]}


def sdist():
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in FILES.items():
            content = text if isinstance(text, bytes) else text.encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def wheel():
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("b/model.json", json.dumps(MODEL) + "\n" * 200)
        archive.writestr("b-1.dist-info/METADATA.json", json.dumps(MODEL))
        archive.writestr("b/more.json", json.dumps({"documentation": "word " * 60}))
    return packed.getvalue()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A list of two packages, and a package index that this process serves."""
    files = {"a-1.tar.gz": sdist(), "b-1-py3-none-any.whl": wheel()}

    class Index(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.strip("/").split("/")[-1]
            content = files.get(name)
            if content is None:
                page = {"files": [{"filename": f, "url": f"/files/{f}"} for f in files
                                  if f.startswith(name)]}  # fmt: skip
                content = json.dumps(page).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple/")
    sums = [hashlib.sha256(content).hexdigest() for content in files.values()]
    listed = tmp_path / "list.txt"
    listed.write_text(
        f"# comment\ntrain a a-1.tar.gz {sums[0]} *.rst=text *.py=text\n"
        f"val b b-1-py3-none-any.whl {sums[1]} *.json=json:documentation\n"
    )
    yield listed, files
    server.shutdown()


def corpus(run, listed):
    out = listed.parent / "out"
    run("dev/corpus.py", f"--listed={listed}", f"--out={out}", f"--cache={out}/packages",
        "--tokenizer=byte")  # fmt: skip
    return [bytes(np.fromfile(out / f"{split}.bin", np.uint16)[:-1].astype(np.uint8)).decode()
            for split in ("train", "val")]  # fmt: skip


def test_a_corpus_comes_from_pinned_packages_without_what_repeats(run, index):
    train, val = corpus(run, index[0])
    assert train.count(LONG) == 3  # inside two other lines, and once on its own
    assert train.count("A paragraph of its own") == 1
    assert "\t\treturn 1" in train and "Of a test" not in train and "\u03b1" not in train
    assert val.startswith("Of a service & more.") and "not taken" not in val
    assert f"{LONG}\n" not in val  # it is in the training split


def test_a_package_that_is_another_one_is_refused(run, index):
    listed, files = index
    files["b-1-py3-none-any.whl"] += b"\0"
    with pytest.raises(ValueError, match="b-1-py3-none-any.whl does not have the checksum in"):
        corpus(run, listed)
    listed.write_text(listed.read_text().replace("b-1-py3", "b-2-py3"))
    with pytest.raises(ValueError, match="the package index has no b-2-py3-none-any.whl any more"):
        corpus(run, listed)
    assert not (listed.parent / "out" / "train.bin").exists()


def test_the_list_of_packages_is_whole():
    lines = (ROOT / "dev" / "corpus.txt").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    assert {f[0] for f in fields} == {"train", "val"} and len({f[1] for f in fields}) == len(fields)
    for _, name, file, checksum, *kinds in fields:
        assert len(checksum) == 64 and file.lower().startswith(name.replace("-", "_")[:4]) and kinds
