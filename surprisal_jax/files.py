"""Files on disk, written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """`write_text` of a value as JSON.

    Raises:
      ValueError: a NaN or an infinity, which JSON has no number for.
    """
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of a text in UTF-8, with the line ends that it has."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write to a temporary file beside the target, flush it to disk, and rename it: a reader never sees half a file."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
