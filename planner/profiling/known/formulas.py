"""Sums of products of a model's sizes, as recorded from traces and evaluated without torch.

A monomial is a product of sizes with one letter each: "BDKT" is examples x head dim x heads x tokens. A square has its
letter twice, and "" is 1.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

Sizes = Mapping[str, int]
Factor = int | Fraction


@dataclass(frozen=True, slots=True)
class Formula:
    """A sum of monomials with factors. Factors may be fractions, but every value is whole."""

    terms: tuple[tuple[str, Factor], ...]

    @classmethod
    def of(cls, factors: Mapping[str, Factor]) -> "Formula":
        """Returns the formula with these factors, in a fixed order and without zeros."""
        return cls(tuple(sorted((monomial, factor) for monomial, factor in factors.items() if factor)))

    @classmethod
    def parse(cls, text: str) -> "Formula":
        """Reads what `str` of a formula gives: "2 BT + 1/2 D"."""
        factors: dict[str, Factor] = {}
        for term in text.split(" + ") if text else ():
            factor, _, monomial = term.partition(" ")
            factors[monomial] = Fraction(factor) if "/" in factor else int(factor)
        return cls.of(factors)

    def __str__(self) -> str:
        """Returns the formula as text."""
        return " + ".join(f"{factor} {monomial}".rstrip() for monomial, factor in self.terms)

    def value(self, sizes: Sizes) -> int:
        """Returns the value for some sizes."""
        total: Factor = 0
        for monomial, factor in self.terms:
            for size in monomial:
                factor *= sizes[size]
            total += factor
        return int(total)

    def plus(self, other: "Formula", sign: int = 1) -> "Formula":
        """Returns the sum, or with `sign` -1 the difference."""
        factors = dict(self.terms)
        for monomial, factor in other.terms:
            factors[monomial] = factors.get(monomial, 0) + sign * factor
        return Formula.of(factors)

    def at_most(self, other: "Formula") -> bool:
        """Returns whether no factor is larger than that of `other`. Then no value is larger, as sizes are positive."""
        return all(factor >= 0 for _, factor in other.plus(self, -1).terms)

    def without(self, *names: str) -> "Formula":
        """Returns the formula for the size 1 of these names."""
        factors: dict[str, Factor] = {}
        for monomial, factor in self.terms:
            left = "".join(size for size in monomial if size not in names)
            factors[left] = factors.get(left, 0) + factor
        return Formula.of(factors)

    def without_term(self, monomial: str) -> "Formula":
        """Returns the formula without a term."""
        return Formula(tuple(term for term in self.terms if term[0] != monomial))

    @property
    def constant(self) -> Factor:
        """The term that depends on no size."""
        return dict(self.terms).get("", 0)

    @property
    def growing(self) -> "Formula":
        """The formula without its constant."""
        return Formula(tuple(term for term in self.terms if term[0]))


def largest_of(formulas: Iterable[Formula]) -> tuple[Formula, ...]:
    """Leaves out the formulas whose value is never above that of another one."""
    kept: list[Formula] = []
    for formula in sorted(set(formulas), key=lambda each: (len(each.terms), str(each)), reverse=True):
        if not any(formula.at_most(other) for other in kept):
            kept = [other for other in kept if not other.at_most(formula)]
            kept.append(formula)
    return tuple(sorted(kept, key=str))


def largest_value(formulas: Iterable[Formula], sizes: Sizes) -> int:
    """Returns the largest value of some formulas; 0 if there are none."""
    return max((formula.value(sizes) for formula in formulas), default=0)
