import dataclasses

import pytest
from judging_facts import (
    assignment_of,
    audit_of,
    case,
    examination_of,
    failed,
    measured,
    memory_points,
    mistake,
    output,
    right,
    with_probe,
    wrong,
)

from grader.judging import judge
from grader.measurement import (
    CompileReport,
    Failure,
    FailureKind,
    Finding,
    Launch,
    MistakeMatch,
    OutputWritten,
    Storage,
    TorchOp,
    WrongElement,
)
from grader.verdicts import Verdict

FORWARD = assignment_of()
BACKWARD = assignment_of("flash-attention")
SOFTMAX = assignment_of("online-softmax")
LAYER_NORM = assignment_of("fused-bias-dropout-layernorm")


def diagnosis(assignment, *runs, **changes):
    examination = with_probe(examination_of(assignment, **changes), *runs)
    return judge(assignment, examination).diagnosis


def wrong_in(assignment, names, **how):
    return [wrong(name, assignment, **how) for name in names]


def names_of(assignment):
    return [one.name for one in assignment.cases]


# -- files that give no result -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(FailureKind))
def test_every_kind_of_failure_has_its_label_and_words(kind):
    found = diagnosis(FORWARD, load_failure=Failure(kind=kind, message="the message\nand more", line=21), probes=())
    assert found.label == kind.value
    assert "line 21" in found.sentence
    assert "the message and more" in found.sentence
    assert found.hint


def test_the_kind_seen_most_often_is_the_one_that_is_told():
    found = diagnosis(
        FORWARD,
        failed("random", FailureKind.RAISES),
        *(failed(name, FailureKind.COMPILE_ERROR, "Both operands must be same dtype") for name in ("tail", "large")),
    )
    assert found.label == "compile-error"
    assert "Both operands must be same dtype" in found.sentence
    assert any("large and tail" in line and "29 of 32" in line for line in found.evidence)


def test_what_a_hidden_probe_raised_is_not_quoted():
    assignment = assignment_of(cases=(case("random"), case("secret", hidden=True)))
    found = diagnosis(assignment, failed("secret", FailureKind.RAISES, "words of the hidden probe"))
    assert found.label == "raises"
    assert "hidden probe" in found.sentence
    assert "words" not in str(found)
    assert "secret" not in str(found)


def test_a_launch_that_needs_too_much_shared_memory_is_called_so():
    message = "out of resource: shared memory, Required: 294912, Hardware limit: 232448."
    found = diagnosis(FORWARD, failed("head-dim-128", FailureKind.RAISES, message))
    assert found.label == "needs-bigger-shared-memory"


def test_control_characters_of_a_message_do_not_reach_the_sentence():
    found = diagnosis(FORWARD, failed("random", FailureKind.RAISES, "\x1b[2J<b>\u202e" + "x" * 10**5))
    assert "\x1b" not in found.sentence
    assert "\u202e" not in found.sentence
    assert len(found.sentence) < 700


# -- labels that need no bank ------------------------------------------------------------------------------------------


def with_output(assignment, name, **changes):
    """A probe whose last output has another form."""
    run = right(name, assignment)
    outputs = (*run.outputs[:-1], dataclasses.replace(run.outputs[-1], **changes))
    return dataclasses.replace(run, outputs=outputs)


def test_a_wrong_shape_is_told_with_both_shapes():
    runs = [
        with_output(SOFTMAX, name, shape=(64, 1), want_shape=(64,), rel_error=None)
        for name in names_of(SOFTMAX)
        if name != "repeat"
    ]
    found = diagnosis(SOFTMAX, *runs)
    assert found.label == "wrong-shape"
    assert found.sentence == "lse has shape (64, 1) in random; the handout asks for (64,)."


def test_a_wrong_dtype_shows_in_half_precision_alone():
    runs = [
        with_output(LAYER_NORM, name, dtype="float32", want_dtype=dtype)
        for name, dtype in (("half", "float16"), ("half-wide", "float16"), ("bfloat16", "bfloat16"))
    ]
    found = diagnosis(LAYER_NORM, *runs)
    assert found.label == "wrong-dtype"
    assert found.sentence == "y has dtype float32 in half; the handout asks for float16."


def test_a_missing_output_is_told():
    runs = [measured(name, {"y": 1e-7}) for name in names_of(SOFTMAX)]
    assert diagnosis(SOFTMAX, *runs).label == "wrong-result-type"


def test_a_changed_input_also_breaks_the_repeat():
    runs = (
        dataclasses.replace(right("input-unchanged", LAYER_NORM), inputs_unchanged=False),
        dataclasses.replace(right("repeat", LAYER_NORM), inputs_unchanged=False, repeat_equal=False),
    )
    assert diagnosis(LAYER_NORM, *runs).label == "input-mutated"


