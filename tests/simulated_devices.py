"""Several accelerators on one CPU: ``sim:0``, ``sim:1``. An operation on tensors of two devices fails, as on GPUs.

A tensor of such a device is a CPU tensor that says where it stands. Every operation computes on the CPU, and before it
does, all tensors with dimensions must be on one device. PyTorch's private backend is registered for the whole process,
so tests run this in a process of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

COPIES = {"aten::copy_", "aten::_to_copy", "aten::to"}  # (`to` comes whole in inference mode)
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index"}  # indices may be on the CPU


class _Backend:
    """What PyTorch asks of the module of a backend."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 2

    def manual_seed_all(self, seed: int) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


class SimTensor(torch.Tensor):
    """A CPU tensor that says that it stands elsewhere."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor, device: torch.device | None = None, requires_grad: bool = False) -> Any:
        if device is None:  # accelerate makes parameters anew by their class, wherever their values stand
            return torch.nn.Parameter(inner, requires_grad)
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            dtype=inner.dtype,
            device=device,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
        )

    def __init__(self, inner: torch.Tensor, device: torch.device | None = None, requires_grad: bool = False) -> None:
        if device is not None:
            self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.inner.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("cannot convert a sim tensor to numpy; use .cpu() first")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{self.inner!r} on {self.device}"


class _Devices(TorchDispatchMode):
    """Sees the operations that no `SimTensor` takes part in: what makes tensors and what moves them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Factories(TorchFunctionMode):
    """`torch.tensor` makes its result where no dispatch mode sees it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and device is not None and torch.device(device).type == "sim":
            del kwargs["device"]
            return func(*_on_cpu(args), **kwargs).to(device)
        return func(*args, **kwargs)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    name = func._schema.name
    tensors = list(_tensors((args, kwargs)))
    # As in PyTorch, only numbers on the CPU go with everything.
    devices = list(dict.fromkeys(t.device for t in tensors if t.ndim or t.device.type != "cpu"))
    devices = devices or [t.device for t in tensors][:1]
    if name in INDEXING and tensors[0].device.type == "sim":
        devices = [tensors[0].device, *(d for d in devices if d.type != "cpu" and d != tensors[0].device)]
    if name not in COPIES and len(devices) > 1:
        found = ", ".join(sorted(map(str, devices)))
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got {found}")
    asked = kwargs.get("device") or next((a for a in args if isinstance(a, torch.device)), None)
    device = torch.device(asked) if asked is not None else devices[0] if devices else torch.device("cpu")
    if name == "aten::copy_":
        device = args[0].device
    if device.type == "sim" and device.index is None:
        device = torch.device("sim:0")
    plain_args, plain_kwargs = _on_cpu(args), _on_cpu(kwargs)
    if device.type != "sim":
        return func(*plain_args, **plain_kwargs)
    with torch.inference_mode(False), torch.no_grad():  # a tensor that wraps another cannot be an inference tensor
        result = func(*plain_args, **plain_kwargs)
        return _wrapped(func, args, kwargs, result, device)


def _wrapped(func: Any, args: Any, kwargs: Any, result: Any, device: torch.device) -> Any:
    wrapped = tree_map(lambda x: SimTensor(x, device) if isinstance(x, torch.Tensor) else x, result)
    if func._schema.name == "aten::to":
        return wrapped
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def _on_cpu(value: Any) -> Any:
    """Lists, tuples and dictionaries with CPU tensors and the CPU for everything that stands elsewhere."""
    if isinstance(value, SimTensor):
        return value.inner
    if type(value) in (list, tuple):
        return type(value)(_on_cpu(part) for part in value)
    if isinstance(value, dict):
        return {name: _on_cpu(part) for name, part in value.items()}
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "sim" else value


def register() -> None:
    """Once a process."""
    _setup_privateuseone_for_python_backend("sim", _Backend())


@contextlib.contextmanager
def simulated_devices() -> Iterator[None]:
    """Inside the block, ``sim:0`` and ``sim:1`` are devices."""
    with _Factories(), _Devices():
        yield
