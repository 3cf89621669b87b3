"""What runs while a model is captured."""

from __future__ import annotations

import os
import sys
import sysconfig
import types
from typing import Any

import torch

# Code that needs no audit: torch (leaves, and what looks at proxies on fx's behalf), Python's own
# library, and this package.
_KNOWN = tuple(
    folder + os.sep
    for folder in (
        os.path.dirname(torch.__file__),
        os.path.dirname(os.path.abspath(__file__)),
        sysconfig.get_path("stdlib"),
    )
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

#: Modes of torch that forward may ask for: a graph keeps the answer.
_MODES = frozenset(
    map(id, (torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.is_autocast_enabled))
)


class Watch:
    """Notes, while entered, which of somebody's own functions run (``codes``) and which modes of
    torch they ask for (``asked``). ``blind`` under a profiler that cannot be set again from here,
    such as cProfile."""

    def __init__(self) -> None:
        self.codes: set[types.CodeType] = set()
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
                    self.codes.add(frame.f_code)
        elif event == "c_call" and id(argument) in _MODES and needs_audit(frame.f_code):
            self.asked.add(argument.__name__)


def needs_audit(code: types.CodeType) -> bool:
    """Whether a function is somebody's own: its control flow is not known."""
    file = code.co_filename
    if code.co_name.startswith("<") and code.co_name != "<lambda>":
        return False  # a comprehension: read with the function around it
    if file == "<string>" and code.co_varnames[:1] == ("_cls",):
        return False  # the constructor of a namedtuple
    if any(folder in file for folder in _INSTALLED):
        return not file.startswith(_KNOWN[:2])
    return not file.startswith((*_KNOWN, "<frozen"))
