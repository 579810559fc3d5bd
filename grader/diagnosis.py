"""What is wrong with a hand-in, in words a student can act on, and which facts show it.

A label is given only when the facts single it out. Otherwise the sentence says what is known: where the first wrong
element is, which rows, which inputs, whether errors grow, whether two runs differ. Nothing here quotes a hidden probe.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from grader.assignment import Assignment, Case
from grader.measurement import (
    Audit,
    Examination,
    Failure,
    FailureKind,
    Finding,
    MistakeMatch,
    MistakeOnProbe,
    OutputRun,
    ProbeMeasured,
    TorchOp,
)
from grader.statistics import fit_exponent
from grader.verdicts import (
    VALUE_FAULTS,
    AxisVerdict,
    CaseGrade,
    CaseVerdict,
    Diagnosis,
    Fault,
    MemoryGrade,
    NumericsGrade,
    StructureGrade,
    Verdict,
    only_hidden,
)
from grader.wording import apart, count, listed, one_line, plain

# A mistake explains a probe when its outputs are this near to the student's, in limits of that probe, ...
NEAR_LIMITS = 8.0
# ... or, where it is plainly wrong, in parts of its own size (what it computes may magnify rounding) ...
NEAR_SHARE = 1e-3
PLAINLY_WRONG = 0.1
# ... and this many times nearer than the oracle is to either.
APART = 4.0
# Share of the wrong probes that it must explain, and share of the right ones that it may get wrong.
EXPLAINS_AT_LEAST = 0.8
CONTRADICTS_AT_MOST = 0.1
# A mistake is computed in float64; where its values overflow the student's dtype nothing can be compared.
OVERFLOWS = 1e30

_NO_CUDA = re.compile(r"not compiled with CUDA|no NVIDIA driver|No CUDA GPUs|CUDA.* not available", re.I)
_SHARED_MEMORY = re.compile(r"out of resource.*shared memory|shared memory.*(hardware limit|required)", re.I | re.S)


_UNDEFINED = re.compile(r"NameError|is not defined")
_GRADIENTS = re.compile(r"returned an incorrect number of gradients")

_SHARED_BYTES = re.compile(r"Required: (\d{1,12}), Hardware limit: (\d{1,12})")


@dataclass(frozen=True, slots=True)
class _Facts:
    """The probes that count, side by side with what was measured."""

    assignment: Assignment
    examination: Examination
    cases: tuple[CaseGrade, ...]
    structure: StructureGrade

    @property
    def failing(self) -> list[CaseGrade]:
        return [case for case in self.cases if case.verdict is CaseVerdict.FAIL]

    @property
    def passing(self) -> list[CaseGrade]:
        return [case for case in self.cases if case.passed]

    @property
    def wrong_values(self) -> list[CaseGrade]:
        return [case for case in self.failing if VALUE_FAULTS & set(case.faults)]

    @property
    def faults(self) -> set[Fault]:
        return {fault for case in self.failing for fault in case.faults}

    def asked(self, case: CaseGrade) -> Case:
        found = self.assignment.case(case.name)
        if found is None:
            raise KeyError(case.name)
        return found

    def run(self, case: CaseGrade) -> ProbeMeasured | None:
        runs = [run for run in self.examination.probes if run.name == case.name]
        return next((run for run in runs if isinstance(run, ProbeMeasured)), None)

    def names(self, cases: Sequence[CaseGrade]) -> str:
        """Names of the visible ones; how many hidden ones there are."""
        visible = [case.name for case in cases if not case.hidden]
        hidden = len(cases) - len(visible)
        return listed(visible + ([f"{hidden} hidden"] if hidden else []))


def diagnose(
    assignment: Assignment,
    examination: Examination,
    verdict: Verdict,
    *,
    numerics: NumericsGrade,
    memory: MemoryGrade | None,
    structure: StructureGrade,
    failure: Failure | None,
) -> Diagnosis:
    """Say what is wrong.

    Args:
        verdict: the measured headline, before anything is held. A full file gets no label, only notes.
        failure: the failure that an `error` or `limit` is about.
    """
    facts = _Facts(assignment, examination, numerics.cases, structure)
    if verdict is Verdict.FULL:
        found = Diagnosis(sentence="Everything that was measured is as the assignment asks.")
    elif failure is not None:
        found = _ignores_strides(facts) or _failed(facts, failure)
    elif verdict is Verdict.REFUSED:
        found = _refused(facts)
    elif verdict is Verdict.WRONG:
        found = _wrong(facts)
    else:
        found = _right_but(facts, memory)
    return dataclasses.replace(found, notes=_notes(examination, structure, verdict))


# -- files that gave no result ----------------------------------------------------------------------------------------

_SAYINGS: dict[FailureKind, tuple[str, str]] = {
    FailureKind.SYNTAX_ERROR: (
        "The file does not parse",
        "Python stopped before it ran anything. Look at the line and the one before it.",
    ),
    FailureKind.IMPORT_ERROR: (
        "The file does not load",
        "A hand-in is one file. It may import torch, triton, numpy, einops, einx, jaxtyping and the standard library.",
    ),
    FailureKind.ENTRY_MISSING: (
        "The entry point is missing",
        "Names are part of the contract: the handout gives the name and the arguments.",
    ),
    FailureKind.ENTRY_AMBIGUOUS: (
        "There is more than one possible entry point",
        "Say which one counts with a line such as ENTRY = MyFlashAttention at the bottom of the file.",
    ),
    FailureKind.WRONG_SIGNATURE: (
        "The entry point does not take the arguments of the handout",
        "It is called with positional arguments, in the order of the handout.",
    ),
    FailureKind.RAISES: (
        "The call raised an exception",
        "It came out of your file; the probes marked below are the inputs that led to it.",
    ),
    FailureKind.COMPILE_ERROR: (
        "Triton does not compile the kernel",
        "Triton's own message and line are below; look at the types and shapes of the operands there.",
    ),
    FailureKind.WRONG_RESULT_TYPE: (
        "The call did not return what the handout asks for",
        "Return plain torch tensors, in the order of the handout.",
    ),
    FailureKind.PYTHON_EXIT: (
        "The process left by itself before it gave a result",
        "Look for exit(), sys.exit() or os._exit(); the file must stay loaded while it is called.",
    ),
    FailureKind.CRASHED: (
        "The process crashed",
        "Usually an address outside the tensors: check masks and offsets, and what non-contiguous inputs do to them.",
    ),
    FailureKind.NOT_OURS: (
        "The process answered with something that is not a result",
        "Results are the tensors that the entry point returns; nothing else is read.",
    ),
    FailureKind.TIME_LIMIT: (
        "Stopped at the time limit",
        "Look for a loop whose end condition can be stepped over, or for work that grows too fast with the size.",
    ),
    FailureKind.MEMORY_LIMIT: (
        "Ran out of its memory allowance",
        "Look for tensors that grow with T², or for data built while the file is imported.",
    ),
    FailureKind.OUTPUT_LIMIT: (
        "Printed more than the output limit allows and was stopped",
        "Remove debugging prints, first of all those inside the kernel or its launch function.",
    ),
    FailureKind.PROCESS_LIMIT: (
        "Started more processes or threads than allowed",
        "A kernel needs none of its own.",
    ),
    FailureKind.SCRATCH_LIMIT: (
        "Wrote more to its scratch folder than allowed",
        "A kernel needs no files; Triton's cache fits.",
    ),
}


def _failed(facts: _Facts, failure: Failure) -> Diagnosis:
    saying, hint = _SAYINGS[failure.kind]
    label = failure.kind.value
    evidence = []
    if _SHARED_MEMORY.search(failure.message):
        label = "needs-bigger-shared-memory"
        saying = "The kernel asks for more shared memory than the GPU has"
        hint = "Ask for fewer stages or smaller tiles."
        evidence += _shared_memory(failure.message)
    if failure.kind is FailureKind.CRASHED:
        evidence += _device_fault(facts)
    where = "" if failure.stage == "load" else f" in probe {failure.stage}"
    message = f": {one_line(failure.message).rstrip(': ')}" if failure.message.strip(": \n") else ""
    if only_hidden(facts.cases, failure):
        where, message = " in a hidden probe", ". Its message is shown to staff only"
    elif failure.line is not None:
        where += f" at line {failure.line}"
    sentence = f"{saying}{where}{message}"
    same = [case for case in facts.cases if case.failure is not None and case.failure.kind is failure.kind]
    hint = _what_a_message_means(failure, [facts.asked(case) for case in same]) or hint
    if same:
        evidence.append(f"{facts.names(same)} ended this way; {len(facts.passing)} of {len(facts.cases)} probes pass.")
    return Diagnosis(label=label, sentence=_stop(sentence), hint=hint, evidence=tuple(evidence))


def _what_a_message_means(failure: Failure, cases: Sequence[Case]) -> str:
    """A hint that the message, or the `cases` that led to it, make better than that of their kind; else nothing."""
    if failure.kind in (FailureKind.COMPILE_ERROR, FailureKind.RAISES) and _UNDEFINED.search(failure.message):
        return "Nothing has that name where it is used: look for a misspelling, and for a value that is set elsewhere."
    if failure.kind is not FailureKind.RAISES:
        return ""
    if _NO_CUDA.search(failure.message):
        return (
            "The file asks for the cuda device, and this grading runs on a CPU: "
            "take the device of the inputs, as in device=q.device."
        )
    if _GRADIENTS.search(failure.message):
        return "backward returns one gradient for each argument of forward, in their order, and None for a flag."
    if failure.message.startswith("NotImplementedError"):
        return "That line says that something is still to be written, as in the starter: write it, then hand in again."
    if cases and all(_is_strided(case) for case in cases):
        return "It came out of your file, and only where tensors are not contiguous, as the handout says they may be."
    return ""


def _shared_memory(message: str) -> list[str]:
    """How much was asked for and how much there is, from Triton's own message."""
    asked = _SHARED_BYTES.search(message)
    if asked is None:
        return []
    want, limit = int(asked[1]), int(asked[2])
    return [
        f"It asks for {want:,} B of shared memory a block ({want / 1024:.0f} KiB); this GPU has {limit:,} B "
        f"({limit / 1024:.0f} KiB)."
    ]


