"""The closed forms: their examples are the figures of their sources, and they load without torch."""

from __future__ import annotations

import doctest
import subprocess
import sys

import pytest

from loopwright import planning
from loopwright.errors import ConfigError
from loopwright.planning import formulas


def test_every_formula_has_an_example_that_holds() -> None:
    of_objects = doctest.DocTestFinder().find(formulas)
    with_examples = {one.name.rpartition(".")[2] for one in of_objects if one.examples}
    assert with_examples == set(planning.__all__) - {"ParameterBytes", "Plan", "Row", "plan"}
    assert doctest.testmod(formulas).failed == 0


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'adamw'"):
        formulas.bytes_per_parameter(optimizer="adamww")
    with pytest.raises(ConfigError, match="got '8-true'"):
        formulas.bytes_per_parameter("8-true")


def test_formulas_are_loaded_without_torch() -> None:
    code = "import sys, loopwright.planning.formulas; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
