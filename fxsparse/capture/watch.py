"""What runs while a model is captured."""

from __future__ import annotations

import enum
import functools
import inspect
import os
import sys
import sysconfig
import types
from typing import Any

import torch
from torch import fx

# Code that needs no audit: torch (leaves, and what looks at proxies on fx's behalf), Python's own
# library, and this package.
_KNOWN = tuple(
    folder + os.sep
    for folder in (
        os.path.dirname(torch.__file__),
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        sysconfig.get_path("stdlib"),
    )
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

_LIBRARY = sysconfig.get_path("stdlib") + os.sep

#: Types of arguments that a tensor in the graph cannot hide in.
_PLAIN = (bool, int, float, complex, str, type, torch.dtype, torch.device, torch.nn.Module)

#: Modes of torch that forward may ask for: a graph keeps the answer.
_MODES = frozenset(
    map(id, (torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.is_autocast_enabled))
)


class Watch:
    """Notes, while entered, which of somebody's own functions run, each with the names of the
    arguments that are no tensor in any call (``codes``), to which functions of Python's library they
    hand tensors (``handed``), and which modes of torch they ask for (``asked``). ``blind`` under a
    profiler that cannot be set again from here, such as cProfile."""

    def __init__(self) -> None:
        self.codes: dict[types.CodeType, frozenset[str]] = {}
        self.handed: set[str] = set()
        self.asked: set[str] = set()
        self.blind = False

    def __enter__(self) -> Watch:
        self._outer = sys.getprofile()
        self.blind = self._outer is not None and not callable(self._outer)
        if not self.blind:
            sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        if not self.blind:
            sys.setprofile(self._outer)

    def _on_event(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            if needs_audit(frame.f_code):
                # fx looks through a module's attributes for tensors: what they do is not forward's.
                asker: types.FrameType | None = frame
                while asker is not None and asker.f_code.co_name == "__getattribute__":
                    asker = asker.f_back
                if asker is not None and needs_audit(asker.f_code):
                    known = _known_names(frame)
                    self.codes[frame.f_code] = known & self.codes.get(frame.f_code, known)
            elif _is_library(frame.f_code.co_filename) and _takes_a_tensor(frame):
                self.handed.add(frame.f_code.co_name)
        elif event == "c_call" and id(argument) in _MODES and needs_audit(frame.f_code):
            self.asked.add(argument.__name__)


@functools.lru_cache(maxsize=4096)
def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARY) and not any(folder in file for folder in _INSTALLED)


def _takes_a_tensor(frame: types.FrameType) -> bool:
    """Whether somebody's own function calls this one with a tensor: it may ask what that is."""
    asker = frame.f_back
    if asker is None or not needs_audit(asker.f_code):
        return False
    return any(isinstance(value, fx.Proxy) for value in frame.f_locals.values())


def _known_names(frame: types.FrameType) -> frozenset[str]:
    """What :func:`.audit.objection` wants to know of a call that begins."""
    code, values = frame.f_code, frame.f_locals
    known = {n for n in arguments(code) if n in values and _is_plain(values[n])}
    if not isinstance(values.get("self"), (fx.Proxy, torch.Tensor, type(None))):
        known.add("self")
    if getattr(frame.f_globals.get(code.co_name), "__code__", None) is code:
        known.add(code.co_name)
    return enumerations(code, frame.f_globals) | known


def arguments(code: types.CodeType) -> frozenset[str]:
    """The names of a function's arguments."""
    more = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + more])


def enumerations(code: types.CodeType, names: dict[str, Any]) -> frozenset[str]:
    """The names of global enumerations in a function: they do not change."""
    return frozenset(n for n in code.co_names if isinstance(names.get(n), enum.EnumMeta))


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, fx.Proxy):
        return getattr(type(value), "is_constant", False)
    return value is None or isinstance(value, _PLAIN)


def needs_audit(code: types.CodeType) -> bool:
    """Whether a function is somebody's own: its control flow is not known."""
    if not _is_foreign(code.co_filename):
        return False
    if code.co_name.startswith("<") and code.co_name != "<lambda>":
        return False  # a comprehension: read with the function around it
    # not the constructor of a namedtuple
    return not (code.co_filename == "<string>" and code.co_varnames[:1] == ("_cls",))


@functools.lru_cache(maxsize=4096)
def _is_foreign(file: str) -> bool:
    if any(folder in file for folder in _INSTALLED):
        return not file.startswith(_KNOWN[:2])
    return not file.startswith((*_KNOWN, "<frozen"))