def _device_fault(facts: _Facts) -> list[str]:
    """What the second run under compute-sanitizer saw, unless only staff may read about that probe."""
    found = facts.examination.device_fault
    if found is None or any(case.name == found.probe and case.hidden for case in facts.cases):
        return []
    kernel = f" in {one_line(found.kernel, 60)}" if found.kernel else ""
    line = f" at line {found.line}" if found.line is not None else ""
    near = f": {one_line(found.where)}" if found.where else ""
    return [
        _stop(f"compute-sanitizer, run on {found.probe}, names the place{line}{kernel}: {one_line(found.what)}{near}")
    ]


# -- rules ------------------------------------------------------------------------------------------------------------


def _refused(facts: _Facts) -> Diagnosis:
    audit = facts.examination.audit
    if facts.examination.library_calls:
        calls = listed(sorted({_with_line(call) for call in facts.examination.library_calls}))
        foreign = _foreign_outputs(facts)
        what = f"{listed(foreign)} {'comes' if len(foreign) == 1 else 'come'} from" if foreign else "The file calls"
        return Diagnosis(
            label="library-attention",
            sentence=f"{what} {calls}; the assignment is to write that kernel.",
            hint="Write the kernel in Triton; the library's own may serve to test it, outside the file.",
        )
    foreign = _foreign_outputs(facts)
    if audit is not None and audit.n_launches == 0:
        sentence = "No Triton kernel is launched; the assignment is to write one."
    elif not foreign:
        sentence = _why_no_kernel_computes(facts)
    else:
        sentence = f"{_sentence_case(listed(foreign))} {_is(foreign)} not written by a Triton kernel of this file."
    return Diagnosis(
        label="no-triton-kernel",
        sentence=sentence,
        hint="Every output that the handout names has to be stored by a kernel of your own.",
        evidence=tuple(_stop(f"Found: {check.found}; asked: {check.allowed}") for check in facts.structure.refusals),
    )


def _why_no_kernel_computes(facts: _Facts) -> str:
    right = facts.examination.right_without_launches
    if right:
        come = "comes" if len(right) == 1 else "come"
        return (
            f"{_sentence_case(listed(right))} {come} out right while no kernel runs: the file's kernels are not needed."
        )
    by_torch = next((check.found for check in facts.structure.refusals if check.name == "forbidden-op"), None)
    if by_torch is not None:
        return f"What the kernel is to do is done outside it: {by_torch}."
    audit = facts.examination.audit
    unread = listed(audit.unread_inputs) if audit is not None else ""
    return f"No kernel of this file reads {unread}, so none computes the answer."


def _foreign_outputs(facts: _Facts) -> list[str]:
    audit = facts.examination.audit
    own = {output.name for output in facts.assignment.outputs if output.own_kernel}
    return [done.name for done in audit.outputs if done.name in own and not done.by_own_kernel] if audit else []