def test_different_masks_in_two_runs_are_nondeterministic():
    bad = [name for name in names_of(LAYER_NORM) if name not in ("p-zero", "shifted", "half-wide", "repeat")]
    repeat = dataclasses.replace(wrong("repeat", LAYER_NORM, error=0.7), repeat_equal=False)
    bank = mistake("wrong-dropout-mask", bad, names_of(LAYER_NORM), distance=0.6)
    found = diagnosis(LAYER_NORM, repeat, *wrong_in(LAYER_NORM, bad, error=0.7), mistakes=(bank,))
    assert found.label == "nondeterministic"
    assert any("p-zero" in line for line in found.evidence)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"guards_intact": False}, "writes", id="guard-bands"),
        pytest.param(
            {"findings": (Finding(kind="out-of-bounds-load", message="x[64] of shape (64,)", line=9),)},
            "reads",
            id="audited-load",
        ),
    ],
)
def test_a_broken_guard_alone_is_out_of_bounds(changes, words):
    found = diagnosis(SOFTMAX, dataclasses.replace(right("guard", SOFTMAX), **changes))
    assert found.label == "out-of-bounds"
    assert words in found.sentence


def strayed(name, kind="out-of-bounds-load", assignment=SOFTMAX):
    finding = Finding(kind=kind, message=f"Line 9: {kind} of x; mask these lanes off.", line=9)
    return dataclasses.replace(wrong(name, assignment), findings=(finding,))


def test_what_strays_in_few_of_the_wrong_probes_is_not_what_is_wrong():
    most = [name for name in names_of(SOFTMAX) if name != "half"]
    few = diagnosis(SOFTMAX, *wrong_in(SOFTMAX, most), strayed("tail"), strayed("guard"))
    assert few.label == ""
    assert diagnosis(SOFTMAX, *(strayed(name) for name in most)).label == "out-of-bounds"


def test_where_a_kernel_strays_stores_are_told_first_each_once_and_with_one_line_number():
    found = diagnosis(SOFTMAX, strayed("tail"), strayed("one-column"), strayed("guard", "out-of-bounds-store"))
    assert found.sentence == "The kernel writes outside its tensors."
    assert found.evidence[:2] == (
        "Line 9: out-of-bounds-store of x; mask these lanes off.",
        "Line 9: out-of-bounds-load of x; mask these lanes off.",
    )
    assert "Line 9" not in "".join(found.evidence[2:])


@pytest.mark.parametrize(
    ("assignment", "names"),
    [(FORWARD, ["strided"]), (BACKWARD, ["grad-ones", "grad-strided"]), (BACKWARD, ["strided"])],
)
def test_only_strided_probes_wrong_means_strides_are_ignored(assignment, names):
    far, packed = (
        mistake(label, names, names_of(assignment), distance=distance)
        for label, distance in (("anything", 0.3), ("ignores-strides", 1e-7))
    )
    found = diagnosis(assignment, *wrong_in(assignment, names, error=1.3), mistakes=(far,))
    assert found.label == "ignores-strides"
    assert "or with another tensor's stride" in found.hint
    found = diagnosis(assignment, *wrong_in(assignment, names, error=1.3), mistakes=(far, packed))
    assert found.label == "ignores-strides"
    assert "from the shape alone;" in found.hint


def test_a_known_mistake_that_shows_on_views_alone_keeps_its_name():
    bank = mistake("wrong-dropout-mask", ["strided"], names_of(LAYER_NORM))
    assert diagnosis(LAYER_NORM, wrong("strided", LAYER_NORM), mistakes=(bank,)).label == "wrong-dropout-mask"


def test_a_crash_on_an_expanded_gradient_is_ignored_strides_too():
    runs = (failed("grad-ones", FailureKind.CRASHED), wrong("grad-strided", BACKWARD))
    assert judge(BACKWARD, with_probe(examination_of(BACKWARD), *runs)).verdict is Verdict.ERROR
    assert diagnosis(BACKWARD, *runs).label == "ignores-strides"


def test_an_exception_on_strided_inputs_is_quoted_as_it_is():
    found = diagnosis(FORWARD, failed("strided", FailureKind.RAISES, "q must be contiguous"))
    assert found.label == "raises"
    assert "q must be contiguous" in found.sentence
    assert "only where tensors are not contiguous" in found.hint
    elsewhere = failed("tail", FailureKind.RAISES, "q must be contiguous")
    assert "contiguous" not in diagnosis(FORWARD, failed("strided", FailureKind.RAISES, "a message"), elsewhere).hint


