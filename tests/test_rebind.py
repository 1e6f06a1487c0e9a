"""Copies of methods: decorators, closures, globals, rewritten statements; on one instance and off again."""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import inspect
import linecache
import math
import pathlib
import types

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn
from transformers import AttentionInterface

from kernelgraft.errors import RebindError
from kernelgraft.sites import InterfaceProxy, current, global_functions, innermost, install, rebind, source_ref
from kernelgraft.sites.rebind import callee, function_tree
from kernelgraft.sites.source import loaded_globals

OFFSET = 1.0


def double(x):
    return x * 2


def unused(x):
    return x


def logged(function):
    """A decorator with functools.wraps."""

    @functools.wraps(function)
    def around(*args, **kwargs):
        return function(*args, **kwargs)

    return around


def renamed(old, new):
    """A decorator that rewrites a keyword, with arguments of its own and without functools.wraps."""

    def decorator(function):
        def around(*args, **kwargs):
            if old in kwargs:
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return around

    return decorator


def kept_in_an_object(function):
    return functools.wraps(function)(functools.partial(function))


def outermost_only(function):
    """A decorator that compares itself with the class's method, as gradient checkpointing does."""

    @functools.wraps(function)
    def around(self, *args, **kwargs):
        self.outermost = type(self).forward is around
        return function(self, *args, **kwargs)

    return around


class Base(nn.Module):
    def forward(self, x):
        return x + 100


class Plain(Base):
    """A method with defaults, keyword-only defaults, a private name, a closure over the class and nested functions."""

    def __init__(self):
        super().__init__()
        self.__hidden = 3.0

    def forward(self, x, scale=2.0, *, bias: float = 0.5):
        """Documented."""
        parts = [double(x) * part for part in (scale, OFFSET)]
        return super().forward(sum(parts)) + bias + self.__hidden


class Decorated(Plain):
    @outermost_only
    @logged
    @renamed("old", "scale")
    def forward(self, x, scale=2.0, *, bias: float = 0.5):
        return double(x) * scale + bias


class InObject(nn.Module):
    forward = kept_in_an_object(lambda self, x: double(x))


def made(factor):
    class Made(nn.Module):
        def forward(self, x):
            return double(x) * factor

    return Made


X = torch.arange(6.0)


def test_a_replaced_global_is_seen_by_the_copy_only():
    module, other = Plain(), Plain()
    expected = module(X)
    scope = dict(Plain.forward.__globals__)
    copied = rebind(Plain.forward, names={"double": lambda x: x * 5})
    install(module, "forward", copied)
    assert torch.equal(module(X), (X * 5 * 2.0 + X * 5) + 100 + 0.5 + 3.0)
    assert torch.equal(other(X), expected)
    assert torch.equal(Plain.forward(module, X), expected)
    assert dict(Plain.forward.__globals__) == scope and double(1) == 2


def test_the_copy_keeps_what_describes_a_function():
    copied = rebind(Plain.forward, names={"double": double})
    original = Plain.forward
    for name in (
        "__name__",
        "__qualname__",
        "__module__",
        "__doc__",
        "__defaults__",
        "__kwdefaults__",
        "__annotations__",
    ):
        assert getattr(copied, name) == getattr(original, name), name
    assert inspect.signature(copied) == inspect.signature(original)
    assert inspect.getsource(copied) == inspect.getsource(original)
    assert copied.__kwdefaults__ is not original.__kwdefaults__


@pytest.mark.parametrize("how", ["names", "transform"])
def test_every_decorator_is_kept(how):
    module = Decorated()
    if how == "names":
        copied = rebind(Decorated.forward, names={"double": lambda x: x * 5})
        factor = 5
    else:
        copied = rebind(Decorated.forward, transform=lambda tree: tree)
        factor = 2
    install(module, "forward", copied)
    assert torch.equal(module(X, old=3.0, bias=1.0), X * factor * 3.0 + 1.0)
    assert module.outermost is True
    assert inspect.signature(module.forward) == inspect.signature(Decorated().forward)
    assert innermost(copied) is not innermost(Decorated.forward)
    assert innermost(copied).__code__.co_name == "forward"
    assert torch.equal(Decorated()(X, old=3.0, bias=1.0), X * 2 * 3.0 + 1.0)


