"""Results of the user's functions: taken as they are, or refused with the path that named them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agentrl.algorithms.base import SampleView, Tensor, TokenLoss, TokenView
from agentrl.errors import PluginError, SettingsError
from agentrl.plugins import compat, load_object

if TYPE_CHECKING:
    from agentrl.algorithms.fields import AlgorithmFields

_LOSS, WEIGHTS = "--custom-loss-function-path", "--custom-pg-loss-reducer-function-path"
TIS = "--custom-tis-function-path"


def load_function(path: str | None, flag: str) -> Callable[..., Any]:
    """The function of two arguments at `path`, or a class. Raises PluginError or SettingsError: it is no such thing."""
    found: Callable[..., Any] = load_object(path or "", what=flag)
    if not callable(found):
        raise SettingsError(f"{flag} {path}: expected a function, got {found!r}")
    if inspect.isroutine(found) and not inspect.isbuiltin(found):
        try:
            inspect.signature(found).bind(None, None)
        except TypeError as error:
            raise SettingsError(
                f"{flag} {path}: it is called with two arguments, the second are settings: {error}"
            ) from None
    return found


def is_own(path: str | None, flag: str) -> bool:
    """Return true if there is a path, and of no function in another trainer's form: `train.hooks` call those."""
    if not path:
        return False
    foreign = compat()
    return foreign is None or not foreign.is_foreign(path, flag)


def check_functions(settings: AlgorithmFields) -> None:
    """Load what the settings name, so that a wrong path is known before anything starts; raises as `load_function`."""
    weights, tis = settings.custom_pg_loss_reducer_function_path, settings.custom_tis_function_path
    for flag, path in ((_LOSS, settings.custom_loss_function_path), (WEIGHTS, weights), (TIS, tis)):
        if is_own(path, flag):
            load_function(path, flag)


def own_loss(view: TokenView, settings: AlgorithmFields) -> TokenLoss:
    """The loss of `custom_loss_function_path`, its statistics detached. Raises PluginError: it is no `TokenLoss` of [N]
    tensors, has another dtype than the log-probs, or no gradient."""
    path = f"{_LOSS} {settings.custom_loss_function_path}"
    found = load_function(settings.custom_loss_function_path, _LOSS)(view, settings)
    if not isinstance(found, TokenLoss):
        raise PluginError(f"{path}: expected a TokenLoss, got {type(found).__name__}")
    what = f"{path}: the statistic"
    stats = {name: _like(value, view.log_probs, f"{what} {name!r}") for name, value in found.stats.items()}
    loss = _like(found.loss, view.log_probs, f"{path}: the loss")
    if loss.dtype != view.log_probs.dtype:
        raise PluginError(f"{path}: the loss is {loss.dtype}, but the log-probs are {view.log_probs.dtype}")
    if view.log_probs.requires_grad and not loss.requires_grad:
        raise PluginError(f"{path}: the loss has no gradient; make it of view.log_probs, and detach nothing")
    return TokenLoss(loss, {name: value.detach() for name, value in stats.items()})


def own_weights(inputs: SampleView, settings: AlgorithmFields) -> Tensor:
    """The weights [N] of `custom_pg_loss_reducer_function_path`; tokens that do not train weigh 0 whatever it gave."""
    found = _weights(settings.custom_pg_loss_reducer_function_path, WEIGHTS, inputs, settings)
    return found.masked_fill(inputs.loss_mask == 0, 0)


def own_importance(view: TokenView, settings: AlgorithmFields) -> Tensor:
    """The importance weights [N] of `custom_tis_function_path`, detached."""
    return _weights(settings.custom_tis_function_path, TIS, view, settings).detach().to(view.log_probs.dtype)


def _weights(path: str | None, flag: str, given: SampleView | TokenView, settings: AlgorithmFields) -> Tensor:
    what, mask = f"{flag} {path}", given.loss_mask
    values = finite(load_function(path, flag)(given, settings), mask, f"{what}: the weights")
    if ((values < 0) & (mask != 0)).any():
        raise PluginError(
            f"{what}: the weights of trained tokens must not be negative, got {values[mask != 0].min():g}"
        )
    return values


def finite(found: Any, mask: Tensor, what: str) -> Tensor:
    """`found`, a floating-point tensor [N] that is finite where `mask` [N] is 1. Raises PluginError: it is not."""
    values = _like(found, mask, what)
    if wrong := (~values.isfinite() & (mask != 0)).nonzero().flatten().tolist():
        at = wrong[0]
        raise PluginError(f"{what} of {len(wrong)} trained token(s) are not finite, e.g. {values[at].item()} at {at}")
    return values


def _like(found: Any, like: Tensor, what: str) -> Tensor:
    import torch

    if not isinstance(found, torch.Tensor):
        raise PluginError(f"{what}: expected a tensor, got {type(found).__name__}")
    if found.shape != like.shape:
        n, shape = like.numel(), tuple(found.shape)
        raise PluginError(f"{what}: expected one value for each of the {n} response tokens, got shape {shape}")
    if not found.is_floating_point():
        raise PluginError(f"{what}: expected floating-point numbers, got {found.dtype}")
    return found