def test_an_exception_without_words_leaves_no_colon():
    found = diagnosis(FORWARD, failed("random", FailureKind.RAISES, "AssertionError: "))
    assert found.sentence == "The call raised an exception in probe random: AssertionError."


def unwritten(assignment, name, rows=5):
    form = {
        "rel_error": None,
        "n_not_finite": rows * 32,
        "n_wrong": rows * 32,
        "wrong_rows": tuple(range(64 - rows, 64)),
        "n_wrong_rows": rows,
    }
    outputs = (output("o", **form), *(output(one.name) for one in assignment.outputs[1:]))
    return measured(name, {}, outputs=outputs)


UNWRITTEN_IN = ("causal-more-keys", "causal-more-queries", "causal-tail", "guard", "query-tail", "tail")


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        pytest.param("NotImplementedError: write the kernel", "still to be written", id="starter"),
        pytest.param("AssertionError: Torch not compiled with CUDA enabled", "device of the inputs", id="cuda"),
        pytest.param("ValueError: bad tile", "came out of your file", id="other"),
    ],
)
def test_an_exception_is_told_what_it_means(message, hint):
    assert hint in diagnosis(FORWARD, failed("random", FailureKind.RAISES, message)).hint


@pytest.mark.parametrize(
    ("failure", "hint"),
    [
        pytest.param(
            Failure(kind=FailureKind.COMPILE_ERROR, message="NameError: name 'qkk' is not defined", line=40),
            "has that name", id="name",
        ),
        pytest.param(Failure(kind=FailureKind.RAISES, message="NameError: name 'math' is not defined"), "has that name",
                     id="name-outside-the-kernel"),
        pytest.param(
            Failure(kind=FailureKind.RAISES, message="function F returned an incorrect number of gradients"),
            "one gradient for each argument", id="gradients",
        ),
    ],
)  # fmt: skip
def test_what_is_misspelt_or_missing_is_told_so(failure, hint):
    assert hint in diagnosis(FORWARD, load_failure=failure, probes=()).hint


@pytest.mark.parametrize(("rows", "said"), [(1, "The last row of 64 of o in tail holds"), (2, "The last 2 rows of 64")])
def test_one_row_is_told_as_one(rows, said):
    found = diagnosis(FORWARD, *(unwritten(FORWARD, name, rows=rows) for name in UNWRITTEN_IN))
    assert found.label == "output-unwritten"
    assert found.sentence.startswith(said)


def test_trailing_rows_of_poison_are_unwritten_output():
    found = diagnosis(
        FORWARD,
        *(unwritten(FORWARD, name) for name in UNWRITTEN_IN),
        audit=audit_of(
            FORWARD,
            outputs=(
                OutputWritten(name="o", by_own_kernel=True, unwritten_elements=160),
                OutputWritten(name="lse", by_own_kernel=True),
            ),
        ),
    )
    assert found.label == "output-unwritten"
    assert "last 5 rows of 64 of o in tail" in found.sentence
    assert any("160 elements" in line for line in found.evidence)


def test_rows_that_are_written_for_other_values_are_not_unwritten():
    found = diagnosis(FORWARD, unwritten(FORWARD, "large"))
    assert found.label == ""


def test_garbage_in_trailing_rows_needs_the_audit_to_be_called_unwritten():
    outputs = (output("o", 1e30, wrong_rows=(62, 63), n_wrong_rows=2, n_wrong=64), output("lse"))
    runs = [measured(name, {}, outputs=outputs) for name in UNWRITTEN_IN]
    seen = audit_of(
        FORWARD, outputs=tuple(OutputWritten(name=n, by_own_kernel=True, unwritten_elements=64) for n in ("o", "lse"))
    )
    assert diagnosis(FORWARD, *runs, audit=seen).label == "output-unwritten"
    assert diagnosis(FORWARD, *runs).label == ""


def test_small_errors_everywhere_in_float32_are_a_low_precision_accumulator():
    right_ones = ("half", "bfloat16", "repeat")
    bad = [name for name in names_of(FORWARD) if name not in right_ones]
    found = diagnosis(FORWARD, *wrong_in(FORWARD, bad, error=4e-4))
    assert found.label == "low-precision-accumulator"
    assert "lse is exact" in found.sentence


def test_larger_errors_are_not_called_low_precision():
    bad = [name for name in names_of(FORWARD) if name not in ("half", "bfloat16", "repeat")]
    assert diagnosis(FORWARD, *wrong_in(FORWARD, bad, error=0.1)).label == ""


