"""Plans of a program's objects: settings are checked before objects are created."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError, nearest
from ..lazy import is_core
from ..settings.complete import complete
from ..settings.names import ClassProblem, find_class, find_maker
from ..settings.parameters import parameters_of
from ..settings.tree import WRONG, Settings, SettingsTree, is_class_node, resolve
from ..settings.typed import ObjectPlan, Typed
from .program import Program
from .trainer_types import TRAINER_TYPES

# Any in this file: settings and planned objects.

_OF_SCHEDULE = ("monitor", "interval", "frequency", "strict", "name")


@dataclass
class Plans:
    """The planned objects and their settings.

    Attributes:
        made: Top-level key -> its plan or value.
        tree: The settings, with interpolations and links followed.
        schedule_options: Entries of `lr_scheduler` that the Trainer reads, such as `interval`.
        needs_length: Whether the schedule is given the length of the run, as `num_steps`.
        notes: Messages for the user about settings that were replaced or left out.
    """

    made: dict[str, Any] = field(default_factory=dict)
    tree: SettingsTree = field(default_factory=dict)
    schedule_options: SettingsTree = field(default_factory=dict)
    needs_length: bool = False
    notes: list[str] = field(default_factory=list)

    def completed(self, program: Program, *, with_defaults: bool = True) -> dict[str, object]:
        """Return the settings as saved and printed: YAML values, and classes by their paths."""
        seed = {"seed_everything": self.made["seed_everything"]}
        found: SettingsTree = seed if with_defaults or "seed_everything" in self.tree else {}
        ordered = ("trainer", "model", "data", "optimizer", "lr_scheduler", *program.declared.names, *program.arguments)
        for key in ordered if with_defaults else (key for key in self.tree if key in ordered):
            if self.made.get(key) is None and key not in self.tree:
                continue
            names_class = with_defaults and key in ("model", "data", "optimizer", "lr_scheduler")
            found[key] = complete(
                self.made.get(key), self.tree.get(key), names_class=names_class, with_defaults=with_defaults
            )
        for name, value in self.schedule_options.items():
            found["lr_scheduler"]["init_args"][name] = value
        return found


def plan_all(program: Program, settings: Settings) -> Plans:
    """Check all settings and return plans.

    Raises:
        ConfigError: The settings are invalid; all problems are named.
    """
    declared = program.declared
    program.trust_at = settings.trust_at
    tree = resolve(settings, program.default_of)
    tree, replaced = declared.with_links(
        tree, functools.partial(program.default_of, tree), lambda path: settings.origin(settings.route(path))
    )
    for source, target in declared.copies():
        text = settings.texts.get(settings.route(source))
        if text is not None:  # the text as written, for parameters of type str
            key, _, name = target.partition(".")
            settings.texts.update({target: text, f"{key}.init_args.{name}": text})
    typed = Typed(settings, problems=list(settings.problems))
    for key in [key for key in tree if key not in program.keys]:
        hint = nearest(key, program.keys) or f"; settings: {', '.join(program.keys)}"
        typed.problems.append(f"{settings.named(key)}: unknown setting{hint}")
    plans = Plans(tree=tree)
    plans.made["trainer"] = plan_trainer(program.trainer_class, typed, tree.get("trainer") or {})
    for key in program.bases:
        plans.made[key] = _object(program, typed, key, tree.get(key))
    _optimizer(plans, typed)
    for name, maker in declared.classes.items():
        if name in tree or name in declared.required:
            value = tree.get(name) or {}
            plans.made[name] = WRONG if value is WRONG else typed.plan(maker, value, name, given=declared.linked(name))
    for name, one in program.values.items():
        if name in tree:
            plans.made[name] = typed.value(tree[name], one.annotation, name)
        elif one.is_required:
            typed.problems.append(f"{name}: required")
        elif name == "seed_everything" or name in declared.values:
            plans.made[name] = one.default
    if typed.problems:
        raise _all_wrong(program, typed)
    left_out = [f"{path} is ignored: the chosen class does not take it" for path in typed.skipped]
    plans.notes = [*replaced, *left_out]
    return plans


def _all_wrong(program: Program, typed: Typed) -> ConfigError:
    lines = "".join(f"\n  - {line}" for line in typed.problems)
    count = len(typed.problems)
    return ConfigError(
        f"Expected a valid configuration, got {count} {'problem' if count == 1 else 'problems'}:{lines}",
        fix=typed.remedy or f"correct these settings; `{program.shown} --help` lists the available ones.",
    )


def plan_trainer(trainer_class: Callable[..., object], typed: Typed, values: object) -> Any:
    """Return the plan of a trainer; WRONG if the settings are not a mapping.

    Args:
        trainer_class: Trainer, a subclass, or a function that returns one.
        typed: Converts the values.
        values: The settings below `trainer`.
    """
    if not isinstance(values, dict):
        if values is not WRONG:
            typed.problems.append(f"{typed.settings.named('trainer')}: expected its parameters, got {values!r}")
        return WRONG
    plan = ObjectPlan(trainer_class, {}, "trainer")
    folder = values.get("default_root_dir")
    typed.log_folder = folder if isinstance(folder, str) else None
    known = parameters_of(trainer_class)
    for name, value in values.items():
        annotation = TRAINER_TYPES.get(name)
        if annotation is not None and name in known.named:
            plan.arguments[name] = typed.value(value, annotation(), f"trainer.{name}")
    rest = {name: value for name, value in values.items() if name not in plan.arguments}
    given = frozenset(plan.arguments)
    plan.arguments.update(typed.plan(trainer_class, rest, "trainer", given=given).arguments)
    return plan


def _object(program: Program, typed: Typed, key: str, value: Any) -> Any:
    fixed, base = program.bases[key]
    settings, given = typed.settings, program.declared.linked(key)
    if value is WRONG:
        return WRONG
    if value is None and fixed is None:
        if key == "model":
            typed.problems.append("model: name a class, as in model=package.module.Net")
        return None
    name, arguments, path = None, value or {}, key
    if isinstance(value, str):
        name, arguments = value, {}
    elif is_class_node(value):
        name, arguments, path = value["class_path"], value["init_args"], f"{key}.init_args"
    elif isinstance(value, dict) and set(value) == {"init_args"}:
        arguments, path = value["init_args"], f"{key}.init_args"
    elif not isinstance(arguments, dict):
        typed.problems.append(f"{settings.named(key)}: expected parameters or a class, got {value!r}")
        return WRONG
    if name is WRONG:
        return WRONG
    if name is None or program.is_fixed(name, key):
        if fixed is None:
            typed.problems.append(f"{settings.named(key)}: name a class, as in {key}=package.module.Class")
            return WRONG
        return typed.plan(fixed, arguments, path, given=given)
    try:
        found = find_class(name, fixed if isinstance(fixed, type) else base, settings.trust_at(f"{key}.class_path"))
    except ClassProblem as problem:
        return typed.no_class(key, problem)
    return typed.plan(found, arguments, path, given=given)


def _optimizer(plans: Plans, typed: Typed) -> None:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    tree, settings = plans.tree, typed.settings
    if tree.get("lr_scheduler") is not None and tree.get("optimizer") is None:
        typed.problems.append("lr_scheduler: it needs an optimizer; name one, as in optimizer=Adam")
    for key, base, first in (("optimizer", Optimizer, "params"), ("lr_scheduler", LRScheduler, "optimizer")):
        value: Any = tree.get(key)
        name = value["class_path"] if is_class_node(value) else value
        if name is None or name is WRONG:
            continue
        if not isinstance(name, str):
            typed.problems.append(f"{settings.named(key)}: name a class, as in {key}=Adam")
            continue
        try:
            found = find_maker(name, base, settings.trust_at(f"{key}.class_path"))
        except ClassProblem as problem:
            typed.no_class(key, problem)
            continue
        arguments = dict(value["init_args"]) if is_class_node(value) else {}
        if key == "lr_scheduler":
            own = parameters_of(found).named
            plans.schedule_options = {
                name: arguments.pop(name) for name in _OF_SCHEDULE if name in arguments and name not in own
            }
        # Loopwright's own schedules get the length of the run from the Trainer.
        plans.needs_length = key == "lr_scheduler" and is_core(found) and "num_steps" not in arguments
        given = {first, *({"num_steps"} if plans.needs_length else ())}
        path = f"{key}.init_args" if is_class_node(value) else key
        plans.made[key] = typed.plan(found, arguments, path, given=frozenset(given))
        plans.made[key].is_partial = True
