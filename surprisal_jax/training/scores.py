"""The score cache: what the reference says of every example, once, in a file keyed by what it depends on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from surprisal_jax.config import InputError
from surprisal_jax.files import write_json

_MANIFEST = "manifest.json"


class ScoreCache:
    """One named array, such as `base_token_nll`, float32 [N, S-1] as a memory-mapped `.npy`, and a manifest with its
    identity and the rows that are done.

    Rows start as NaN. A range of rows reaches the disk before the manifest counts it, so scoring goes on where it was
    interrupted.
    """

    def __init__(self, directory: Path, name: str, identity: Mapping[str, Any], shape: tuple[int, int]) -> None:
        """Open the cache, or create it.

        Raises:
          InputError: the directory holds scores of something else; both sides are named.
        """
        self._directory = directory
        self._path = directory / f"{name}.npy"
        self._identity = {**identity, "shape": list(shape), "dtype": "float32"}
        self.rows_done = 0
        directory.mkdir(parents=True, exist_ok=True)
        manifest_path = directory / _MANIFEST
        if manifest_path.exists():
            manifest = json.loads(manifest_path.read_text())
            for key, value in self._identity.items():
                if manifest["identity"].get(key) != value:
                    raise InputError(
                        f"{manifest_path}: {key}: got {manifest['identity'].get(key)!r}, expected {value!r};"
                        " move the directory away"
                    )
            self.rows_done = int(manifest["rows_done"])
            self._array = np.lib.format.open_memmap(self._path, mode="r+")
        else:
            # The manifest comes last: a cache without one was never opened for writing, and is made again.
            self._array = np.lib.format.open_memmap(self._path, mode="w+", dtype=np.float32, shape=shape)
            self._array[:] = np.nan
            self._array.flush()
            self._write_manifest()
        if self._array.shape != shape or self._array.dtype != np.float32:
            raise InputError(
                f"{self._path}: got {self._array.dtype} {self._array.shape}, expected float32 {shape};"
                " move the directory away"
            )

    def append(self, values: np.ndarray) -> None:
        """The next rows, in order."""
        stop = self.rows_done + len(values)
        self._array[self.rows_done : stop] = values
        self._array.flush()
        self.rows_done = stop
        self._write_manifest()

    def read(self) -> np.ndarray:
        """All rows, in memory.

        Raises:
          InputError: rows that were never scored.
        """
        values = np.array(self._array)
        missing = np.isnan(values).any(axis=1)
        if self.rows_done != len(values) or missing.any():
            raise InputError(
                f"{self._path}: row {int(np.argmax(missing))}: got NaN, expected a score of the reference;"
                " move the directory away"
            )
        return values

    def _write_manifest(self) -> None:
        write_json(self._directory / _MANIFEST, {"identity": self._identity, "rows_done": self.rows_done})
