"""Each op on the emulated device, below autograd: judged by CUDA's rules, run on the CPU, its results adopted."""

from __future__ import annotations

from typing import Any

import torch

from perfdoctor.emulate import border
from perfdoctor.emulate.arrivals import start_copy
from perfdoctor.emulate.stand_ins import run_or_explain
from perfdoctor.emulate.sync_rules import HOST_OUTPUTS, RULES, START_COPY, Rule
from perfdoctor.record import crossings

# In one C call: 0.7 us less an op than the context manager _DisableTorchDispatch.
_without_dispatch = torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]
_NONE: dict[str, Any] = {}
_make = torch.Tensor._make_subclass  # type: ignore[attr-defined]
_COMPOSITE = "CompositeImplicitAutograd"
# OpOverload -> (its raw callable, its rule, whether it is decomposed, which outputs stay on the host)
_plans: dict[Any, tuple[Any, Rule | None, bool, tuple[int, ...]]] = {}


def run(cls: type, func: Any, args: Any, kwargs: Any) -> Any:
    """Run one op for the tensor class `cls` of the emulated device."""
    crossings.num_ops += 1
    plan = _plans.get(func) or _planned(func)
    op, rule, composite, host_outputs = plan
    if composite:
        # Under inference_mode ops arrive whole: taken apart, the reads inside show.
        return func.decompose(*args, **(kwargs or {}))
    kind = None
    if rule is not None:
        kind = rule(args, kwargs or {})
        if kind is not None and kind is not START_COPY:
            border.cross(kind)
    try:
        out = _without_dispatch(op, (), args, kwargs or _NONE)
    except NotImplementedError as error:
        out = run_or_explain(func, args, kwargs or {}, error)
    if kind is START_COPY:
        start_copy(out)
        return out
    if type(out) is torch.Tensor:
        return _make(cls, out) if not host_outputs else out
    if type(out) in (tuple, list):
        return _adopted(cls, out, host_outputs)
    return out


def _adopted(cls: type, out: Any, host_outputs: tuple[int, ...]) -> Any:
    def adopted(index: int, value: Any) -> Any:
        if type(value) is torch.Tensor:
            return value if index in host_outputs else _make(cls, value)
        return _adopted(cls, value, ()) if type(value) in (tuple, list) else value

    return type(out)(adopted(index, value) for index, value in enumerate(out))


def _planned(func: Any) -> tuple[Any, Rule | None, bool, tuple[int, ...]]:
    name = func._schema.name
    overload = func._overloadname
    rule = RULES.get(f"{name}.{overload}", RULES.get(name))
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    # silu_backward has both: the CPU kernel is what plain eager runs.
    composite = rule is None and has_kernel(func.name(), _COMPOSITE) and not has_kernel(func.name(), "CPU")
    plan = (func._op, rule, composite, HOST_OUTPUTS.get(name, ()))
    _plans[func] = plan
    return plan
