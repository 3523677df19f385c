"""Architectures by name, as ``nn.Module``: torchvision, timm, or a user's own factory."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hapi.errors import ModelChoiceError, ModelError
from hapi.lazy_torchvision import vision
from hapi.models.graph.tracing import TRACE_LOCK, describe_failure
from hapi.models.zoo.names import ALIASES, TIMM, suggestion
from hapi.wire.references import ARCHITECTURE_PATTERN

ImportRule = bool | Collection[str]
"""May ``package.module:factory`` be imported: yes or no, or only these (the exact names, or modules)."""

_CLASSES_WITHOUT_DEFAULT = 1000
"""Given to a factory that insists on ``num_classes``: always the same, so that its front is."""


@dataclass(frozen=True)
class Architecture:
    """Recipe for the module of one architecture at one input shape."""

    name: str
    """Canonical name: aliases are resolved."""
    make: Callable[[], nn.Module]
    leaf_types: tuple[type, ...] = ()
    """Modules that the library knows fx cannot trace."""
    functions: tuple[Any, ...] = ()
    """Functions that the library knows fx must not trace into."""
    make_pretrained: Callable[[], nn.Module] | None = None
    """Likewise with the library's own weights, for a library that fits them to the input shape itself."""

    @property
    def family_name(self) -> str | None:
        """Its torchvision name, for the paper's numbering; None for an architecture of another library."""
        return None if ":" in self.name else self.name


def find_architecture(
    name: str, input_shape: Sequence[int], *, pretrained: bool = False, allow_import: ImportRule = False
) -> Architecture:
    """Return the architecture called ``name``.

    Args:
        name: a torchvision name, ``timm:NAME`` or ``package.module:factory``.
        input_shape: shape of one sample (C, H, W).
        pretrained: with the settings of the library's own weights (googlenet and inception normalise their
            input again).
        allow_import: whether a factory may be imported: yes, no, or which.

    Raises:
        ModelError: there is none; the message names near misses.
    """
    name = ALIASES.get(name, name)
    if ARCHITECTURE_PATTERN.fullmatch(name) is None:
        raise ModelChoiceError(f"{name[:80]!r} is not an architecture's name")
    if name.startswith(TIMM):
        return _from_timm(name, input_shape)
    if ":" in name:
        return _from_factory(name, allow_import)
    return _from_torchvision(name, input_shape, pretrained)


def build_module(architecture: Architecture, seed: int) -> nn.Module:
    """The module with its weights initialised from ``seed``, on the CPU. The global generator is untouched."""
    with TRACE_LOCK, torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        return _make(architecture)


def build_structure(architecture: Architecture) -> nn.Module:
    """Return the module without its weights: tensors that it creates empty lie on the meta device.

    Tensors that the constructor computes (index tables, masks) are real.
    """
    with TRACE_LOCK, torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        try:
            with _EmptyIsMeta(), warnings.catch_warnings():
                # A factory that loads weights of its own does so in vain, and torch would tell for each tensor.
                warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")
                return _checked(architecture, architecture.make())
        except Exception:  # a constructor that computes with its own weights needs them
            return _make(architecture)


def _make(architecture: Architecture) -> nn.Module:
    try:
        module = architecture.make()
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{architecture.name} cannot be built: {describe_failure(error)}") from error
    return _checked(architecture, module)


def _checked(architecture: Architecture, made: Any) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise ModelChoiceError(f"{architecture.name} returned a {type(made).__name__}, not a torch.nn.Module")
    return made


_INITIALISERS = frozenset(
    (
        torch.Tensor.normal_,
        torch.Tensor.uniform_,
        torch.Tensor.fill_,
        torch.Tensor.zero_,
        # Of truncated normals.
        torch.Tensor.erfinv_,
        torch.Tensor.mul_,
        torch.Tensor.add_,
        torch.Tensor.clamp_,
        # Handed to the mode as a whole.
        nn.init.normal_,
        nn.init.uniform_,
        nn.init.constant_,
        nn.init.kaiming_uniform_,
    )
)
"""Change values and nothing else. On a tensor without values torch takes as long over them as over real ones."""