def test_an_answer_of_an_earlier_call_is_a_cached_result():
    assert diagnosis(FORWARD, wrong("fresh-inputs", FORWARD)).label == "cached-result"


def test_an_overwritten_first_result_is_a_shared_buffer():
    run = dataclasses.replace(right("fresh-inputs", FORWARD), first_result_kept=False)
    assert diagnosis(FORWARD, run).label == "shared-output-buffer"


def test_a_race_has_its_name_only_where_results_show_it():
    race = audit_of(BACKWARD, findings=(Finding(kind="race-write-write", message="two programs store dq[0, 3]"),))
    assert diagnosis(BACKWARD, audit=race).label == ""
    repeat = dataclasses.replace(wrong("repeat", BACKWARD, only=("dq",)), repeat_equal=False)
    assert diagnosis(BACKWARD, repeat, wrong("random", BACKWARD, only=("dq",)), audit=race).label == "backward-race"


# -- structure, memory, rules ------------------------------------------------------------------------------------------


def test_stored_scores_are_named_with_their_growth():
    found = diagnosis(FORWARD, memory=memory_points(2.0), audit=audit_of(FORWARD, n_launches=2))
    assert found.label == "stored-scores"
    assert any("T^2.00" in line for line in found.evidence)


def test_a_dense_backward_is_stored_scores_of_the_backward():
    found = diagnosis(BACKWARD, memory=memory_points(backward=2.0))
    assert found.label == "stored-scores"
    assert "backward" in found.sentence


def test_saved_scores_are_named_with_their_shape():
    saved = (Storage(shape=(1, 192, 192), dtype="float32", size_bytes=147456),)
    found = diagnosis(
        BACKWARD, memory=memory_points(2.0, backward=2.0, kept=2.0), audit=audit_of(BACKWARD, saved=saved)
    )
    assert found.label == "saved-scores-for-backward"
    assert "[1, 192, 192] float32" in found.sentence


def test_two_launches_are_not_fused():
    launch = audit_of(LAYER_NORM).launches[0]
    audit = audit_of(
        LAYER_NORM,
        n_launches=2,
        launches=(dataclasses.replace(launch, kernel="dropout_kernel"), dataclasses.replace(launch, kernel="norm")),
        unique_bytes=390_000,
    )
    found = diagnosis(LAYER_NORM, audit=audit)
    assert found.label == "not-fused"
    assert "2 launches (dropout_kernel and norm)" in found.sentence


def test_one_kernel_launched_again_and_again_is_told_so():
    launch = dataclasses.replace(audit_of(FORWARD).launches[0], kernel="attend")
    found = diagnosis(FORWARD, audit=audit_of(FORWARD, n_launches=3, launches=(launch,) * 3))
    assert found.label == "not-fused"
    assert "3 launches (attend, 3 times)" in found.sentence
    assert "One grid has room" in found.hint


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({"torch_ops": (TorchOp(op="aten.softmax", count=1, size_bytes=800),)}, "torch-compute"),
        ({"unique_bytes": 390_000}, "extra-traffic"),
    ],
)
def test_other_losses_of_structure_have_names(changes, label):
    assert diagnosis(FORWARD, audit=audit_of(FORWARD, **changes)).label == label


def test_library_attention_is_named_with_its_line():
    audit = audit_of(
        FORWARD,
        library_calls=(TorchOp(op="scaled_dot_product_attention", count=1, size_bytes=8, line=12),),
        outputs=(OutputWritten(name="o", by_own_kernel=False), OutputWritten(name="lse", by_own_kernel=True)),
    )
    found = diagnosis(FORWARD, audit=audit)
    assert found.label == "library-attention"
    assert found.sentence.startswith("o comes from scaled_dot_product_attention (line 12)")


def test_what_is_refused_says_what_was_found_and_what_was_asked():
    found = diagnosis(SOFTMAX, audit=audit_of(SOFTMAX, n_launches=0, launches=()))
    assert "Found: 0 Triton launches; asked: at least 1." in found.evidence


def test_no_launch_is_no_triton_kernel():
    assert diagnosis(SOFTMAX, audit=audit_of(SOFTMAX, n_launches=0, launches=())).label == "no-triton-kernel"


