"""How many CPUs may be used: affinity and the quotas of control groups, on made-up file systems."""

import os

import pytest
from kernel_support import run_ok

from fxsparse import _C

CPUS = len(os.sched_getaffinity(0))
needs_two = pytest.mark.skipif(CPUS < 2, reason="with one CPU every quota gives the same answer")


def write(root, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def v2(limits: dict[str, str], group: str = "/") -> dict[str, str]:
    files = {f"sys/fs/cgroup{path}/cpu.max": text for path, text in limits.items()}
    return {"proc/self/cgroup": f"0::{group}\n", **files}


def v1(quota: str, period: str, mount: str = "cpu,cpuacct", group: str = "/") -> dict[str, str]:
    folder = f"sys/fs/cgroup/{mount}{group}"
    return {
        "proc/self/cgroup": f"9:memory:/x\n4:cpu,cpuacct:{group}\n0::/\n",
        f"{folder}/cpu.cfs_quota_us": quota,
        f"{folder}/cpu.cfs_period_us": period,
    }


UNLIMITED = {
    "no files": {},
    "v2 max": v2({"": "max 100000\n"}),
    "v2 group without a file": v2({}, "/a/b"),
    "v2 nonsense": v2({"": "many some\n"}),
    "v2 zero period": v2({"": "100000 0\n"}),
    "v1 minus one": v1("-1\n", "100000\n"),
    "v1 empty": v1("", ""),
    "v1 of another controller": {
        "proc/self/cgroup": "4:cpuset:/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    },
    "large quota": v2({"": "100000000 100000\n"}),
    "broken lines": {"proc/self/cgroup": "nothing\n:\n0::\n"},
}


@pytest.mark.parametrize("files", UNLIMITED.values(), ids=UNLIMITED.keys())
def test_no_limit(tmp_path, files):
    assert _C.usable_cpus(write(tmp_path, files)) == CPUS


ONE = {
    "v2 whole": v2({"": "100000 100000\n"}),
    "v2 half": v2({"": "50000 100000\n"}),
    "v2 in a group": v2({"/a/b": "100000 100000\n"}, "/a/b"),
    "v2 in a group above": v2({"/a": "100000 100000\n", "/a/b": "max 100000\n"}, "/a/b"),
    "v2 host path in a container": v2({"": "100000 100000\n"}, "/docker/0123"),
    "v2 other period": v2({"": "25000 25000\n"}),
    "v1 at its own mount": v1("100000\n", "100000\n"),
    "v1 at the short mount": v1("100000\n", "100000\n", mount="cpu"),
    "v1 in a group": v1("30000\n", "100000\n", group="/docker/0123"),
    "hybrid": {
        "proc/self/cgroup": "4:cpu,cpuacct:/\n0::/a\n",
        "sys/fs/cgroup/unified/a/cpu.max": "100000 100000\n",
    },
}


@needs_two
@pytest.mark.parametrize("files", ONE.values(), ids=ONE.keys())
def test_limit_of_one(tmp_path, files):
    assert _C.usable_cpus(write(tmp_path, files)) == 1


@needs_two
def test_quota_is_rounded_up(tmp_path):
    assert _C.usable_cpus(write(tmp_path, v2({"": "110000 100000\n"}))) == 2


@needs_two
def test_affinity_is_honoured():
    script = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    assert run_ok(script + "print(_C.usable_cpus(), _C.get_num_threads())") == "1 1"
