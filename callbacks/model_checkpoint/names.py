"""Names of checkpoints: templates such as "{epoch}-{val_loss:.3f}", validated and rendered."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from string import Formatter

from torch import Tensor

from ...errors import ConfigError, ModuleError, nearest

COUNTERS = ("epoch", "step")
_LONGEST = 255  # bytes of a name, on common file systems


def template_names(template: str) -> list[str]:
    """Return the metrics that a template names, without `epoch` and `step`, each once."""
    names = [name for _, name, _, _ in Formatter().parse(template) if name]
    return [name for name in dict.fromkeys(names) if name not in COUNTERS]


def check_template(template: str, argument: str) -> None:
    """Refuse a template that could not be rendered or found again.

    Raises:
        ConfigError: Names what is wrong with it.
    """
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(
            f"{argument}={template!r} is not a template: {error}.", fix="write metrics as {name}."
        ) from None
    problems = []
    for _, name, spec, _ in parts:
        if name == "":
            problems.append("an empty pair of braces")
        elif name is not None and not _is_spec(spec or "", integer=name in COUNTERS):
            problems.append(f"{{{name}:{spec}}} has a format that does not suit a number")
    if os.path.basename(template).startswith(".") or not os.path.basename(template):
        problems.append("the name is empty or begins with a dot, which is how unfinished files begin")
    if os.path.isabs(template) or ".." in template.split("/"):
        problems.append("it leads out of dirpath, where files are neither counted nor removed")
    if "\0" in template or any(len(part.encode()) > _LONGEST for part in _fixed_text(parts).split("/")):
        problems.append(f"no file can have that name: a zero byte, or more than {_LONGEST} bytes")
    if problems:
        raise ConfigError(
            f"{argument}={template!r}: {'; '.join(problems)}.", fix="write for example '{epoch}-{val_loss:.3f}'."
        )


def _fixed_text(parts: list[tuple[str, str | None, str | None, str | None]]) -> str:
    return "".join(literal for literal, _, _, _ in parts)


def _is_spec(spec: str, *, integer: bool) -> bool:
    try:
        format(1 if integer else 1.0, spec)
    except ValueError:
        return False
    return True


def render_name(
    template: str, metrics: Mapping[str, Tensor | float], *, insert_names: bool, equals: str, number_format: str = ".6g"
) -> str:
    """Return the template with its metrics filled in.

    Args:
        template: Text with `{name}` or `{name:spec}`; names may contain slashes and dots.
        metrics: Values by name; 0-dim tensors or numbers. Reading a tensor waits for its device. What is absent is 0.
        insert_names: Write `name=value` instead of the value alone.
        equals: Text between name and value.
        number_format: Format of a number whose field has no format.
    """
    rendered = []
    for literal, name, spec, _ in Formatter().parse(template):
        rendered.append(literal)
        if name:
            raw = metrics.get(name, 0)
            value = raw.item() if isinstance(raw, Tensor) else raw
            value = int(value) if name in COUNTERS else value
            text = format(value, spec or ("" if isinstance(value, int) else number_format))
            rendered.append(f"{name}{equals}{text}" if insert_names else text)
    return "".join(rendered)


def missing_metric(missing: list[str], metrics: Iterable[str], where: str) -> ModuleError:
    """Return the error for required metrics that were not logged."""
    known = sorted(name for name in metrics if name not in COUNTERS)
    described = ", ".join(f"{name!r}{nearest(name, known)}" for name in missing)
    return ModuleError(
        f"ModelCheckpoint({where}): no metric named {described} was logged; there are {known}.",
        fix=f"log it with self.log({missing[0]!r}, ...) in the step or hook before the save, or name one of those.",
    )