def _right_but(facts: _Facts, memory: MemoryGrade | None) -> Diagnosis:
    """Numbers are right, points were lost elsewhere."""
    audit, structure = facts.examination.audit, facts.structure
    gradients = any(output.gradient for output in facts.assignment.outputs)
    if structure.failed("saved"):
        found = next(check.found for check in structure.checks if check.name == "saved")
        return Diagnosis(
            label="saved-scores-for-backward" if gradients else "stored-scores",
            sentence=f"Numbers are right, but something of size T² stays alive after the forward ({found}).",
            hint="Only the inputs, the outputs and one number per row may be kept; scores can be computed again.",
            evidence=_memory_evidence(memory),
        )
    if structure.failed("stored"):
        return Diagnosis(
            label="stored-scores",
            sentence="Numbers are right, but the forward stores a matrix of size T²: its memory grows with T squared.",
            hint="Scores need not outlive the tile they belong to, and a mask can be made for one tile at a time.",
            evidence=_memory_evidence(memory),
        )
    if memory is not None and memory.verdict is AxisVerdict.FAIL:
        backward = memory.forward_exponent is not None and memory.forward_exponent <= memory.pass_exponent
        where = "the backward builds whole T × T matrices" if backward else "memory grows with T squared"
        return Diagnosis(
            label="stored-scores",
            sentence=f"Numbers are right, but {where}.",
            hint="Recompute the scores tile by tile and add each tile's share to the gradients.",
            evidence=_memory_evidence(memory),
        )
    return _structure_only(facts, audit, memory)


def _structure_only(facts: _Facts, audit: Audit | None, memory: MemoryGrade | None) -> Diagnosis:
    structure = facts.structure
    found = {check.name: check for check in structure.checks if not check.ok}
    if "launches" in found and audit is not None:
        times = Counter(one_line(launch.kernel, 60) for launch in audit.launches)
        kernels = listed([f"{name}, {n} times" if n > 1 else name for name, n in times.items()])
        return Diagnosis(
            label="not-fused",
            sentence=f"Numbers are right, but it takes {count(audit.n_launches, 'launch', 'launches')} ({kernels}); "
            f"{found['launches'].allowed} asked.",
            hint="What one kernel writes and the next one reads crosses global memory twice."
            if len(times) != 1
            else "One grid has room for every batch entry, every row and every tile.",
            evidence=(f"Unique bytes: {found['bytes'].found}, {found['bytes'].allowed}.",) if "bytes" in found else (),
        )
    if "torch-ops" in found and audit is not None:
        return Diagnosis(
            label="torch-compute",
            sentence=f"Numbers are right, but part of the work is done by torch ({found['torch-ops'].found}).",
            hint="Beside the kernel only copies, fills and views are allowed, and what the handout lists.",
        )
    if "bytes" in found:
        return Diagnosis(
            label="extra-traffic",
            sentence=f"Numbers are right, but {found['bytes'].found} the least possible bytes cross global memory; "
            f"{found['bytes'].allowed} asked.",
            hint="Read each input once and write each output once.",
        )
    if "tile" in found:
        return Diagnosis(
            label="row-in-one-tile",
            sentence=f"Numbers are right, but the largest tile on the chip is too large: {found['tile'].found}; "
            f"{found['tile'].allowed} is asked.",
            hint="Stream tiles of a fixed width; a whole row does not fit for long T.",
            evidence=_memory_evidence(memory),
        )
    if "backward-launches" in found:
        return Diagnosis(
            label="not-fused",
            sentence=f"Numbers are right, but the backward takes {found['backward-launches'].found} launches; "
            f"{found['backward-launches'].allowed} asked.",
        )
    if found:
        check = next(iter(found.values()))
        return Diagnosis(sentence=f"Numbers are right, but {check.found}; {check.allowed} is asked.")
    if structure.verdict is AxisVerdict.NOT_RUN:
        return Diagnosis(sentence="Numbers are right, but the structure of the file was not examined.")
    if memory is not None and memory.verdict is AxisVerdict.NOT_RUN:
        return Diagnosis(sentence="Numbers are right, but memory was not measured at every size that it takes.")
    return Diagnosis(
        sentence="Everything is right; the speed-up over the naive baseline does not earn all points yet.",
        hint="The report compares bytes and times with the reference.",
    )


def _memory_evidence(memory: MemoryGrade | None) -> tuple[str, ...]:
    if memory is None:
        return ()
    found = []
    for what, exponent in (
        ("Forward memory", memory.forward_exponent),
        ("Memory with the backward", memory.backward_exponent),
        ("What stays alive after the forward", memory.kept_exponent),
    ):
        if exponent is not None:
            found.append(f"{what} grows like T^{exponent:.2f}; at most T^{memory.pass_exponent:g} passes.")
    if memory.failed_at is not None:
        found.append(f"T = {memory.failed_at:,} did not fit into memory.")
    return tuple(found)


# -- wrong numbers ----------------------------------------------------------------------------------------------------


def _wrong(facts: _Facts) -> Diagnosis:
    """The most telling explanation first; each returns None when the facts do not single it out."""
    witnesses: tuple[Callable[[_Facts], Diagnosis | None], ...] = (
        _only_when_large,
        _wrong_form,
        _only_a_check,
        _ignores_strides,
        _tuned_in_place,
        _race,
        _known_mistake,
        _output_unwritten,
        _input_mutated,
        _nondeterministic,
        _low_precision,
        _difference_of_squares,
        _out_of_bounds,
    )
    for witness in witnesses:
        found = witness(facts)
        if found is not None:
            return dataclasses.replace(found, evidence=(*found.evidence, *_known(facts)))
    if facts.structure.refusals:
        return dataclasses.replace(_refused(facts), evidence=_known(facts))
    return _unnamed(facts)


def _only_when_large(facts: _Facts) -> Diagnosis | None:
    """Right in every probe, wrong in a plain call at a size that is timed."""
    found = next((call for call in facts.examination.large_calls if call.failure is None), None)
    if found is None or facts.failing:
        return None
    sizes = ", ".join(f"{one_line(axis, 20)} = {size:,}" for axis, size in found.axes.items())
    off = "not finite" if found.rel_error is None else f"off by {found.rel_error:.1e} of the largest value"
    return Diagnosis(
        label="wrong-when-large",
        sentence=f"Right in all {len(facts.passing)} probes, which are small, but {found.output} is wrong at a size "
        f"that is timed ({sizes}, {one_line(found.dtype, 20)}): {off}, where {found.limit:.1e} passes.",
        hint="Look at what depends on the size: offsets beyond 2^31 elements need 64 bits; a fixed number of tiles, of "
        "programs or of stages ends too soon.",
        evidence=(f"{found.n_wrong_rows} of the {count(found.n_rows, 'row')} looked at in a plain call are wrong.",),
    )


