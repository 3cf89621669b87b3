"""The thread pool: right under concurrency, fork and exit; quiet when idle."""

import pytest
import torch
from kernel_support import run_ok

# A weight large enough for eight threads, its result on one, and a call.
SETUP = """
import os, signal, threading, time
torch.set_num_threads(1)
torch.manual_seed(0)
_C.set_num_threads(1)
weight = torch.randn(1000, 800).where(torch.rand(1000, 800) < 0.5, 0.0)
packed, x = pack(weight), torch.randn(20, 800)
def call(threads=0, more=False):
    return torch.ops.fxsparse.linear(x, packed, None, 1000, 800, torch.float32, threads, more)
def workers():
    names = (open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task"))
    return sum(name == "fxsparse" for name in names)
expected = call(1)
check_product(expected, x, weight)
_C.set_num_threads(4)
"""


def test_workers_are_made_when_needed_and_kept():
    script = """
assert workers() == 0
assert torch.equal(call(), expected)
assert workers() == 3
_C.set_num_threads(2)
assert torch.equal(call(), expected)
_C.set_num_threads(6)
assert torch.equal(call(), expected)
assert workers() == 5
"""
    run_ok(SETUP + script)


def test_threads_is_an_upper_bound():
    run_ok(SETUP + "assert torch.equal(call(2), expected) and workers() == 1")


def test_what_follows_does_not_change_the_result():
    script = """
for i in range(200):
    assert torch.equal(call(more=i % 2 == 0), expected)
    assert torch.equal(call(3, more=i % 3 == 0), expected)
    time.sleep(i * 1e-6)
"""
    run_ok(SETUP + script)


def test_empty_jobs():
    script = """
for more in (False, True):
    for threads in (1, 2, 4):
        _C.run_nothing(threads, more, 100)
assert torch.equal(call(), expected) and workers() == 3
"""
    run_ok(SETUP + script)


def test_small_work_stays_on_one_thread():
    script = """
small = pack(torch.eye(64))
for _ in range(100):
    torch.ops.fxsparse.linear(torch.randn(1, 64), small, None, 64, 64, torch.float32, 0)
assert workers() == 0
"""
    run_ok(SETUP + script)


def test_many_python_threads_call_at_once():
    script = """
wrong = []
def loop():
    for i in range(100):
        if not torch.equal(call(more=i % 3 > 0), expected):
            wrong.append(1)
callers = [threading.Thread(target=loop, daemon=True) for _ in range(4)]
[t.start() for t in callers]; [t.join() for t in callers]
assert not wrong
"""
    run_ok(SETUP + script)


def test_the_size_may_change_while_calls_run():
    script = """
wrong, stop = [], threading.Event()
def loop():
    while not stop.is_set():
        for more in (True, False):
            if not torch.equal(call(more=more), expected):
                wrong.append(1)
callers = [threading.Thread(target=loop, daemon=True) for _ in range(2)]
[t.start() for t in callers]
for i in range(300):
    _C.set_num_threads(1 + i % 7)
    time.sleep(0.001)
stop.set(); [t.join() for t in callers]
assert not wrong
"""
    run_ok(SETUP + script)


def test_fork_while_other_threads_call():
    """Each child gets a pool of its own, whatever the parent's threads were doing."""
    script = """
stop = threading.Event()
def loop():
    while not stop.is_set():
        call(more=True)
callers = [threading.Thread(target=loop, daemon=True) for _ in range(2)]
[t.start() for t in callers]
for _ in range(20):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        ok = torch.equal(call(), expected) and workers() == 3
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
stop.set(); [t.join() for t in callers]
assert torch.equal(call(), expected)
"""
    run_ok(SETUP + script)


def test_fork_during_the_first_call():
    """A call that is made when fork has begun: its threads are not the child's either."""
    script = """
import ctypes
libc = ctypes.CDLL(None)
Handler = ctypes.CFUNCTYPE(None)
first = Handler(lambda: (call(), None)[1])
libc.__register_atfork(first, Handler(), Handler(), None)
child = os.fork()
if child == 0:
    signal.alarm(20)
    ok = torch.equal(call(), expected) and workers() == 3
    os._exit(0 if ok else 1)
assert workers() == 3
assert os.waitpid(child, 0)[1] == 0
"""
    run_ok(SETUP + script)


def test_grandchildren():
    script = """
call()
def nest(depth):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        ok = torch.equal(call(), expected)
        if depth:
            ok = ok and nest(depth - 1) == 0
        os._exit(0 if ok else 1)
    return os.waitpid(child, 0)[1]
assert nest(3) == 0
"""
    run_ok(SETUP + script)


def test_exit_is_clean():
    """Exit handlers may still call, and nothing waits for the workers."""
    script = """
import atexit
atexit.register(lambda: print(torch.equal(call(more=True), expected), flush=True))
call()
"""
    assert run_ok(SETUP + script, timeout=20) == "True"


def test_calls_from_exit_handlers_of_the_process():
    """They run after the main thread's thread_local objects are destroyed."""
    script = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