def test_an_output_of_torch_beside_a_kernel_is_no_triton_kernel():
    audit = audit_of(
        FORWARD,
        outputs=(OutputWritten(name="o", by_own_kernel=False), OutputWritten(name="lse", by_own_kernel=True)),
    )
    found = diagnosis(FORWARD, audit=audit)
    assert found.label == "no-triton-kernel"
    assert found.sentence == "o is not written by a Triton kernel of this file."


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        pytest.param({"right_without_launches": ("lse", "o")}, "lse and o come out right while no kernel runs",
                     id="right-without-launches"),
        pytest.param({"audit": audit_of(FORWARD, unread_inputs=("q", "k"))}, "No kernel of this file reads q and k",
                     id="unread"),
        pytest.param({"audit": audit_of(FORWARD, torch_ops=(TorchOp(op="bmm", count=1, size_bytes=1 << 20),))},
                     "What the kernel is to do is done outside it: bmm.", id="torch"),
    ],
)  # fmt: skip
def test_why_no_kernel_computes_the_answer_is_said(changes, sentence):
    asked = dataclasses.replace(FORWARD, structure=dataclasses.replace(FORWARD.structure, forbidden_ops=("bmm",)))
    found = judge(asked, dataclasses.replace(examination_of(asked), **changes)).diagnosis
    assert found.label == "no-triton-kernel"
    assert found.sentence.startswith(sentence)


# -- the bank ----------------------------------------------------------------------------------------------------------

TAIL = ["tail", "key-tail", "negative-tail", "one-tile", "causal-more-queries"]


def named(*bank, failing=TAIL, error=0.4):
    return diagnosis(FORWARD, *wrong_in(FORWARD, failing, error=error), mistakes=tuple(bank))


def test_a_mistake_that_explains_the_outputs_is_named_with_its_step_and_hint():
    found = named(mistake("tail-unmasked", TAIL, names_of(FORWARD), tile=32))
    assert (found.label, found.step, found.hint) == (
        "tail-unmasked",
        "the step of tail-unmasked",
        "look at tail-unmasked",
    )
    assert "5 of 5 wrong probes" in found.evidence[0]
    assert "27 of the 27" in found.evidence[0]


@pytest.mark.parametrize(
    ("tile", "said"),
    [
        pytest.param(1024, "N right probes fit into one such tile, where this mistake changes nothing.", id="fits"),
        pytest.param(512, "N right probes fit into one such tile, where this mistake changes nothing.", id="just-fits"),
        pytest.param(256, "", id="they-are-wider"),
        pytest.param(4096, "", id="the-wrong-one-fits-too"),
        pytest.param(None, "", id="no-tile"),
    ],
)
@pytest.mark.parametrize("axis", ["cols", "keys"])
def test_right_probes_that_fit_into_one_tile_are_said_to_show_nothing(axis, tile, said):
    wide, *narrow = SOFTMAX.cases
    cases = (
        dataclasses.replace(wide, axes={axis: 2000}),
        *(dataclasses.replace(one, axes={axis: 512}) for one in narrow),
    )
    asked = dataclasses.replace(SOFTMAX, cases=cases)
    bank = (mistake("no-rescale", [wide.name], names_of(asked), tile=tile),)
    found = diagnosis(asked, wrong(wide.name, asked), mistakes=bank)
    assert found.label == "no-rescale"
    told = [one for one in found.evidence if "one such tile" in one]
    assert told == ([said.replace("N", str(len(narrow)))] if said else [])


@pytest.mark.parametrize(
    "bank",
    [
        pytest.param({"distance": 0.3}, id="far-from-the-student"),
        pytest.param({"own_error": 3e-7, "distance": 1e-7}, id="as-near-to-the-oracle"),
        pytest.param({"own_error": 1e-4, "distance": 9e-5}, id="no-nearer-than-the-oracle"),
    ],
)
def test_a_mistake_that_does_not_explain_the_outputs_is_not_named(bank):
    assert named(mistake("tail-unmasked", TAIL, names_of(FORWARD), **bank)).label == ""


def test_a_mistake_without_comparable_outputs_is_not_named():
    match = mistake("tail-skipped", TAIL, names_of(FORWARD))
    blank = MistakeMatch(
        label="tail-skipped",
        tile=None,
        probes=tuple(dataclasses.replace(one, distance=None, own_error=None) for one in match.probes),
    )
    assert named(blank).label == ""


def test_a_mistake_that_is_not_finite_where_the_student_is_not_is_named():
    causal = [name for name in names_of(FORWARD) if "causal" in name]
    bank = mistake("causal-off-by-one", causal, names_of(FORWARD), distance=0.0, own_error=None)
    assert named(bank, failing=causal, error=None).label == "causal-off-by-one"


