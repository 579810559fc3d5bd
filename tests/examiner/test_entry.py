"""Which function or class of a student's file is graded."""

import sys
import types

import pytest

from workers.entry import EntryError, check_signature, find_entry

SIGNATURE = "flash_attention_forward(q, k, v, is_causal=False) -> (o, lse)"
CLASS = """
class {name}(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        return q
"""


@pytest.fixture
def module_of(monkeypatch):
    def build(source):
        module = types.ModuleType("submission")
        monkeypatch.setitem(sys.modules, "submission", module)
        exec("import torch\n" + source, module.__dict__)
        return module

    return build


def find(module, wanted="flash_attention_forward", kind="function"):
    return find_entry(module, wanted, kind)


def test_a_function_of_the_configured_name_is_used(module_of):
    entry = find(module_of("def flash_attention_forward(q, k, v, is_causal=False): ..."))
    assert (entry.name, entry.is_autograd) == ("flash_attention_forward", False)


def test_an_instance_that_can_be_called_is_used_too(module_of):
    entry = find(module_of("class F:\n  def __call__(self, *a): return 1\nflash_attention_forward = F()"))
    assert entry.call(1, 2) == 1


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        pytest.param(["Anything"], "Anything", id="the-only-one"),
        pytest.param(["FlashTorch", "FlashTriton"], "FlashTriton", id="the-only-one-with-triton"),
        pytest.param(["A", "FlashAttention", "ATriton"], "FlashAttention", id="the-configured-name"),
    ],
)
def test_an_autograd_class_is_found_by_rule(module_of, names, chosen):
    module = module_of("".join(CLASS.format(name=name) for name in names))
    entry = find(module, "FlashAttention", "autograd")
    assert (entry.name, entry.is_autograd) == (chosen, True)


@pytest.mark.parametrize("value", ["'B'", "B"], ids=["name", "class"])
def test_a_module_level_entry_wins(module_of, value):
    module = module_of(CLASS.format(name="FlashTriton") + CLASS.format(name="B") + f"ENTRY = {value}")
    assert find(module, "FlashAttention", "autograd").name == "B"


def test_two_equally_good_classes_are_listed(module_of):
    module = module_of(CLASS.format(name="TritonA") + CLASS.format(name="TritonB"))
    with pytest.raises(EntryError, match=r"TritonA and TritonB are equally good.*ENTRY = 'TritonA'") as caught:
        find(module, "FlashAttention", "autograd")
    assert caught.value.kind == "entry-ambiguous"


def test_a_similar_name_is_named(module_of):
    with pytest.raises(EntryError, match="found softmax_online instead") as caught:
        find(module_of("def softmax_online(x): ..."), "online_softmax")
    assert caught.value.kind == "entry-missing"


@pytest.mark.parametrize(
    "source", ["flash_attention_forward = 3", "ENTRY = 'nothing'", "ENTRY = 5", ""], ids=["int", "dangling", "5", "no"]
)
def test_no_entry_point_is_one_clear_sentence(module_of, source):
    with pytest.raises(EntryError) as caught:
        find(module_of(source))
    assert caught.value.kind == "entry-missing"


def test_imported_classes_do_not_count(module_of):
    with pytest.raises(EntryError, match="defines nothing that can be called"):
        find(module_of("from torch.autograd import Function"), "FlashAttention", "autograd")


@pytest.mark.parametrize(
    ("parameters", "fits"),
    [
        ("q, k, v, is_causal=False", True),
        ("q, k, v, is_causal", True),
        ("*args", True),
        ("q, k, v", False),
        ("q, k, v, scale, *, is_causal", False),
    ],
)
def test_the_signature_must_take_the_arguments_by_position(module_of, parameters, fits):
    entry = find(module_of(f"def flash_attention_forward({parameters}): ..."))
    if fits:
        check_signature(entry, 4, SIGNATURE)
        return
    with pytest.raises(EntryError, match="expected flash_attention_forward") as caught:
        check_signature(entry, 4, SIGNATURE)
    assert caught.value.kind == "wrong-signature"


def test_the_context_of_a_class_is_not_an_argument(module_of):
    check_signature(find(module_of(CLASS.format(name="Flash")), "Flash", "autograd"), 4, SIGNATURE)