class _EmptyIsMeta(TorchFunctionMode):
    """A context in which ``torch.empty`` allocates nothing. Other ways to make a tensor are unchanged."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        changed = args[0] if args else kwargs.get("tensor")
        if func in _INITIALISERS and isinstance(changed, torch.Tensor) and changed.is_meta:
            return changed
        if func in (torch.empty, torch.empty_strided) and str(kwargs.get("device") or "cpu") == "cpu":
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def torchvision_names() -> list[str]:
    """Return the names of torchvision's classification models."""
    models = vision("torchvision.models")
    return [str(name) for name in models.list_models(module=models)]


def _from_torchvision(name: str, input_shape: Sequence[int], pretrained: bool) -> Architecture:
    models = vision("torchvision.models")
    known = torchvision_names()
    if name not in known:
        raise ModelChoiceError(f"unknown architecture {name!r}; {suggestion(name, [*known, *ALIASES])}")
    options: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):
        # Auxiliary heads would make training return three tensors.
        options = {"aux_logits": False, "transform_input": pretrained, "init_weights": not pretrained}
    elif re.fullmatch(r"vit_[a-z]_\d+", name):
        options = {"image_size": _square(name, input_shape)}
    elif name.startswith("maxvit"):
        options = {"input_size": tuple(input_shape[1:])}
    return Architecture(name, lambda: models.get_model(name, weights=None, **options))


def _square(name: str, input_shape: Sequence[int]) -> int:
    if len(input_shape) != 3 or input_shape[1] != input_shape[2]:
        raise ModelChoiceError(f"{name} takes square images, not samples of shape {list(input_shape)}")
    return input_shape[1]


def _from_timm(name: str, input_shape: Sequence[int]) -> Architecture:
    timm = import_timm(name)
    short = name.removeprefix(TIMM)
    if not timm.is_model(short):
        raise ModelChoiceError(
            f"timm has no model {short!r}; {suggestion(short.split('.')[0], timm.list_models())}"
        )
    options: dict[str, Any] = {}
    try:
        settings = timm.get_pretrained_cfg(short)
    except RuntimeError as error:
        raise ModelChoiceError(f"timm has no weights {short!r}: {error}") from error
    if settings is not None and settings.fixed_input_size:
        options["img_size"] = tuple(input_shape[1:])
    make_pretrained = None
    if settings is not None and settings.has_weights:
        make_pretrained = partial(timm.create_model, short, pretrained=True, **options)
    features: Any = importlib.import_module("timm.models._features_fx")
    return Architecture(
        name,
        lambda: timm.create_model(short, pretrained=False, **options),
        leaf_types=tuple(features.get_notrace_modules()),
        functions=tuple(features.get_notrace_functions()),
        make_pretrained=make_pretrained,
    )


def import_timm(name: str) -> Any:
    """The timm package; :class:`ModelError` when it is not installed."""
    try:
        return importlib.import_module("timm")
    except ImportError:
        raise ModelError(
            f"model {name!r} needs timm, which is not installed: pip install 'hapi-split[timm]'"
        ) from None


def _from_factory(name: str, allow_import: ImportRule) -> Architecture:
    module_name, _, attribute = name.partition(":")
    allowed = (
        allow_import if isinstance(allow_import, bool) else bool({name, module_name} & set(allow_import))
    )
    if not allowed:
        raise ModelError(
            f"importing {name!r} is not allowed here; the server's operator allows it with --allow-model {name}"
        )
    try:
        factory: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            if not hasattr(factory, part):
                raise ModelChoiceError(f"{name!r} cannot be imported: there is no {part!r} in {module_name}")
            factory = getattr(factory, part)
    except ModelError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise ModelChoiceError(
                f"{name!r} cannot be imported: there is no module {error.name!r}"
            ) from None
        raise ModelError(f"{name!r} cannot be imported: {describe_failure(error)}") from error
    if not callable(factory):
        raise ModelChoiceError(
            f"{name!r} is a {type(factory).__name__}, not a function or class that makes a model"
        )
    return Architecture(name, lambda: factory(**_required_classes(name, factory)))


def _required_classes(name: str, factory: Callable[..., Any]) -> dict[str, int]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return {}
    required = [
        p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    unknown = [r for r in required if r != "num_classes"]
    if unknown:
        raise ModelChoiceError(
            f"{name!r} needs the argument {unknown[0]!r}; only 'num_classes' may be without a default"
        )
    return dict.fromkeys(required, _CLASSES_WITHOUT_DEFAULT)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw random numbers from ``seed`` in the block, and restore the global generator afterwards (CPU)."""
    with TRACE_LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
