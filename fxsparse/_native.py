"""Loads the compiled core: the torch operators (``torch.ops.fxsparse``) and the module ``_C``."""

from pathlib import Path

import torch

_HERE = Path(__file__).resolve().parent


def _missing(detail: str) -> ImportError:
    return ImportError(
        f"fxsparse at {_HERE} has no compiled core ({detail}). If this is the source folder, install it "
        "first: `pip install --no-build-isolation -e .` from the clone's root (or `make install`); "
        "if fxsparse is already installed elsewhere, run Python from another folder."
    )


_LIBRARY = _HERE / "libfxsparse.so"
if not _LIBRARY.is_file():
    raise _missing("libfxsparse.so is not there")
try:
    torch.ops.load_library(_LIBRARY)
except OSError as error:
    raise _missing(f"libfxsparse.so does not load: {error}") from error
try:
    from . import _C  # type: ignore[attr-defined]
except ImportError as error:
    raise _missing(f"_C does not load: {error}") from error

__all__ = ["_C"]