def test_nothing_but_nan_everywhere_has_no_name():
    everywhere = names_of(FORWARD)
    bank = mistake("tail-skipped", everywhere, everywhere, distance=0.0, own_error=None, tile=2048)
    found = named(bank, failing=everywhere, error=None)
    assert found.label == ""
    assert found.hint.startswith("Where o is wrong not one value is finite: look for 0 / 0")
    # with right probes beside them, where it is right too, it is told from others
    beside = mistake("tail-skipped", TAIL, everywhere, distance=0.0, own_error=None, tile=2048)
    assert named(beside, error=None).label == "tail-skipped"


def test_where_nothing_is_right_the_evidence_does_not_speak_of_it():
    everywhere = names_of(FORWARD)
    found = named(mistake("missing-scale", everywhere, everywhere), failing=everywhere)
    assert (
        found.evidence[0]
        == f"The outputs agree with this mistake in {len(everywhere)} of {len(everywhere)} wrong probes."
    )


def test_a_mistake_that_is_wrong_where_the_student_is_right_is_not_named():
    everywhere = [name for name in names_of(FORWARD) if name not in ("half", "repeat")]
    assert named(mistake("missing-scale", everywhere, names_of(FORWARD))).label == ""


def test_one_odd_probe_of_many_does_not_hide_the_mistake():
    match = mistake("causal-missing", [*TAIL, "large", "long"], names_of(FORWARD))
    odd = tuple(dataclasses.replace(one, distance=0.5) if one.probe == "long" else one for one in match.probes)
    found = named(dataclasses.replace(match, probes=odd), failing=[*TAIL, "large", "long"])
    assert found.label == "causal-missing"


def test_a_mistake_that_shows_on_few_probes_is_found_by_them():
    few = ["eps", "small-variance", "narrow"]
    bank = (
        mistake("eps-outside-sqrt", few, names_of(LAYER_NORM), distance=0.1),
        mistake("dropout-not-scaled", few, names_of(LAYER_NORM)),
    )
    assert diagnosis(LAYER_NORM, *wrong_in(LAYER_NORM, few, error=0.02), mistakes=bank).label == "dropout-not-scaled"


def test_ties_go_to_the_pattern_then_to_the_untiled_then_to_the_bank():
    probes = names_of(FORWARD)
    # wrong in one probe more than the student: still plausible, but less exact
    loose = mistake("loose", [*TAIL, "long"], probes)
    exact = mistake("exact", TAIL, probes, tile=32)
    assert (named(loose, exact).label, named(loose, exact).runner_up) == ("exact", "loose")
    plain, tiled = mistake("untiled", TAIL, probes), mistake("tiled", TAIL, probes, tile=64)
    assert named(tiled, plain).label == "untiled"
    first, second = mistake("first", TAIL, probes), mistake("second", TAIL, probes)
    assert named(first, second).label == "first"
    assert named(exact, dataclasses.replace(exact, tile=64)).runner_up == ""


def test_rounding_that_a_large_error_magnifies_does_not_hide_the_mistake():
    bad = ["random", "causal"]
    bank = mistake("wrong-logsumexp", bad, names_of(BACKWARD), distance=8e-4, own_error=500.0)
    assert diagnosis(BACKWARD, *wrong_in(BACKWARD, bad, error=500.0), mistakes=(bank,)).label == "wrong-logsumexp"


def test_a_mistake_of_astronomic_size_explains_nothing_by_its_size():
    bad = ["random", "causal"]
    bank = mistake("backward-missing-scale", bad, names_of(BACKWARD), distance=1.0, own_error=1e18)
    assert diagnosis(BACKWARD, *wrong_in(BACKWARD, bad, error=500.0), mistakes=(bank,)).label == ""


def test_a_probe_where_only_the_students_dtype_overflows_is_no_witness():
    bad = ["causal", "causal-tail", "guard"]
    match = mistake("backward-not-causal", [*bad, "causal-large"], names_of(BACKWARD), own_error=500.0)
    overflowing = tuple(
        dataclasses.replace(one, distance=None, own_error=4e37) if one.probe == "causal-large" else one
        for one in match.probes
    )
    runs = [*wrong_in(BACKWARD, bad, error=500.0), wrong("causal-large", BACKWARD, error=None)]
    found = diagnosis(BACKWARD, *runs, mistakes=(dataclasses.replace(match, probes=overflowing),))
    assert found.label == "backward-not-causal"
    assert "3 of 3 wrong probes" in found.evidence[0]


def test_a_right_file_has_no_label_whatever_the_bank_says():
    bank = mistake("tail-unmasked", TAIL, names_of(FORWARD))
    found = diagnosis(FORWARD, mistakes=(bank,))
    assert (found.label, found.runner_up) == ("", "")


# -- what is known where nothing has a name ----------------------------------------------------------------------------