def _wrong_form(facts: _Facts) -> Diagnosis | None:
    """Shape, dtype and number of results, where that is what fails."""
    for fault, label in (
        (Fault.MISSING, FailureKind.WRONG_RESULT_TYPE.value),
        (Fault.SHAPE, "wrong-shape"),
        (Fault.DTYPE, "wrong-dtype"),
    ):
        cases = [case for case in facts.failing if fault in case.faults]
        # a shape that is off on one odd input beside wrong values everywhere is not the news
        if not cases or 2 * len(cases) < len(facts.failing):
            continue
        case = _example(cases)
        name = next(output.name for output in case.outputs if output.fault is fault)
        run = facts.run(case)
        found = next((output for output in run.outputs if output.name == name), None) if run else None
        where = "a hidden probe" if case.hidden else case.name
        if found is None or fault is Fault.MISSING:
            return Diagnosis(
                label=label,
                sentence=f"{name} was not returned in {where}.",
                hint=f"The handout asks for {facts.assignment.signature}.",
            )
        if fault is Fault.SHAPE:
            sentence = (
                f"{name} has shape {_shape(found.shape)} in {where}; the handout asks for {_shape(found.want_shape)}."
            )
            hint = "Shapes are part of the contract; values were not compared where they differ."
        else:
            sentence = (
                f"{name} has dtype {one_line(found.dtype, 40)} in {where}; the handout asks for {found.want_dtype}."
            )
            hint = "Compute in float32 if you like, but return the dtype that the handout asks for."
        return Diagnosis(label=label, sentence=sentence, hint=hint, evidence=(f"It shows in {facts.names(cases)}.",))
    return None


def _only_a_check(facts: _Facts) -> Diagnosis | None:
    """Values are right everywhere; what a probe asks beside them is not."""
    faults = facts.faults
    fresh = [case for case in facts.failing if facts.asked(case).check == "fresh-inputs"]
    if fresh and len(fresh) == len(facts.failing):
        if faults & VALUE_FAULTS:
            return Diagnosis(
                label="cached-result",
                sentence="The second call on the same buffers, with new values, gives a wrong answer.",
                hint="Results must come from the values of this call, not from an earlier one.",
            )
        return Diagnosis(
            label="shared-output-buffer",
            sentence="An earlier result changes when the function is called again.",
            hint="Every call returns tensors of its own.",
        )
    if not faults or faults & VALUE_FAULTS:
        return None
    if faults <= {Fault.INPUTS, Fault.REPEAT} and Fault.INPUTS in faults:
        return _input_mutated(facts)
    if faults == {Fault.GUARD}:
        return _out_of_bounds(facts)
    if faults == {Fault.REPEAT}:
        return _nondeterministic(facts)
    return None


def _ignores_strides(facts: _Facts) -> Diagnosis | None:
    strange = [case for case in facts.cases if case.verdict not in (CaseVerdict.PASS, CaseVerdict.NOT_RUN)]
    if not strange or not all(_is_strided(facts.asked(case)) for case in strange):
        return None
    if not any(not _is_strided(facts.asked(case)) for case in facts.passing):
        return None
    # an exception that the file raises on purpose says what it wants; it is quoted as it is
    crashed = {FailureKind.CRASHED, FailureKind.PYTHON_EXIT}
    if any(case.failure is not None and case.failure.kind not in crashed for case in strange):
        return None
    known = _known_mistake(facts)
    if known is not None and known.label != "ignores-strides":
        return known  # what depends on strides and should not, such as the number that a mask is drawn for
    gradient = all(case.name.startswith("grad-") for case in strange)
    what = "the incoming gradient is" if gradient else "inputs are"
    hint = "Addresses are computed from the shape alone; look at where each stride enters."
    if known is None:
        hint = "An address is computed from the shape alone or with another tensor's stride; look at where each enters."
    return Diagnosis(
        label="ignores-strides",
        sentence=f"Only {facts.names(strange)} {_fail(strange)}: results are wrong when {what} not contiguous.",
        hint=hint,
    )


def _is_strided(case: Case) -> bool:
    return case.layout == "strided" or case.name in ("strided", "grad-strided", "grad-ones")


@dataclass(frozen=True, slots=True)
class _Candidate:
    match: MistakeMatch
    explained: int
    compared: int
    tried: int
    contradicted: int
    mispredicted: int
    order: int

    @property
    def rank(self) -> tuple[int, int, int, bool, int]:
        # more explained, fewer contradictions, the better pattern, no tile before a tile, the bank's order
        tiled = self.match.tile is not None
        return (-self.explained, self.contradicted, self.mispredicted, tiled, self.order)


def _within_one_tile(facts: _Facts, match: MistakeMatch) -> int:
    """How many right probes cannot show a mistake between tiles, where all the wrong ones are wider than a tile."""
    tile = match.tile
    if tile is None:
        return 0

    def is_narrow(case: CaseGrade) -> bool:
        asked = facts.assignment.case(case.name)
        return asked is not None and max(asked.axes.get("keys", 0), asked.axes.get("cols", 0)) in range(1, tile + 1)

    on = {probe.probe: probe for probe in match.probes}
    if any(is_narrow(case) for case in facts.wrong_values):
        return 0
    narrow = [case for case in facts.passing if case.name in on and is_narrow(case)]
    return sum(_predicts_pass(on[case.name], case) for case in narrow)


def _known_mistake(facts: _Facts) -> Diagnosis | None:
    wrong, right = facts.wrong_values, facts.passing
    found = []
    for order, match in enumerate(facts.examination.mistakes):
        on = {probe.probe: probe for probe in match.probes}
        compared = [case for case in wrong if case.name in on and not _overflows(on[case.name], case)]
        explained = sum(_explains(on[case.name], case) for case in compared)
        tried = [case for case in right if case.name in on]
        contradicted = sum(_contradicts(on[case.name], case) for case in tried)
        if not compared or explained < math.ceil(EXPLAINS_AT_LEAST * len(compared)):
            continue
        if contradicted > CONTRADICTS_AT_MOST * len(tried):
            continue
        if not tried and all(_is_blank(facts, case) for case in compared):
            continue  # nothing but NaN everywhere has many causes
        mispredicted = sum(_predicts_pass(on[case.name], case) for case in compared)
        mispredicted += sum(not _predicts_pass(on[case.name], case) for case in tried)
        found.append(_Candidate(match, explained, len(compared), len(tried), contradicted, mispredicted, order))
    if not found:
        return None
    found.sort(key=lambda candidate: candidate.rank)
    best = found[0]
    other = next((candidate.match.label for candidate in found if candidate.match.label != best.match.label), "")
    tile = f", with a tile of {best.match.tile}," if best.match.tile is not None else ""
    agrees = f"The outputs agree with this mistake{tile} in {best.explained} of {count(best.compared, 'wrong probe')}"
    if best.tried:
        agrees += f", and it gives right answers in {best.tried - best.contradicted} of the {best.tried} that are right"
    evidence: tuple[str, ...] = (f"{agrees}.",)
    within = _within_one_tile(facts, best.match)
    if within:
        fit = f"{count(within, 'right probe')} {'fits' if within == 1 else 'fit'} into one such tile"
        evidence += (f"{fit}, where this mistake changes nothing.",)
    return Diagnosis(
        label=best.match.label,
        sentence=_stop(f"Outputs agree with a known mistake: {best.match.label.replace('-', ' ')}"),
        hint=best.match.hint,
        step=best.match.step,
        evidence=evidence,
        runner_up=other,
    )


