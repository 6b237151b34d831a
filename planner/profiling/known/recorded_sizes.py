"""Numbers of bytes that know the formula they came from, for traces of models whose sizes are different primes."""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from windlass.engine.memory_plan import UnitNeed
from windlass.planner.profiling import LayerOperators
from windlass.planner.profiling.known.formulas import Factor, Formula, largest_of


class NoProductError(ValueError):
    """A size of a trace is no product of the model's sizes."""


class SizedInt(int):
    """A number of bytes, and the formulas of which it is the largest value. Another one may be largest elsewhere."""

    formulas: frozenset[Formula]

    def __new__(cls, value: int, formulas: Iterable[Formula]) -> "SizedInt":
        """Makes the number."""
        sized = super().__new__(cls, value)
        sized.formulas = frozenset(formulas)
        return sized

    def __add__(self, other: int) -> "SizedInt":
        """Returns the sum."""
        return SizedInt(int(self) + int(other), [a.plus(b) for a in self.formulas for b in formulas_of(other)])

    __radd__ = __add__

    def __sub__(self, other: int) -> "SizedInt":
        """Returns the difference. `other` must have one formula."""
        (less,) = formulas_of(other)
        return SizedInt(int(self) - int(other), [formula.plus(less, -1) for formula in self.formulas])

    def __rsub__(self, other: int) -> "SizedInt":
        """Returns the difference."""
        return SizedInt(int(other), formulas_of(other)) - self


def formulas_of(number: int) -> frozenset[Formula]:
    """Returns the formulas of a number; a plain one is a constant."""
    return number.formulas if isinstance(number, SizedInt) else frozenset((Formula.of({"": int(number)}),))


class RecordedSizes:
    """The arithmetic of a trace. Implements `SizeArithmetic`."""

    def __init__(self, primes: Mapping[str, tuple[int, int]], *, max_factor: int | None = 64) -> None:
        """Prepares the arithmetic.

        Args:
            primes: the prime of each size, and the factor of the prime that the size itself has: (19, 2) for 38. A size
                whose factor has primes of other sizes precedes them.
            max_factor: the largest factor of a size of the trace, beside the model's sizes; None: any.
        """
        self._primes = dict(primes)
        self._max_factor = max_factor
        self._cached: dict[int, Formula] = {}

    @property
    def sizes(self) -> dict[str, int]:
        """The model's sizes in the trace."""
        return {name: prime * factor for name, (prime, factor) in self._primes.items()}

    def formula(self, number: int) -> Formula:
        """Returns the monomial of a number. Raises NoProductError if it is none."""
        if (formula := self._cached.get(number)) is None:
            formula = self._cached[number] = self._factored(number)
        return formula

    def of(self, nbytes: int) -> SizedInt:
        """See SizeArithmetic."""
        return SizedInt(nbytes, [self.formula(nbytes)])

    def larger(self, one: int, other: int) -> SizedInt:
        """See SizeArithmetic."""
        ones, others = formulas_of(one), formulas_of(other)
        if others <= ones and isinstance(one, SizedInt) and one >= other:
            return one
        return SizedInt(max(int(one), int(other)), ones | others)

    def _factored(self, number: int) -> Formula:
        if not number:
            return Formula.of({})
        left, names, divisor = number, "", 1
        for name, (prime, factor) in self._primes.items():
            while left % prime == 0:
                left //= prime
                names += name
                if left % factor:
                    divisor *= factor
                else:
                    left //= factor
        if self._max_factor is not None and left > self._max_factor * divisor:
            raise NoProductError(f"{number} is no product of {self.sizes} and a factor up to {self._max_factor}")
        share = Fraction(left, divisor)
        whole: Factor = share.numerator if share.denominator == 1 else share
        return Formula.of({"".join(sorted(names)): whole})


def unit_of(sizes: RecordedSizes, need: UnitNeed) -> list[Any]:
    """Returns the formulas of a unit's need as JSON values: output, held, swapped, and those of both peaks."""
    swapped = [str(sizes.formula(nbytes)) for nbytes in need.swapped]
    peaks = [_largest(sizes, peak) for peak in (need.forward_peak_nbytes, need.backward_peak_nbytes)]
    return [_only(need.output_nbytes), _only(need.held_nbytes), swapped, *peaks]


def operators_in(sizes: RecordedSizes, layer: LayerOperators) -> dict[str, Any]:
    """Returns the formulas of a layer's operators as JSON values."""
    return {
        "operators": [
            [
                operator.name,
                [str(sizes.formula(nbytes)) for nbytes in operator.outputs_nbytes],
                str(sizes.formula(operator.num_flops)),
                operator.is_saved,
                list(operator.reads),
            ]
            for operator in layer.operators
        ],
        "saves_input": layer.saves_input,
    }


def _only(number: int) -> str:
    (formula,) = formulas_of(number)
    return str(formula)


def _largest(sizes: RecordedSizes, number: int) -> list[str]:
    formulas = formulas_of(number)
    assert max(formula.value(sizes.sizes) for formula in formulas) == number, "the formulas are those of the number"
    return [str(formula) for formula in largest_of(formulas)]