def test_the_first_wrong_element_is_told_as_it_was_measured():
    found = named()
    assert found.label == ""
    assert (
        "negative-tail: 2,048 of 2,048 values of o are off by more than 2.0e-05 of the largest. The first is at "
        "[0, 3, 5]: yours 0.25, expected 0.125."
    ) in found.evidence
    assert "o is wrong; lse is right everywhere." in found.evidence


def test_an_element_that_is_not_a_number_is_told_so():
    first = WrongElement(index=(0, 0, 0), got=None, want=0.5)
    run = measured("tail", {}, outputs=(output("o", None, first_wrong=first), output("lse")))
    assert any("yours not a finite number, expected 0.5" in line for line in diagnosis(FORWARD, run).evidence)


@pytest.mark.parametrize(
    ("failing", "said"),
    [
        ([name for name in names_of(FORWARD) if name.startswith("causal")], "Wrong exactly for is_causal=True."),
        (["half", "bfloat16"], "Wrong exactly for half precision."),
        ([n for n in names_of(FORWARD) if n not in ("half", "bfloat16")], "Wrong exactly for float32."),
        ([n for n in names_of(FORWARD) if "tail" in n or n == "tiny"], "Wrong exactly for sizes that are no multiple"),
    ],
)
def test_what_wrong_probes_have_in_common_is_told(failing, said):
    # repeat, guard and the like share the plain sizes of `random`
    assert any(line.startswith(said) for line in diagnosis(FORWARD, *wrong_in(FORWARD, failing)).evidence)


@pytest.mark.parametrize(
    ("failing", "said"),
    [
        pytest.param(
            ("n-512", "n-4096"), "Wrong exactly where queries is 512 or more, and right up to 128.", id="large"
        ),
        pytest.param(("n-8", "n-128", "n-512"), "Right only for queries = 4,096.", id="one-size"),
        pytest.param(("n-8", "n-512"), "", id="neither"),
    ],
)
def test_a_size_that_tells_wrong_from_right_is_told(failing, said):
    cases = tuple(case(f"n-{size}", axes={"queries": size, "keys": 128}, options={}) for size in (8, 128, 512, 4096))
    assignment = assignment_of(cases=cases)
    told = [one for one in diagnosis(assignment, *wrong_in(assignment, failing)).evidence if "queries" in one]
    assert told == ([said] if said else [])


def test_a_size_of_a_hidden_probe_is_not_told():
    cases = tuple(
        case(f"n-{size}", axes={"queries": size, "keys": 128}, options={}, hidden=size == 512)
        for size in (8, 16, 512, 4096)
    )
    assignment = assignment_of(cases=cases)
    found = diagnosis(assignment, *wrong_in(assignment, ["n-512", "n-4096"]))
    assert "Wrong exactly where queries is 4,096 or more, and right up to 16." in found.evidence


@pytest.mark.parametrize(
    ("cases", "said"),
    [
        pytest.param(
            [case("a", options={"p": 0.3}), case("b", options={"p": 0.0}), case("c", options={"p": 0.5})],
            "Wrong exactly for p above 0.", id="option",
        ),
        pytest.param(
            [case("a", axes={"batch": 2, "keys": 8}), case("b", axes={"batch": 1, "keys": 8}),
             case("c", axes={"batch": 3, "keys": 64})],
            "Wrong exactly for several batch entries.", id="batch",
        ),
        pytest.param(
            [case("a", axes={"queries": 8, "keys": 64}), case("b", axes={"queries": 8, "keys": 8}),
             case("c", axes={"queries": 64, "keys": 8})],
            "Wrong exactly for different numbers of queries and keys.", id="unequal",
        ),
        pytest.param(
            [case(name, axes={"batch": batch, "queries": queries, "keys": keys})
             for name, batch, queries, keys in (("a", 1, 77, 96), ("b", 1, 64, 77), ("c", 2, 1, 64))],
            "Wrong exactly where queries is no multiple of 64.", id="ragged-queries",
        ),
        pytest.param(
            [case(name, axes={"batch": batch, "queries": queries, "keys": keys})
             for name, batch, queries, keys in (("a", 1, 77, 64), ("b", 1, 64, 96), ("c", 2, 64, 1))],
            "Wrong exactly for sizes that are no multiple of 32.", id="ragged",
        ),
    ],
)  # fmt: skip
def test_what_tells_wrong_inputs_from_right_ones_is_told(cases, said):
    assignment = assignment_of(cases=tuple(cases))
    assert said in diagnosis(assignment, *wrong_in(assignment, ["a", "c"])).evidence


