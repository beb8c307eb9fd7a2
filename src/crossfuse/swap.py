"""Exchange the class of one module *instance* for a generated subclass, and put it back.

This is how PyTorch's ``fully_shard`` changes a module: parameters, buffers and names stay where they are, so the
state dict, optimisers, PEFT and checkpoints see the same model. The generated class carries the name of its base
(weight files and ``architectures`` are written from it) and can be pickled and deep-copied.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, ClassVar

from torch import nn


class Swapped:
    """Marker and pickle support of every generated class; subclasses hold the changed methods."""

    _fused_base: ClassVar[type]
    _fused_mixin: ClassVar[type]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (self._fused_mixin, self._fused_base), self.__dict__


def _rebuild(mixin: type, base: type) -> Any:
    cls: Any = fused_class(mixin, base)
    return object.__new__(cls)


def _with_keywords(forward: Any, base_forward: Any, names: tuple[str, ...]) -> Any:
    """`forward` under the signature of ``base_forward`` plus keyword-only ``names``.

    transformers reads signatures: ``generate`` looks for ``mm_encoder_outputs``, ``Trainer`` drops columns that the
    signature does not name and ``pipeline`` refuses arguments that it does not name.
    """

    @functools.wraps(base_forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    signature = inspect.signature(base_forward)
    parameters = list(signature.parameters.values())
    end = len(parameters) - (bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    extra = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]
    call.__signature__ = signature.replace(parameters=parameters[:end] + extra + parameters[end:])  # type: ignore[attr-defined]
    return call


@functools.cache
def fused_class(mixin: type, base: type) -> type:
    """The one class that puts ``mixin`` over ``base``; memoised, so two fused models share it."""
    namespace: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_fused_base": base,
        "_fused_mixin": mixin,
    }
    names: tuple[str, ...] = getattr(mixin, "extra_keywords", ())
    if names:
        namespace["forward"] = _with_keywords(mixin.forward, base.forward, names)  # type: ignore[attr-defined]
    return type(base.__name__, (mixin, base), namespace)


def swap(module: nn.Module, mixin: type) -> None:
    """Give ``module`` the behaviour of ``mixin``. Raises ValueError where that would be ignored or half done."""
    refuse_untouchable(module)
    base: Any = type(module)
    module.__class__ = fused_class(mixin, base)
    if not isinstance(module, mixin):
        raise RuntimeError(f"the class of {type(module).__name__} could not be exchanged")


def restore(module: nn.Module) -> None:
    """Undo `swap`."""
    if isinstance(module, Swapped):
        refuse_untouchable(module)
        module.__class__ = module._fused_base


def refuse_untouchable(module: nn.Module) -> None:
    """Raise where exchanging the class would be silently ignored: an instance-level ``forward``, FSDP, PEFT."""
    name = type(module).__name__
    if "forward" in module.__dict__:
        raise ValueError(
            f"{name} carries an instance-level forward (dispatch_model or a Trainer's autocast wrapper set it), which "
            "hides the fused one; fuse and unfuse before dispatching or training, on the plain model"
        )
    kind = next((c.__name__ for c in type(module).__mro__ if c.__name__ in _WRAPPERS), None)
    if kind is not None:
        raise ValueError(f"{name} is wrapped by {kind}; the order is fuse, then PEFT, then FSDP / DDP / dispatch")


_WRAPPERS = {"FSDPModule", "FullyShardedDataParallel", "PeftModel", "BaseTuner", "DistributedDataParallel"}
