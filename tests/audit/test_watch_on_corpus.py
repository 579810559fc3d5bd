"""The audit says of files of the corpus exactly what is true of them."""

from __future__ import annotations

import json

import pytest
import torch
from audit_calls import (
    CORPUS,
    attention,
    attention_inputs,
    in_arena,
    kinds,
    layer_norm_inputs,
    line_of,
    load,
    named,
    normal,
    strided,
    watched,
)

from workers.audit import MAX_FACTS_BYTES, Watch, eager_costs, explain_exception

FORWARD = CORPUS / "flash-attention-forward"
TRAINED = CORPUS / "flash-attention"
SOFTMAX = CORPUS / "online-softmax"
FUSED = CORPUS / "fused-bias-dropout-layernorm"


def good_files(folder):
    return [pytest.param(path, id=path.stem) for path in sorted(folder.glob("ok-*.py"))]


# ---- correct files: nothing is found, nothing is changed


@pytest.mark.parametrize("level", ["bounds", "storages", "full"])
@pytest.mark.parametrize("path", good_files(FORWARD))
def test_a_correct_forward_has_no_findings_and_the_same_bits(path, level):
    inputs = in_arena(**attention_inputs(2, 50, 70, 32, make=strided))
    plain = named(("o", "lse"), attention(inputs, True)(load(path)))
    outputs, facts = watched(path, attention(inputs, True), inputs, ("o", "lse"), level=level)
    assert facts.get("findings", []) == []
    assert all(torch.equal(outputs[name], plain[name]) for name in plain)


@pytest.mark.parametrize("order", ["reverse", 7])
@pytest.mark.parametrize("path", good_files(FORWARD))
def test_the_order_of_programs_does_not_matter_to_a_correct_file(path, order):
    inputs = in_arena(**attention_inputs(2, 70, 50, 16))
    natural, _ = watched(path, attention(inputs, False), inputs, ("o", "lse"))
    permuted, facts = watched(path, attention(inputs, False), inputs, ("o", "lse"), order=order, poison_empty=True)
    assert facts["findings"] == []
    assert all(torch.equal(natural[name], permuted[name]) for name in natural)


@pytest.mark.parametrize("path", good_files(TRAINED))
def test_a_correct_backward_has_no_findings_and_the_same_bits(path):
    inputs = in_arena(**attention_inputs(2, 40, 56, 16, make=strided))
    for tensor in inputs.values():
        tensor.requires_grad_()
    grad = in_arena(do=strided(2, 40, 16, seed=9))["do"]
    module = load(path)
    plain = module.FlashAttention.apply(*inputs.values(), True)
    plain_grads = torch.autograd.grad(plain, tuple(inputs.values()), grad)
    with Watch(inputs=inputs, level="full", submission_file=str(path)) as forward:
        o = module.FlashAttention.apply(*inputs.values(), True)
    with Watch(inputs={**inputs, "do": grad}, level="full", submission_file=str(path)) as backward:
        grads = torch.autograd.grad(o, tuple(inputs.values()), grad)
    forward_facts = forward.facts({"o": o})
    backward_facts = backward.facts(dict(zip(("dq", "dk", "dv"), grads, strict=True)))
    assert forward_facts["findings"] == backward_facts["findings"] == []
    assert torch.equal(o, plain)
    assert all(torch.equal(a, b) for a, b in zip(grads, plain_grads, strict=True))
    assert forward_facts["outputs"]["o"]["written_by_kernel"]


@pytest.mark.parametrize("path", good_files(SOFTMAX))
def test_a_correct_softmax_has_no_findings(path):
    inputs = in_arena(x=normal(1, 5, 300, seed=1)[0])
    call = lambda module: module.online_softmax(inputs["x"])  # noqa: E731
    plain = named(("y", "lse"), call(load(path)))
    outputs, facts = watched(path, call, inputs, ("y", "lse"))
    assert facts["findings"] == []
    assert facts["n_launches"] == 1
    assert all(torch.equal(outputs[name], plain[name]) for name in plain)


# ---- exact numbers


