"""`group_parameters`: parameter groups of an optimizer by rules on names, layers or the parameters themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

from torch import nn

from ..errors import ConfigError

# Any in this file: options of parameter groups.

Rule: TypeAlias = "str | type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Parameter], bool]"


def group_parameters(
    module: nn.Module, rules: Sequence[tuple[Rule, Mapping[str, Any]]], *, others: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer: for each rule those that match it, and last the others.

    Each parameter that requires a gradient is in one group, that of the first rule that matches. A tied parameter is
    in one group, by its first name. Groups keep the order of the rules, and parameters the order of the module.

    >>> groups = lw.optim.group_parameters(model, [("bias$", {"weight_decay": 0.0}), (nn.LayerNorm, {"lr": 1e-4})])
    >>> optimizer = torch.optim.AdamW(groups, lr=1e-3)

    Args:
        module: The module.
        rules: Pairs of a rule and the group's options. A rule is a regular expression that is searched in the
            parameter's name, such as "bias$"; a class of modules, or several, for the parameters that such a module
            holds itself; or a function of name and parameter. LearningRateMonitor logs an option `name`.
        others: Options of the parameters that no rule matches; None for those of the optimizer.

    Returns:
        Dicts with `params` and the options, of the groups that have parameters.

    Raises:
        ConfigError: A regular expression or class matches no parameter of the module; or an argument is of another
            form.
    """
    _check(module, rules, others)
    trained = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
    tests = [_test(module, rule) for rule, _ in rules]
    groups: list[list[nn.Parameter]] = [[] for _ in range(len(rules) + 1)]
    for name, one in trained:
        groups[next((number for number, test in enumerate(tests) if test(name, one)), len(rules))].append(one)
    everything = list(module.named_parameters())
    for (rule, _), test in zip(rules, tests, strict=True):
        if (isinstance(rule, str | type | tuple)) and not any(test(name, one) for name, one in everything):
            names = ", ".join(name for name, _ in everything[:5])
            raise ConfigError(
                f"group_parameters: no parameter of {type(module).__name__} matches {_shown(rule)}.",
                fix=f"correct the rule; the first parameters are {names or 'none'}.",
            )
    options = [*(given for _, given in rules), others]
    return [{"params": some, **(given or {})} for some, given in zip(groups, options, strict=True) if some]


def _check(module: object, rules: object, others: object) -> None:
    if not isinstance(module, nn.Module):
        raise _refused(f"a module, got {type(module).__name__}")
    if not isinstance(rules, Sequence) or isinstance(rules, str):
        raise _refused(f"a list of pairs of a rule and options, got {type(rules).__name__}")
    for pair in rules:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise _refused(f"pairs of a rule and options such as ('bias$', {{'weight_decay': 0.0}}), got {pair!r}")
    for options in (*(given for _, given in rules), others):
        if not isinstance(options, Mapping | None):
            raise _refused(f"the options of a rule as a dict, got {options!r}")
        if "params" in (options or ()):
            raise _refused("options without 'params', which the rule chooses")


def _refused(expected: str) -> ConfigError:
    return ConfigError(f"group_parameters: Expected {expected}.", fix="correct the arguments.")


def _test(module: nn.Module, rule: Rule) -> Callable[[str, nn.Parameter], bool]:
    if isinstance(rule, str):
        try:
            pattern = re.compile(rule)
        except re.error as error:
            raise ConfigError(
                f"group_parameters: {rule!r} is not a regular expression ({error}).", fix="correct the rule."
            ) from error
        return lambda name, _: pattern.search(name) is not None
    if _is_kind(rule):
        held = {
            id(one) for part in module.modules() if isinstance(part, rule) for one in part.parameters(recurse=False)
        }
        return lambda _, one: id(one) in held
    if isinstance(rule, nn.Module | type) or not callable(rule):
        shown = type(rule).__name__ if isinstance(rule, nn.Module | nn.Parameter) else repr(rule)
        raise _refused(f"a regular expression, a class of modules or a function as rule, got {shown}")
    return rule


def _is_kind(rule: object) -> TypeGuard[type[nn.Module] | tuple[type[nn.Module], ...]]:
    kinds = rule if isinstance(rule, tuple) else (rule,)
    return all(isinstance(one, type) and issubclass(one, nn.Module) for one in kinds)


def _shown(rule: Rule) -> str:
    if isinstance(rule, str):
        return repr(rule)
    kinds = rule if isinstance(rule, tuple) else (rule,)
    return ", ".join(one.__name__ for one in kinds)
