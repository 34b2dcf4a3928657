"""Download tiny Shakespeare. Its two data sets differ only in their tokenizer."""

import hashlib
import urllib.error
import urllib.request
from pathlib import Path

from steady import UserError
from steady.folder import naming

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def tiny_shakespeare(local: str = "") -> str:
    """Read the text (1.1 million characters) from `local`, or download and verify it."""
    if local:
        with naming(f"cannot read --input={local}", OSError, UnicodeDecodeError):
            return Path(local).read_text(encoding="utf-8-sig")
    try:
        with urllib.request.urlopen(URL, timeout=30) as response:
            content = response.read()
    except (urllib.error.URLError, OSError) as error:
        raise UserError(
            f"cannot download {URL} ({getattr(error, 'reason', error)}); "
            "download it some other way and pass --input=FILE"
        ) from None
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        raise UserError(f"{URL} has checksum {found}, expected {SHA256}")
    return content.decode("utf-8")
