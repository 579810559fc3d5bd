"""An assignment asked in another dtype, for tests and benchmarks."""

from __future__ import annotations

import dataclasses

from grader.assignment import Assignment


def in_dtype(assignment: Assignment, dtype: str) -> Assignment:
    """The same assignment with everything that is asked in float32 asked in `dtype`: probes, memory and structure."""
    cases = (dataclasses.replace(one, dtype=dtype) if one.dtype == "float32" else one for one in assignment.cases)
    memory = assignment.memory
    return dataclasses.replace(
        assignment,
        cases=tuple(cases),
        memory=dataclasses.replace(memory, dtype=dtype) if memory is not None else None,
        structure=dataclasses.replace(assignment.structure, dtype=dtype),
    )
