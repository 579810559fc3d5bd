"""A tenth of benchmarks/hostile.py: correct files are never held, and hostile ones leave nothing behind.

Each correct file is graded once here and once in tests/examiner/test_corpus.py.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import hostile as benchmark


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_tenth_of_the_benchmark_finds_nothing_amiss():
    found = benchmark.run(n_honest=1, n_hostile=20, neighbours=("corpus-fork-bomb",))
    assert found.bad == []
    assert found.n_hostile == 20
    assert len(found.honest) >= 14
