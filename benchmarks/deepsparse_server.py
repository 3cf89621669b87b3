"""DeepSparse for ``peers.py``: ``deepsparse_server.py MODEL.onnx FOLDER``, run by a Python that has it.

Reads x.npy of the folder and writes y.npy, then says how many megabytes the process grew, and answers
every line of input by one run.
"""

import ctypes
import os
import sys

os.environ.update(NM_LOGGING_LEVEL="error", NM_DISABLE_ANALYTICS="1")
out = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # the engine prints a banner

import deepsparse  # noqa: E402
import numpy  # noqa: E402


def resident_bytes() -> int:
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(file: str, folder: str) -> None:
    before = resident_bytes()
    engine = deepsparse.Engine(model=file, batch_size=1, num_cores=1)
    x = [numpy.load(folder + "/x.npy")]
    for _ in range(3):
        (y,) = engine.run(x, val_inp=False)
    numpy.save(folder + "/y.npy", y)
    print((resident_bytes() - before) / 1e6, file=out)
    for _ in sys.stdin:
        engine.run(x, val_inp=False)
        print(0, file=out)


main(*sys.argv[1:])
