"""Results of users' functions: used unchanged, or refused with an error that names the function's path."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from agentrl.algorithms.base import SampleView, Tensor, TokenLoss, TokenView
from agentrl.algorithms.fields import AlgorithmFields
from agentrl.errors import PluginError, SettingsError
from agentrl.plugins import compat, load_object, user_code

_LOSS, WEIGHTS = "--custom-loss-function-path", "--custom-pg-loss-reducer-function-path"
TIS = "--custom-tis-function-path"


def load_function(path: str | None, flag: str) -> Callable[..., Any]:
    """Return the function (of two arguments) or class at `path`. Raises PluginError or SettingsError: there is none.
    Errors of its calls become PluginErrors with the path, except of full device memory, which the trainer handles."""
    import torch

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
    return found if isinstance(found, type) else user_code(f"{flag} {path}", torch.OutOfMemoryError)(found)


def is_own(path: str | None, flag: str) -> bool:
    """Return true if `path` is given, and its function has our form. `train.hooks` calls functions of other forms."""
    if not path:
        return False
    foreign = compat()
    return foreign is None or not foreign.is_foreign(path, flag)


def check_functions(settings: AlgorithmFields) -> None:
    """Load the functions that the settings name, so that a wrong path fails before the start. See `load_function`."""
    weights, tis = settings.custom_pg_loss_reducer_function_path, settings.custom_tis_function_path
    for flag, path in ((_LOSS, settings.custom_loss_function_path), (WEIGHTS, weights), (TIS, tis)):
        if is_own(path, flag):
            load_function(path, flag)


def own_loss(view: TokenView, settings: AlgorithmFields) -> TokenLoss:
    """Return the loss of `custom_loss_function_path`, with detached statistics. Raises PluginError: the result is no
    `TokenLoss` of [N] tensors, or the loss has another dtype than the log-probs, or no gradient."""
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
    """Return the weights [N] of `custom_pg_loss_reducer_function_path`. Untrained tokens always get weight 0."""
    found = _weights(settings.custom_pg_loss_reducer_function_path, WEIGHTS, inputs, settings)
    return found.masked_fill(inputs.loss_mask == 0, 0)


def own_importance(view: TokenView, settings: AlgorithmFields) -> Tensor:
    """Return the importance weights [N] of `custom_tis_function_path`, detached."""
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
    """Return `found`, a float tensor [N]. Raises PluginError: it is no such tensor, or not finite where `mask` is 1."""
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
