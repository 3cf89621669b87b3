"""The options of ``fxsparse.compile``: one checked, frozen dataclass."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

CAPTURES = ("auto", "trace", "export", "modules")
PREFERS = ("memory", "latency")


@dataclass(frozen=True)
class Options:
    """Checked options; see :func:`fxsparse.compile` for their meaning."""

    threshold: float
    include: tuple[str, ...] | None
    exclude: tuple[str, ...]
    min_elements: int
    batch_hint: int | None
    threads: int | Mapping[str, int] | None
    prefer: str

    @classmethod
    def checked(
        cls,
        *,
        threshold: float = 0.5,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        min_elements: int = 4096,
        values: torch.dtype | None = None,
        batch_hint: int | None = None,
        threads: int | Mapping[str, int] | None = None,
        prefer: str = "memory",
    ) -> Options:
        """Build the options, or raise one error that names the option, what it takes and what came."""
        if isinstance(threshold, bool) or not isinstance(threshold, numbers.Real):
            raise TypeError(f"threshold: expected a number in [0, 1], got {threshold!r}")
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold: expected a sparsity in [0, 1], got {threshold!r}")
        if isinstance(min_elements, bool) or not isinstance(min_elements, numbers.Integral):
            raise TypeError(f"min_elements: expected an int, got {min_elements!r}")
        if min_elements < 0:
            raise ValueError(f"min_elements: expected 0 or more, got {min_elements}")
        check_unsupported(values, batch_hint, prefer)
        if isinstance(threads, Mapping):
            for pattern, count in threads.items():
                check_threads(count, f"threads[{pattern!r}]", optional=False)
            _patterns("threads", tuple(threads))
        else:
            check_threads(threads)
        return cls(
            float(threshold),
            None if include is None else _patterns("include", include),
            _patterns("exclude", exclude),
            int(min_elements),
            batch_hint,
            dict(threads) if isinstance(threads, Mapping) else threads,
            prefer,
        )

    def check_patterns(self, paths: Sequence[str]) -> None:
        """Raise ``ValueError`` for a pattern that matches none of the weight paths."""
        threads = tuple(self.threads) if isinstance(self.threads, Mapping) else ()
        for option, patterns in (
            ("include", self.include or ()),
            ("exclude", self.exclude),
            ("threads", threads),
        ):
            for pattern in patterns:
                if not matches(pattern, paths):
                    raise ValueError(
                        f"{option}: the pattern {pattern!r} matches no weight path; {_closest(pattern, paths)}"
                    )

    def asks_for(self, path: str) -> bool:
        """Whether an ``include`` pattern names the weight at ``path``."""
        return self.include is not None and any(matches(p, [path]) for p in self.include)

    def threads_for(self, paths: Sequence[str]) -> tuple[int | None, set[int]]:
        """The thread limit of a weight under all its ``paths``, and the distinct limits that matched."""
        if not isinstance(self.threads, Mapping):
            return self.threads, set()
        found = [count for pattern, count in self.threads.items() if matches(pattern, paths)]
        return (found[0] if found else None), set(found)


def _closest(pattern: str, paths: Sequence[str]) -> str:
    if not paths:
        return "the model has no weights to match"
    close = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.3)
    return f"closest: {', '.join(close)}" if close else f"there are {', '.join(paths[:3])}, ..."


def matches(pattern: str, paths: Iterable[str]) -> bool:
    """Whether the ``fnmatch`` pattern (case counts) matches any of the paths."""
    return any(fnmatchcase(path, pattern) for path in paths)


def check_capture(capture: str, has_inputs: bool) -> None:
    if capture not in CAPTURES:
        raise ValueError(
            f"capture: expected one of {', '.join(map(repr, CAPTURES))}, got {capture!r}"
        )
    if capture == "export" and not has_inputs:
        raise ValueError(
            "capture='export': expected example_inputs to export the model with, got none"
        )


def check_threads(threads: object, option: str = "threads", optional: bool = True) -> None:
    if threads is None and optional:
        return
    if isinstance(threads, bool) or not isinstance(threads, int):
        raise TypeError(f"{option}: expected an int of 1 or more, got {threads!r}")
    if not 1 <= threads < 2**31:
        raise ValueError(f"{option}: expected 1 or more, got {threads}")


def check_unsupported(values: object, batch_hint: object, prefer: object) -> None:
    """Check the options that choose how a weight is stored."""
    if values is not None:
        if not isinstance(values, torch.dtype):
            raise TypeError(f"values: expected None or a torch.dtype, got {values!r}")
        raise NotImplementedError(
            f"values={values} is not available yet: nonzeros are stored in the weight's own dtype (values=None)"
        )
    if batch_hint is not None:
        if isinstance(batch_hint, bool) or not isinstance(batch_hint, int):
            raise TypeError(f"batch_hint: expected a number of rows, got {batch_hint!r}")
        if batch_hint < 1:
            raise ValueError(f"batch_hint: expected 1 or more rows, got {batch_hint}")
    if prefer not in PREFERS:
        raise ValueError(f"prefer: expected one of {', '.join(map(repr, PREFERS))}, got {prefer!r}")


def _patterns(option: str, patterns: Sequence[str]) -> tuple[str, ...]:
    found = None if isinstance(patterns, str) or not isinstance(patterns, Iterable) else [*patterns]
    if found is None or not all(isinstance(pattern, str) for pattern in found):
        raise TypeError(f"{option}: expected a sequence of fnmatch patterns, got {patterns!r}")
    return tuple(found)