def test_one_starts_from_the_smallest_wrong_probe_that_is_shown():
    cases = tuple(
        case(name, axes={"queries": size}, hidden=name == "secret")
        for name, size in (("wide", 512), ("small", 16), ("secret", 2), ("right", 1))
    )
    assignment = assignment_of(cases=cases)
    found = diagnosis(assignment, *wrong_in(assignment, ["wide", "small", "secret"]))
    assert found.hint.endswith("start from the smallest wrong probe, small (what small tries).")


@pytest.mark.parametrize(
    ("failing", "error", "label"),
    [
        pytest.param(["shifted"], 2e-4, "variance-by-difference", id="alone"),
        pytest.param(["shifted"], 0.4, "", id="plainly-wrong"),
        pytest.param(["shifted"], None, "", id="not-finite"),
        pytest.param(["shifted", "tail"], 2e-4, "", id="others-too"),
        pytest.param(["eps"], 2e-4, "", id="another"),
    ],
)
def test_digits_lost_where_values_are_far_from_zero_are_a_difference_of_squares(failing, error, label):
    cases = tuple(dataclasses.replace(one, fill=one.name) if one.name == "shifted" else one for one in LAYER_NORM.cases)
    assignment = dataclasses.replace(LAYER_NORM, cases=cases)
    runs = [measured(name, {"y": error}) for name in failing]
    runs = [dataclasses.replace(run, outputs=(dataclasses.replace(run.outputs[0], n_wrong=9),)) for run in runs]
    assert diagnosis(assignment, *runs).label == label


def test_errors_that_grow_with_the_length_are_told():
    cases = tuple(
        case(f"t{size}", axes={"queries": 8, "keys": size, "head_dim": 32}, options={}) for size in (64, 128, 256, 512)
    )
    assignment = assignment_of(cases=cases)
    runs = [wrong(f"t{size}", assignment, error=size / 1e4) for size in (64, 128, 256, 512)]
    found = diagnosis(assignment, *runs)
    assert "The error grows with the sequence length, about like T^1.0." in found.evidence


def test_rows_are_told():
    run = measured("tail", {}, outputs=(output("o", 0.4, wrong_rows=(61, 62, 63), n_wrong_rows=3), output("lse")))
    assert any(
        line == "tail: the last 3 of 64 rows of o have a wrong element (61, 62 and 63)."
        for line in diagnosis(FORWARD, run).evidence
    )


def test_nothing_of_a_hidden_probe_is_told_but_that_it_fails():
    assignment = assignment_of(cases=(case("random"), case("secret", hidden=True)))
    found = diagnosis(assignment, wrong("secret", assignment, error=0.123))
    assert found.sentence == "1 hidden probe fails; every visible one passes."
    for told in ("secret", "0.123", "[0, 3, 5]"):
        assert told not in str(found)
    assert "nothing that the handout does not mention" in found.hint


def test_a_wrong_answer_of_torch_says_so_beside_the_numbers():
    audit = audit_of(FORWARD, n_launches=0, launches=())
    found = diagnosis(FORWARD, wrong("random", FORWARD), audit=audit)
    assert found.label == "no-triton-kernel"
    assert any("0 Triton launches" in note for note in found.notes)


# -- notes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("Loop-carried variable m has initial type fp32", "does not compile, line 31"),
        ("out of resource: shared memory, Required: 524288", "more shared memory"),
    ],
)
def test_what_would_not_run_on_the_gpu_is_a_note_on_a_full_file(message, said):
    failure = Failure(kind=FailureKind.COMPILE_ERROR, message=message, line=31, stage="compile")
    report = CompileReport(target="sm_90", kernels=(), failures=(failure,))
    found = diagnosis(FORWARD, compile_report=report)
    assert found.label == ""
    assert any(said in note for note in found.notes)


@pytest.mark.parametrize(("alike", "said"), [(True, True), (False, False)])
def test_the_order_of_programs_is_not_blamed_where_two_calls_differ_anyway(alike, said):
    repeat = dataclasses.replace(right("repeat", LAYER_NORM), repeat_equal=alike)
    found = diagnosis(LAYER_NORM, repeat, audit=audit_of(LAYER_NORM, order_dependent=True))
    assert any("another order" in note for note in found.notes) is said


def test_launches_named_by_a_stranger_are_made_printable():
    evil = Launch(
        kernel="\x1b]0;owned\x07", line=1, grid=(1,), requested_bytes=1, unique_bytes=1, dot_flops=0,
        largest_tile_elements=1,
    )  # fmt: skip
    found = diagnosis(LAYER_NORM, audit=audit_of(LAYER_NORM, n_launches=2, launches=(evil, evil)))
    assert "\x1b" not in str(found.sentence)