def test_wrapped_points_at_the_copy():
    copied = rebind(logged(Plain.forward), names={"double": double})
    assert copied.__wrapped__ is innermost(copied)
    assert copied.__wrapped__ is not Plain.forward


def test_a_bound_method_is_taken_by_its_function():
    assert innermost(Plain().forward) is Plain.forward


def test_a_name_that_is_not_used_is_refused():
    with pytest.raises(
        RebindError, match=r"`Plain\.forward` does not use `unused`, `x` as a global; it uses OFFSET, double"
    ):
        rebind(Plain.forward, names={"unused": unused, "x": 1, "double": double})


def test_a_decorator_that_is_an_object_is_refused():
    with pytest.raises(RebindError, match="under 0 decorators there is a partial"):
        rebind(InObject.forward, names={"double": double})


def test_a_decorator_that_keeps_the_method_elsewhere_is_refused():
    store = {}

    def registered(function):
        store["f"] = function

        @functools.wraps(function)
        def around(self, x):
            return store["f"](self, x)

        return around

    with pytest.raises(RebindError, match="outside its closure"):
        rebind(registered(Plain.forward), names={"double": double})


def test_closures_are_shared_with_the_original():
    triple = made(3)
    copied = rebind(triple.forward, transform=lambda tree: tree)
    assert copied.__closure__ == triple.forward.__closure__
    assert torch.equal(copied(triple(), X), X * 6)


def swap(old, new):
    class Swap(ast.NodeTransformer):
        def visit_Name(self, node):
            return ast.copy_location(ast.Name(new, node.ctx), node) if node.id == old else node

    return lambda tree: Swap().visit(tree)


def test_a_rewritten_method_keeps_super_private_names_and_lines():
    copied = rebind(
        Plain.forward, names={"__kernelgraft_7": lambda x: x * 5}, transform=swap("double", "__kernelgraft_7")
    )
    assert torch.equal(copied(Plain(), X), (X * 5 * 2.0 + X * 5) + 100 + 0.5 + 3.0)
    assert copied.__code__.co_filename == Plain.forward.__code__.co_filename
    assert copied.__code__.co_firstlineno == Plain.forward.__code__.co_firstlineno
    assert set(copied.__code__.co_lines()) and {line for *_, line in copied.__code__.co_lines() if line} == {
        line for *_, line in Plain.forward.__code__.co_lines() if line
    }


def test_a_rewritten_method_under_decorators_cites_the_same_lines():
    copied = rebind(Decorated.forward, transform=lambda tree: tree)
    assert innermost(copied).__code__.co_firstlineno == innermost(Decorated.forward).__code__.co_firstlineno
    assert source_ref(copied) == source_ref(Decorated.forward)


def test_an_injected_name_must_be_used_by_the_rewritten_code():
    with pytest.raises(RebindError, match="does not use `__kernelgraft_8`"):
        rebind(Plain.forward, names={"__kernelgraft_8": double}, transform=swap("double", "__kernelgraft_7"))


def test_rebinding_twice_keeps_both_changes():
    once = rebind(Plain.forward, names={"a": lambda x: x * 5}, transform=swap("double", "a"))
    twice = rebind(once, names={"OFFSET": 0.0})
    thrice = rebind(twice, names={"b": 4.0}, transform=swap("OFFSET", "b"))
    assert torch.equal(twice(Plain(), X), X * 5 * 2.0 + 100 + 0.5 + 3.0)
    assert torch.equal(thrice(Plain(), X), (X * 5 * 2.0 + X * 20) + 100 + 0.5 + 3.0)


def test_the_tree_is_private():
    tree = function_tree(Plain.forward)
    tree.body.clear()
    assert len(function_tree(Plain.forward).body) == 3


def test_a_source_that_is_not_that_of_the_code_is_refused(tmp_path):
    file = tmp_path / "changing.py"
    file.write_text("def forward(self, x):\n    return x + 1\n")
    scope = {"__name__": "changing"}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    file.write_text("def forward(self, x):\n    return x + 2222\n")
    linecache.checkcache(str(file))
    with pytest.raises(RebindError, match="not that of the loaded code"):
        function_tree(scope["forward"])