def _is_blank(facts: _Facts, case: CaseGrade) -> bool:
    """Not one element of the wrong outputs is finite."""
    outputs = _wrong_outputs(facts, case)
    return bool(outputs) and all(output.n_not_finite == output.n_elements for output in outputs)


def _wrong_outputs(facts: _Facts, case: CaseGrade) -> list[OutputRun]:
    run = facts.run(case)
    at_fault = {output.name for output in case.outputs if output.fault is not None}
    return [output for output in run.outputs if output.name in at_fault] if run is not None else []


def _explains(probe: MistakeOnProbe, case: CaseGrade) -> bool:
    """The mistake's outputs are the student's, and clearly not the oracle's."""
    distance, own, limit = probe.distance, probe.own_error, case.limit
    if distance is None or limit is None or not math.isfinite(distance):
        return False
    plain_one = own is None or own >= PLAINLY_WRONG
    near = distance <= NEAR_LIMITS * limit or (plain_one and distance <= NEAR_SHARE)
    apart = own is None or own >= APART * distance
    student = case.rel_error
    return near and apart and own != 0 and (student is None or student >= APART / 2 * distance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resemblance:
    """How near one known mistake is to what a file gave, over the wrong probes that both can be compared in."""

    label: str
    tile: int | None
    same: int  # probes with the mistake's outputs
    nearer: int  # other probes whose outputs are nearer to the mistake's than to the right ones
    compared: int


def resemblances(examination: Examination, numerics: NumericsGrade) -> list[Resemblance]:
    """The known mistakes that the wrong outputs are like, the likest first; each in its best tile, by its label."""
    wrong = {case.name: case for case in numerics.cases if VALUE_FAULTS & set(case.faults)}
    best: dict[str, Resemblance] = {}
    for match in examination.mistakes:
        pairs = [(probe, wrong[probe.probe]) for probe in match.probes if probe.probe in wrong]
        same = sum(_explains(probe, case) for probe, case in pairs)
        nearer = sum(_is_nearer(probe, case) and not _explains(probe, case) for probe, case in pairs)
        known = best.get(match.label)
        if same + nearer and (known is None or (same, nearer) > (known.same, known.nearer)):
            best[match.label] = Resemblance(
                label=match.label, tile=match.tile, same=same, nearer=nearer, compared=len(pairs)
            )
    return sorted(best.values(), key=lambda one: (-one.same, -one.nearer))


def _is_nearer(probe: MistakeOnProbe, case: CaseGrade) -> bool:
    return probe.distance is not None and case.rel_error is not None and probe.distance < case.rel_error


def _overflows(probe: MistakeOnProbe, case: CaseGrade) -> bool:
    return case.rel_error is None and probe.own_error is not None and probe.own_error >= OVERFLOWS


def _contradicts(probe: MistakeOnProbe, case: CaseGrade) -> bool:
    """The student is right where the mistake is plainly wrong."""
    return case.limit is not None and (probe.own_error is None or not probe.own_error <= 3 * case.limit)


def _predicts_pass(probe: MistakeOnProbe, case: CaseGrade) -> bool:
    return case.limit is not None and probe.own_error is not None and probe.own_error <= case.limit


def _output_unwritten(facts: _Facts) -> Diagnosis | None:
    audit = facts.examination.audit
    unwritten = [done for done in audit.outputs if done.unwritten_elements] if audit else []
    cases = facts.wrong_values
    if not cases:
        return None
    seen: list[tuple[CaseGrade, OutputRun]] = []
    for case in cases:
        run = facts.run(case)
        trailing = [output for output in run.outputs if _trailing_rows(output)] if run else []
        holes = [output for output in trailing if output.n_not_finite == output.n_wrong or unwritten]
        if holes:
            seen.append((case, holes[0]))
    # which rows are written hangs on sizes alone: where other values of the same sizes come out right, all of them are
    by_size = all(any(_same_sizes(facts.asked(case), facts.asked(one)) for one in facts.passing) for case, _ in seen)
    if len(seen) >= math.ceil(EXPLAINS_AT_LEAST * len(cases)) and not by_size:
        visible = [one for one in seen if not one[0].hidden]
        where, last = "The last rows of the output", 0
        if visible:
            case, output = visible[0]
            last = output.n_wrong_rows
            rows = "row" if last == 1 else f"{last:,} rows"
            where = f"The last {rows} of {output.n_rows} of {output.name} in {case.name}"
        return Diagnosis(
            label="output-unwritten",
            sentence=f"{where} {'holds' if last == 1 else 'hold'} whatever was in memory: no program wrote "
            f"{'it' if last == 1 else 'them'}.",
            hint="Count the programs of the grid against the rows.",
            evidence=_unwritten_evidence(audit),
        )
    not_finite = all(Fault.NOT_FINITE in case.faults for case in cases)
    if unwritten and not_finite:
        return Diagnosis(
            label="output-unwritten",
            sentence=f"Part of {listed([done.name for done in unwritten])} is never written.",
            hint="Look at which elements the stores and their masks reach.",
            evidence=_unwritten_evidence(audit),
        )
    return None


def _same_sizes(one: Case, other: Case) -> bool:
    """Nothing but the values, and how many batch entries there are, may differ."""

    def sizes(case: Case) -> dict[str, int]:
        return {axis: size for axis, size in case.axes.items() if axis != "batch"}

    return sizes(one) == sizes(other) and one.dtype == other.dtype and one.options == other.options


def _trailing_rows(output: OutputRun) -> bool:
    """The wrong rows are the last ones, without a gap, and not all of them."""
    rows = output.wrong_rows
    if not rows or not output.n_wrong_rows < output.n_rows or output.shape != output.want_shape:
        return False
    return rows[0] + output.n_wrong_rows == output.n_rows and rows == tuple(range(rows[0], rows[0] + len(rows)))


def _unwritten_evidence(audit: Audit | None) -> tuple[str, ...]:
    return tuple(
        f"{done.name}: {count(done.unwritten_elements, 'element')} never written in the audited call."
        for done in (audit.outputs if audit else ())
        if done.unwritten_elements
    )


def _input_mutated(facts: _Facts) -> Diagnosis | None:
    if Fault.INPUTS not in facts.faults:
        return None
    return Diagnosis(
        label="input-mutated",
        sentence="An input holds other values after the call than before it, so a second call on it answers "
        "something else.",
        hint="Store into tensors of your own; look at which pointer each store uses.",
    )


def _tuned_in_place(facts: _Facts) -> Diagnosis | None:
    """Wrong in just those calls in which the autotuner tried its configurations."""
    runs = [(case, run) for case in facts.cases for run in [facts.run(case)] if run is not None]
    tuned = {case.name for case, run in runs if run.tuned}
    wrong = {case.name for case in facts.wrong_values}
    if not wrong or not wrong <= tuned or not facts.passing or 2 * len(wrong) < len(tuned):
        return None
    return Diagnosis(
        label="autotune-in-place",
        sentence="Wrong only in calls in which @triton.autotune tried its configurations: "
        f"{facts.names(facts.wrong_values)}.",
        hint="Timing a configuration runs the kernel many times on the same tensors, so one that adds to what it finds "
        "or changes what it reads, must start afresh each time: see reset_to_zero and restore_value.",
    )


def _race(facts: _Facts) -> Diagnosis | None:
    """Two programs on one address, where results show it (on a GPU)."""
    races = _races(facts.examination)
    differ = bool(_unequal_repeats(facts))
    if not races or not (differ or facts.examination.device.kind == "cuda"):
        return None
    what = "Two runs differ" if differ else "Results are wrong on the GPU"
    return Diagnosis(
        label=_race_label(facts.assignment),
        sentence=f"{what}, and programs of one launch meet at the same address: {races[0]}",
        hint="Give every output element one owner, or sum in a second pass.",
    )


def _race_label(assignment: Assignment) -> str:
    return "backward-race" if any(output.gradient for output in assignment.outputs) else "race"


def _races(examination: Examination) -> list[str]:
    audit = examination.audit
    found = [finding for finding in (audit.findings if audit else ()) if finding.kind.startswith("race")]
    return [_placed(race) for race in found]


def _placed(finding: Finding) -> str:
    """What was found and in which line, which most messages begin with."""
    message = one_line(finding.message)
    if finding.line is None or message.startswith(f"Line {finding.line}:"):
        return message
    return f"{message.removesuffix('.')} (line {finding.line})"


def _unequal_repeats(facts: _Facts) -> list[CaseGrade]:
    runs = [(case, facts.run(case)) for case in facts.cases]
    return [case for case, run in runs if run is not None and run.repeat_equal is False]


def _nondeterministic(facts: _Facts) -> Diagnosis | None:
    if not _unequal_repeats(facts):
        return None
    right = [case for case in facts.passing if not case.hidden]
    return Diagnosis(
        label="nondeterministic",
        sentence="Two calls with the same arguments give different results.",
        hint="The result must depend on the arguments alone: look for a seed, a counter or a buffer that lives on.",
        evidence=(f"Right in {facts.names(right)}.",) if right else (),
    )


def _low_precision(facts: _Facts) -> Diagnosis | None:
    """Small errors of one size everywhere in float32, none in half precision, other outputs exact."""
    single = [case for case in facts.cases if facts.asked(case).dtype == "float32" and case.outputs]
    half = [case for case in facts.cases if facts.asked(case).dtype != "float32" and case.outputs]
    wrong = [case for case in single if set(case.faults) == {Fault.VALUES}]
    others = [case for case in facts.failing if case not in wrong]
    if others or not wrong or not all(case.passed for case in half):
        return None
    # probes that ask for something else than values may pass by chance; most of the others may not
    if len(wrong) < 0.8 * sum(facts.asked(case).check != "repeat" for case in single):
        return None
    at_fault = {output.name for case in wrong for output in case.outputs if output.fault is not None}
    exact = [output.name for output in facts.assignment.outputs if output.name not in at_fault]
    errors = [case.rel_error for case in wrong if case.rel_error is not None]
    most = 2e-2 if exact else 5e-3
    if len(errors) < len(wrong) or not (5e-5 <= median(errors) <= 5e-3 and max(errors) <= most):
        return None
    named = [output.name for output in facts.assignment.outputs if output.name in at_fault]
    also = f" {listed(exact)} {_is(exact)} exact." if exact else ""
    return Diagnosis(
        label="low-precision-accumulator",
        sentence=f"{_sentence_case(listed(named))} {_is(named)} off by about {median(errors):.0e} in nearly every "
        f"float32 probe, and right in half precision.{also}",
        hint="Look at the dtype of what is summed up from tile to tile, and of what goes into tl.dot.",
    )


def _difference_of_squares(facts: _Facts) -> Diagnosis | None:
    """Digits lost where values lie far from 0, and nowhere else; how many is chance, so that no bank can hold it."""
    far = [case for case in facts.cases if facts.asked(case).fill == "shifted"]
    if not far or [case.name for case in facts.failing] != [case.name for case in far]:
        return None
    errors = [case.rel_error for case in far]
    if not all(set(case.faults) == {Fault.VALUES} for case in far):
        return None
    if not all(error is not None and error < PLAINLY_WRONG for error in errors):
        return None
    return Diagnosis(
        label="variance-by-difference",
        sentence=f"Only {facts.names(far)} {_fail(far)}, by a few digits: they are lost where values lie far from 0.",
        hint="Two large numbers that are nearly equal leave few digits when they are subtracted: what is the variance "
        "made of?",
        step="var = mean((z - mean)^2), over the d elements of the row",
    )


def _out_of_bounds(facts: _Facts) -> Diagnosis | None:
    seen = [finding for finding in _findings(facts) if finding[0].startswith("out-of-bounds")]
    if Fault.GUARD not in facts.faults and not seen:
        return None
    # in the interpreter every probe tells of itself: what shows in few of the wrong ones does not explain the others
    if facts.examination.device.kind != "cuda":
        strayed = sum(_strays(facts, case) for case in facts.failing)
        if strayed < math.ceil(EXPLAINS_AT_LEAST * len(facts.failing)):
            return None
    stores = [message for kind, message in seen if kind == "out-of-bounds-store"]
    messages = stores + [message for kind, message in seen if kind != "out-of-bounds-store"]
    return Diagnosis(
        label="out-of-bounds",
        sentence=f"The kernel {'writes' if stores or not seen else 'reads'} outside its tensors.",
        hint="Every load and store of a partial tile needs a mask, and each mask and address the sizes and strides of "
        "the tensor that it is about.",
        evidence=tuple(dict.fromkeys(messages))[:3],
    )


def _strays(facts: _Facts, case: CaseGrade) -> bool:
    """This probe itself touched memory outside its tensors."""
    run = facts.run(case)
    found = run.findings if run is not None else ()
    return Fault.GUARD in case.faults or any(one.kind.startswith("out-of-bounds") for one in found)


def _findings(facts: _Facts) -> list[tuple[str, str]]:
    """Kind and sentence of what the audit saw, of visible probes only."""
    audit = facts.examination.audit
    found = list(audit.findings) if audit else []
    for case in facts.cases:
        run = facts.run(case)
        if run is not None and not case.hidden:
            found += run.findings
    return [(item.kind, _stop(_placed(item))) for item in found]


# -- what is known where no mistake has a name -------------------------------------------------------------------------


def _unnamed(facts: _Facts) -> Diagnosis:
    known = _known(facts)
    failing = facts.failing
    not_run = [case for case in facts.cases if case.verdict is CaseVerdict.NOT_RUN]
    if not failing:
        return Diagnosis(
            sentence=f"{count(len(not_run), 'probe')} did not run, so the numbers are not shown to be right."
        )
    visible = [case for case in failing if not case.hidden]
    if not visible:
        return Diagnosis(
            sentence=f"{count(len(failing), 'hidden probe')} {_fail(failing)}; every visible one passes.",
            hint="Hidden probes try nothing that the handout does not mention: go through what it promises and what it "
            "does not, two things at a time.",
        )
    sentence = f"{len(failing)} of {count(len(facts.cases), 'probe')} {_fail(failing)}: {facts.names(failing)}."
    return Diagnosis(sentence=sentence, hint=_where_to_start(facts, visible), evidence=known)


def _where_to_start(facts: _Facts, visible: Sequence[CaseGrade]) -> str:
    blank = _blank_outputs(facts)
    smallest = min((facts.asked(case) for case in visible), key=lambda case: math.prod(case.axes.values()))
    start = f"start from the smallest wrong probe, {smallest.name} ({smallest.tries.rstrip('.')})."
    if blank:
        return (
            f"Where {listed(blank)} {_is(blank)} wrong not one value is finite: look for 0 / 0, for inf - inf, for exp "
            f"of a large positive number, and for memory that is added to before it is set; {start}"
        )
    return f"No known mistake explains the outputs; {start}"


def _blank_outputs(facts: _Facts) -> list[str]:
    """Outputs of which no wrong probe has a single finite element."""
    seen: dict[str, list[bool]] = {}
    for case in facts.wrong_values:
        for output in _wrong_outputs(facts, case):
            seen.setdefault(output.name, []).append(output.n_not_finite == output.n_elements)
    return [name for name, blank in seen.items() if all(blank)]


def _known(facts: _Facts) -> tuple[str, ...]:
    """Observations, the most useful first. Only about visible probes."""
    observers: tuple[Callable[[_Facts], str | None], ...] = (
        _first_wrong_element,
        _which_outputs,
        _which_inputs,
        _which_rows,
        _growth,
        _runs_differ,
    )
    return tuple(said for said in (observer(facts) for observer in observers) if said is not None)


def _first_wrong_element(facts: _Facts) -> str | None:
    visible = [case for case in facts.wrong_values if not case.hidden]
    if not visible:
        return None
    case = _example(visible)
    run = facts.run(case)
    for grade in case.outputs:
        output = next((one for one in run.outputs if one.name == grade.name), None) if run else None
        if grade.fault in VALUE_FAULTS and output is not None and output.first_wrong is not None:
            first = output.first_wrong
            got, want = (
                ("not a finite number", f"{first.want:.4g}") if first.got is None else apart(first.got, first.want)
            )
            return (
                f"{case.name}: {output.n_wrong:,} of {count(output.n_elements, 'value')} of {output.name} are off by "
                f"more than {output.limit:.1e} of the largest. The first is at {list(first.index)}: yours {got}, "
                f"expected {want}."
            )
    return None


def _which_outputs(facts: _Facts) -> str | None:
    wrong = {output.name for case in facts.wrong_values for output in case.outputs if output.fault is not None}
    right = [output.name for output in facts.assignment.outputs if output.name not in wrong]
    if not wrong or not right:
        return None
    named = [output.name for output in facts.assignment.outputs if output.name in wrong]
    return f"{_sentence_case(listed(named))} {_is(named)} wrong; {listed(right)} {_is(right)} right everywhere."


def _which_inputs(facts: _Facts) -> str | None:
    """What the wrong probes have in common and the right ones lack."""
    wrong, right = facts.wrong_values, facts.passing
    if not wrong or not right:
        return None
    marks: list[tuple[str, Callable[[Case], bool]]] = [
        ("for inputs that are not contiguous", _is_strided),
        ("for half precision", lambda case: case.dtype != "float32"),
        ("for float32", lambda case: case.dtype == "float32"),
    ]
    options = sorted({key for case in facts.cases for key in facts.asked(case).options or {}})
    marks += [(f"for {key}=True", _has_option(key)) for key in options]
    marks += [(f"for {key} above 0", _is_positive(key)) for key in options]
    marks += [
        ("for several batch entries", lambda case: case.axes.get("batch", 1) > 1),
        ("for as many queries as keys", lambda case: case.axes.get("queries") == case.axes.get("keys")),
        ("for different numbers of queries and keys", lambda case: case.axes.get("queries") != case.axes.get("keys")),
    ]
    # the widest tile that fits: a size that is no multiple of 16 is none of 128 either
    tiles = (128, 64, 32, 16)
    axes = {axis for case in facts.cases for axis in facts.asked(case).axes}
    tiled = sorted(axes - {"batch", "rows"})
    marks += [(f"for sizes that are no multiple of {tile}", _ragged(tile, tiled)) for tile in tiles]
    marks += [(f"where {axis} is no multiple of {tile}", _ragged(tile, [axis])) for axis in tiled for tile in tiles]
    for name, mark in marks:
        if all(mark(facts.asked(case)) for case in wrong) and not any(mark(facts.asked(case)) for case in right):
            return f"Wrong exactly {name}."
    return _which_sizes(facts, wrong, right)


def _which_sizes(facts: _Facts, wrong: Sequence[CaseGrade], right: Sequence[CaseGrade]) -> str | None:
    """An axis whose size tells wrong from right; of hidden probes it is used, and not told."""

    def sizes(cases: Sequence[CaseGrade], axis: str) -> list[int]:
        return [facts.asked(case).axes.get(axis, 0) for case in cases]

    shown_wrong, shown_right = ([case for case in cases if not case.hidden] for cases in (wrong, right))
    if not shown_wrong or not shown_right:
        return None
    found = []
    for axis in facts.asked(wrong[0]).axes:
        of_wrong, of_right = sizes(wrong, axis), sizes(right, axis)
        if min(of_wrong) > max(of_right) and len(of_right) > 1:
            least, most = min(sizes(shown_wrong, axis)), max(sizes(shown_right, axis))
            found.append(f"Wrong exactly where {axis} is {least:,} or more, and right up to {most:,}.")
        elif len(set(of_right)) == 1 and of_right[0] not in of_wrong:
            found.append(f"Right only for {axis} = {of_right[0]:,}.")
    return found[0] if len(found) == 1 else None


def _has_option(key: str) -> Callable[[Case], bool]:
    return lambda case: (case.options or {}).get(key) is True


def _is_positive(key: str) -> Callable[[Case], bool]:
    def positive(case: Case) -> bool:
        value = (case.options or {}).get(key)
        return not isinstance(value, bool) and isinstance(value, int | float) and value > 0

    return positive


def _ragged(tile: int, axes: Sequence[str]) -> Callable[[Case], bool]:
    return lambda case: any(case.axes.get(axis, 0) % tile for axis in axes)


def _which_rows(facts: _Facts) -> str | None:
    visible = [case for case in facts.wrong_values if not case.hidden]
    if not visible:
        return None
    case = _example(visible)
    run = facts.run(case)
    output = next((one for one in run.outputs if one.n_wrong_rows), None) if run else None
    if output is None or output.n_rows < 2:
        return None
    if output.n_wrong_rows == output.n_rows:
        return f"{case.name}: every row of {output.name} has a wrong element."
    where = f"{output.n_wrong_rows} of {output.n_rows} rows"
    if _trailing_rows(output):
        where = f"the last {where}"
    elif output.wrong_rows[:1] == (0,) and output.wrong_rows == tuple(range(len(output.wrong_rows))):
        where = f"the first {where}" if len(output.wrong_rows) == output.n_wrong_rows else where
    rows = listed([str(row) for row in output.wrong_rows], of=output.n_wrong_rows)
    return f"{case.name}: {where} of {output.name} have a wrong element ({rows})."


def _growth(facts: _Facts) -> str | None:
    """Whether errors grow with the swept axis, over plain float32 probes of one kind."""
    axes = facts.assignment.memory.along if facts.assignment.memory else ()
    points: dict[int, float] = {}
    for case in facts.wrong_values:
        asked = facts.asked(case)
        size = max((asked.axes.get(axis, 0) for axis in axes), default=0)
        plain_one = asked.dtype == "float32" and asked.layout == "contiguous" and asked.fill == "normal"
        if size and plain_one and not asked.options and case.rel_error and math.isfinite(case.rel_error):
            points[size] = max(points.get(size, 0.0), case.rel_error)
    if len(points) < 3:
        return None
    exponent = fit_exponent(list(points), list(points.values()))
    if abs(exponent) < 0.3:
        return "The error does not depend on the sequence length."
    return f"The error {'grows' if exponent > 0 else 'shrinks'} with the sequence length, about like T^{exponent:.1f}."


def _runs_differ(facts: _Facts) -> str | None:
    return "Two calls with the same arguments give different bits." if _unequal_repeats(facts) else None


# -- notes ------------------------------------------------------------------------------------------------------------


def _notes(examination: Examination, structure: StructureGrade, verdict: Verdict) -> tuple[str, ...]:
    """Advice that changes no verdict here: what the target GPU would do, what the audit saw beside the probes."""
    found = []
    report = examination.compile_report
    # on a GPU the file itself met whatever there is to meet
    if report is not None and examination.device.kind != "cuda":
        found += [_stop(_compile_note(report.target, failure)) for failure in report.failures[:3]]
        found += [
            f"{one_line(kernel.kernel, 80)} needs {kernel.shared_bytes:,} B of shared memory at "
            f"{one_line(kernel.shapes)}; {report.target} has {report.shared_limit_bytes:,} B a block, so the launch "
            f"would fail there. Ask for fewer stages or smaller tiles."
            for kernel in report.kernels
            if kernel.shared_bytes > report.shared_limit_bytes
        ][:3]
    races = _races(examination)
    if races and verdict not in (Verdict.ERROR, Verdict.LIMIT):
        found.append(
            f"Programs of one launch meet at the same address, which a GPU runs in any order: {_stop(races[0])}"
        )
    audit = examination.audit
    # a file that answers otherwise each time does so in another order too
    alike = not any(isinstance(run, ProbeMeasured) and run.repeat_equal is False for run in examination.probes)
    if audit is not None and audit.order_dependent and not races and alike:
        found.append("Results change when the programs of a launch run in another order, as they do on a GPU.")
    if structure.refusals and verdict is Verdict.WRONG:
        found += [_stop(f"Beside the numbers: {check.found}") for check in structure.refusals]
    return tuple(found)


def _compile_note(target: str, failure: Failure) -> str:
    line = f", line {failure.line}" if failure.line is not None else ""
    if _SHARED_MEMORY.search(failure.message):
        what = "would not launch: it needs more shared memory than there is"
    elif failure.kind is FailureKind.COMPILE_ERROR:
        what = "does not compile"
    else:
        what = "fails at the sizes that speed is measured at"
    return f"For {target} this file {what}{line}: {one_line(failure.message)}"


# -- words ------------------------------------------------------------------------------------------------------------


def _example(cases: Sequence[CaseGrade]) -> CaseGrade:
    """The one to talk about: visible before hidden, required before others, then the assignment's order."""
    return min(cases, key=lambda case: (case.hidden, not case.required))


def _with_line(call: TorchOp) -> str:
    return one_line(call.op, 80) + (f" (line {call.line})" if call.line is not None else "")


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(str(size) for size in shape)}{',' if len(shape) == 1 else ''})"


def _sentence_case(text: str) -> str:
    """Names of tensors keep their case; an empty list becomes a word."""
    return text or "An output"


def _is(names: Sequence[object]) -> str:
    return "is" if len(names) <= 1 else "are"


def _fail(cases: Sequence[object]) -> str:
    return "fails" if len(cases) == 1 else "fail"


def _stop(sentence: str) -> str:
    text = plain(sentence, 600)
    return text if text.endswith((".", "!", "?", "…")) else text + "."
