"""What the audit says of single kernels: provenance, races, counts, memory, exceptions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from audit_calls import in_arena, kinds, line_of, load, normal
from triton.tools.tensor_descriptor import TensorDescriptor

from workers.audit import MAX_FACTS_BYTES, MAX_TEXT, Watch, explain_exception

PATH = Path(__file__).parent / "audited_kernels.py"
kernels = load(PATH)


def watch(inputs=None, **more):
    settings = {"level": "full", "submission_file": str(PATH), **more}
    return Watch(inputs=inputs or {}, **settings)


# ---- ways to reach memory


def test_block_pointers_touch_what_their_boundary_check_lets_through():
    x = in_arena(x=normal(20, 24))["x"]
    with watch({"x": x}) as seen:
        y = torch.empty(20, 24)
        kernels.copy_tiles[(2,)](x, y, 20, 24, BM=16, BN=16)
    facts = seen.facts({"y": y})
    assert torch.equal(x, y)
    assert facts["findings"] == []
    assert facts["requested_bytes"] == facts["unique_bytes"] == 2 * 20 * 24 * 4


def test_a_block_pointer_without_a_boundary_check_reads_outside():
    x = in_arena(x=normal(20, 16))["x"]
    with watch({"x": x}) as seen:
        y = torch.empty(20, 16)
        kernels.copy_tiles_unchecked[(1,)](x, y, 20, 16, BM=32, BN=16)
    (found,) = seen.facts()["findings"]
    assert found["kind"] == "out-of-bounds-load"
    assert found["element"] == 20 * 16
    assert found["lanes"] == 12 * 16
    assert torch.equal(x, y)


def test_descriptors_made_in_a_kernel_and_before_it_are_followed():
    x = in_arena(x=normal(20, 16))["x"]
    with watch({"x": x}) as seen:
        y, z = torch.empty(20, 16), torch.empty(20, 16)
        kernels.copy_described[(2,)](x, y, 20, 16, BM=16, BN=16)
        kernels.copy_by_descriptor[(2,)](
            TensorDescriptor.from_tensor(x, [16, 16]), TensorDescriptor.from_tensor(z, [16, 16]), BM=16
        )
    facts = seen.facts()
    assert torch.equal(x, y)
    assert torch.equal(x, z)
    assert facts["findings"] == []
    assert [item["unique_load_bytes"] for item in facts["launches"]] == [20 * 16 * 4] * 2


def test_boolean_tensors_and_flags_are_arguments_like_others():
    flags, x = torch.arange(20) % 3 == 0, normal(20)
    with watch({"flags": flags, "x": x}) as seen:
        y = torch.empty(20)
        kernels.choose[(1,)](flags, x, y, 20, negate=True, WIDTH=32)
    facts = seen.facts()
    assert torch.equal(y, torch.where(flags, -x, 0.0))
    assert facts["findings"] == []
    assert facts["launches"][0]["args"][0]["unique_load_bytes"] == 20


def test_an_expanded_argument_has_the_bytes_of_its_distinct_elements():
    x = torch.ones(1).expand(4, 16)
    with watch({"x": x}, level="full") as seen:
        y = torch.empty(4, 16)
        kernels.copy_rows[(4,)](x, y, 0, WIDTH=16)
    facts = seen.facts()
    assert facts["launches"][0]["args"][0]["unique_load_bytes"] == 0
    assert facts["findings"] == []


def test_a_tensor_passed_twice_counts_once():
    x = in_arena(x=normal(16))["x"]
    with watch({"x": x, "same": x}) as seen:
        kernels.add_to[(1,)](x, x, WIDTH=16)
    facts = seen.facts()
    assert facts["launches"][0]["requested_load_bytes"] == 2 * 64
    assert facts["launches"][0]["unique_load_bytes"] == 64
    assert facts["unique_bytes"] == 128


def test_reading_before_a_tensor_is_out_of_bounds_even_where_a_neighbour_lies():
    inputs = in_arena(before=normal(8, seed=1), x=normal(8, seed=2))
    with watch(inputs, level="bounds") as seen:
        y = torch.empty(8)
        kernels.read_before[(1,)](inputs["x"], y, WIDTH=8)
    (found,) = seen.facts()["findings"]
    assert found["kind"] == "out-of-bounds-load"
    assert (found["arg"], found["element"], found["lanes"]) == ("X", -1, 1)
    assert y[0].isnan()
    assert torch.equal(y[1:], inputs["x"][:7])


def test_a_view_that_reaches_beyond_its_input_is_cut_at_the_input():
    x = in_arena(x=normal(8))["x"]
    with watch({"x": x}, level="bounds") as seen:
        y = torch.empty(32)
        kernels.heuristic_copy[(1,)](x.as_strided((32,), (1,)), y, 32)
    (found,) = seen.facts()["findings"]
    assert (found["kind"], found["element"]) == ("out-of-bounds-load", 8)
    assert torch.equal(y[:8], x)


def test_leaving_a_view_inside_its_tensor_is_told_and_left_alone():
    x = in_arena(x=normal(4, 8))["x"]
    with watch({"x": x}, level="bounds") as seen:
        y = torch.empty(16)
        kernels.heuristic_copy[(1,)](x[0], y, 16)
    (found,) = seen.facts()["findings"]
    assert (found["kind"], found["element"]) == ("outside-view-load", 8)
    assert torch.equal(y, x.reshape(-1)[:16])


def test_a_pointer_from_nowhere_is_wild_and_reads_nothing():
    secret = torch.ones(16)
    with watch(level="bounds") as seen:
        x, y = torch.zeros(16), torch.zeros(16)
        kernels.through_an_integer[(1,)](x, y, secret.data_ptr(), WIDTH=16)
    assert kinds(seen.facts()) == {"wild-pointer"}
    assert y.isnan().all()


def test_memory_that_torch_did_not_allocate_is_foreign():
    cached = torch.zeros(16)
    with watch() as seen:
        y = torch.empty(16)
        kernels.heuristic_copy[(1,)](cached, y, 16)
    (found,) = seen.facts()["findings"]
    assert (found["kind"], found["arg"]) == ("foreign-memory", "X")


# ---- order between programs


def test_atomics_do_not_race():
    x = normal(64)
    with watch({"x": x}) as seen:
        s = torch.zeros(1)
        kernels.total[(4,)](x, s, WIDTH=16)
    facts = seen.facts()
    assert torch.allclose(s, x.sum())
    assert facts["findings"] == []
    assert facts["launches"][0]["atomics"] == 4


def test_programs_that_take_turns_under_a_lock_do_not_race():
    x = normal(64)
    with watch({"x": x}) as seen:
        s, lock = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
        kernels.total_under_lock[(4,)](x, s, lock, WIDTH=16)
    assert torch.allclose(s, x.sum())
    assert seen.facts()["findings"] == []


def test_a_program_that_reads_what_another_writes_races():
    x = torch.ones(8)
    with watch({"x": x}) as seen:
        y = torch.zeros(8)
        kernels.chain[(8,)](x, y)
    assert kinds(seen.facts()) == {"race-read-after-write"}


def test_a_program_that_writes_what_another_read_races():
    with watch() as seen:
        x = torch.zeros(9)
        kernels.shift_left[(8,)](x)
    (found,) = seen.facts()["findings"]
    assert found["kind"] == "race-write-after-read"
    assert (found["program"], found["other_program"]) == ([1, 0, 0], [0, 0, 0])


def test_permuted_programs_show_a_result_that_hangs_on_their_order():
    x = torch.ones(8)
    results = []
    for order in (None, "reverse", 5):
        with watch({"x": x}, level="bounds", order=order):
            y = torch.zeros(8)
            kernels.chain[(8,)](x, y)
        results.append(y)
    assert results[0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert results[1].tolist() == [1] * 8
    assert not torch.equal(results[0], results[2])


# ---- initialised or not


@pytest.mark.parametrize("poison", [False, True])
def test_reading_what_was_never_written_is_told(poison):
    x = normal(16)
    with watch({"x": x}, poison_empty=poison) as seen:
        y = torch.empty(16)
        kernels.add_to[(1,)](x, y, WIDTH=16)
    (found,) = seen.facts()["findings"]
    assert (found["kind"], found["arg"], found["element"], found["lanes"]) == ("uninitialised-read", "Y", 0, 16)
    assert found["line"] == line_of(PATH, "tl.load(Y + cols) + tl.load(X + cols))")
    if poison:
        assert y.isnan().all()


def test_torch_that_reads_what_was_never_written_is_told():
    x = normal(4, 16)
    with watch({"x": x}) as seen:
        kernels.reads_unwritten(x)
    (found,) = seen.facts()["findings"]
    assert found["kind"] == "uninitialised-read"
    assert found["line"] == line_of(PATH, "return y + x")


def test_poison_fills_integers_and_booleans_too():
    with watch(level="bounds", poison_empty=True):
        floats = torch.empty(3, dtype=torch.bfloat16)
        integers = torch.empty_like(torch.zeros(2, dtype=torch.int32))
        flags = torch.zeros(1).new_empty(2, dtype=torch.bool)
        written = torch.zeros(3)
    assert floats.isnan().all()
    assert (integers == 2**31 - 1).all()
    assert flags.all()
    assert torch.equal(written, torch.zeros(3))


def test_being_written_by_a_kernel_survives_copies_and_casts_but_not_arithmetic():
    x = normal(6, 20)
    with watch({"x": x}) as seen:
        copied, doubled = kernels.cast_of_a_copy(x), kernels.doubled_copy(x)
    outputs = seen.facts({"copied": copied, "doubled": doubled})["outputs"]
    assert outputs["copied"]["written_by_kernel"]
    assert outputs["copied"]["kernel_elements"] == 6 * 20
    assert not outputs["doubled"]["written_by_kernel"]


# ---- storages


def test_what_a_call_hides_from_autograd_is_still_seen_alive():
    x = normal(2, 8)
    keep = []
    with watch({"x": x}, level="storages") as seen:
        out = kernels.kept_elsewhere(x, keep)
    facts = seen.facts({"out": out})
    line = line_of(PATH, "scores = x[:, :, None]")
    assert facts["saved"] == [{"shape": [2, 8, 8], "dtype": "float32", "bytes": 512, "line": line, "role": "own"}]
    assert facts["peak_bytes"] == facts["alive_after_bytes"] == 512 + 64


def test_garbage_that_only_a_cycle_holds_is_not_kept():
    with watch(level="storages") as seen:
        ring = [torch.zeros(8)]
        ring.append(ring)
        del ring
    assert seen.facts()["saved"] == []


def test_the_peak_counts_what_lived_at_one_time():
    with watch(level="storages") as seen:
        for _ in range(5):
            torch.zeros(100)
        kept = torch.zeros(50)
    facts = seen.facts({"kept": kept})
    assert facts["peak_bytes"] == 400
    assert facts["alive_after_bytes"] == 200
    assert facts["largest_storages"][0]["count"] == 5


def test_programs_need_not_run_to_count_launches_and_memory():
    x = normal(4, 16)
    with watch({"x": x}, level="full", run_programs=False) as seen:
        y = torch.zeros(4, 16)
        kernels.copy_rows[(4,)](x, y, 16, WIDTH=16)
    facts = seen.facts({"y": y})
    assert facts["n_launches"] == 1
    assert facts["peak_bytes"] == 256
    assert torch.equal(y, torch.zeros(4, 16))


def test_torch_compile_is_a_library_call():
    with watch() as seen:
        kernels.compiled()
    assert {"op": "torch.compile", "line": line_of(PATH, "torch.compile(")} in seen.facts()["library_calls"]


# ---- exceptions


@pytest.mark.parametrize("level", ["bounds", "storages", "full"])
def test_an_exception_keeps_its_type_message_and_line_and_leaves_nothing_behind(level):
    x, y = normal(16), torch.zeros(16)
    before = tl.load
    with pytest.raises(triton.runtime.errors.InterpreterError) as caught, watch({"x": x, "y": y}, level=level) as seen:
        kernels.raises[(2,)](x, y, WIDTH=16)
    told = explain_exception(caught.value, str(PATH))
    assert told["type"] == "NameError"
    assert told["message"] == "name 'undefined_name' is not defined"
    assert told["line"] == line_of(PATH, "+ undefined_name")
    assert told["source"].startswith("return tl.load(X")
    assert tl.load is before
    if level != "storages":
        assert seen.facts()["n_launches"] == 1
    with watch({"x": x, "y": y}) as again:
        kernels.heuristic_copy[(1,)](x, y, 16)
    assert torch.equal(x, y)
    assert again.facts()["findings"] == []


def test_a_type_error_of_tritons_is_told_as_it_is():
    x, y = normal(16), torch.zeros(16)
    with pytest.raises(triton.runtime.errors.InterpreterError) as caught, watch({"x": x, "y": y}):
        kernels.wrong_shapes[(1,)](x, y, WIDTH=8)
    told = explain_exception(caught.value, str(PATH))
    assert told["type"] == "ValueError"
    assert "incompatible dimensions" in told["message"]
    assert told["line"] == line_of(PATH, "tl.load(X + tl.arange(0, 2 * WIDTH))")


def test_host_code_that_raises_is_told_with_its_line():
    with pytest.raises(IndexError) as caught:
        kernels.cast_of_a_copy(torch.zeros(3))
    told = explain_exception(caught.value, str(PATH))
    assert (told["type"], told["line"]) == ("IndexError", line_of(PATH, "copy_rows[(x.shape[0],)]"))


# ---- size of what is told


def test_no_operation_is_hidden_behind_many_rows_of_another():
    with watch() as seen:
        torch.ones(3).exp()
        for size in range(4, 64):
            torch.zeros(size)
    facts = seen.facts()
    assert facts["torch_ops_cut"] > 0
    assert any("exp" in row["op"] for row in facts["torch_ops"])


def test_facts_stay_small_and_say_what_was_cut():
    x = normal(16)
    with watch({"x": x}) as seen:
        for k in range(60):
            y = torch.zeros(16)
            kernels.heuristic_copy[(1,)](x, y, 16)
            y.reshape(2, 8).repeat(k % 40 + 1, 1).add(1)
    facts = seen.facts({f"a name of many letters {'x' * 1000} {k}": x for k in range(16)})
    assert len(json.dumps(facts, ensure_ascii=False).encode()) <= MAX_FACTS_BYTES
    assert facts["n_launches"] == 60
    assert len(facts["launches"]) + facts["launches_cut"] == 60
    assert facts["torch_ops_cut"] > 0
    assert all(len(name) <= MAX_TEXT for name in facts["outputs"])


# ---- whether the kernels do the work


def test_inputs_that_no_kernel_reads_are_named_and_copies_of_them_count_as_read():
    x, z, untouched = normal(4, 16), normal(4, 16), normal(4, 16)
    with watch({"x": x, "z": z, "untouched": untouched}) as seen:
        y = torch.empty(4, 16)
        kernels.copy_rows[(4,)](x, y, 16, WIDTH=16)
        copied = torch.cat([z, z]).mul(2.0).contiguous()
        kernels.copy_rows[(4,)](copied, y, 16, WIDTH=16)
    assert seen.facts({"y": y})["unread_inputs"] == ["untouched"]


def test_a_kernel_that_only_copies_what_numpy_computed_reads_no_input():
    x = normal(4, 16)
    with watch({"x": x}) as seen:
        made = torch.from_numpy(x.numpy() * 2)
        y = torch.empty(4, 16)
        kernels.copy_rows[(4,)](made, y, 16, WIDTH=16)
    facts = seen.facts({"y": y})
    assert facts["unread_inputs"] == ["x"]
    assert facts["outputs"]["y"]["written_by_kernel"]
    assert "numpy" in {row["op"] for row in facts["torch_ops"]}


@pytest.mark.parametrize("taken", [torch.Tensor.numpy, torch.Tensor.tolist], ids=["numpy", "tolist"])
def test_values_taken_out_of_torch_are_told_with_their_bytes(taken):
    x = normal(4, 16)
    with watch({"x": x}) as seen:
        taken(x)
    (row,) = [row for row in seen.facts()["torch_ops"] if row["op"] in ("numpy", "tolist")]
    assert (row["count"], row["bytes"]) == (1, 4 * 16 * 4)


def test_a_call_without_launches_leaves_what_kernels_would_have_written_unwritten():
    x = normal(4, 16)
    with watch({"x": x}, level="bounds", poison_empty=True, run_programs=False) as seen:
        y = torch.empty(4, 16)
        kernels.copy_rows[(4,)](x, y, 16, WIDTH=16)
    assert y.isnan().all()
    assert seen.facts()["n_launches"] == 1
