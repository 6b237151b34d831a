"""Integer programs with few kinds of blocks: their form, bounds of their values, and their solutions."""

from windlass.planner.solver.program.decomposition import solve_in_parts as solve_in_parts
from windlass.planner.solver.program.integer_program import SPARE_WEIGHT as SPARE_WEIGHT
from windlass.planner.solver.program.integer_program import Assignment as Assignment
from windlass.planner.solver.program.integer_program import BlockGroup as BlockGroup
from windlass.planner.solver.program.integer_program import Bound as Bound
from windlass.planner.solver.program.integer_program import Buffer as Buffer
from windlass.planner.solver.program.integer_program import Option as Option
from windlass.planner.solver.program.integer_program import Outcome as Outcome
from windlass.planner.solver.program.integer_program import Overflow as Overflow
from windlass.planner.solver.program.integer_program import Program as Program
from windlass.planner.solver.program.integer_program import least_assignment as least_assignment
from windlass.planner.solver.program.integer_program import outcome_of as outcome_of
from windlass.planner.solver.program.integer_program import shortfall as shortfall
from windlass.planner.solver.program.kept_results import forget_programs as forget_programs
from windlass.planner.solver.program.relaxation import Prices as Prices
from windlass.planner.solver.program.relaxation import least_cost as least_cost
from windlass.planner.solver.program.relaxation import priced_cost as priced_cost
from windlass.planner.solver.program.relaxation import relaxed as relaxed
