"""`Reading`: settings of a `LightningArgumentParser`, checked and completed, and the objects they describe."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ....cli.build import Building
from ....cli.complete import complete
from ....cli.groups import TYPED
from ....cli.names import ClassProblem, Trust, find_class
from ....cli.parameters import EMPTY, parameters_of
from ....cli.plans import plan_trainer
from ....cli.settings import WRONG, Settings, is_class_node, resolve
from ....cli.typed import Plan, Typed, with_class_defaults
from ....errors import ConfigError, nearest
from ....lazy import home_of
from ..trainer import Trainer
from .class_paths import in_lightnings_form, path_of
from .declared import ClassGroup, Link, Value
from .namespace import Namespace, to_namespace, to_plain

if TYPE_CHECKING:
    from .argument_parser import LightningArgumentParser

__all__ = ["Reading"]

# Any in this file: settings, classes of users, and what is made of them.

_LIGHTNINGS = """
accelerator strategy devices num_nodes precision logger callbacks fast_dev_run max_epochs min_epochs max_steps min_steps
max_time limit_train_batches limit_val_batches limit_test_batches limit_predict_batches overfit_batches
val_check_interval check_val_every_n_epoch num_sanity_val_steps log_every_n_steps enable_checkpointing
enable_progress_bar enable_model_summary accumulate_grad_batches gradient_clip_val gradient_clip_algorithm deterministic
benchmark inference_mode use_distributed_sampler profiler detect_anomaly barebones plugins sync_batchnorm
reload_dataloaders_every_n_epochs default_root_dir enable_autolog_hparams model_registry
"""
# Parameters of Loopwright's Trainer that Lightning's does not have: they are left out of what it may read.
_OWN = frozenset(inspect.signature(Trainer).parameters) - frozenset(_LIGHTNINGS.split())


class Reading:
    """Settings, checked and completed.

    Args:
        parser: What is declared.
        settings: The settings.
        applies_links: Whether settings that follow from others are computed; they are there already otherwise.
        checks: Whether wrong and missing settings are an error.

    Attributes:
        config: The configuration, with defaults.
        given: The settings without defaults.

    Raises:
        ConfigError: The settings are invalid; all problems are named.
    """

    def __init__(
        self,
        parser: LightningArgumentParser,
        settings: Settings,
        *,
        applies_links: bool = True,
        checks: bool = True,
    ) -> None:
        self._parser = parser
        self._settings = settings
        self._plans: dict[str, Any] = {}
        self._applies_links = applies_links
        tree = settings.tree
        if parser.options.get("parser_mode") == "omegaconf":
            tree = resolve(settings, lambda tree, path: EMPTY)
        self._tree = tree
        self.given = Namespace(to_namespace(tree))
        self._typed = Typed(settings, problems=list(settings.problems), fills_untyped=True)
        self._check_names()
        self.config = Namespace()
        for key in self._order():
            self._link_to(key)
            self._read_one(key)
        self.config = Namespace({key: self.config[key] for key in parser.declared if key in self.config})
        if not checks:
            self._name_missing()
        elif self._typed.problems:
            raise _all_wrong(self._typed)

    # -- settings ------------------------------------------------------------------------------------------------

    def _check_names(self) -> None:
        known = {key.partition(".")[0] for key in self._parser.declared}
        # A file of a subcommand has its arguments, too: those without a value mean nothing to another.
        for key in [key for key, value in self._tree.items() if key not in known and value is not None]:
            hint = nearest(key, sorted(known)) or f"; settings: {', '.join(sorted(known))}"
            self._note(key, f"unknown setting{hint}")

    def _order(self) -> list[str]:
        """Return keys in an order in which links find their sources."""
        links = [one for one in self._parser.links if not one.on_instantiate]
        return _ordered(list(self._parser.declared), links)

    def _read_one(self, key: str) -> None:
        one, value = self._parser.declared[key], _at(self._tree, key)
        if isinstance(one, Value):
            self._read_value(one, value)
            return
        if value is EMPTY:
            value = None
        plan = self._planned(one, value)
        self._plans[key] = plan
        if plan is WRONG:
            return
        if not isinstance(plan, Plan):
            self.config[key] = plan
            return
        raw = value if value is not None else {}
        if isinstance(raw, dict) and set(raw) == {"init_args"}:
            raw = raw["init_args"]
        if isinstance(raw, dict) and not is_class_node(raw):
            raw = with_class_defaults(parameters_of(plan.target).named, raw, self._trust_below(key))
        elif is_class_node(raw):
            named, trust_in = parameters_of(plan.target).named, self._trust_below(f"{key}.init_args")
            below = with_class_defaults(named, raw["init_args"], trust_in)
            raw = {**raw, "init_args": below}
        found: Any = in_lightnings_form(complete(plan, raw, names_class=one.names_class))
        if one.names_class:
            typed = raw["class_path"] if is_class_node(raw) else raw
            is_lightnings = isinstance(typed, str) and typed.partition(".")[0] in ("lightning", "pytorch_lightning")
            found["class_path"] = typed if is_lightnings else path_of(plan.target)
        elif is_class_node(found) and plan.target is one.target:
            found = {**found["init_args"], **found.get("dict_kwargs", {})}
        if self._is_trainer(one):
            found = self._of_trainer(found)
        if not found and not one.names_class and not parameters_of(plan.target).is_open:
            return  # nothing can be set
        self.config[key] = to_namespace(found)

    def _trust_below(self, path: str) -> Callable[[str], Trust | None]:
        return lambda name: self._settings.trust_at(f"{path}.{name}.class_path")

    def _of_trainer(self, found: dict[str, Any]) -> dict[str, Any]:
        given = self._tree.get("trainer")
        given = given if isinstance(given, dict) else {}
        one = given.get("callbacks")
        if isinstance(one, dict) and one.get("init_args"):
            found = {**found, "callbacks": [found["callbacks"]]}  # as Lightning does for one with arguments
        return {name: one for name, one in found.items() if name in given or name not in _OWN}

    def _read_value(self, one: Value, value: Any) -> None:
        parameter = one.parameter
        if value is EMPTY:
            if parameter.is_required and not (not parameter.is_annotated and self._typed.fills_untyped):
                self._note(parameter.name, "required")
            default = None if parameter.is_required else parameter.default
            self.config[parameter.name] = default
            self._plans[parameter.name] = default
            return
        if value is WRONG:
            return
        plan = self._typed.value(value, parameter.annotation, parameter.name)
        if one.convert is not None and isinstance(plan, str | int | float):
            plan = one.convert(self._settings.texts.get(parameter.name, str(plan)))
            self._plans[parameter.name] = self.config[parameter.name] = plan
            return
        self._plans[parameter.name] = plan
        if plan is not WRONG:
            found = in_lightnings_form(complete(plan, value))
            self.config[parameter.name] = to_namespace(found, is_group=False)

    def _is_trainer(self, group: ClassGroup) -> bool:
        target = group.target
        return group.key == "trainer" or (inspect.isclass(target) and issubclass(target, Trainer))

    def _planned(self, group: ClassGroup, value: Any) -> Any:
        """Return the plan of a group; None without one, WRONG if it cannot be made."""
        if value is WRONG:
            return WRONG
        target, path, arguments = group.target, group.key, value
        if value is None:
            if group.names_class:
                if group.required:
                    self._note(group.key, f"name a class, as in --{group.key}=package.module.Class")
                    return WRONG
                return None
            arguments = {}
        elif isinstance(value, str) or is_class_node(value):
            name = value if isinstance(value, str) else value["class_path"]
            arguments = {} if isinstance(value, str) else value["init_args"]
            path = group.key if isinstance(value, str) else f"{group.key}.init_args"
            target = self._class(group, name)
            if target is WRONG:
                return WRONG
        elif isinstance(value, dict):
            if set(value) == {"init_args"}:
                arguments, path = value["init_args"], f"{group.key}.init_args"
            if group.names_class:
                if not arguments and not group.required:
                    return None
                self._note(group.key, f"name a class, as in --{group.key}=package.module.Class")
                return WRONG
        else:
            return value  # an object
        if self._is_trainer(group):
            return plan_trainer(target, self._typed, arguments)
        linked = {one.target.removeprefix(f"{group.key}.").partition(".")[0] for one in self._late(group.key)}
        return self._typed.plan(target, arguments, path, given=frozenset(group.skip | linked))

    def _class(self, group: ClassGroup, name: Any) -> Any:
        target = group.target
        own = getattr(target, "__qualname__", "")
        if not isinstance(target, tuple) and name in (own, f"__main__.{own}", f"{home_of(target)}.{own}"):
            return target
        bases = target if isinstance(target, tuple) else (target,)
        try:
            trust = self._settings.trust_at(f"{group.key}.class_path")
            return find_class(str(name), bases if all(map(inspect.isclass, bases)) else object, trust)
        except ClassProblem as problem:
            return self._typed.no_class(group.key, problem)

    def _note(self, key: str, what: str) -> None:
        source = self._settings.origin(key)
        self._typed.problems.append(f"{key}{f' ({source})' if source else ''}: {what}")

    def _name_missing(self) -> None:
        """Set what must be given to None."""
        for key, group in self._parser.declared.items():
            if isinstance(group, ClassGroup) and not group.names_class:
                known = [name for name in parameters_of(group.target).named if name not in group.skip]
                found = vars(self.config.get(key, Namespace()))
                self.config[key] = Namespace({name: found.get(name) for name in known})

    # -- links ---------------------------------------------------------------------------------------------------

    def _late(self, key: str) -> list[Link]:
        """Return the links to a group that read objects."""
        return [one for one in self._parser.links if one.on_instantiate and _is_below(one.target, key)]

    def _link_to(self, key: str) -> None:
        """Set what follows from settings that have been read."""
        for one in self._parser.links:
            if not _is_below(one.target, key):
                continue
            source = self._settings.origin(self._settings.route(one.target))
            if self._applies_links and source.startswith(TYPED) and _at(self._tree, one.target) is not EMPTY:
                self._note(one.target, f"it follows from {', '.join(one.sources)}: omit it")
                continue
            if one.on_instantiate:
                _take(self._tree, one.target)
            elif self._applies_links:
                if any(_is_below(source, key) for source in one.sources):
                    self._read_ahead(key)
                found = [_at_config(self.config, source) for source in one.sources]
                if all(value is not EMPTY for value in found):
                    _set(self._tree, one.target, to_plain(one.value(found)))

    def _read_ahead(self, key: str) -> None:
        """Read a group one of whose settings follows from another: its values have defaults and types then.

        Problems are reported when it is read again; a group with a wrong value has no values yet.
        """
        typed = self._typed
        self._typed = Typed(self._settings, fills_untyped=True)
        self._read_one(key)
        plan = self._plans.get(key)
        if isinstance(plan, Plan) and WRONG in plan.arguments.values():
            self.config.pop(key, None)
        self._typed = typed

    def set_values(self, values: dict[str, Any]) -> None:
        """Replace values: those that do not stand below a class."""
        self._plans.update(values)

    # -- objects -------------------------------------------------------------------------------------------------

    def instantiated(self, config: Namespace) -> Namespace:
        """Return the configuration with objects in place of their settings."""
        building = Building(self._settings, collects=False)
        late = [one for one in self._parser.links if one.on_instantiate]
        made = config.clone()
        for key in _ordered(list(self._parser.declared), late):
            one, plan = self._parser.declared[key], self._plans.get(key)
            if isinstance(one, ClassGroup) and isinstance(plan, Plan):
                self._apply(one, plan, config, made)
                made[key] = self._made(one, plan, config, building)
            elif isinstance(one, Value):
                made[key] = building.made(plan)
        return made

    def _apply(self, group: ClassGroup, plan: Plan, config: Namespace, made: Namespace) -> None:
        for link in self._late(group.key):
            value = link.value([_attribute(made, source) for source in link.sources])
            parts = link.target.removeprefix(f"{group.key}.").split(".")
            node: Any = plan
            for part in parts[:-1]:
                node = node.arguments.get(part) if isinstance(node, Plan) else None
            if isinstance(node, Plan):
                node.arguments[parts[-1]] = value
                self._parser.linked_values[link.target] = value

    def _made(self, group: ClassGroup, plan: Plan, config: Namespace, building: Building) -> Any:
        if not group.instantiate:
            if group.skip:  # optimizers and schedules are made of their settings
                return config.get(group.key, Namespace())
            made = {name: building.made(value) for name, value in plan.arguments.items()}
            return Namespace({**_arguments_of(config[group.key]), **made})
        with self._parser.around(group.key, plan.target):
            return building.made(plan)


def _arguments_of(config: Any) -> dict[str, Any]:
    return vars(config) if isinstance(config, Namespace) else {}


def _is_below(target: str, key: str) -> bool:
    return target == key or target.startswith(f"{key}.")


def _ordered(keys: list[str], links: list[Link]) -> list[str]:
    needs = {
        key: {
            own
            for one in links
            if _is_below(one.target, key)
            for source in one.sources
            for own in keys
            if _is_below(source, own) and own != key
        }
        for key in keys
    }
    ordered: list[str] = []
    while len(ordered) < len(keys):
        ready = [key for key in keys if key not in ordered and needs[key] <= set(ordered)]
        if not ready:
            rest = ", ".join(key for key in keys if key not in ordered)
            raise ConfigError(f"Expected links without cycles, got a cycle between {rest}.", fix="remove one of them.")
        ordered.append(ready[0])
    return ordered


def _below(node: Any, part: str) -> Any:
    """Return what stands below a node, also among the arguments of a class."""
    if is_class_node(node) and part not in ("class_path", "init_args"):
        node = node["init_args"]
    return node.get(part, EMPTY) if isinstance(node, dict) else EMPTY


def _at(tree: dict[str, Any], path: str) -> Any:
    node: Any = tree
    for part in path.split("."):
        node = _below(node, part)
        if node is EMPTY:
            return EMPTY
    return node


def _at_config(config: Namespace, path: str) -> Any:
    node: Any = config
    for part in path.split("."):
        entries = vars(node) if isinstance(node, Namespace) else node if isinstance(node, dict) else {}
        if part not in entries and "init_args" in entries:
            below = entries["init_args"]
            entries = vars(below) if isinstance(below, Namespace) else below
        if part not in entries:
            return EMPTY
        node = entries[part]
    return node


def _take(tree: dict[str, Any], path: str) -> None:
    above, _, last = path.rpartition(".")
    node = _at(tree, above) if above else tree
    node = node["init_args"] if is_class_node(node) else node
    if isinstance(node, dict):
        node.pop(last, None)


def _set(tree: dict[str, Any], path: str, value: object) -> None:
    """Set a value at a dotted path, if the classes that it leads through are named."""
    *above, last = path.split(".")
    node: Any = tree
    for number, part in enumerate(above):
        below = _below(node, part)
        owner = node["init_args"] if is_class_node(node) else node
        if isinstance(below, str):
            below = owner[part] = {"class_path": below, "init_args": {}}
        elif below is EMPTY or below is None:
            if number:
                return
            below = owner[part] = {}
        node = below
    if is_class_node(node):
        node = node["init_args"]
    if isinstance(node, dict):
        node[last] = value


def _attribute(made: Namespace, source: str) -> Any:
    """Return an attribute of an object that was made."""
    parts = source.split(".")
    for count in range(len(parts), 0, -1):
        found = made.get(".".join(parts[:count]), EMPTY)
        if found is not EMPTY:
            for part in parts[count:]:
                found = getattr(found, part)
            return found
    raise ConfigError(f"Expected an object at {source}, got none.", fix="correct the source of the link.")


def _all_wrong(typed: Typed) -> ConfigError:
    lines = "".join(f"\n  - {line}" for line in typed.problems)
    count = len(typed.problems)
    return ConfigError(
        f"Expected a valid configuration, got {count} {'problem' if count == 1 else 'problems'}:{lines}",
        fix=typed.remedy or "correct these settings; --help lists the available ones.",
    )
