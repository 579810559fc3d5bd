"""The judge against itself: known mistakes and empty answers, taken for hand-ins, never get what right ones get."""

from __future__ import annotations

import functools

import pytest
import torch

from benchmarks.mutation import TILES, Asked, Mutant, Trial, load, slugs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TILE = 64
ATTENTION = ("flash-attention-forward", "flash-attention")


@functools.cache
def trial_of(slug: str) -> Trial:
    torch.set_num_threads(1)
    return Trial(load(slug))


def mutants(slug: str, *tiles: int) -> list[Mutant]:
    return list(trial_of(slug).mutants(tiles))


@functools.cache
def labels(slug: str) -> frozenset[str]:
    return frozenset(mutant.mistake.label for mutant in mutants(slug, TILE))


@pytest.mark.parametrize("slug", slugs())
def test_the_right_answer_earns_all_of_numerics(slug):
    grade = trial_of(slug).grade(lambda asked: asked.oracle)
    assert grade.numerics.points == grade.numerics.out_of
    assert grade.diagnosis.label == ""


@pytest.mark.parametrize("slug", slugs())
def test_no_known_mistake_earns_all_of_numerics(slug):
    trial = trial_of(slug)
    grades = {
        f"{one.mistake.label}#{one.nth}, tile {one.tile}": trial.grade(one.answers, diagnosed=False).numerics
        for one in mutants(slug, TILES[0], TILES[-1])
    }
    assert [form for form, numerics in grades.items() if not numerics.points < numerics.out_of] == []


@pytest.mark.parametrize("slug", slugs())
def test_a_known_mistake_is_named(slug):
    """Or another of the same numbers. What the backward shares with the forward is tried there."""
    trial = trial_of(slug)
    known = labels("flash-attention-forward") if slug == "flash-attention" else frozenset()
    misnamed = []
    for one in mutants(slug, TILE):
        if one.mistake.label in known:
            continue
        grade = trial.grade(one.answers)
        named = grade.diagnosis.label
        if named != one.mistake.label and not trial.has_numbers_of(named, one, grade):
            misnamed.append((one.mistake.label, one.nth, named))
    assert misnamed == []


# -- answers that know nothing ----------------------------------------------------------------------------------------


def constant(value):
    return lambda asked: {name: torch.full_like(want, value) for name, want in asked.oracle.items()}


def best_constant(asked: Asked):
    """The constant that is nearest to each output: nobody can have it without the answer."""
    middle = {name: (want.max() + want.min()) / 2 for name, want in asked.oracle.items()}
    return {name: torch.full_like(want, float(middle[name])) for name, want in asked.oracle.items()}


def identity(asked: Asked):
    """Every output is the first input of its shape."""
    found = {}
    for name, want in asked.oracle.items():
        alike = [value for value in asked.inputs.values() if value.shape == want.shape]
        found[name] = alike[0].double() if alike else torch.zeros_like(want)
    return found


def mean_of_values(asked: Asked):
    """Attention that attends to everything alike, with the logsumexp and the gradients that belong to it."""
    q, k, v = (asked.inputs[name].double() for name in ("q", "k", "v"))
    flat = {"q": torch.zeros_like(q), "k": torch.zeros_like(k), "v": v} | {
        name: value.double() for name, value in asked.inputs.items() if name == "do"
    }
    return trial_of_inputs(asked).operation.oracle(flat, asked.options)


def trial_of_inputs(asked: Asked) -> Trial:
    return trial_of(ATTENTION["do" in asked.inputs])


def mean_of_rows(asked: Asked):
    """Softmax of a row without differences; LayerNorm of one without a spread."""
    x = asked.inputs["x"].double()
    if "lse" in asked.oracle:
        flat = x.mean(dim=-1, keepdim=True).expand(x.shape)
        return {"y": torch.softmax(flat, dim=-1), "lse": torch.logsumexp(flat, dim=-1)}
    return {"y": asked.inputs["beta"].double().expand(x.shape)}


EMPTY = {
    "zeros": constant(0.0),
    "ones": constant(1.0),
    "not-a-number": constant(float("nan")),
    "infinity": constant(float("inf")),
    "best-constant": best_constant,
    "identity": identity,
}


@pytest.mark.parametrize("answer", EMPTY)
@pytest.mark.parametrize("slug", slugs())
def test_an_answer_that_knows_nothing_earns_nothing(slug, answer):
    grade = trial_of(slug).grade(EMPTY[answer], diagnosed=False)
    assert grade.numerics.points == 0.0
    assert grade.verdict == "wrong"


@pytest.mark.parametrize("slug", slugs())
def test_the_mean_earns_nothing(slug):
    mean = mean_of_values if slug in ATTENTION else mean_of_rows
    assert trial_of(slug).grade(mean, diagnosed=False).numerics.points == 0.0


OUTPUTS = [(slug, output.name) for slug in slugs() for output in load(slug).outputs]


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize(("slug", "output"), OUTPUTS)
def test_no_output_can_be_left_out(slug, output, value):
    """All the others right, this one a constant."""

    def answers(asked):
        return {**asked.oracle, output: torch.full_like(asked.oracle[output], value)}

    assert trial_of(slug).grade(answers, diagnosed=False).numerics.points == 0.0


@pytest.mark.parametrize("slug", slugs())
def test_an_answer_to_other_inputs_earns_nothing(slug):
    """What a file would say that keeps the answers of an earlier run."""
    trial, other = trial_of(slug), Trial(load(slug), seed=1)
    stale = {asked.case.name: asked.oracle for asked in other.asked}
    assert trial.grade(lambda asked: stale[asked.case.name], diagnosed=False).numerics.points == 0.0