def test_code_without_source_can_be_rebound_but_not_rewritten():
    scope = {"math": math}
    exec("def forward(self, x):\n    return math.floor(x)\n", scope)
    assert rebind(scope["forward"], names={"math": types.SimpleNamespace(floor=lambda x: -1)})(None, 3.5) == -1
    with pytest.raises(RebindError, match="no source to rewrite"):
        rebind(scope["forward"], transform=lambda tree: tree)
    with pytest.raises(RebindError, match="no source to cite"):
        source_ref(scope["forward"])


def test_a_string_over_several_lines_survives():
    class Speaks(nn.Module):
        def forward(self):
            return """one
        two"""

    assert rebind(Speaks.forward, transform=lambda tree: tree)(None) == Speaks().forward()


def test_global_functions_are_those_that_are_loaded():
    def local(self, x):
        return torch.relu(double(x)) + len([unused(x) for _ in range(1)]) + math.pi + OFFSET

    assert global_functions(local) == {"double": double, "unused": unused}
    assert {"double", "unused", "OFFSET", "torch", "math", "len"} <= loaded_globals(local.__code__)


def test_global_functions_look_under_decorators(monkeypatch):
    monkeypatch.setitem(globals(), "double", logged(double))
    assert global_functions(Plain.forward)["double"] is double.__wrapped__


def test_a_source_ref_of_transformers_is_a_permalink_with_a_hash():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    ref = source_ref(LlamaRMSNorm.forward)
    lines, first = inspect.getsourcelines(LlamaRMSNorm.forward)
    assert ref.file == "transformers/models/llama/modeling_llama.py"
    assert (ref.first_line, ref.last_line) == (first, first + len(lines) - 1)
    assert ref.sha256 == hashlib.sha256("".join(lines).encode()).hexdigest()
    assert ref.symbol == "LlamaRMSNorm.forward"
    assert ref.url == (
        f"https://github.com/huggingface/transformers/blob/v{transformers.__version__}/src/transformers/models/llama/"
        f"modeling_llama.py#L{ref.first_line}-L{ref.last_line}"
    )
    part = source_ref(LlamaRMSNorm.forward, first=first + 1, last=first + 2, symbol="x")
    file = pathlib.Path(inspect.getsourcefile(LlamaRMSNorm)).read_text().splitlines(keepends=True)
    assert part.sha256 == hashlib.sha256("".join(file[first : first + 2]).encode()).hexdigest()
    assert part.symbol == "x" and part.url.endswith(f"#L{first + 1}-L{first + 2}")


def test_a_source_ref_elsewhere_has_no_url():
    assert source_ref(Plain).url is None
    assert (source_ref(Plain).symbol, source_ref(Plain).file) == ("Plain", "test_rebind.py")


def test_a_source_ref_of_torch_has_the_release_without_its_build():
    ref = source_ref(nn.LayerNorm.forward)
    release = torch.__version__.partition("+")[0]
    assert ref.file == "torch/nn/modules/normalization.py"
    assert ref.url.startswith(f"https://github.com/pytorch/pytorch/blob/v{release}/{ref.file}#L{ref.first_line}-L")


def test_an_unreleased_version_has_no_url(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "5.25.0.dev0")
    assert source_ref(nn.LayerNorm.forward).url is None


# Installing.