@pytest.mark.parametrize("length", [64, 192, 384])
def test_flash_touches_2056_bytes_and_asks_for_8_squared_and_1544_per_position(length):
    inputs = in_arena(**attention_inputs(2, length, length, 64))
    _, facts = watched(FORWARD / "ok-base2-class.py", attention(inputs, True), inputs, ("o", "lse"))
    assert facts["n_launches"] == 1
    assert facts["unique_bytes"] == 2056 * length
    assert facts["requested_bytes"] == 8 * length**2 + 1544 * length
    assert facts["dot_flops"] == 2 * 2 * 2 * 64 * sum(64 * 64 * (tile + 1) for tile in range(length // 64))
    assert facts["largest_tile_elements"] == 64 * 64


def test_bytes_are_told_per_argument():
    inputs = in_arena(**attention_inputs(1, 64, 128, 32))
    path = FORWARD / "ok-raw-strides.py"
    _, facts = watched(path, attention(inputs, False), inputs, ("o", "lse"))
    (launch,) = facts["launches"]
    by_name = {argument["name"]: argument for argument in launch["args"]}
    # two programs of 32 queries each stream over all keys
    assert by_name["k_ptr"]["requested_load_bytes"] == 2 * by_name["k_ptr"]["unique_load_bytes"] == 2 * 128 * 32 * 4
    assert by_name["q_ptr"]["unique_load_bytes"] == 64 * 32 * 4
    assert by_name["lse_ptr"]["unique_store_bytes"] == 64 * 4
    assert launch["grid"] == [2, 1, 1]
    assert launch["line"] == line_of(path, "attn_fwd[(")


@pytest.mark.parametrize("path", good_files(FUSED))
def test_the_fused_chain_is_one_launch_and_twice_the_bytes_of_the_tensor(path):
    inputs = in_arena(**layer_norm_inputs(256, 768))
    _, facts = watched(path, lambda m: m.fused_bias_dropout_layernorm(*inputs.values(), 0.1, 5), inputs, ("y",))
    assert facts["n_launches"] == 1
    assert facts["n_torch_ops"] == 0
    assert facts["findings"] == []
    assert facts["unique_bytes"] == (2 * 256 * 768 + 3 * 768) * 4
    assert round(facts["unique_bytes"] / (256 * 768 * 4), 2) == 2.01


@pytest.mark.parametrize("rows", [64, 256, 1024])
def test_the_eager_chain_is_three_launches_and_six_times_the_bytes(rows):
    def chain(x, bias, gamma, beta):
        dropped = torch.nn.functional.dropout(x + bias, 0.1, training=True)
        return torch.nn.functional.layer_norm(dropped, (768,), gamma, beta)

    costs = eager_costs(chain, list(layer_norm_inputs(rows, 768).values()))
    assert costs["launches"] == 3
    assert costs["bytes"] / (rows * 768 * 4) == pytest.approx(6.26, abs=0.05)


def test_naive_attention_on_fakes_moves_bytes_that_grow_with_the_square():
    def naive(q, k, v):
        return torch.softmax(q @ k.mT * 0.125, -1) @ v

    costs = [eager_costs(naive, list(attention_inputs(1, n, n, 64).values()))["bytes"] for n in (256, 512, 1024)]
    linear = [4 * 64 * 4 * n for n in (256, 512, 1024)]
    squares = [cost - line for cost, line in zip(costs, linear, strict=True)]
    assert squares[1] == 4 * squares[0]
    assert squares[2] == 4 * squares[1]


# ---- planted faults


def test_two_programs_that_share_dq_race():
    path = TRAINED / "backward-race.py"
    inputs = attention_inputs(1, 64, 64, 16)
    for tensor in inputs.values():
        tensor.requires_grad_()
    o, _ = watched(path, lambda m: m.FlashAttention.apply(*inputs.values(), False), inputs, ("o",))
    with Watch(inputs=inputs, level="full", submission_file=str(path)) as watch:
        o["o"].sum().backward()
    facts = watch.facts()
    assert kinds(facts) == {"race-read-after-write", "race-write-write"}
    found = {finding["kind"]: finding for finding in facts["findings"]}
    assert found["race-write-write"]["line"] == line_of(path, "tl.store(DQ + at, dq")
    assert found["race-write-write"]["arg"] == "DQ"
    assert found["race-write-write"]["program"] == [1, 0, 0]
    assert found["race-write-write"]["other_program"] == [0, 0, 0]
    assert found["race-read-after-write"]["line"] == line_of(path, "dq = tl.load(DQ")


def test_a_store_past_the_end_is_dropped_and_named_with_its_line():
    path = SOFTMAX / "out-of-bounds.py"
    inputs = in_arena(x=normal(5, 100))
    for level in ("bounds", "full"):
        outputs, facts = watched(path, lambda m: m.online_softmax(inputs["x"]), inputs, ("y", "lse"), level=level)
        (found,) = [item for item in facts["findings"] if item["kind"] == "out-of-bounds-store"]
        assert found["arg"] == "y_ptr"
        assert found["element"] == 500
        assert found["line"] == line_of(path, "tl.store(y_ptr")
        assert found["source"].startswith("tl.store(y_ptr + row * y_row + cols")
        assert "element 500 of y_ptr of shape (5, 100)" in found["message"]
        assert torch.allclose(outputs["y"], inputs["x"].softmax(-1))


def test_elements_that_no_program_writes_are_counted():
    inputs = in_arena(**attention_inputs(2, 100, 64, 16))
    path = FORWARD / "output-unwritten.py"
    outputs, facts = watched(path, attention(inputs, False), inputs, ("o", "lse"), poison_empty=True)
    assert facts["outputs"]["o"]["unwritten_elements"] == 2 * 4 * 16
    assert facts["outputs"]["o"]["first_unwritten"] == 96 * 16
    assert facts["outputs"]["lse"]["unwritten_elements"] == 2 * 4
    assert outputs["o"][:, 96:].isnan().all()


def test_strides_that_are_ignored_read_outside_an_expanded_gradient():
    path = TRAINED / "ignores-strides.py"
    inputs = attention_inputs(2, 40, 40, 16)
    for tensor in inputs.values():
        tensor.requires_grad_()
    o, _ = watched(path, lambda m: m.FlashAttention.apply(*inputs.values(), False), inputs, ("o",))
    for level in ("bounds", "full"):
        with Watch(inputs=inputs, level=level, submission_file=str(path)) as watch:
            grads = torch.autograd.grad(o["o"].sum(), tuple(inputs.values()), retain_graph=True)
        (found,) = [item for item in watch.facts()["findings"] if item["kind"] == "out-of-bounds-load"]
        assert found["arg"] == "DO"
        assert "strides (0, 0, 0)" in found["message"]
        assert grads[2].isnan().any()


def test_strides_that_are_ignored_are_seen_as_reads_between_the_rows():
    path = FORWARD / "ignores-strides.py"
    inputs = in_arena(**attention_inputs(2, 40, 40, 16, make=strided))
    _, facts = watched(path, attention(inputs, False), inputs, ("o", "lse"))
    assert kinds(facts) == {"outside-view-load"}
    assert {finding["arg"] for finding in facts["findings"]} == {"Q", "K", "V"}
    assert all("between the rows of" in finding["message"] for finding in facts["findings"])


def test_a_syntax_error_is_told_with_its_line():
    path = FUSED / "syntax-error.py"
    with pytest.raises(SyntaxError) as caught:
        load(path)
    told = explain_exception(caught.value, str(path))
    assert told["type"] == "SyntaxError"
    assert told["line"] == 21


def test_stored_scores_are_named_with_shape_and_line():
    path = FORWARD / "stored-scores.py"
    inputs = in_arena(**attention_inputs(2, 96, 128, 16))
    _, facts = watched(path, attention(inputs, False), inputs, ("o", "lse"), level="storages")
    largest = facts["largest_storages"][0]
    assert largest["shape"] == [2, 96, 128]
    assert largest["bytes"] == 2 * 96 * 128 * 4
    assert largest["line"] == line_of(path, "s = torch.empty(")
    assert not largest["alive_after"]
    assert facts["peak_bytes"] == (2 * 96 * 128 + 2 * 96 * 16 + 2 * 96) * 4
    assert facts["alive_after_bytes"] == (2 * 96 * 16 + 2 * 96) * 4
    assert facts["saved"] == []


def test_scores_saved_for_the_backward_are_named_with_their_line():
    path = TRAINED / "saved-scores-for-backward.py"
    inputs = attention_inputs(1, 48, 64, 16)
    for tensor in inputs.values():
        tensor.requires_grad_()
    for level in ("storages", "full"):
        _, facts = watched(path, lambda m: m.FlashAttention.apply(*inputs.values(), False), inputs, ("o",), level=level)
        own = [row for row in facts["saved"] if row["role"] == "own"]
        assert own == [
            {
                "shape": [1, 48, 64],
                "dtype": "float32",
                "bytes": 48 * 64 * 4,
                "line": line_of(path, "p = torch.empty("),
                "role": "own",
            }
        ]


def test_a_flash_forward_saves_inputs_output_and_one_number_a_row():
    inputs = attention_inputs(2, 48, 64, 16)
    for tensor in inputs.values():
        tensor.requires_grad_()
    path = TRAINED / "ok-three-kernels.py"
    _, facts = watched(path, lambda m: m.FlashAttention.apply(*inputs.values(), False), inputs, ("o",))
    assert sorted((row["role"], row["shape"]) for row in facts["saved"]) == [
        ("input", [2, 48, 16]),
        ("input", [2, 64, 16]),
        ("input", [2, 64, 16]),
        ("output", [2, 48, 16]),
        ("own", [2, 48]),
    ]


def test_library_attention_is_named_with_its_line_and_its_output_is_not_a_kernels():
    path = FORWARD / "library-attention.py"
    inputs = in_arena(**attention_inputs(1, 32, 32, 16))
    _, facts = watched(path, attention(inputs, False), inputs, ("o", "lse"))
    assert {
        "op": "scaled_dot_product_attention",
        "line": line_of(path, "F.scaled_dot_product_attention"),
    } in facts["library_calls"]
    assert not facts["outputs"]["o"]["written_by_kernel"]
    assert facts["outputs"]["lse"]["written_by_kernel"]


def test_a_chain_that_is_not_fused_shows_its_launches():
    inputs = in_arena(**layer_norm_inputs(256, 768))
    _, facts = watched(
        FUSED / "not-fused.py", lambda m: m.fused_bias_dropout_layernorm(*inputs.values(), 0.1, 5), inputs, ("y",)
    )
    assert facts["n_launches"] + sum(op["count"] for op in facts["torch_ops"] if not op.get("fill")) >= 2
    assert facts["unique_bytes"] / (256 * 768 * 4) > 4


def test_a_gradient_from_torch_counts_the_operations_of_its_lines():
    path = TRAINED / "ok-tiled-torch-backward.py"
    inputs = attention_inputs(1, 96, 96, 16)
    for tensor in inputs.values():
        tensor.requires_grad_()
    o, _ = watched(path, lambda m: m.FlashAttention.apply(*inputs.values(), True), inputs, ("o",))
    with Watch(inputs=inputs, level="full", submission_file=str(path)) as watch:
        grads = torch.autograd.grad(o["o"], tuple(inputs.values()), normal(1, 96, 16))
    facts = watch.facts(dict(zip(("dq", "dk", "dv"), grads, strict=True)))
    assert facts["n_launches"] == 0
    assert not facts["outputs"]["dk"]["written_by_kernel"]
    assert facts["outputs"]["dk"]["unwritten_elements"] == 0
    lines = {op["line"] for op in facts["torch_ops"]}
    assert line_of(path, "ds = p * (g @ vj.mT") in lines
    # a strip of 64 keys at most: no tensor of 96 x 96
    assert all(row["shape"] != [1, 96, 96] for row in facts["largest_storages"])


@pytest.mark.parametrize("path", [*good_files(FORWARD), *good_files(TRAINED)])
def test_facts_are_plain_and_small(path):
    inputs = in_arena(**attention_inputs(1, 40, 40, 16))
    call = (
        attention(inputs, True)
        if path.parent == FORWARD
        else lambda module: module.FlashAttention.apply(*inputs.values(), True)
    )
    names = ("o", "lse") if path.parent == FORWARD else ("o",)
    _, facts = watched(path, call, inputs, names)
    text = json.dumps(facts, allow_nan=False)
    assert len(text) < MAX_FACTS_BYTES
    assert json.loads(text) == facts
