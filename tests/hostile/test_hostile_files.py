"""Every hostile file of the table gets what the table says, for the reason that it says, and no point too much."""

import tomllib
from pathlib import Path

import pytest
from hostile_cases import EARNS, HERE, HOLDS, complaints, hostile, in_interpreter, programs, undeserved

CORPUS = HERE.parent / "corpus"
CASES = hostile()
# the lists of what was seen on graders of kernels, and of what programs do to a host; one word of each entry is enough
EXPLOITS = (
    "patched timer", "sys.modules", "rewriting the evaluator", "forging the result pipe", "os._exit(0)", "grandchild",
    "outlives its timeout", "more than 64 KiB", "seed read", "data_ptr", "hash of the contents", "work done in warm-up",
    "batch-and-skip", "call-order", "lazy tensor", "side stream", "background thread", "stale allocator", "gc scan",
    "importing the reference", "behind a decoy", "mutated inputs", "precision downgrade", "degenerate inputs",
    "shape specialisation", "subsampled", "L2 persistence", "slow warm-up", "slowing a baseline", "CUDA graph",
    "patched symbols", "geometric mean", "poisoned shared reference", "pickle", "network tunnels",
    "assembled at run time", "before it was counted", "behind the inputs", "memory of the host", "made wrong",
    "until the inputs appear", "a slow pilot", "at timed sizes alone", "after they were looked at", "timed alone",
)  # fmt: skip
KINDS = (
    "fork and thread bombs", "malloc", "mmap", "memfd", "disk and inode fill", "stdout and stderr floods",
    "compiler output", "daemons", "signal-ignoring", "TCP, unix, abstract, UDP, netlink and vsock", "ptrace",
    "process_vm_readv", "/proc walks", "symlinks in the work folder", "raw system calls", "nested JSON",
    "oversized frames", "file-descriptor floods", "forged results",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in in_interpreter()])
def test_a_hostile_file_gets_what_it_must_and_no_point_more(case, grade, honest_points):
    examination, graded = grade(case)
    assert complaints(case, examination, graded) == [], case.by
    assert undeserved(case, graded, honest_points) == 0
    assert examination.isolation.level == "full"


def test_every_exploit_and_every_kind_of_program_has_a_case_of_its_own():
    own = [case.tries for case in CASES if not case.file]
    assert [name for name in EXPLOITS if not any(name in tries for tries in own)] == []
    everything = [*(case.tries for case in CASES), *(row["tries"] for row in programs().values())]
    assert [name for name in KINDS if not any(name in tries for tries in everything)] == []


def test_the_table_and_the_folders_name_the_same_files():
    own = {case.name for case in CASES if not case.file}
    assert own == {path.stem for path in (HERE / "files").glob("*.py")}
    expected = tomllib.loads((CORPUS / "expected.toml").read_text())
    from_corpus = {Path(case.file).name for case in CASES if case.file}
    assert from_corpus == {name.removeprefix("hostile/") for name in expected if name.startswith("hostile/")}


def test_each_case_says_what_must_hold_and_leaves_a_trace_to_check():
    for case in CASES:
        assert case.holds in HOLDS, case.name
        assert case.earns in EARNS, case.name
        traces = (case.evidence, case.failure, case.faults, case.checks, case.shows, case.compiles, case.on_gpu)
        no_trace_needed = case.holds in ("contained", "no-faster", "wrong") or case.memory
        assert any(traces) or no_trace_needed, case.name


def test_the_corpus_and_the_table_agree_on_what_is_accepted():
    expected = tomllib.loads((CORPUS / "expected.toml").read_text())
    for case in CASES:
        if case.file:
            want = expected[f"hostile/{Path(case.file).name}"]
            words = {want["verdict"], *want.get("accept", ())}
            words |= {"held"} if "cheat" in words else set()
            words |= {"partial"} if "full" in words else set()
            assert set(case.verdicts) <= words, case.name