class Hook(ModelHook):
    def __init__(self):
        self.calls = 0

    def pre_forward(self, module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


def five(self, x, scale=2.0):
    return x * 5


def state(module):
    return {name: id(value) for name, value in vars(module).items()}


def test_installing_and_undoing_leaves_no_trace():
    module = Plain()
    before, expected = state(module), module(X)
    undo = install(module, "forward", five)
    assert undo.active and torch.equal(module(X), X * 5) and current(module, "forward") is five
    undo()
    assert state(module) == before and torch.equal(module(X), expected)
    assert not undo.active
    undo()  # a second time does nothing
    assert state(module) == before


def test_what_was_installed_before_comes_back_by_identity():
    module = Plain()
    module.forward = types.MethodType(five, module)
    before = state(module)
    undo = install(module, "forward", rebind(current(module, "forward"), transform=lambda tree: tree))
    assert torch.equal(module(X), X * 5) and state(module) != before
    undo()
    assert state(module) == before


def test_several_installs_come_off_in_reverse_order():
    module = Plain()
    before = state(module)
    first = install(module, "forward", five)
    second = install(module, "forward", rebind(five, transform=lambda tree: tree))
    with pytest.raises(RebindError, match="undo the later replacement first"):
        first()
    assert not first.active and second.active
    second()
    first()
    assert state(module) == before


def test_a_hook_attached_before_goes_on_and_is_left_as_it_was():
    module, hook = Plain(), Hook()
    add_hook_to_module(module, hook)
    before, expected = state(module), module(X)
    undo = install(module, "forward", five)
    assert torch.equal(module(X), X * 5) and hook.calls == 2
    assert current(module, "forward") is five and undo.active
    undo()
    assert state(module) == before
    assert torch.equal(module(X), expected) and hook.calls == 3


def test_a_hook_attached_after_goes_on_when_the_function_is_undone():
    module, hook = Plain(), Hook()
    expected = module(X)
    undo = install(module, "forward", five)
    add_hook_to_module(module, hook)
    assert torch.equal(module(X), X * 5) and hook.calls == 1 and undo.active
    undo()
    assert torch.equal(module(X), expected) and hook.calls == 2
    assert inspect.signature(module.forward) == inspect.signature(Plain().forward)
    remove_hook_from_module(module)
    assert module.forward == types.MethodType(Plain.forward, module)


def test_undo_after_the_hook_was_removed():
    module = Plain()
    before = state(module)
    undo = install(module, "forward", five)
    add_hook_to_module(module, Hook())
    remove_hook_from_module(module)
    assert torch.equal(module(X), X * 5)
    undo()
    assert state(module) == before


def test_undo_under_another_wrapper():
    module = Plain()
    expected = module(X)
    undo = install(module, "forward", five)
    module.forward = logged(module.forward)
    assert torch.equal(module(X), X * 5)
    undo()
    assert torch.equal(module(X), expected)
    assert inspect.signature(module.forward) == inspect.signature(Plain().forward)


def test_a_deep_copy_is_bound_to_the_copy():
    module = Plain()
    undo = install(module, "forward", rebind(Plain.forward, names={"OFFSET": 0.0}))
    twin = copy.deepcopy(module)
    twin._Plain__hidden = -3.0
    assert twin.forward.__self__ is twin
    assert torch.equal(twin(X), module(X) - 6.0)
    undo()
    assert torch.equal(twin(X), X * 4 + 100 + 0.5 - 3.0)


def test_something_that_is_no_method_is_refused():
    module = Plain()
    module.forward = lambda x: x
    with pytest.raises(RebindError, match=r"`Plain\.forward` was replaced by something that is no method"):
        current(module, "forward")


# The stand-in for the attention interface.


def test_the_proxy_wraps_what_it_finds_once_per_name():
    real, asked = AttentionInterface(), []

    def wrap(found, name):
        asked.append((found, name))
        return functools.partial(found)

    proxy = InterfaceProxy(real, wrap)
    first = proxy.get_interface("sdpa", unused)
    assert first.func is real["sdpa"] and proxy["sdpa"] is first and proxy.get("sdpa", None) is first
    assert proxy.get_interface("eager", unused).func is unused
    assert proxy.get_interface("eager", double).func is double
    assert [name for _, name in asked] == ["sdpa", "eager", "eager"]
    assert proxy.get("nothing there") is None and "sdpa" in proxy and "nothing there" not in proxy
    assert isinstance(proxy, AttentionInterface) and set(proxy) == set(real) and len(proxy) == len(real)
    assert proxy.valid_keys() == real.valid_keys()


def test_writing_through_the_proxy_reaches_the_real_object():
    real = AttentionInterface()
    proxy = InterfaceProxy(real, lambda found, name: found)
    proxy["mine"] = double
    assert real["mine"] is double and "mine" not in AttentionInterface()
    del proxy["mine"]
    assert "mine" not in real


def test_a_function_that_kernels_made_a_module_of_is_that_function() -> None:
    def turned(q: int, k: int) -> int:
        return q - k

    class Func(torch.nn.Module):  # as the package `kernels` makes one
        kernel_layer_name = "turned"

        def forward(self, *args: int, **kwargs: int) -> int:
            return turned(*args, **kwargs)

    made, plain = Func(), torch.nn.Linear(2, 2)
    assert callee(made) is turned and callee(turned) is turned and callee(plain) is plain
    made.forward = lambda q, k: q + k  # it runs another kernel by now
    assert callee(made) is made