size = 20 * 800 * 4 + 4096
def late(_):
    others = [libc.malloc(size) for _ in range(4)]  # what was freed may be anybody's now
    [ctypes.memset(block, 7, size) for block in others]
    right = torch.equal(call(1), expected)
    intact = all(ctypes.string_at(block, size) == bytes([7]) * size for block in others)
    os._exit(0 if right and intact else 1)
handler = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(late)
libc.__cxa_atexit(handler, None, None)
call(1)
libc.exit(2)
"""
    run_ok(SETUP + script, timeout=20)


def test_ended_threads_leave_no_buffers():
    script = """
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
weight = torch.zeros(16, 100_000).fill_diagonal_(1)
packed, x = pack(weight), torch.randn(8, 100_000)  # 3 MB of input to each thread
def wide():
    torch.ops.fxsparse.linear(x, packed, None, 16, 100_000, torch.float32, 1)
def one_thread():
    thread = threading.Thread(target=wide)
    thread.start(); thread.join()
one_thread()
before = resident()
for _ in range(30):
    one_thread()
assert resident() - before < 30e6
"""
    run_ok(SETUP + script)


def test_wide_gradients_leave_no_large_buffer():
    script = """
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
weight = torch.randn(16, 200_000).where(torch.rand(16, 200_000) < 0.1, 0.0)
packed, grad = pack(weight), torch.randn(32, 16)
out = torch.full((32, 200_000), float("nan"))  # 26 MB
def run(isa):
    _C.run_kernel_transposed(isa, packed.data_ptr(), packed.numel(), grad.data_ptr(), 16, 32,
                             out.data_ptr(), 200_000, 1)
before = resident()
run(_C.isa())
assert resident() - before < 10e6
check_product(out, grad, weight.T)
"""
    run_ok(SETUP + script)


@pytest.mark.parametrize("more", [False, True])
def test_idle_workers_use_no_cpu(more):
    """Even where the job that was promised does not come."""
    script = f"""
for _ in range(10):
    call(more={more})
time.sleep(0.05)
before = time.process_time()
time.sleep(0.5)
print(time.process_time() - before)
"""
    assert float(run_ok(SETUP + script)) < 0.02


def test_workers_run_where_they_may():
    """Off the caller's CPU where there is another, and never where they were not allowed to."""
    script = """
def worker_tasks():
    for task in os.listdir("/proc/self/task"):
        if open(f"/proc/self/task/{task}/comm").read().strip() == "fxsparse":
            yield int(task)
def call_often():
    for _ in range(20):
        assert torch.equal(call(), expected)
        time.sleep(0.001)
allowed = os.sched_getaffinity(0)
call_often()
for task in worker_tasks():
    narrowed = os.sched_getaffinity(task)
    assert narrowed <= allowed and len(narrowed) >= max(len(allowed) - 1, 1)
    chosen = min(allowed - narrowed, default=min(allowed))
    os.sched_setaffinity(task, {chosen})
    call_often()
    assert os.sched_getaffinity(task) == {chosen}
"""
    run_ok(SETUP + script)


def test_more_threads_than_cpus():
    """On one CPU a thread that is waited for may not be running: nobody may spin for long."""
    script = """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
_C.set_num_threads(8)
begin = time.time()
for _ in range(200):
    assert torch.equal(call(), expected)
print(time.time() - begin)
"""
    assert float(run_ok(SETUP + script)) < 10


FLUSH = """
# Products are denormal: 0 under flush-to-zero, in every row, whichever thread computes it.
tiny = torch.finfo(torch.float32).smallest_normal
weight = torch.full((4000, 300), tiny / 4)
packed, x = pack(weight), torch.full((1, 300), 1 / 512)
def small(threads):
    return torch.ops.fxsparse.linear(x, packed, None, 4000, 300, torch.float32, threads)
for flush in (True, False, True, False):
    assert torch.set_flush_denormal(flush)
    for _ in range(50):
        y = bits(small(4))  # as integers: a comparison of floats would itself flush
        assert (y == 0).all() if flush else (y > 0).all()
assert workers() == 3
"""


@pytest.mark.skipif(
    not torch.set_flush_denormal(False), reason="this CPU cannot flush denormals to zero"
)
def test_workers_share_the_callers_floating_point_mode():
    run_ok(SETUP + FLUSH)


def test_signals_go_to_the_program_not_to_workers():
    script = """
call()
blocked = set()
for task in os.listdir("/proc/self/task"):
    status = open(f"/proc/self/task/{task}/status").read()
    if open(f"/proc/self/task/{task}/comm").read().strip() == "fxsparse":
        mask = int(status.split("SigBlk:")[1].split()[0], 16)
        blocked.add(mask >> (signal.SIGINT - 1) & 1)
assert blocked == {1}
"""
    run_ok(SETUP + script)


def test_torch_keeps_its_own_threads():
    script = """
before = torch.get_num_threads()
call()
assert torch.get_num_threads() == before
"""
    run_ok(SETUP + script)


def test_scripts_can_fail():
    with pytest.raises(AssertionError, match="exit code 1"):
        run_ok(SETUP + "assert workers() == 17")
